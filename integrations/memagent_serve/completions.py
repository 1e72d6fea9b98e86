"""Handles chat requests: a request is passed on, or read, or read and then passed on with the findings."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import msgspec
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from memagent_graph.documents import Document, DocumentRef
from memagent_graph.plain_text import replace_lone_surrogates
from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy
from memagent_graph.reader import MemAgent
from memagent_graph.reading.run_history import await_result
from memagent_graph.reading.state import ReaderContext
from memagent_graph.results import ReadResult
from memagent_graph.tokenizers.pieces import shorten_text
from memagent_serve.api_errors import APIError, make_bad_request_error
from memagent_serve.bodies import LARGE_BYTES, BodyQuota, read_body
from memagent_serve.chat_replies import (
    DONE,
    HEARTBEAT_SECONDS,
    RUN_ID_HEADER,
    ReplyHead,
    build_annotations,
    describe_read,
    format_answer,
    format_progress,
    get_finish_reason,
    sum_usage,
)
from memagent_serve.chat_requests import (
    ChatRequest,
    FileContent,
    JSONText,
    Options,
    parse_chat,
    parse_fields,
    refuse_invalid_json,
    require_readable,
)
from memagent_serve.keys import Owner
from memagent_serve.long_parts import (
    MEDIA_KIND,
    ReadingPlan,
    compose_question,
    is_front_end_task,
    plan_reading,
)
from memagent_serve.metrics import Metrics
from memagent_serve.reads import ReadManager, ReadRequest, ServedRead
from memagent_serve.request_texts import (
    Continuation,
    join_sources,
    list_sources,
    needs_model_server,
    shorten_task,
)
from memagent_serve.serve_settings import ServeSettings
from memagent_serve.short_requests import (
    EVENT_STREAM,
    answer_locally,
    bad_gateway_on_error,
    get_media_type,
    iter_events,
    make_gateway_error,
    relay_request,
    require_model,
    require_supported,
)
from memagent_serve.uploads import Uploads, clean_file_name

NEW_READ_HEADER: Final = "X-Memagent-New-Read"
READ_HEADER: Final = "X-Memagent-Read"
_SECONDS_BETWEEN_NOTES: Final = 0.2
_SEND_TIMEOUT_SECONDS: Final = 60.0
_FRAME_TOKENS: Final = 128
"""Tokens reserved for the sentences that introduce the findings."""

T = TypeVar("T")


@dataclass(frozen=True)
class LongRequest:
    """A request that must be read."""

    options: Options
    source_names: tuple[str, ...]
    """The names of the texts that are read."""
    read_request: ReadRequest
    continuation: Continuation | None
    """The request to pass on with the findings; None if the read's answer is the reply."""
    reservation: AsyncExitStack = field(default_factory=AsyncExitStack)
    """The reserved memory of the request's body, until the request has been passed on."""


@dataclass(eq=False, repr=False)
class ChatCompletions:
    """Answers chat requests."""

    reader: MemAgent
    manager: ReadManager
    uploads: Uploads
    """The files that requests may refer to."""
    settings: ServeSettings
    metrics: Metrics
    request_quota: BodyQuota
    """The quota of large requests in memory."""

    def __post_init__(self) -> None:
        self._policy_server = self.reader.policy if isinstance(self.reader.policy, OpenAICompatiblePolicy) else None
        self._parse_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One for each API key: its large requests are parsed one at a time, so that they do not delay other keys."""
        self._parse_slots = asyncio.Semaphore(2)

    async def respond(self, request: Request, owner: Owner) -> Response:
        """Reply to a request.

        Raises:
            APIError: the request is refused.
            MemAgentError: the read or the policy failed.
        """
        with self.uploads.holding_texts():
            long_request = await self._receive(request, owner)
            if isinstance(long_request, Response):
                return long_request
            try:
                self.metrics.completions.labels("read_and_passed" if long_request.continuation else "read").inc()
                is_new = request.headers.get(NEW_READ_HEADER) in {"1", "true"}
                is_retry = request.headers.get("X-Stainless-Retry-Count", "0") != "0"  # of an official client
                read, start_kind = await self.manager.start(
                    long_request.read_request, read_again=is_new, is_retry=is_retry
                )
            except BaseException:
                await long_request.reservation.aclose()
                raise
        if long_request.options.stream:
            return EventSourceResponse(
                self._stream_events(long_request, read),
                headers={RUN_ID_HEADER: read.run_id, READ_HEADER: start_kind},
                ping=HEARTBEAT_SECONDS,
                send_timeout=_SEND_TIMEOUT_SECONDS,
                sep="\n",
            )
        async with long_request.reservation:
            response = await cancel_on_disconnect(request, self._respond(long_request, read))
        response.headers[RUN_ID_HEADER] = read.run_id
        response.headers[READ_HEADER] = start_kind
        return response

    async def _receive(self, request: Request, owner: Owner) -> Response | LongRequest:
        """Receive a request; pass it on if it is short."""
        settings, context = self.settings, await self.reader.aprepare()
        accept = request.headers.get("accept")
        max_bytes = min(owner.max_bytes or settings.max_body, settings.max_body)
        async with AsyncExitStack() as stack:
            reserve = stack.enter_context(self.request_quota.reservation(owner))
            body = await read_body(request, max_bytes, settings.idle_seconds, settings.body_seconds, reserve=reserve)
            is_large = len(body) > LARGE_BYTES
            locks = (self._parse_locks[owner.name], self._parse_slots) if is_large else (nullcontext(), nullcontext())
            with refuse_invalid_json():
                async with locks[0], locks[1]:
                    fields = await asyncio.to_thread(parse_fields, body) if is_large else parse_fields(body)
                    plan = await self._plan_request(body, fields, context)
                if isinstance(plan, bytes):
                    self.metrics.completions.labels("passed").inc()
                    return await cancel_on_disconnect(request, self._pass_on(plan, accept, context))
                long_request = await cancel_on_disconnect(request, self._make_long_request(plan, owner, context))
            if long_request.continuation:
                return replace(long_request, reservation=stack.pop_all())
            return long_request

    # Short requests

    async def _pass_on(self, body: bytes, accept: str | None, context: ReaderContext) -> Response:
        if self._policy_server is not None:
            return await relay_request(self._policy_server, "POST", "chat/completions", body, accept=accept or "*/*")
        chat = parse_chat(parse_fields(body))
        require_supported(chat, self.reader.policy)
        return await answer_locally(chat, self.reader.policy, context.sampling, context.budget.answer_tokens)

    # Long requests

    async def _plan_request(
        self, body: bytes, fields: dict[str, msgspec.Raw], context: ReaderContext
    ) -> ReadingPlan | bytes:
        """Return the plan of what to read. If the request fits, return the body to pass on instead."""
        if fields.pop("cache_salt", None) is not None:  # it would give access to the prefix cache of another key
            body = msgspec.json.encode(fields)
        budget, tokenizer = context.budget, context.tokenizer
        window = context.window or budget.context_window
        fits = len(body) <= (self.settings.read_above or window * 3 // 4)  # a token has at least one byte
        try:
            chat = parse_chat(fields)
        except APIError:
            if fits and self._policy_server is not None:
                return body  # the policy server may understand it
            raise
        if fits and not chat.has_files:
            return body
        max_tokens = self.settings.read_above or window - min(
            _count_reply_tokens(chat, budget.answer_tokens), window // 4
        )
        findings_tokens = budget.memory_tokens + budget.answer_tokens + _FRAME_TOKENS
        plan = await asyncio.to_thread(
            plan_reading, chat, tokenizer, max_tokens=max_tokens, findings_tokens=findings_tokens
        )
        if plan.is_empty:
            if plan.prompt_tokens > max_tokens and not MEDIA_KIND.search(chat.unreadable_kind or "image"):
                require_readable(chat)
            return body
        if not chat.has_files and is_front_end_task(chat):
            return await asyncio.to_thread(shorten_task, chat, max_tokens, tokenizer)
        return plan

    async def _make_long_request(self, plan: ReadingPlan, owner: Owner, context: ReaderContext) -> LongRequest:
        """Store the texts to read. Converting files may take long."""
        chat = plan.request
        require_readable(chat)
        require_model(chat, self.reader.policy.name)
        needs_continuation = self._policy_server is not None and needs_model_server(plan)
        if self._policy_server is None:
            require_supported(chat, self.reader.policy)
        question, short_request = await asyncio.to_thread(_compose_questions, plan, context, needs_continuation)
        self.manager.require_capacity(owner, question)
        attached_files = {position: part.file for position, part in chat.parts.items() if part.file is not None}
        files = {position: await self._store_file(file, owner) for position, file in attached_files.items()}
        sources = await asyncio.to_thread(list_sources, plan, files, self.reader.store)
        options = chat.options
        requested_tokens, budget_tokens = options.answer_tokens, context.budget.answer_tokens
        lowers_budget = requested_tokens is not None and requested_tokens < budget_tokens and not needs_continuation
        reference = sources[0].reference if len(sources) == 1 else None
        return LongRequest(
            options=options,
            source_names=tuple(source.name for source in sources),
            read_request=ReadRequest(
                owner=owner,
                document=reference or await self.uploads.add_text(owner, join_sources(sources), replaces_held=True),
                question=question,
                sampling=options.make_sampling(context.sampling),
                answer_tokens=requested_tokens if lowers_budget else None,
            ),
            continuation=Continuation(plan, short_request) if needs_continuation else None,
        )

    async def _store_file(self, file: FileContent, owner: Owner) -> DocumentRef:
        if file.file_id is not None:
            return await self.uploads.read_text(owner, file.file_id)
        data = JSONText.of(file.file_data)
        if data is None:
            raise make_bad_request_error("a file part has neither file_id nor file_data", "messages")
        data_file = io.BytesIO(await asyncio.to_thread(_decode_base64, data))
        return await self.uploads.add_text(owner, Document.from_file(data_file, clean_file_name(file.filename)))

    # Replies

    async def _respond(self, long_request: LongRequest, read: ServedRead) -> Response:
        result = await await_result(self.manager.follow(read))
        if (continuation := long_request.continuation) is not None:
            return await self._continue(long_request, continuation, result)
        return await self._answer(long_request, result)

    async def _answer(self, long_request: LongRequest, result: ReadResult) -> Response:
        text = format_answer(result, long_request.options.stop_texts)
        annotations = await asyncio.to_thread(build_annotations, result, text)
        reply_head = ReplyHead(result.run_id, self.reader.policy.name)
        message = {"content": text, "annotations": annotations}
        details = describe_read(result, long_request.source_names)
        return JSONResponse(
            reply_head.make_completion(message, get_finish_reason(result), sum_usage(result.usage), memagent=details)
        )

    async def _continue(self, long_request: LongRequest, continuation: Continuation, result: ReadResult) -> Response:
        assert self._policy_server is not None  # noqa: S101  otherwise the read's answer is the reply
        response = await relay_request(
            self._policy_server, "POST", "chat/completions", continuation.make_body(result, long_request.source_names)
        )
        annotations = await asyncio.to_thread(build_annotations, result, "")
        with bad_gateway_on_error("reply"):
            reply = json.loads(bytes(response.body))  # also accepts lone surrogates
            if response.status_code != 200:
                return response
            for choice in reply["choices"]:
                choice["message"]["annotations"] = annotations
            reply["usage"] = sum_usage(result.usage, reply.get("usage"))
            reply["memagent"] = describe_read(result, long_request.source_names)
            text = replace_lone_surrogates(json.dumps(reply, allow_nan=False, ensure_ascii=False))
            return Response(text, media_type="application/json")  # a later request with half a pair would be refused

    async def _stream_events(self, long_request: LongRequest, read: ServedRead) -> AsyncIterator[str]:
        """Yield a streamed reply: progress as reasoning, then the answer."""
        reply_head = ReplyHead(read.run_id, self.reader.policy.name)
        source_names = ", ".join(long_request.source_names)
        async with long_request.reservation:
            yield reply_head.make_chunk({"role": "assistant", "reasoning_content": f"Reading {source_names}.\n"})
            async with aclosing(self.manager.follow(read)) as changes:
                memory, last_note = "", 0.0
                async for change in changes:
                    if isinstance(change, ReadResult):
                        async for event in self._stream_result(long_request, reply_head, change):
                            yield event
                        continue
                    is_note_due = time.monotonic() - last_note >= _SECONDS_BETWEEN_NOTES
                    if is_note_due and (change.newest_update or not change.state.has_ended):
                        yield reply_head.make_chunk({"reasoning_content": format_progress(change, memory)})
                        memory = change.newest_update.memory if change.newest_update else memory
                        last_note = time.monotonic()

    async def _stream_result(
        self, long_request: LongRequest, reply_head: ReplyHead, result: ReadResult
    ) -> AsyncIterator[str]:
        continuation = long_request.continuation
        text = "" if continuation is not None else format_answer(result, long_request.options.stop_texts)
        if continuation is None:
            yield reply_head.make_chunk({"content": text})
        annotations = await asyncio.to_thread(build_annotations, result, text)
        yield reply_head.make_chunk(
            {"annotations": annotations}, memagent=describe_read(result, long_request.source_names)
        )
        if continuation is not None:
            async for event in self._stream_continuation(long_request, continuation, reply_head, result):
                yield event
            return
        yield reply_head.make_chunk({}, get_finish_reason(result))
        if long_request.options.wants_usage:
            yield reply_head.make_usage_chunk(sum_usage(result.usage))
        yield DONE

    async def _stream_continuation(
        self, long_request: LongRequest, continuation: Continuation, reply_head: ReplyHead, result: ReadResult
    ) -> AsyncIterator[str]:
        assert self._policy_server is not None  # noqa: S101  otherwise the read's answer is the reply
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self._policy_server.relay(
            "POST", "chat/completions", continuation.make_body(result, long_request.source_names), headers
        ) as server_reply:
            if get_media_type(server_reply) != EVENT_STREAM:
                raise await make_gateway_error(server_reply)
            async for event in iter_events(server_reply):
                if (merged_event := self._merge_event(event, long_request, reply_head, result)) is not None:
                    yield merged_event

    def _merge_event(
        self, event: str, long_request: LongRequest, reply_head: ReplyHead, result: ReadResult
    ) -> str | None:
        """Return an event of the model's reply as an event of this reply; None if it was not requested."""
        if event == DONE:
            return DONE
        with bad_gateway_on_error("stream"):
            values = json.loads(event)
            if values.get("choices") is None:
                return event
            values |= {"id": f"chatcmpl-{reply_head.run_id}", "created": reply_head.created}
            if values.get("usage"):
                if not values["choices"] and not long_request.options.wants_usage:
                    return None
                values["usage"] = sum_usage(result.usage, values["usage"])
            return json.dumps(values)  # also half of a surrogate pair, as the next event may have the other half


async def cancel_on_disconnect(request: Request, reply: Awaitable[T]) -> T:
    """Wait for a reply; it is cancelled if the client disconnects.

    Raises:
        APIError: the client has disconnected.
    """
    reply_task = asyncio.ensure_future(reply)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({reply_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if reply_task.done():
            return reply_task.result()
        raise APIError(499, "the client has gone", code="client_gone")
    finally:
        for task in (reply_task, disconnect_task):
            task.cancel()
        await asyncio.gather(reply_task, disconnect_task, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _count_reply_tokens(chat: ChatRequest, default_tokens: int) -> int:
    """Return how many tokens to reserve for the reply. The model server decides about invalid options."""
    try:
        return chat.options.answer_tokens or default_tokens
    except APIError:
        return default_tokens


def _compose_questions(plan: ReadingPlan, context: ReaderContext, needs_continuation: bool) -> tuple[str, str]:
    """Return the question of the read, and the replacement of a long user request in the request that is passed on."""
    max_tokens, tokenizer = context.budget.question_tokens, context.tokenizer
    question = _shorten_to_budget(
        max_tokens, compose_question(plan, tokenizer, max_tokens, with_context=not needs_continuation), context
    )
    is_request_read = needs_continuation and any(position.message == plan.latest_index for position in plan.positions)
    return question, compose_question(plan, tokenizer, max_tokens, with_context=False) if is_request_read else ""


def _shorten_to_budget(max_tokens: int, question: str, context: ReaderContext) -> str:
    """Shorten a question until it fits in `max_tokens` tokens, even with its tags escaped."""
    limit = max_tokens
    while (excess := context.count_shown_tokens(question) - max_tokens) > 0 and limit > 1:
        limit = max(1, limit - excess)
        question = shorten_text(question, limit, context.tokenizer.count)
    return question


def _decode_base64(data: JSONText) -> bytes:
    """Decode base64 text or a base64 data URL."""
    try:
        digits = data.decode().encode().translate(None, b" \t\r\n\v\f")  # `split` takes twenty times the memory
        digits = digits.partition(b",")[2] if digits.startswith(b"data:") else digits
        return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except (ValueError, msgspec.DecodeError) as error:
        raise make_bad_request_error(f"file_data is not base64: {error}", "messages") from error

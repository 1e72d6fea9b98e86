"""The routes of the live page. All except the page itself and the sign-in need the cookie of `page_sessions`."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, TypeVar

import msgspec
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_serve.api_errors import make_bad_request_error, make_not_found_error, make_too_busy_error
from memagent_serve.app import ServerResources, get_owner, store_upload
from memagent_serve.bodies import read_body
from memagent_serve.chat_replies import HEARTBEAT_SECONDS
from memagent_serve.completions import cancel_on_disconnect
from memagent_serve.keys import LOCAL, Owner
from memagent_serve.ledger import ReadState
from memagent_serve.live.live_events import format_passage, format_read, format_sources, stream_changes
from memagent_serve.live.live_reads import LiveReads
from memagent_serve.page_sessions import PAGE_PREFIX, SIGN_IN_PATH, STATIC_PREFIX, PageSessions

_MAX_BODY_BYTES: Final = 1 << 20
_MAX_SIGN_IN_BYTES: Final = 4096
_MAX_LISTED_READS: Final = 200
_MAX_QUESTIONS: Final = 32
_MAX_FILES: Final = 64
_MAX_STREAMS_PER_OWNER: Final = 32
_SEND_TIMEOUT_SECONDS: Final = 30.0
_PAGE_HEADERS: Final = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
_FILE_HEADERS: Final = {
    **_PAGE_HEADERS,
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
_RUN_PAGE_HEADERS: Final = {**_PAGE_HEADERS, "Content-Security-Policy": "frame-ancestors 'none'"}
"""Headers for run pages, which contain their own content security policy."""

T = TypeVar("T")


class SignInRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Sign in with the token of the start-up message, or with a key."""

    token: str


class NewReadsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Read files for one or more questions; each question is a separate read."""

    files: list[str]
    questions: list[str]
    read_again: bool = False


class EditRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Replace a memory."""

    chunk: int
    before: str
    text: str
    branch: str = ""


class AnswerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Ask from the current memory."""

    question: str


class RatingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Judge an answer."""

    up: bool


@dataclass(eq=False, repr=False)
class LivePage:
    """The page's routes."""

    resources: ServerResources
    """The resources, shared with the API."""
    sessions: PageSessions
    """Who may use the page."""

    def __post_init__(self) -> None:
        self._live = LiveReads(self.resources)
        self._streams: Counter[str] = Counter()

    def make_routes(self) -> list[Route]:
        """Return the routes, for `make_app`."""
        read_path = f"{PAGE_PREFIX}/reads/{{id}}"
        return [
            Route("/", self._serve_file),
            Route(STATIC_PREFIX + "{name}", self._serve_file),
            Route(SIGN_IN_PATH, self._sign_in, methods=["POST"]),
            Route(SIGN_IN_PATH, self._describe_session),
            Route(SIGN_IN_PATH, self._sign_out, methods=["DELETE"]),
            Route(f"{PAGE_PREFIX}/files", self._add_file, methods=["POST"]),
            Route(f"{PAGE_PREFIX}/reads", self._start_reads, methods=["POST"]),
            Route(f"{PAGE_PREFIX}/reads", self._list_reads),
            Route(f"{read_path}/pause", self._pause, methods=["POST"]),
            Route(f"{read_path}/stop", self._stop, methods=["POST"]),
            Route(f"{read_path}/continue", self._resume, methods=["POST"]),
            Route(f"{read_path}/memory", self._edit, methods=["POST"]),
            Route(f"{read_path}/answer", self._answer, methods=["POST"]),
            Route(f"{read_path}/thumbs", self._judge, methods=["POST"]),
            Route(f"{read_path}/sources", self._show_sources),
            Route(f"{read_path}/passage", self._show_passage),
            Route(f"{read_path}/page", self._show_run_page),
            Route(f"{PAGE_PREFIX}/events", self._stream_events),
        ]

    async def _serve_file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in _STATIC_FILES:
            raise make_not_found_error("the page has no such file")
        package, media_type = _STATIC_FILES[name]
        text = files(package).joinpath(name).read_text(encoding="utf-8")
        return Response(text, media_type=f"{media_type}; charset=utf-8", headers=_FILE_HEADERS)

    async def _sign_in(self, request: Request) -> Response:
        body = await _parse_body(self.resources, request, SignInRequest, _MAX_SIGN_IN_BYTES)
        return self.sessions.sign_in(body.token, request.scope)

    async def _describe_session(self, request: Request) -> Response:
        await self.resources.reader.aprepare()  # some policies know their name only after this
        return _make_json_response({"owner": get_owner(request).name, "model": self.resources.reader.policy.name})

    async def _sign_out(self, request: Request) -> Response:
        self.sessions.sign_out(request.scope)
        return Response(status_code=204)

    async def _add_file(self, request: Request) -> Response:
        file = await store_upload(self.resources, request)
        document = await cancel_on_disconnect(request, self._live.add_document(get_owner(request), file))
        return _make_json_response({"id": file.id, "text_bytes": document["size"]})

    async def _start_reads(self, request: Request) -> Response:
        body = await _parse_body(self.resources, request, NewReadsRequest)
        if len(body.questions) > _MAX_QUESTIONS or len(body.files) > _MAX_FILES:
            limits = f"at most {_MAX_QUESTIONS} questions and {_MAX_FILES} files are allowed at once"
            raise make_bad_request_error(f"{limits}, got {len(body.questions)} and {len(body.files)}", "questions")
        start = self._live.start_reads(get_owner(request), body.files, body.questions, read_again=body.read_again)
        reads = await cancel_on_disconnect(request, start)
        return _make_json_response({"reads": [read.run_id for read in reads]})

    async def _list_reads(self, request: Request) -> Response:
        owner, query = get_owner(request), request.query_params
        newest = min(_MAX_LISTED_READS, _parse_number(query.get("newest"), 50))
        reads, total = await self.resources.manager.search(
            owner, query.get("q", ""), newest=newest, skip=_parse_number(query.get("skip"), 0)
        )
        answers = await asyncio.to_thread(self._live.get_answers, [entry.run_id for entry, _ in reads])
        values = [format_read(entry, read, answers.get(entry.run_id)) for entry, read in reads]
        return _make_json_response({"reads": values, "total": total})

    async def _pause(self, request: Request) -> Response:
        await self._live.pause(*_get_owner_and_run_id(request))
        return Response(status_code=204)

    async def _stop(self, request: Request) -> Response:
        await self._live.pause(*_get_owner_and_run_id(request), ReadState.CANCELLED)
        return Response(status_code=204)

    async def _resume(self, request: Request) -> Response:
        await self._live.resume(*_get_owner_and_run_id(request))
        return Response(status_code=204)

    async def _edit(self, request: Request) -> Response:
        body = await _parse_body(self.resources, request, EditRequest)
        await self._live.edit(*_get_owner_and_run_id(request), body.chunk, body.branch, body.before, body.text)
        return Response(status_code=204)

    async def _answer(self, request: Request) -> Response:
        body = await _parse_body(self.resources, request, AnswerRequest)
        answer = await self._live.answer_now(*_get_owner_and_run_id(request), body.question)
        return _make_json_response({"answer": answer.answer, "memory": answer.memory})

    async def _judge(self, request: Request) -> Response:
        body = await _parse_body(self.resources, request, RatingRequest)
        await self._live.judge(*_get_owner_and_run_id(request), up=body.up)
        return Response(status_code=204)

    async def _show_sources(self, request: Request) -> Response:
        view = await self._live.get_view(*_get_owner_and_run_id(request))
        return _make_json_response({"lines": await asyncio.to_thread(lambda: format_sources(build_timeline(view)))})

    async def _show_passage(self, request: Request) -> Response:
        view, query = await self._live.get_view(*_get_owner_and_run_id(request)), request.query_params
        start = _parse_number(query.get("start"), 0)
        end = max(start, _parse_number(query.get("end"), start))
        return _make_json_response(
            await asyncio.to_thread(format_passage, view, self.resources.reader.store, start, end)
        )

    async def _show_run_page(self, request: Request) -> Response:
        owner, run_id = _get_owner_and_run_id(request)
        view = await self._live.get_view(owner, run_id)
        page = await asyncio.to_thread(lambda: render_page(build_timeline(view), document_link=f"/#document/{run_id}"))
        return Response(page.encode("utf-8"), media_type="text/html; charset=utf-8", headers=_RUN_PAGE_HEADERS)

    async def _stream_events(self, request: Request) -> Response:
        owner = get_owner(request)
        if self._streams[owner.name] >= _MAX_STREAMS_PER_OWNER:
            raise make_too_busy_error("too many pages are open with this key; close some", 5)
        self._streams[owner.name] += 1
        events = stream_changes(self._live, owner, request.query_params.get("run"))
        return _EventStream(
            events,
            lambda: self._streams.subtract([owner.name]),
            headers=_PAGE_HEADERS,
            ping=HEARTBEAT_SECONDS,
            send_timeout=_SEND_TIMEOUT_SECONDS,
            sep="\n",
        )


class _EventStream(EventSourceResponse):
    """A stream of events that calls a function when it ends, even if it ends before the first event."""

    def __init__(self, events: AsyncIterator[dict[str, str]], on_end: Callable[[], None], **options: Any) -> None:
        super().__init__(events, **options)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _get_owner_and_run_id(request: Request) -> tuple[Owner, str]:
    return get_owner(request), request.path_params["id"]


async def _parse_body(
    resources: ServerResources, request: Request, body_type: type[T], max_bytes: int = _MAX_BODY_BYTES
) -> T:
    """Parse the JSON body of a small request.

    Raises:
        APIError: the body is too long, does not arrive, or is invalid, or other requests use all the memory.
    """
    seconds = resources.settings.idle_seconds
    owner: Owner = request.state.owner or LOCAL  # a sign-in has no owner yet; its body is too small to be counted
    with resources.request_quota.reservation(owner) as reserve:
        body = await read_body(request, max_bytes, seconds, seconds, reserve=reserve)
    try:
        return msgspec.json.decode(body, type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise make_bad_request_error(f"the request cannot be parsed: {error}", code="invalid_json") from error


def _make_json_response(value: Any) -> Response:
    """Return a value as ASCII JSON, which can also carry lone surrogates."""
    return Response(json.dumps(value), media_type="application/json", headers=_PAGE_HEADERS)


def _parse_number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) <= 15 else default


_STATIC_FILES: Final = {
    "index.html": (__package__, "text/html"),
    "live.js": (__package__, "text/javascript"),
    "live.css": (__package__, "text/css"),
    "page.css": ("memagent_graph.timeline", "text/css"),
}
"""The package and the media type of each file of the page. The page shares the style sheet of run pages."""

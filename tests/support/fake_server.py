"""An HTTP server with a part of the OpenAI API and vLLM's additions, whose replies a test chooses."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from memagent_graph import Completion, OpenAICompatiblePolicy, SamplingParams
from memagent_graph.policy import Message
from memagent_graph.tokenizers import EMBEDDED, load_tokenizer
from support.scripts import read_perfectly

HELLO = [Message(role="user", content="hello there")]
Reply = str | dict[str, Any] | web.Response


class FakeServer:
    """Replies with `respond(body, number)`; `number` counts the requests from 0.

    A text becomes a completion, a dict is sent as JSON, a `web.Response` as it is. `requests`, `bodies` and `headers`
    hold those of all completion requests in order; `peak_concurrency` is the largest number in flight. `authorization`
    is the required header; `key` sets it.
    """

    def __init__(
        self,
        respond: Callable[[dict[str, Any], int], Reply] | None = None,
        *,
        delay: float = 0.0,
        model: str = "fake",
        key: str | None = None,
        authorization: str | None = None,
        window: int | None = 8192,
        vllm: bool = False,
        root: str | None = None,
        tokenizer_info: dict[str, Any] | None = None,
        port: int = 0,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        self.respond = respond or (lambda body, number: read_perfectly(body["messages"][-1]["content"]))
        self.delay = delay
        self.count_tokens = count_tokens or load_tokenizer(EMBEDDED).count
        self.model = model
        self.authorization = f"Bearer {key}" if key else authorization
        self.window = window
        self.vllm = vllm
        self.root = root
        self.tokenizer_info = tokenizer_info
        self.models: Any = None
        """The reply at /models in place of the usual list: JSON, or a function that returns a response."""
        self.adapters: list[str] = []
        """Names of adapters, which are served beside the model as by vLLM."""
        self.requests: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.peak_concurrency = 0
        self._in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._port = port

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._serve, daemon=True).start()
        assert self._ready.wait(10), "the fake server did not start"
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def ask(self, sampling: SamplingParams | None = None, **options: Any) -> Completion:
        """Ask this server for one completion, through a policy with these options."""
        policy = OpenAICompatiblePolicy(**{"model": self.model, "base_url": self.base_url, **options})
        try:
            return await policy.complete(HELLO, sampling or SamplingParams())
        finally:
            await policy.aclose()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._serve_models)
        if self.tokenizer_info is not None:
            app.router.add_get("/tokenizer_info", self._serve_tokenizer_info)
        app.router.add_post("/v1/chat/completions", self._serve_completion)
        self.add_routes(app)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    def add_routes(self, app: web.Application) -> None:
        """Add further routes; subclasses override this."""

    def _refuse_wrong_key(self, request: web.Request) -> web.Response | None:
        if self.authorization and request.headers.get("Authorization") != self.authorization:
            return web.json_response({"error": {"message": "Incorrect API key"}}, status=401)
        return None

    async def _serve_models(self, request: web.Request) -> web.Response:
        if refusal := self._refuse_wrong_key(request):
            return refusal
        if self.models is not None:
            return self.models() if callable(self.models) else web.json_response(self.models)
        entry = {"id": self.model, "object": "model", "owned_by": "vllm" if self.vllm else "fake"}
        if self.root:
            entry["root"] = self.root
        if self.window:
            entry["max_model_len"] = self.window  # type: ignore[assignment]
        adapters = [{**entry, "id": name, "parent": self.model, "max_model_len": None} for name in self.adapters]
        return web.json_response({"object": "list", "data": [entry, *adapters]})

    async def _serve_tokenizer_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.tokenizer_info)

    async def _serve_completion(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refuse_wrong_key(request):
            return refusal
        body = await request.json()
        self.bodies.append(await request.read())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self._in_flight += 1
        self.peak_concurrency = max(self.peak_concurrency, self._in_flight)
        try:
            await asyncio.sleep(self.delay)
            if body["model"] not in {self.model, *self.adapters}:
                message = f"The model `{body['model']}` does not exist."
                return web.json_response({"error": {"message": message, "code": 404}}, status=404)
            reply = self.respond(body, len(self.requests) - 1)
        finally:
            self._in_flight -= 1
        if isinstance(reply, web.Response):
            return reply
        if body.get("stream") and isinstance(reply, str):
            return await self._stream_reply(request, body, reply)
        return web.json_response(reply if isinstance(reply, dict) else self.make_reply(body, reply))

    async def _stream_reply(self, request: web.Request, body: dict[str, Any], text: str) -> web.StreamResponse:
        """Send a text word by word."""
        reply = self.make_reply(body, text)
        chunk_fields = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
        deltas = [
            {"role": "assistant", "content": ""},
            *({"content": word} for word in re.findall(r"\s*\S+\s*$|\s*\S+", text)),
        ]
        choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
        choices.append([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        chunks = [{**chunk_fields, "choices": choice} for choice in choices]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**chunk_fields, "choices": [], "usage": reply["usage"]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def make_reply(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        """Return a chat completion in vLLM's format; a token is a word."""
        words = text.split()
        prompt_tokens = sum(self.count_tokens(message["content"] or "") for message in body["messages"])
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(words)}
        message = {"role": "assistant", "content": text}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {
            "id": "x",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [choice],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }
        if body.get("logprobs"):
            logprob_fields = {"logprob": -0.5, "bytes": None, "top_logprobs": []}
            choice["logprobs"] = {"content": [{"token": word, **logprob_fields} for word in words]}
        if body.get("return_token_ids"):
            choice["token_ids"] = list(range(len(words)))
            reply["prompt_token_ids"] = list(range(prompt_tokens))
        return reply

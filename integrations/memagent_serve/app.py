"""The application and its routes. `memagent serve` runs it; tests and other servers can mount it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from memagent_graph.addresses import AllowedNames
from memagent_graph.errors import MemAgentError
from memagent_graph.policies.model_info import SelfDescribing
from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy
from memagent_graph.policies.replies import parse_model_entries
from memagent_graph.reader import MemAgent
from memagent_serve.api_errors import APIError, make_bad_request_error, make_not_found_error
from memagent_serve.bodies import BodyQuota, limit_body
from memagent_serve.chat_replies import RUN_ID_HEADER
from memagent_serve.completions import READ_HEADER, ChatCompletions
from memagent_serve.guard import Guard
from memagent_serve.keys import Owner
from memagent_serve.ledger import Entry, Ledger
from memagent_serve.metrics import Metrics
from memagent_serve.page_sessions import PageSessions
from memagent_serve.reads import ReadManager, ServedRead, name_state
from memagent_serve.serve_settings import ServeSettings
from memagent_serve.short_requests import bad_gateway_on_error, get_media_type, relay_request
from memagent_serve.uploads import UploadedFile, Uploads

_HEALTH_TIMEOUT_SECONDS: Final = 5.0
_MAX_LISTED_READS: Final = 100
_MIN_FREE_BYTES: Final = 16 << 20
_FORM_BYTES: Final = 1 << 16
"""The maximum size of an upload's form without the file."""


@dataclass
class ServerResources:
    """The resources of the routes. Other parts of the server (a page, MCP) share them.

    Args:
        reader: the reader.
        settings: access and limits.
    """

    reader: MemAgent
    settings: ServeSettings
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.settings.folder / "reads.sqlite")
        settings = self.settings
        self.manager = ReadManager(self.reader, self.ledger, settings, self.metrics)
        self.uploads = Uploads(
            settings.folder / "files",
            self.ledger,
            self.reader.store,
            quota=settings.storage,
            total_quota=settings.total_storage,
            texts_in_use=self.manager.list_documents,
        )
        self.request_quota = BodyQuota(settings.request_memory, max(settings.max_body, settings.request_memory // 2))
        self.upload_quota = BodyQuota(settings.total_storage, settings.storage + _FORM_BYTES)
        """The quota of uploads while they arrive, in the system's folder for temporary files."""
        self.completions = ChatCompletions(
            self.reader, self.manager, self.uploads, settings, self.metrics, self.request_quota
        )
        self.metrics.add_gauge(
            "memagent_request_bytes", "Bytes of large requests in memory.", lambda: self.request_quota.used_bytes
        )
        self.metrics.add_gauge("memagent_reads", "Running and waiting reads.", lambda: len(self.manager))

    async def aclose(self) -> None:
        """End all reads; they continue when they are requested again."""
        await self.manager.aclose()
        self.ledger.close()


def make_app(
    resources: ServerResources, routes: Sequence[BaseRoute] = (), sessions: PageSessions | None = None
) -> Starlette:
    """Return the application.

    Args:
        resources: the resources of the routes; they are closed with the application.
        routes: additional routes, which the guard protects too.
        sessions: the browsers that may use the live page, if its routes are included.
    """
    settings = resources.settings

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await resources.aclose()

    allowed_names = AllowedNames(settings.names, settings.origins)
    secrets = getattr(resources.reader.policy, "secrets", ())
    middleware = [Middleware(Guard, allowed_names, settings.keys, resources.metrics, sessions, secrets)]
    if settings.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=[*allowed_names.origins],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # the official client for JavaScript sends several of its own
            expose_headers=[RUN_ID_HEADER, READ_HEADER, "Retry-After", "X-Should-Retry"],
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=[*_make_routes(resources), *routes],
        middleware=middleware,
        exception_handlers={HTTPException: _make_error_response},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def get_owner(request: Request) -> Owner:
    """Return the owner of a request's key."""
    owner: Owner = request.state.owner
    return owner


async def store_upload(resources: ServerResources, request: Request) -> UploadedFile:
    """Store the file of a request's form.

    Raises:
        APIError: the form has no file, or the file is too large or does not arrive.
    """
    owner, settings = get_owner(request), resources.settings
    max_bytes = (owner.max_bytes or settings.storage) + _FORM_BYTES
    with resources.upload_quota.reservation(owner, max_bytes) as reserve:
        receive = limit_body(request.receive, max_bytes, settings.idle_seconds, settings.body_seconds, reserve)
        form_request = Request(request.scope, receive)
        async with form_request.form(max_files=1, max_fields=8, max_part_size=_FORM_BYTES) as form:
            file, purpose = form.get("file"), form.get("purpose", "user_data")
            if not isinstance(file, UploadFile) or not isinstance(purpose, str):
                raise make_bad_request_error("the form has no file; send it as the field file", "file")
            return await asyncio.to_thread(resources.uploads.add, owner, file.filename, purpose, file.file)


def _make_routes(resources: ServerResources) -> list[Route]:
    reader, manager, uploads = resources.reader, resources.manager, resources.uploads

    async def create_completion(request: Request) -> Response:
        return await resources.completions.respond(request, get_owner(request))

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await _list_models(reader)})

    async def get_model(request: Request) -> Response:
        model_id = request.path_params["name"]
        for entry in await _list_models(reader):
            if entry.get("id") == model_id:
                return JSONResponse(entry)
        raise make_not_found_error("there is no such model here; GET /v1/models lists them", "model_not_found", "model")

    async def refuse_responses(request: Request) -> Response:
        raise make_not_found_error(
            "the Responses API is not served here; use /v1/chat/completions, which reads requests of any length",
            "unsupported_api",
        )

    async def add_file(request: Request) -> Response:
        return JSONResponse((await store_upload(resources, request)).to_body())

    async def list_files(request: Request) -> Response:
        entries = await asyncio.to_thread(uploads.list_files, get_owner(request))
        return JSONResponse({"object": "list", "data": [file.to_body() for file in entries], "has_more": False})

    async def get_file(request: Request) -> Response:
        file = await asyncio.to_thread(uploads.get, get_owner(request), request.path_params["id"])
        return JSONResponse(file.to_body())

    async def get_file_content(request: Request) -> Response:
        path = await asyncio.to_thread(uploads.get_content_path, get_owner(request), request.path_params["id"])
        return FileResponse(path, media_type="application/octet-stream")

    async def delete_file(request: Request) -> Response:
        file_id = request.path_params["id"]
        await asyncio.to_thread(uploads.delete, get_owner(request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def list_reads(request: Request) -> Response:
        reads, _ = await manager.search(get_owner(request), "", newest=_MAX_LISTED_READS)
        return JSONResponse({"object": "list", "data": [_make_read_object(entry, read) for entry, read in reads]})

    async def get_read(request: Request) -> Response:
        owner, run_id = get_owner(request), request.path_params["id"]
        read = manager.find(owner, run_id)  # before the ledger, where an end is recorded first
        entry = await asyncio.to_thread(resources.ledger.get, owner.name, run_id)
        return JSONResponse(_make_read_object(entry, read or manager.find(owner, run_id)))

    async def cancel_read(request: Request) -> Response:
        running_read = manager.find(get_owner(request), request.path_params["id"])
        if running_read is not None:
            await manager.cancel(running_read)
        return await get_read(request)

    async def get_health(request: Request) -> Response:
        usage = await asyncio.to_thread(shutil.disk_usage, resources.settings.folder)
        components = {
            "server": "ok",
            "policy": await _check_policy(reader),
            "reads": await _check_ledger(resources.ledger),
            "disk": "ok" if usage.free >= _MIN_FREE_BYTES else "its disk is full",
        }
        is_healthy = all(component == "ok" for component in components.values())
        return JSONResponse(
            {"status": "ok" if is_healthy else "failed", "parts": components}, 200 if is_healthy else 503
        )

    async def get_metrics(request: Request) -> Response:
        return Response(resources.metrics.render(), media_type=resources.metrics.content_type)

    return [
        Route("/v1/chat/completions", create_completion, methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", get_model),
        Route("/v1/responses{rest:path}", refuse_responses, methods=["GET", "POST", "DELETE"]),
        Route("/v1/files", add_file, methods=["POST"]),
        Route("/v1/files", list_files),
        Route("/v1/files/{id}", get_file),
        Route("/v1/files/{id}", delete_file, methods=["DELETE"]),
        Route("/v1/files/{id}/content", get_file_content),
        Route("/v1/reads", list_reads),
        Route("/v1/reads/{id}", get_read),
        Route("/v1/reads/{id}/cancel", cancel_read, methods=["POST"]),
        Route("/health", get_health),
        Route("/metrics", get_metrics),
    ]


async def _make_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  what the handler is registered for
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    refusal = APIError(error.status_code, error.detail, code=code, headers=error.headers)
    return JSONResponse(refusal.to_body(), refusal.status, headers=refusal.headers)


def _make_read_object(entry: Entry, read: ServedRead | None) -> dict[str, Any]:
    values = {name: value for name, value in asdict(entry).items() if name not in {"owner", "request", "read_request"}}
    values["state"] = name_state(entry, read)
    if read is not None:
        values["chunks"] = len(read.updates)
        values["progress"] = read.newest_update.progress if read.newest_update else None
    return {"object": "read", **values}


async def _list_models(reader: MemAgent) -> list[dict[str, Any]]:
    if not isinstance(reader.policy, OpenAICompatiblePolicy):
        context, created = await reader.aprepare(), int(time.time())
        window = context.window or context.budget.context_window
        model = {"id": reader.policy.name, "object": "model", "created": created, "owned_by": "memagent"}
        return [{**model, "max_model_len": window}]
    reply = await relay_request(reader.policy, "GET", "models")
    with bad_gateway_on_error("list of models"):
        return parse_model_entries(bytes(reply.body))


async def _check_policy(reader: MemAgent) -> str:
    """Return the policy's state. Its error messages are left out, because anyone may request the health."""
    policy = reader.policy
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_SECONDS):
            if isinstance(policy, OpenAICompatiblePolicy):
                async with policy.relay("GET", "models") as reply:
                    is_ok = reply.status == 200 and get_media_type(reply) == "application/json"
                    if is_ok or (policy.model_list_error and reply.status in {403, 404, 405}):  # no list, or not for us
                        return "ok"
                    return f"its server answers {reply.status} to a request for its models"
            if isinstance(policy, SelfDescribing):
                await policy.describe()
    except TimeoutError:
        return f"its server does not answer within {_HEALTH_TIMEOUT_SECONDS:g} s"
    except MemAgentError:
        return "its server cannot be reached; is it running, and is --base-url right?"
    return "ok"


async def _check_ledger(ledger: Ledger) -> str:
    try:
        await asyncio.to_thread(ledger.search, "", "", newest=1)
    except MemAgentError:
        return "the list of reads cannot be read; is the disk full?"
    return "ok"

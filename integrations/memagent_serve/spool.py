"""Request bodies as they arrive: small ones in memory, large ones in unnamed files under a quota."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Final

from memagent_graph.storage.private_files import private_folder
from memagent_serve.api_errors import ApiError, too_busy

IN_MEMORY_BYTES: Final = 1 << 20
_WRITE_BYTES: Final = 1 << 20
_WAIT_SECONDS: Final = 10


class Body:
    """A request's body. `view` is valid until it is closed; a large one is mapped from its file."""

    def __init__(self, data: bytes | None, file: IO[bytes] | None, size: int) -> None:
        self._data = data
        self._file = file
        self.size = size

    @property
    def is_large(self) -> bool:
        """Whether it is on disk."""
        return self._file is not None

    def view(self) -> memoryview:
        """Its bytes."""
        if self._file is None:
            return memoryview(self._data or b"")
        # The mapping exists as long as it is used; only the parts that are used are in memory.
        return memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))


class Spool:
    """Receives bodies.

    Args:
        folder: the folder of large ones while they are needed.
        quota: the maximum bytes of all large ones together.
        idle_seconds: how long the next piece of a body may take to arrive.
        body_seconds: how long a whole body may take.
    """

    def __init__(self, folder: Path, *, quota: int, idle_seconds: float, body_seconds: float) -> None:
        self._folder = folder
        self._quota = quota
        self._idle_seconds = idle_seconds
        self._body_seconds = body_seconds
        self.used = 0
        """Bytes in use now."""

    @asynccontextmanager
    async def received(
        self, stream: AsyncIterator[bytes], *, declared: str | None, largest: int
    ) -> AsyncIterator[Body]:
        """A whole body; its file is removed afterwards.

        Args:
            stream: its pieces.
            declared: the Content-Length header.
            largest: its maximum size in bytes.

        Raises:
            ApiError: 413 if it is larger, 408 if it does not arrive, 429 if the quota is used up.
        """
        expected = int(declared) if declared is not None and declared.isdecimal() else 0
        self._check(expected, largest, param="Content-Length")
        taken = 0
        file: IO[bytes] | None = None
        buffer = bytearray()
        size = 0

        def take(upto: int) -> None:
            nonlocal taken
            if upto > taken:
                if self.used + upto - taken > self._quota:
                    raise self._full()
                self.used += upto - taken
                taken = upto

        if expected > IN_MEMORY_BYTES:
            take(expected)
        try:
            async for piece in self._pieces(stream):
                size += len(piece)
                self._check(size, largest)
                buffer += piece
                if len(buffer) >= _WRITE_BYTES and (file is not None or size > IN_MEMORY_BYTES):
                    take(size)
                    if file is None:
                        file = await asyncio.to_thread(self._new_file)
                    await asyncio.to_thread(_write, file, buffer)
                    buffer = bytearray()
            if file is None:
                yield Body(bytes(buffer), None, size)
                return
            take(size)
            await asyncio.to_thread(_finish, file, buffer)
            yield Body(None, file, size)
        finally:
            self.used -= taken
            if file is not None:
                file.close()

    async def _pieces(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._body_seconds
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + self._idle_seconds)) as patience:
                async for piece in stream:
                    patience.reschedule(None)
                    yield piece
                    patience.reschedule(min(deadline, loop.time() + self._idle_seconds))
        except TimeoutError as error:
            raise ApiError(408, "the request's body did not arrive in time", code="request_timeout") from error

    def _check(self, size: int, largest: int, param: str | None = None) -> None:
        if size > largest:
            raise ApiError(
                413,
                f"a request may have {largest:,} bytes; send less, or start the server with a larger --max-body",
                code="request_too_large",
                param=param,
            )

    def _full(self) -> ApiError:
        return too_busy("other requests use all the space for large ones; send it again later", _WAIT_SECONDS)

    def _new_file(self) -> IO[bytes]:
        private_folder(self._folder)
        return tempfile.TemporaryFile(dir=self._folder)


def _write(file: IO[bytes], data: bytearray) -> None:
    file.write(data)


def _finish(file: IO[bytes], rest: bytearray) -> None:
    file.write(rest)
    file.flush()


def require_plain(content_type: str | None, content_encoding: str | None) -> None:
    """Refuse everything but plain JSON; also compressed bodies, which may be bombs.

    Raises:
        ApiError: 415.
    """
    if (content_encoding or "identity").lower() != "identity":
        raise ApiError(
            415, "compressed requests are not accepted; send the JSON uncompressed", code="unsupported_encoding"
        )
    if (content_type or "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: send Content-Type: application/json", code="unsupported_type")

"""Checks which documents a model's arguments may name.

A model chooses a tool's arguments, and a text that it has read may influence that choice. So each kind of source has
its own check: files must be below allowed roots, state keys and the fetcher are named by the developer, and nothing may
be larger than the maximum. A refusal is a `RefusedSourceError` with a message for the model.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from memagent_graph.documents import Document
from memagent_graph.documents.allowed_paths import AllowedRoots, shorten_name
from memagent_graph.errors import RefusedSourceError

Content: TypeAlias = str | bytes
Fetcher: TypeAlias = Callable[[str], Content | Awaitable[Content]]
"""A function that downloads a web address. It decides which hosts are allowed, and is called only with http and https
addresses."""

_WEB_SCHEMES = ("http", "https")
_SOURCE_KINDS = ("path", "text", "state_key", "url")


@dataclass(frozen=True, slots=True)
class NamedSource:
    """The document that a model named: exactly one of the first four fields is set."""

    path: str | None = None
    text: str | None = None
    state_key: str | None = None
    url: str | None = None
    pages: str | None = None
    """The pages to read of a PDF file; all pages if it is None."""


@dataclass(frozen=True)
class DocumentSources:
    """Everything that a tool may read."""

    roots: AllowedRoots
    """Folders (or single files) below which paths must be, and the largest size."""
    fetcher: Fetcher | None = None
    """Downloads web addresses; without it no address is read."""
    state_keys: tuple[str, ...] = ()
    """The keys of the agent's state that may be read; text, bytes or LangChain documents."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of source that can be read, which a tool's schema offers to the model."""
        availability = {
            "path": bool(self.roots.roots),
            "text": True,
            "state_key": bool(self.state_keys),
            "url": self.fetcher is not None,
        }
        return tuple(kind for kind, is_offered in availability.items() if is_offered)

    async def open(self, source: NamedSource, state: Any = None) -> Document:
        """Return the document that a model named.

        Args:
            source: the source.
            state: the agent's state, a mapping or an object with attributes; None outside an agent.

        Raises:
            RefusedSourceError: the source may not be read, does not exist, or is too large.
            DocumentError: `pages` does not name pages.
        """
        kinds = [kind for kind in _SOURCE_KINDS if getattr(source, kind) is not None]
        if len(kinds) != 1:
            raise RefusedSourceError(
                f"exactly one source must be named, got {' and '.join(kinds) or 'none'}",
                hint=f"Choose one of: {', '.join(self.kinds)}.",
            )
        if source.path is not None:
            document = await asyncio.to_thread(self.roots.find_document, source.path)
        elif source.text is not None:
            document = self._make_document(source.text, "the text")
        elif source.state_key is not None:
            document = self._open_state_value(source.state_key, state)
        else:
            document = await self._fetch(source.url or "")
        return document.only(source.pages or None)

    def _open_state_value(self, key: str, state: Any) -> Document:
        if key not in self.state_keys:
            hint = f"Choose one of: {', '.join(self.state_keys)}." if self.state_keys else "Pass the text itself."
            raise RefusedSourceError(f"the state key {shorten_name(key)!r} may not be read", hint=hint)
        value = state.get(key) if hasattr(state, "get") else getattr(state, key, None)
        if isinstance(value, str | bytes):
            return self._make_document(value, f"state key {key!r}", key)
        documents: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
        if documents and all(isinstance(getattr(item, "page_content", None), str) for item in documents):
            byte_count = sum(len(item.page_content.encode("utf-8", "replace")) for item in documents)
            self.roots.require_size(byte_count, f"state key {key!r}")
            return Document.from_langchain(documents, key)
        raise RefusedSourceError(
            f"the state holds no text under {key!r}" if value else f"the state key {key!r} is empty",
            hint="Choose a key with text, bytes or LangChain documents.",
        )

    async def _fetch(self, url: str) -> Document:
        display_url = shorten_name(url)
        if self.fetcher is None:
            raise RefusedSourceError("web addresses are not read here", hint=f"Choose one of: {', '.join(self.kinds)}.")
        try:
            parts = urlsplit(url)
            is_web_address = parts.scheme.lower() in _WEB_SCHEMES and parts.hostname
        except ValueError:
            is_web_address = None
        if not is_web_address:
            raise RefusedSourceError(
                f"{display_url!r} is not a web address", hint="Only whole http and https addresses are read."
            )
        try:
            content = await asyncio.to_thread(self.fetcher, url)
            if inspect.isawaitable(content):
                content = await content
        except Exception as error:  # a fetcher may raise anything, and the model should see it
            raise RefusedSourceError(
                f"{display_url!r} could not be fetched ({type(error).__name__}: {shorten_name(str(error))})",
                hint="Check the address, or read something else.",
            ) from error
        if not isinstance(content, str | bytes):
            raise RefusedSourceError(
                f"what was fetched from {display_url!r} is a {type(content).__name__}, not text or bytes",
                hint="Read something else.",
            )
        return self._make_document(content, display_url, PurePosixPath(unquote(parts.path)).name or str(parts.hostname))

    def _make_document(self, content: Content, display_name: str, name: str = "text") -> Document:
        if isinstance(content, bytes):
            self.roots.require_size(len(content), display_name)
            return Document.from_bytes(content, name)
        self.roots.require_text(content, display_name)
        # Not `Document.of`: it checks whether a short text is a path, which would reveal files outside the roots.
        return Document.from_text(content, name)

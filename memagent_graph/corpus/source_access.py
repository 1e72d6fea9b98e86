"""Opens what a corpus consists of: files, objects behind fsspec, members of archives. Says no to what leads elsewhere.

What a path or URL may lead to:

- a local path, links followed, has to be below the input's root;
- http and https have to lead to a public address, which is checked at every connection, so that neither a name's
  address that changes nor a redirect leads into the own network;
- object stores (s3, gs, az, ...) are those that fsspec knows, with the user's own credentials and endpoints; a path in
  a table has to be below the root there, too;
- a chain of URLs (`a::b`) is refused, as each link of it could be any of these.

The last and the check of addresses can be switched off by whoever starts the run, not by what is in a table.
"""

from __future__ import annotations

import importlib.util
import io
import ipaddress
import socket
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

from memagent_graph.corpus.corpus_documents import CorpusDocument
from memagent_graph.errors import DocumentError, MissingExtraError, RefusedSourceError

if TYPE_CHECKING:
    from memagent_graph.documents import Document

WEB: Final = frozenset({"http", "https"})
STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "memory"})
"""Schemes of fsspec that are opened; others reach further than a corpus needs (ssh, git, a shell elsewhere)."""
_PACKAGES: Final = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "adl": "adlfs", "hf": "huggingface_hub",
}  # fmt: skip
_SEPARATOR: Final = "::"
_BLOCK_BYTES: Final = 4 * 2**20
_TRANSLATED: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that a gateway leads on to the IPv4 address in their last four bytes (RFC 6052)."""


@dataclass(frozen=True, slots=True)
class ArchiveBounds:
    """What an archive may hold. Its own table of contents is checked before any of it is unpacked.

    Attributes:
        members: how many files.
        total_bytes: unpacked, all together.
        ratio: unpacked over packed bytes, of the archive and of each file above a megabyte.
    """

    members: int = 100_000
    total_bytes: int = 100 * 2**30
    ratio: float = 200.0


@dataclass(frozen=True)
class SourceAccess:
    """Opens documents below one root. It can be pickled; what it has open stays in its process.

    Args:
        root: the folder or URL below which paths have to be; empty for a corpus without files.
        allow_private: let http and https lead into private networks and to this machine.
        allow_chained: let fsspec open chains of URLs.
        max_bytes: the largest document.
        encoding: the charset of text files, if it is not to be detected.
        bounds: what archives may hold.
    """

    root: str = ""
    allow_private: bool = False
    allow_chained: bool = False
    max_bytes: int = 2**30
    encoding: str | None = None
    bounds: ArchiveBounds = field(default_factory=ArchiveBounds)

    @property
    def absolute(self) -> SourceAccess:
        """The same for a process that works in another folder."""
        return self if not self.root or scheme_of(self.root) else replace(self, root=str(Path(self.root).absolute()))

    def filesystem(self, location: str) -> tuple[Any, str]:
        """The fsspec filesystem of a URL, and the path there.

        Raises:
            RefusedSourceError: a scheme, address or chain that may not be opened.
            MissingExtraError: fsspec, or the package for that scheme, is not installed.
        """
        if _SEPARATOR in location and not self.allow_chained:
            raise RefusedSourceError(
                f"{shown(location)} is a chain of URLs",
                hint="Name the file or archive itself; --allow-chained-urls opens chains.",
            )
        scheme = scheme_of(location)
        if importlib.util.find_spec("fsspec") is None:
            raise MissingExtraError("corpus", f"opening {shown(location)}")
        import fsspec.core  # noqa: PLC0415  an optional dependency

        if _SEPARATOR in location:
            found = fsspec.core.url_to_fs(location)
            return found[0], str(found[1])
        if scheme not in WEB | STORES:
            raise RefusedSourceError(
                f"{shown(location)} has the scheme {scheme!r}, which is not opened",
                hint=f"Use one of {', '.join(sorted(WEB | STORES))}, or a path.",
            )
        package = _PACKAGES.get(scheme)
        if package and importlib.util.find_spec(package) is None:
            raise DocumentError(
                f"opening {shown(location)} needs the package {package}, which is not installed",
                hint=f"Install it with: pip install {package}",
            )
        options: dict[str, Any] = {}
        if scheme in WEB:
            require_public(location, allow_private=self.allow_private)
            options = {"get_client": _any_client if self.allow_private else _public_client}
        elif scheme != "memory":
            options = {"use_listings_cache": False}
        with store_failures(location):
            found = fsspec.core.url_to_fs(location, **options)
        return found[0], str(found[1])

    @contextmanager
    def open_file(self, location: str) -> Iterator[IO[bytes]]:
        """A file by its path or URL, in binary.

        Raises:
            DocumentError: it cannot be opened, or may not be.
        """
        with ExitStack() as stack:
            if scheme_of(location):
                filesystem, path = self.filesystem(location)
                with store_failures(location):
                    file = stack.enter_context(filesystem.open(path, "rb", block_size=_BLOCK_BYTES))
                yield cast("IO[bytes]", file)
            else:
                with store_failures(location):
                    opened = stack.enter_context(Path(location).open("rb"))
                yield opened

    def below_root(self, given: str) -> str:
        """The path or URL that a table's path stands for.

        Raises:
            RefusedSourceError: it leads out of the root, or is an address that may not be opened.
        """
        if "\0" in given or not given.strip():
            raise RefusedSourceError(f"{given[:200]!r} is not a path", hint="Correct it in the table.")
        if _SEPARATOR in given:
            raise RefusedSourceError(f"{shown(given)} is a chain of URLs", hint="A table cannot name chains.")
        scheme = scheme_of(given)
        if scheme in WEB:
            require_public(given, allow_private=self.allow_private)
            return given
        root_scheme = scheme_of(self.root)
        if scheme or root_scheme:
            joined = given if scheme else f"{self.root.rstrip('/')}/{given}"
            inside = joined.startswith(self.root.rstrip("/") + "/") and ".." not in urlsplit(joined).path.split("/")
            if scheme == "file" or not inside:
                raise _outside(given)
            return joined
        try:
            root = Path(self.root).resolve(strict=True)
            found = (root / given).resolve(strict=True)
        except FileNotFoundError:
            raise DocumentError(f"the file {given} does not exist", hint="Correct the path in the table.") from None
        except (OSError, RuntimeError, ValueError) as error:
            raise RefusedSourceError(f"{given[:200]!r} cannot be followed", hint="Correct it in the table.") from error
        if root not in found.parents:
            raise _outside(given)
        return str(found)

    @contextmanager
    def opened(self, document: CorpusDocument) -> Iterator[Document]:
        """A document's text or file, ready for the document store.

        Raises:
            DocumentError: it cannot be opened, may not be, or is larger than is allowed.
        """
        from memagent_graph.documents import Document  # noqa: PLC0415  listing needs none of it

        name = document.name.rpartition("/")[2] or document.name
        if document.trouble is not None:
            raise RefusedSourceError(document.trouble)
        if document.size is not None and document.size > self.max_bytes:
            raise _too_large(document.name, self.max_bytes)
        if document.text is not None:
            yield Document.from_text(document.text, name)
            return
        if document.location is None:
            raise DocumentError(f"{document.name} has neither a text nor a file", hint="Correct it in the table.")
        if document.member is None and not scheme_of(document.location):
            yield Document.from_path(document.location, encoding=self.encoding)
            return
        with ExitStack() as stack:
            file = stack.enter_context(self._content(document.location, document.member))
            bounded = _Bounded(file, document.name, self.max_bytes)
            yield Document.from_file(cast("IO[bytes]", bounded), name, encoding=self.encoding)

    @contextmanager
    def _content(self, location: str, member: str | None) -> Iterator[IO[bytes]]:
        if member is None:
            with self.open_file(location) as file:
                yield file
            return
        archive = _archives.get(self, location)
        try:
            with archive.open(member) as inner:
                yield inner
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, KeyError, ValueError) as error:
            raise DocumentError(
                f"{member} cannot be unpacked: {error}", hint="Unpack the archive yourself, and read its folder."
            ) from error


def members_of(access: SourceAccess, location: str) -> list[zipfile.ZipInfo]:
    """The files in a zip archive, within the bounds.

    Raises:
        DocumentError: it is not a zip archive, or holds more than is allowed.
    """
    return [each for each in _archives.get(access, location).infolist() if not each.is_dir()]


def require_public(url: str, *, allow_private: bool = False) -> None:
    """Refuse an address that is written out in a URL and is not a public one. Names are checked when they connect.

    Raises:
        RefusedSourceError: it is a private, link-local or otherwise reserved address, or there is no host.
    """
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host:
        raise RefusedSourceError(f"{shown(url)} names no host", hint="Write it as https://HOST/PATH.")
    if allow_private:
        return
    if host == "localhost" or host.endswith(".localhost"):
        raise _private(host)
    try:
        require_public_address(str(ipaddress.ip_address(host.strip("[]"))))
    except ValueError:
        return


def require_public_address(address: str) -> None:
    """Refuse an IP address that is not on the public network.

    Raises:
        RefusedSourceError: it is private, link-local, of this machine, or reserved.
        ValueError: it is not an IP address.
    """
    found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if found in _TRANSLATED else None
        found = found.ipv4_mapped or found.sixtofour or translated or found
    if not found.is_global or found.is_multicast:
        raise _private(address)


def scheme_of(location: str) -> str:
    """The scheme of a URL in lower case; empty for a path."""
    scheme, separator, _ = location.partition("://")
    return scheme.lower() if separator and scheme.replace("+", "").replace("-", "").replace(":", "").isalnum() else ""


def shown(location: str) -> str:
    """A URL for messages: without user name, password, query and fragment, which may hold keys."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return "the URL"
    if not parts.scheme or not parts.netloc:
        return location if len(location) <= 200 else location[:200] + "..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextmanager
def store_failures(location: str) -> Iterator[None]:
    """What a file system or a client of a store raises, as a `DocumentError` with what is known of the cause."""
    import aiohttp  # noqa: PLC0415  only for its errors

    hint = "Check the name and your rights there."
    try:
        yield
    except (RefusedSourceError, MissingExtraError, DocumentError):
        raise
    except Exception as error:  # clients of stores raise their own kinds, whose words may repeat keys
        for cause in _causes(error):
            if isinstance(cause, RefusedSourceError):
                raise cause from None
        if isinstance(error, FileNotFoundError):
            raise DocumentError(f"{shown(location)} does not exist", hint="Check the name.") from None
        if isinstance(error, PermissionError):
            raise DocumentError(f"{shown(location)} may not be read by this user", hint=hint) from None
        if isinstance(error, aiohttp.ClientError):
            reason = getattr(error, "message", "") or type(error).__name__
            raise DocumentError(f"{shown(location)} cannot be fetched: {reason}", hint=hint) from None
        raise DocumentError(f"{shown(location)} cannot be read ({type(error).__name__})", hint=hint) from error


class _NotPublicError(OSError):
    """A refusal in the form that clients expect of a connection that fails."""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


class _Bounded(io.RawIOBase):
    """A file of which no more is read than a document may have."""

    def __init__(self, file: IO[bytes], name: str, most: int) -> None:
        self._file, self._document, self._most, self._left = file, name, most, most

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        with store_failures(self._document):
            data = self._file.read(min(size, _BLOCK_BYTES) if size >= 0 else _BLOCK_BYTES)
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._document, self._most)
        return data


class _OpenArchives:
    """The zip archives that are open in this process: each is opened once, as its table of contents may be long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, ArchiveBounds], tuple[ExitStack, zipfile.ZipFile]] = {}

    def get(self, access: SourceAccess, location: str) -> zipfile.ZipFile:
        key = (location, access.bounds)
        with self._lock:
            if key not in self._open:
                for stack, _ in self._open.values():
                    stack.close()
                self._open.clear()
                self._open[key] = self._opened(access, location)
            return self._open[key][1]

    def _opened(self, access: SourceAccess, location: str) -> tuple[ExitStack, zipfile.ZipFile]:
        stack = ExitStack()
        try:
            file = stack.enter_context(access.open_file(location))
            archive = stack.enter_context(zipfile.ZipFile(file))
            _require_bounds(archive, access.bounds, shown(location))
        except (zipfile.BadZipFile, NotImplementedError) as error:
            stack.close()
            raise DocumentError(f"{shown(location)} is not a zip archive that can be read: {error}") from error
        except BaseException:
            stack.close()
            raise
        return stack, archive


def _require_bounds(archive: zipfile.ZipFile, bounds: ArchiveBounds, name: str) -> None:
    members = archive.infolist()
    unpacked, packed = sum(each.file_size for each in members), sum(each.compress_size for each in members)
    trouble = None
    if len(members) > bounds.members:
        trouble = f"{len(members):,} files, and may have {bounds.members:,}"
    elif unpacked > bounds.total_bytes:
        trouble = f"{unpacked:,} bytes unpacked, and may have {bounds.total_bytes:,}"
    elif unpacked > bounds.ratio * max(packed, 2**20):
        trouble = f"{unpacked / max(packed, 1):,.0f} times its size unpacked, and may have {bounds.ratio:g} times"
    else:
        for each in members:
            if each.file_size > bounds.ratio * max(each.compress_size, 2**20):
                trouble = f"a file that unpacks to more than {bounds.ratio:g} times its size"
    if trouble:
        raise RefusedSourceError(
            f"the archive {name} has {trouble}", hint="Unpack it yourself if you trust it, and read its folder."
        )


_archives: Final = _OpenArchives()


async def _public_client(loop: Any = None, **options: Any) -> Any:
    import aiohttp  # noqa: PLC0415

    def connected(address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, place = address
        try:
            require_public_address(place[0])
        except RefusedSourceError as refusal:
            raise _NotPublicError(str(refusal)) from refusal
        return socket.socket(family=family, type=kind, proto=protocol)

    connector = aiohttp.TCPConnector(socket_factory=connected)
    return aiohttp.ClientSession(connector=connector, **_kept(options))


async def _any_client(loop: Any = None, **options: Any) -> Any:
    import aiohttp  # noqa: PLC0415

    return aiohttp.ClientSession(**_kept(options))


def _kept(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in {"connector", "trust_env"}}


def _private(address: str) -> RefusedSourceError:
    return RefusedSourceError(
        f"{address} is not a public address",
        hint="--allow-private-addresses lets a corpus be read from your own network.",
    )


def _outside(given: str) -> RefusedSourceError:
    return RefusedSourceError(
        f"{shown(given)!r} leads out of the input's folder",
        hint="Paths in a table are below the table's folder, or below --root.",
    )


def _too_large(name: str, most: int) -> RefusedSourceError:
    return RefusedSourceError(f"{name} has more than {most:,} bytes", hint="Raise --max-bytes, or split it.")

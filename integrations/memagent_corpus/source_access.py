"""Opens the documents of a corpus: local files, web addresses and objects in stores, by these rules.

- A local path must lead to a regular file below the input's root after links are resolved.
- An http or https URL must lead to a public address. The address is checked at every connection, so a redirect or a
  changed DNS entry cannot lead into a private network.
- Object stores (s3, gs, az, ...) are opened through fsspec with the user's own credentials and endpoints. A path in a
  table must be below the root here, too.
- A chain of URLs (`a::b`) is refused, because each URL in it could break one of these rules.

The user who starts the run can switch off the address check. The content of a table cannot.
"""

from __future__ import annotations

import importlib.util
import io
import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

from memagent_graph.documents import Document
from memagent_graph.documents.allowed_paths import resolve_below
from memagent_graph.errors import DocumentError, MissingExtraError, RefusedSourceError, load_extra

WEB_SCHEMES: Final = frozenset({"http", "https"})
STORE_SCHEMES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "memory"})
"""The allowed schemes of fsspec. Others, such as ssh and git, give more access than a corpus needs."""
_PACKAGE_BY_SCHEME: Final = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "adl": "adlfs", "hf": "huggingface_hub",
}  # fmt: skip
PATH_HINT: Final = "Correct the path. Paths in a table begin at the table's folder, or at --root, and stay below it."
_CHAIN_SEPARATOR: Final = "::"
_BLOCK_BYTES: Final = 4 * 2**20
_MAX_FETCH_SECONDS: Final = 3600
_MAX_SILENT_SECONDS: Final = 300
_URL_SEPARATOR: Final = re.compile(r"[/\\?#]")
"""Clients quote all of these but the first, or take them as one, so `..` counts between any two."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that a gateway translates to the IPv4 address in their last four bytes (RFC 6052)."""
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""The only IPv6 addresses that are assigned to hosts of the public internet."""
_DOCUMENTATION_NETWORK: Final = ipaddress.IPv6Network("3fff::/20")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusDocument:
    """A document before it is opened: its name, where its text is, and the questions about it. It can be pickled."""

    name: str
    """Unique in its corpus. A file's name is its path relative to the input's root, never an absolute path."""
    version: str = ""
    """A string that differs if the document may have changed; empty if the source has no such information."""
    size: int | None = None
    """Size in bytes according to the source; None if it is unknown before the document is opened."""
    text: str | None = field(default=None, repr=False)
    """The text, if it comes from a table column."""
    location: str | None = field(default=None, repr=False)
    """The file's path or URL, if the text comes from a file."""
    questions: tuple[str, ...] = ()
    """Questions about this document only, in addition to those about every document."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Input columns that are copied to the document's rows, JSON-serializable."""
    error: str | None = None
    """Why the document cannot be opened, if this is known when it is listed."""


class CorpusSize(NamedTuple):
    """The size of a corpus; None for a number that is unknown before all documents are listed."""

    documents: int | None
    size: int | None
    """The size of all documents in bytes."""


@dataclass(frozen=True)
class SourceAccess:
    """Opens documents below one root. It can be pickled, without the files that it has open.

    Args:
        root: the folder or URL that all paths must be below; if it is empty, no path is allowed.
        allow_private: allow http and https URLs that lead to private networks or to this machine.
        max_bytes: maximum size of a document.
        encoding: the charset of text files; detected if it is None.
    """

    root: str = ""
    allow_private: bool = False
    max_bytes: int = 2**30
    encoding: str | None = None

    @property
    def absolute(self) -> SourceAccess:
        """The same access with an absolute root, for processes with another working directory."""
        return self if not self.root or get_scheme(self.root) else replace(self, root=str(Path(self.root).absolute()))

    def open_filesystem(self, location: str) -> tuple[Any, str]:
        """Return the fsspec filesystem of a path or URL, and the path in it.

        Raises:
            RefusedSourceError: the scheme, the address or a chain of URLs is not allowed.
            MissingExtraError: fsspec is not installed.
            DocumentError: the package for the scheme is not installed, or the store cannot be opened.
        """
        if _CHAIN_SEPARATOR in location and get_scheme(location):
            raise RefusedSourceError(
                f"{display_url(location)} is a chain of URLs", hint="Use the URL of the file itself."
            )
        scheme = get_scheme(location)
        fsspec = load_extra("fsspec", "corpus", f"opening {display_url(location)}")
        if not scheme:
            return fsspec.filesystem("file"), str(Path(location).absolute())
        if scheme not in WEB_SCHEMES | STORE_SCHEMES:
            raise RefusedSourceError(
                f"{display_url(location)} has the scheme {scheme!r}, which is not allowed",
                hint=f"Use a path, or choose one of: {', '.join(sorted(WEB_SCHEMES | STORE_SCHEMES))}.",
            )
        package = _PACKAGE_BY_SCHEME.get(scheme)
        if package and importlib.util.find_spec(package) is None:
            raise DocumentError(
                f"opening {display_url(location)} needs the package {package}, which is not installed",
                hint=f"Install it with: pip install {package}",
            )
        options: dict[str, Any] = {"use_listings_cache": False}
        if scheme in WEB_SCHEMES:
            require_public(location, allow_private=self.allow_private)
            options = {"get_client": partial(_make_http_client, self.allow_private)}
        with convert_store_errors(location):
            filesystem, path = fsspec.url_to_fs(location, **options)
        return filesystem, str(path)

    @contextmanager
    def open_file(self, location: str, block_bytes: int = _BLOCK_BYTES) -> Iterator[IO[bytes]]:
        """Open a file by its path or URL in binary mode.

        Args:
            location: the path or URL.
            block_bytes: the size of a request. 0 reads a web address in one request, without going back.

        Raises:
            DocumentError: the file cannot be opened, or opening it is not allowed.
        """
        filesystem, path = self.open_filesystem(location)
        with convert_store_errors(location):
            file = filesystem.open(path, "rb", block_size=block_bytes)
        with file:
            yield file

    def resolve_below_root(self, path: str) -> str:
        """Resolve a path from a table to a file's path or URL below the root.

        Raises:
            RefusedSourceError: the path is outside the root or does not lead to a regular file, or its address is not
                allowed.
            DocumentError: the file does not exist.
        """
        if "\0" in path or not path.strip():
            raise RefusedSourceError(f"{path[:200]!r} is not a path", hint="Correct it in the table.")
        if _CHAIN_SEPARATOR in path:
            raise RefusedSourceError(f"{display_url(path)} is a chain of URLs", hint="Use the URL of the file itself.")
        scheme = get_scheme(path)
        if scheme in WEB_SCHEMES:
            require_public(path, allow_private=self.allow_private)
            return path
        if scheme or get_scheme(self.root):
            url = path if scheme else f"{self.root.rstrip('/')}/{path}"
            is_inside = url.startswith(self.root.rstrip("/") + "/") and ".." not in _URL_SEPARATOR.split(url)
        else:
            url, is_inside = "", bool(self.root)
        if scheme == "file" or not is_inside:
            raise RefusedSourceError(f"{display_url(path)!r} is outside the input's folder", hint=PATH_HINT)
        return url or str(resolve_below(Path(self.root), path, hint=PATH_HINT))

    @contextmanager
    def open_document(self, document: CorpusDocument) -> Iterator[Document]:
        """Open a document for the document store.

        Raises:
            DocumentError: the document cannot be opened, is too large, or opening it is not allowed.
        """
        name = document.name.rpartition("/")[2] or document.name
        if document.error is not None:
            raise RefusedSourceError(document.error)
        if document.size is not None and document.size > self.max_bytes:
            raise _make_too_large_error(document.name, self.max_bytes)
        if document.text is not None:
            yield Document.from_text(document.text, name)
            return
        if document.location is None:
            raise DocumentError(f"{document.name} has no text and no file", hint="Correct it in the table.")
        if not get_scheme(document.location):
            root = Path(self.root).resolve()
            yield replace(Document.from_path(document.location, encoding=self.encoding), root=root)
            return
        # A web server's reply to a request for a block may be of any size, or the whole file.
        block_bytes = 0 if get_scheme(document.location) in WEB_SCHEMES else _BLOCK_BYTES
        with self.open_file(document.location, block_bytes) as file:
            content = _SizeLimitedFile(file, document.name, self.max_bytes)
            yield Document.from_file(cast("IO[bytes]", content), name, encoding=self.encoding)


def require_public(url: str, *, allow_private: bool = False) -> None:
    """Check that the IP address in a URL is public. Host names are checked later, when a connection is made.

    Raises:
        RefusedSourceError: the address is private, link-local or otherwise reserved, or the URL has no host.
    """
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host:
        raise RefusedSourceError(f"the URL {display_url(url)} has no host", hint="Write it as https://HOST/PATH.")
    if allow_private:
        return
    if host == "localhost" or host.endswith(".localhost"):
        raise _make_private_address_error(host)
    with suppress(ValueError):  # it is a host name
        require_public_address(host)


def require_public_address(address: str) -> None:
    """Check that an IP address is public.

    Raises:
        RefusedSourceError: the address is private, link-local, loopback or reserved.
        ValueError: the string is not an IP address.
    """
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        nat64_address = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
        ip = ip.ipv4_mapped or ip.sixtofour or nat64_address or ip
    is_unassigned = ip.version == 6 and (ip not in _GLOBAL_UNICAST or ip in _DOCUMENTATION_NETWORK)
    if not ip.is_global or ip.is_multicast or is_unassigned:
        raise _make_private_address_error(address)


def get_scheme(location: str) -> str:
    """Return the scheme of a URL in lower case; empty for a path."""
    scheme, separator, _ = location.partition("://")
    return scheme.lower() if separator and scheme.replace("+", "").replace("-", "").replace(":", "").isalnum() else ""


def display_url(location: str) -> str:
    """Return a URL for messages, without user name, password, query and fragment, which may contain keys."""
    try:
        url_parts = urlsplit(location)
    except ValueError:
        return "the URL"
    if not url_parts.scheme or not url_parts.netloc:
        return location if len(location) <= 200 else f"...{location[-200:]}"  # tables are told by their suffix
    return f"{url_parts.scheme}://{url_parts.netloc.rpartition('@')[2]}{url_parts.path}"


@contextmanager
def convert_store_errors(location: str) -> Iterator[None]:
    """Convert errors of a file system or of a store's client to a `DocumentError`."""
    import aiohttp  # noqa: PLC0415  only for its errors

    hint = "Check the name and your permissions."
    try:
        yield
    except (MissingExtraError, DocumentError):
        raise
    except Exception as error:  # each client library has its own exceptions, and their messages may contain keys
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, RefusedSourceError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, FileNotFoundError):
            raise DocumentError(f"{display_url(location)} does not exist", hint="Check the name.") from None
        if isinstance(error, PermissionError):
            raise DocumentError(f"you have no permission to read {display_url(location)}", hint=hint) from None
        if isinstance(error, aiohttp.ClientError):
            reason = getattr(error, "message", "") or type(error).__name__
            raise DocumentError(f"{display_url(location)} cannot be fetched: {reason}", hint=hint) from None
        raise DocumentError(f"{display_url(location)} cannot be read ({type(error).__name__})", hint=hint) from error


class _SizeLimitedFile(io.RawIOBase):
    """Reads a file, and raises `RefusedSourceError` if the file is larger than `max_bytes`."""

    def __init__(self, file: IO[bytes], name: str, max_bytes: int) -> None:
        self._file, self._name, self._max_bytes, self._bytes_left = file, name, max_bytes, max_bytes

    def read(self, size: int = -1) -> bytes:
        with convert_store_errors(self._name):
            data = self._file.read(min(size, _BLOCK_BYTES) if size >= 0 else _BLOCK_BYTES)
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise _make_too_large_error(self._name, self._max_bytes)
        return data


async def _make_http_client(allow_private: bool, loop: Any = None, **options: Any) -> Any:
    """Create an HTTP client that connects only to public addresses, unless private ones are allowed.

    The option `timeout` is an object of aiohttp, or the maximum seconds of a request, as in a JSON configuration.
    """
    import aiohttp  # noqa: PLC0415

    def open_socket(address: tuple[Any, ...]) -> socket.socket:
        family, socket_type, protocol, _, endpoint = address
        try:
            require_public_address(endpoint[0])
        except RefusedSourceError as refusal:  # the client expects an `OSError` from a failed connection
            raise OSError(str(refusal)) from refusal
        return socket.socket(family=family, type=socket_type, proto=protocol)

    connector = None if allow_private else aiohttp.TCPConnector(socket_factory=open_socket)
    # These options could bypass the address check.
    safe_options = {name: value for name, value in options.items() if name not in {"connector", "trust_env"}}
    timeout = safe_options.pop("timeout", None)
    if not isinstance(timeout, aiohttp.ClientTimeout):
        timeout = aiohttp.ClientTimeout(timeout or _MAX_FETCH_SECONDS, sock_connect=30, sock_read=_MAX_SILENT_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, **safe_options)


def _make_private_address_error(address: str) -> RefusedSourceError:
    return RefusedSourceError(
        f"{address} is not a public address",
        hint="Use --allow-private-addresses to read from your own network.",
    )


def _make_too_large_error(name: str, max_bytes: int) -> RefusedSourceError:
    return RefusedSourceError(f"{name} has more than {max_bytes:,} bytes", hint="Raise --max-bytes, or split the file.")

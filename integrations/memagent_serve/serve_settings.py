"""The settings of a server: addresses, access and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from memagent_graph.reading.state import Limits
from memagent_serve.keys import Keys


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of a server. Sizes are in bytes, times in seconds."""

    folder: Path
    """The folder of uploads and the list of reads."""
    keys: Keys = field(default_factory=Keys)
    names: tuple[str, ...] = ()
    """Host names that clients may use, in addition to localhost."""
    origins: tuple[str, ...] = ()
    """Other hosts whose web pages may send requests; none by default."""
    max_reads: int = 4
    """Reads that run at once."""
    max_waiting: int = 64
    """Additional reads that wait for their turn."""
    max_reads_per_key: int = 16
    """Reads of one key, including waiting ones."""
    keep_seconds: float = 3600.0
    """The time for which a finished read answers the same request again."""
    cancel_on_close: bool = False
    """Whether a read ends when the last client that follows it disconnects."""
    limits: Limits = field(default_factory=Limits)
    """Limits of each read, in addition to the limits of its key."""
    read_above: int | None = None
    """Prompts of more tokens than this are read; None: those that do not fit the policy's window."""
    max_body: int = 64 * 2**20
    request_memory: int = 256 * 2**20
    """The maximum size of all large requests together. Decoding them takes about as much memory again."""
    storage: int = 2**30
    """The maximum size of the uploaded files and texts of one key, on disk."""
    total_storage: int = 2**34
    """The maximum size of the files and texts of all keys together."""
    idle_seconds: float = 30.0
    """The longest pause of a client within a request."""
    body_seconds: float = 900.0
    """The longest time until a request has arrived."""
    max_connections: int = 2000

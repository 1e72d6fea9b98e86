"""A server's settings: addresses, access and limits. From flags or the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from memagent_graph.reading.state import Limits
from memagent_serve.keys import Keys


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """A server's settings. Sizes are in bytes, times in seconds."""

    folder: Path
    """The folder of uploads and the list of reads."""
    keys: Keys = field(default_factory=Keys)
    names: tuple[str, ...] = ()
    """Host names that clients may use, besides localhost."""
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
    """Limits of each read, in addition to its key's."""
    read_above: int | None = None
    """Prompts of more tokens than this are read; None: those that do not fit the policy's window."""
    max_body: int = 64 * 2**20
    request_memory: int = 256 * 2**20
    """The maximum size of all large requests together; decoding them takes about as much again."""
    storage: int = 2**30
    """The maximum size on disk of one key's uploaded files and texts together."""
    total_storage: int = 2**34
    """The maximum size of all keys' files and texts together."""
    idle_seconds: float = 30.0
    """The longest pause of a client inside a request."""
    body_seconds: float = 900.0
    """The longest time for a whole request to arrive."""
    max_connections: int = 2000

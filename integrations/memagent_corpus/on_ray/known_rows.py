"""The ids of a table's answered rows, for actors: 16 bytes each, in memory that all actors of a machine share."""

from __future__ import annotations

import importlib
from typing import Any

from memagent_corpus import TableFolder


class KnownRows:
    """A set of row ids in a sorted array, which Ray does not copy for each actor.

    Args:
        ids: a sorted array of the shape `(rows, 2)` with the high and low 64 bits of each id.
    """

    def __init__(self, ids: Any) -> None:
        self._ids = ids

    @classmethod
    def of(cls, table: TableFolder | None) -> KnownRows:
        """Load the ids of a table's rows that have an answer. The set is empty if there is no table yet.

        Raises:
            CorpusError: the table cannot be read.
        """
        numpy = importlib.import_module("numpy")
        if table is None or table.manifest() is None:
            return cls(numpy.empty((0, 2), ">u8"))
        answered = b"".join(bytes.fromhex(row["id"]) for row in table.rows(["id", "error"]) if row["error"] is None)
        ids = numpy.frombuffer(answered, ">u8").reshape(-1, 2)
        return cls(ids[numpy.lexsort((ids[:, 1], ids[:, 0]))])

    def __contains__(self, identity: object) -> bool:
        if not isinstance(identity, str) or not len(self._ids):
            return False
        high, low = int(identity[:16], 16), int(identity[16:32], 16)
        numpy = importlib.import_module("numpy")
        first = int(numpy.searchsorted(self._ids[:, 0], high, "left"))
        last = int(numpy.searchsorted(self._ids[:, 0], high, "right"))
        return any(int(each) == low for each in self._ids[first:last, 1])

    def __len__(self) -> int:
        return len(self._ids)

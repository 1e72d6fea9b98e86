"""The ids of the rows that a table has, for actors: 16 bytes each, in memory that all actors of a machine share."""

from __future__ import annotations

import importlib
from typing import Any

from memagent_graph.corpus import TableFolder


class KnownRows:
    """A container of row ids. Its array is sorted, and Ray does not copy it for each actor.

    Args:
        ids: the two halves of each as numbers, `(rows, 2)`, sorted.
    """

    def __init__(self, ids: Any) -> None:
        self._ids = ids

    @classmethod
    def of(cls, table: TableFolder | None) -> KnownRows:
        """Those of a table that have an answer; none if there is no table yet.

        Raises:
            CorpusError: the table cannot be read.
        """
        numpy = importlib.import_module("numpy")
        if table is None or table.manifest() is None:
            return cls(numpy.empty((0, 2), ">u8"))
        found = b"".join(bytes.fromhex(row["id"]) for row in table.rows(["id", "error"]) if row["error"] is None)
        ids = numpy.frombuffer(found, ">u8").reshape(-1, 2)
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

"""The actors. Each one reads many documents concurrently in one event loop, with a `CorpusReader`.

Ray Data creates the actors of a pool, and restarts an actor that dies. Each call gets one block, and each block is one
document. So if a machine is lost, only the documents that it was reading are affected.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from memagent_corpus import CorpusReader
from memagent_corpus.corpus_documents import CorpusDocument
from memagent_corpus.corpus_rows import Row, decoded_row, encoded
from memagent_corpus.engines import Work
from memagent_corpus.on_ray.actor_plan import ActorPlan, ActorReader
from memagent_corpus.table_folder import arrow_table
from memagent_corpus.table_inputs import Columns, document_of
from memagent_graph.errors import MemAgentError

WORK, OUTCOME = "work", "outcome"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one document, which is sent to the driver."""

    number: int
    """The document's number in its window."""
    rows: tuple[bytes, ...] = ()
    """The rows, encoded as in the ledger."""
    failure: MemAgentError | None = None
    """An error that every other document would cause too."""

    def decoded(self) -> list[Row]:
        """Decode the rows."""
        return [decoded_row(each) for each in self.rows]


class _Actor:
    """Creates its reader at the first document, in the event loop in which it reads.

    Args:
        plan: a pickled `ActorPlan`.
    """

    def __init__(self, plan: bytes) -> None:
        self._plan: ActorPlan = pickle.loads(plan)  # noqa: S301  from our own driver
        self._reader: ActorReader | None = None
        self._failure: MemAgentError | None = None

    def reader(self) -> CorpusReader:
        """Return the reader.

        Raises:
            MemAgentError: the reader cannot be created.
        """
        if self._failure is not None:
            raise self._failure
        if self._reader is None:
            try:
                self._reader = ActorReader(self._plan)
            except MemAgentError as error:
                self._failure = error
                raise
        return self._reader.reader

    def __del__(self) -> None:
        if (reader := getattr(self, "_reader", None)) is not None:
            reader.close()


class ReadWork(_Actor):
    """The actor of `RayEngine`. It turns blocks of pickled `Work` into blocks of pickled `Outcome`."""

    async def __call__(self, block: Any) -> Any:
        """Read the documents of a block, which usually has one, one after another."""
        outcomes = [await self._outcome(*pickle.loads(each)) for each in block.column(WORK).to_pylist()]  # noqa: S301
        arrow = importlib.import_module("pyarrow")
        return arrow.table({OUTCOME: arrow.array([pickle.dumps(each) for each in outcomes], arrow.large_binary())})

    async def _outcome(self, number: int, work: Work) -> Outcome:
        try:
            rows = await work.read(self.reader())
        except MemAgentError as error:
            return Outcome(number, failure=error)
        return Outcome(number, tuple(map(encoded, rows)))


class ReadRows(_Actor):
    """The actor of `read_corpus`. It turns blocks of documents into blocks of table rows.

    Args:
        plan: a pickled `ActorPlan`.
        columns: the columns of the blocks to use.
        answered: ids of the rows that already have an answer.
    """

    def __init__(self, plan: bytes, columns: Columns, answered: Container[str]) -> None:
        super().__init__(plan)
        self._columns, self._answered = columns, answered

    async def __call__(self, block: Any) -> Any:
        """Read the documents of a block, which usually has one, one after another.

        Raises:
            MemAgentError: an error that every other document would cause too.
        """
        reader = self.reader()
        rows: list[Row] = []
        for values in block.to_pylist():
            new_rows = await reader.read_one(self._document(values), answered=self._answered)
            rows += [decoded_row(encoded(each)) for each in new_rows]  # the same values as after the ledger
        return arrow_table(rows, reader.columns)

    def _document(self, values: Mapping[str, Any]) -> CorpusDocument:
        columns, access = self._columns.resolve(list(values), "the dataset"), self._plan.access
        return document_of(values, name_of(values, columns), columns, access)


def name_of(values: Mapping[str, Any], columns: Columns) -> str:
    """Return a name for a document without an id: its path, if it has one.

    Row numbers cannot be used, because blocks arrive in any order.
    """
    given = values.get(columns.path or "")
    return str(given) if isinstance(given, str) and given else "a document without an id"

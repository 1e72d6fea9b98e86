"""The actors: each reads many documents at a time in one event loop, with the reader of the core.

Ray Data makes one for each place in its pool and starts it again if it dies. A call is one block, and a block is one
document, so that a lost machine costs only what was being read there.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from memagent_graph.corpus.corpus_documents import CorpusDocument
from memagent_graph.corpus.corpus_rows import Row, decoded_row, encoded
from memagent_graph.corpus.engines import Work
from memagent_graph.corpus.table_folder import arrow_table
from memagent_graph.corpus.table_inputs import Columns, document_of
from memagent_graph.errors import MemAgentError
from memagent_ray.actor_plan import ActorPlan, ActorReader

WORK, OUTCOME = "work", "outcome"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a document, on its way to the driver."""

    number: int
    """Its place among those that were handed out."""
    rows: tuple[bytes, ...] = ()
    """Each as the ledger has it."""
    failure: MemAgentError | None = None
    """What every other document would meet as well."""

    def decoded(self) -> list[Row]:
        """The rows."""
        return [decoded_row(each) for each in self.rows]


class _Actor:
    """A reader that is made at the first document, in the event loop that it then reads in.

    Args:
        plan: an `ActorPlan`, pickled.
    """

    def __init__(self, plan: bytes) -> None:
        self._plan: ActorPlan = pickle.loads(plan)  # noqa: S301  our own driver's
        self._made: ActorReader | None = None
        self._failure: MemAgentError | None = None

    def _reader(self) -> ActorReader:
        if self._failure is not None:
            raise self._failure
        if self._made is None:
            try:
                self._made = ActorReader(self._plan)
            except MemAgentError as error:
                self._failure = error
                raise
        return self._made

    def __del__(self) -> None:
        if getattr(self, "_made", None) is not None:
            self._made.close()  # type: ignore[union-attr]


class ReadWork(_Actor):
    """For the engine: blocks of `Work` become blocks of `Outcome`, both pickled in a column."""

    async def __call__(self, block: Any) -> Any:
        """One block, whose rows are read one after another; as a rule it has one."""
        found = [await self._outcome(*pickle.loads(each)) for each in block.column(WORK).to_pylist()]  # noqa: S301  ours
        arrow = importlib.import_module("pyarrow")
        return arrow.table({OUTCOME: arrow.array([pickle.dumps(each) for each in found], arrow.large_binary())})

    async def _outcome(self, number: int, work: Work) -> Outcome:
        try:
            rows = await work.read(self._reader().reader)
        except MemAgentError as error:
            return Outcome(number, failure=error)
        return Outcome(number, tuple(map(encoded, rows)))


class ReadRows(_Actor):
    """For `read_corpus`: blocks of documents become blocks of the table's rows.

    Args:
        plan: an `ActorPlan`, pickled.
        columns: which columns of the blocks are what.
        answered: the ids of rows that there are.
    """

    def __init__(self, plan: bytes, columns: Columns, answered: Container[str]) -> None:
        super().__init__(plan)
        self._columns, self._answered = columns, answered

    async def __call__(self, block: Any) -> Any:
        """One block, whose documents are read one after another; as a rule it has one.

        Raises:
            MemAgentError: what every other document would meet as well.
        """
        reader = self._reader().reader
        rows: list[Row] = []
        for values in block.to_pylist():
            found = await reader.read_one(self._document(values), answered=self._answered)
            rows += [decoded_row(encoded(each)) for each in found]  # as the ledger would have them
        return arrow_table(rows, reader.columns)

    def _document(self, values: Mapping[str, Any]) -> CorpusDocument:
        columns, access = self._columns.settled(list(values), "the dataset"), self._plan.access
        return document_of(values, name_of(values, columns), columns, access)


def name_of(values: Mapping[str, Any], columns: Columns) -> str:
    """A document's name where the id that it should have is missing: blocks come in any order, so it has no number."""
    given = values.get(columns.path or "")
    return str(given) if isinstance(given, str) and given else "a document without an id"

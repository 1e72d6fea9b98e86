"""`read_corpus` and `write_table`, for users of Ray Data: from a dataset of documents to a table."""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from memagent_corpus import CorpusReader, TableFolder
from memagent_corpus.corpus_rows import CorpusRow, arrow_table, decode_row, encode_row, row_from
from memagent_corpus.corpus_run import exclusive
from memagent_corpus.on_ray.actor_plan import CPUS, ActorPlan, PlannedActor
from memagent_corpus.on_ray.ray_cluster import ray_module
from memagent_corpus.table_inputs import InputColumns, document_of
from memagent_corpus.table_writer import TableWriter
from memagent_graph.errors import CorpusError
from memagent_graph.reader import MemAgent


class AnsweredRows:
    """The ids of answered rows as a sorted sequence of 16 bytes each, which is small enough for every actor.

    Args:
        ids: the ids, as hexadecimal digits.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        self._ids = b"".join(sorted(map(bytes.fromhex, ids)))

    @classmethod
    def of(cls, table: TableFolder | None) -> AnsweredRows:
        """Load the ids of a table's rows that have an answer; none if there is no table yet.

        Raises:
            CorpusError: the table cannot be read.
        """
        if table is None or table.manifest() is None:
            return cls(())
        return cls(row["id"] for row in table.rows(["id", "error"]) if row["error"] is None)

    def __len__(self) -> int:
        return len(self._ids) // 16

    def __contains__(self, identity: object) -> bool:
        if not isinstance(identity, str):
            return False
        key = bytes.fromhex(identity)
        place = bisect.bisect_left(range(len(self)), key, key=self._at)
        return place < len(self) and self._at(place) == key

    def _at(self, place: int) -> bytes:
        return self._ids[16 * place : 16 * (place + 1)]


class BlockReader(PlannedActor):
    """The actor of `read_corpus`. It turns blocks of documents into blocks of table rows.

    Args:
        plan: a pickled `ActorPlan`.
        columns: the columns of the blocks to use.
        answered_ids: ids of the rows that already have an answer.
    """

    def __init__(self, plan: bytes, columns: InputColumns, answered_ids: Container[str]) -> None:
        super().__init__(plan)
        self._columns, self._answered_ids = columns, answered_ids

    async def __call__(self, block: Any) -> Any:
        """Read the documents of a block, which usually has one, one after another.

        Raises:
            MemAgentError: an error that every other document would cause too.
        """
        reader, rows = self.reader, list[CorpusRow]()
        for values in block.to_pylist():
            path = values.get(self._columns.path or "")  # row numbers are no names, because blocks arrive in any order
            name = path if isinstance(path, str) and path else "a document without an id"
            document = document_of(values, name, self._columns, self._plan.access)
            new_rows = await reader.read_one(document, answered_ids=self._answered_ids)
            rows += [decode_row(encode_row(row)) for row in new_rows]  # the same values as after the ledger
        return arrow_table(rows, reader.columns)

    def __del__(self) -> None:
        self.remove_folder()


def read_corpus(
    dataset: Any,
    plan: ActorPlan,
    *,
    columns: InputColumns | None = None,
    actors: int = 1,
    documents_in_flight: int = 64,
    table: TableFolder | str | Path | None = None,
) -> Any:
    """Read documents on a cluster. The rows have the same columns and ids as those of `memagent corpus`.

    The dataset is lazy: documents are read when the result is used. The rows are in any order. If a document cannot be
    read or the policy fails, its rows have an error. The document is read again when the dataset is used again.

    Args:
        dataset: a `ray.data.Dataset` with a column of texts or paths.
        plan: how documents are read.
        columns: the columns to use. The ids name the documents; without an id column, the paths do.
        actors: maximum number of actors. They start while documents wait and the cluster has free CPUs.
        documents_in_flight: documents that each actor reads at the same time.
        table: an existing table. Questions that have an answer in it are skipped. The documents are opened anyway,
            because the id of a row depends on the text.

    Returns:
        A `ray.data.Dataset` of rows.

    Raises:
        MissingExtraError: Ray is not installed.
        CorpusError: a number is not positive, the documents have no names, or the table cannot be read.
        DocumentError: a column is missing.
    """
    if actors < 1 or documents_in_flight < 1:
        raise CorpusError(f"{actors} actors cannot read {documents_in_flight} documents each", hint="Use 1 or more.")
    chosen = (columns or InputColumns()).resolve(dataset.columns(), "the dataset")
    if chosen.id is None and chosen.path is None:
        raise CorpusError(
            "the documents of the dataset have no names, and its blocks are in any order, so there are no row numbers",
            hint="Choose a column of ids: InputColumns(id=...).",
        )
    answered = AnsweredRows.of(None if table is None else as_table_folder(table))
    blocks = dataset.select_columns(chosen.needed).repartition(target_num_rows_per_block=1)
    return blocks.map_batches(
        BlockReader,
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        fn_constructor_args=(plan.pickled(actors), chosen, answered),
        compute=ray_module("ray.data").ActorPoolStrategy(
            min_size=1, max_size=actors, max_concurrent_calls_per_actor=documents_in_flight
        ),
        num_cpus=CPUS,
    )


def write_table(
    rows: Any, plan: ActorPlan, table: TableFolder | str | Path, *, description: str = "a Ray dataset",
    rows_per_part: int = 10_000,
) -> int:  # fmt: skip
    """Write the rows of `read_corpus` to a table, each exactly once, even after kills and restarts.

    Each row is first stored in the table's ledger, and then written to a part. A row that arrives twice, or that is
    already in the table, replaces the older one.

    Args:
        rows: the dataset that `read_corpus` returned.
        plan: the plan for `read_corpus`. The table stores its settings, and refuses rows with other settings.
        table: the table to write.
        description: the description of the input in the manifest.
        rows_per_part: rows in each part.

    Returns:
        The number of rows in the dataset.

    Raises:
        CorpusError: the table has other settings, another run writes to it, or a disk is full.
    """
    folder = as_table_folder(table)
    with exclusive(folder):
        writer = TableWriter(folder, row_settings(plan), description, rows_per_part=rows_per_part)
        try:
            writer.recover()
            count = 0
            for block in rows.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                for values in block.to_pylist():
                    row = row_from(values)
                    writer.add(row.document, "", [row])
                    count += 1
                if writer.is_part_due:
                    writer.write_parts()
            return count
        finally:
            writer.write_parts(all_rows=True)
            writer.close()


def row_settings(plan: ActorPlan) -> Mapping[str, Any]:
    """Return `CorpusReader.settings` for a plan. The policy must be reachable from this machine."""
    import asyncio  # noqa: PLC0415
    import tempfile  # noqa: PLC0415

    async def settings(store: Path) -> Mapping[str, Any]:
        agent = MemAgent(settings=plan.settings, store=store, run_log=False)
        reader = CorpusReader(agent, plan.questions, plan.access, response_format=plan.response_format)
        try:
            return await reader.settings()
        finally:
            await reader.aclose()

    with tempfile.TemporaryDirectory(prefix="memagent-ray-") as folder:
        return asyncio.run(settings(Path(folder)))


def as_table_folder(table: TableFolder | str | Path) -> TableFolder:
    """Return the table at a path or URL; a `TableFolder` is returned unchanged."""
    return table if isinstance(table, TableFolder) else TableFolder(str(table))

"""`read_corpus` and `write_table`, for users of Ray Data: from a dataset of documents to a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memagent_corpus import CorpusReader, TableFolder
from memagent_corpus.corpus_run import exclusive
from memagent_corpus.on_ray.actor_plan import ActorPlan
from memagent_corpus.on_ray.document_actors import ReadRows
from memagent_corpus.on_ray.known_rows import KnownRows
from memagent_corpus.on_ray.ray_cluster import ray_module
from memagent_corpus.table_folder import row_from
from memagent_corpus.table_inputs import Columns
from memagent_corpus.table_writer import TableWriter
from memagent_graph.errors import CorpusError

CPUS: Final = 0.5
"""CPUs of an actor for Ray's scheduling. An actor waits for the policy most of the time."""


@dataclass(frozen=True, slots=True)
class ActorPool:
    """The number of actors, and the load of each."""

    min_actors: int = 1
    max_actors: int = 1
    """The pool grows to this size while documents wait and the cluster has free CPUs."""
    documents_in_flight: int = 64
    """Documents that one actor reads at the same time."""
    cpus: float = CPUS
    """CPUs of one actor."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_actors <= self.max_actors or self.documents_in_flight < 1 or self.cpus <= 0:
            raise CorpusError(
                f"there can be no pool of {self.min_actors} to {self.max_actors} actors with "
                f"{self.documents_in_flight} documents in flight and {self.cpus} CPUs each",
                hint="All numbers must be positive, and min_actors must not be larger than max_actors.",
            )

    def pickled(self, plan: ActorPlan) -> bytes:
        """Pickle the plan for each actor of this pool.

        The user's answer model is pickled by value, because other machines may not be able to import its module.
        """
        pickler, share = ray_module("ray.cloudpickle"), plan.with_divided_limits(self.max_actors)
        model = plan.response_format.model if plan.response_format else None
        module = sys.modules.get(model.__module__) if model is not None else None
        if module is None:
            return bytes(pickler.dumps(share))
        pickler.register_pickle_by_value(module)
        try:
            return bytes(pickler.dumps(share))
        finally:
            pickler.unregister_pickle_by_value(module)

    def map_blocks(self, dataset: Any, actor: type, plan: bytes, *arguments: Any) -> Any:
        """Map a dataset with blocks of one row through the actors of this pool.

        Args:
            dataset: a `ray.data.Dataset`.
            actor: the class of the actors.
            plan: their pickled plan.
            arguments: the other arguments of the class.
        """
        data = ray_module("ray.data")
        return dataset.map_batches(
            actor,
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            fn_constructor_args=(plan, *arguments),
            compute=data.ActorPoolStrategy(
                min_size=self.min_actors,
                max_size=self.max_actors,
                max_concurrent_calls_per_actor=self.documents_in_flight,
            ),
            num_cpus=self.cpus,
        )


def read_corpus(
    dataset: Any,
    plan: ActorPlan,
    *,
    columns: Columns | None = None,
    pool: ActorPool | None = None,
    table: TableFolder | str | Path | None = None,
) -> Any:
    """Read documents on a cluster. The rows have the same columns and ids as those of `memagent corpus`.

    The dataset is lazy: documents are read when the result is used. The rows are in any order. If a document cannot be
    read or the policy fails, its rows have an error. The document is read again when the dataset is used again.

    Args:
        dataset: a `ray.data.Dataset` with a column of texts or paths.
        plan: how documents are read.
        columns: the columns to use. The ids name the documents; without an id column, the paths do.
        pool: the number of actors.
        table: an existing table. Questions that have an answer in it are skipped. The documents are opened anyway,
            because the id of a row depends on the text.

    Returns:
        A `ray.data.Dataset` of rows.

    Raises:
        MissingExtraError: Ray is not installed.
        CorpusError: the documents have no names, or the table cannot be read.
        DocumentError: a column is missing.
    """
    pool = pool or ActorPool()
    chosen = (columns or Columns()).resolve(dataset.columns(), "the dataset")
    if chosen.id is None and chosen.path is None:
        raise CorpusError(
            "the documents of the dataset have no names, and its blocks are in any order, so there are no row numbers",
            hint="Choose a column of ids: Columns(id=...).",
        )
    known = KnownRows.of(None if table is None else as_table_folder(table))
    blocks = dataset.select_columns(chosen.needed).repartition(target_num_rows_per_block=1)
    return pool.map_blocks(blocks, ReadRows, pool.pickled(plan), chosen, known)


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
        folder.take_over(row_settings(plan), description)
        writer = TableWriter(folder, rows_per_part)
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
        agent = plan.settings.make_reader(api_key=plan.api_key, store=store, run_log=False)
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

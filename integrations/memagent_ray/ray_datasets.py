"""`read_corpus` and `write_table`: the stage between a dataset of documents and a table, for users of Ray Data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from memagent_graph.corpus import CorpusReader, TableFolder
from memagent_graph.corpus.corpus_run import exclusive
from memagent_graph.corpus.table_folder import row_from
from memagent_graph.corpus.table_inputs import Columns
from memagent_graph.corpus.table_writer import TableWriter
from memagent_graph.errors import CorpusError
from memagent_ray.actor_plan import ActorPlan
from memagent_ray.document_actors import ReadRows
from memagent_ray.known_rows import KnownRows
from memagent_ray.ray_cluster import ray_module

CPUS: Final = 0.5
"""Of an actor, for Ray's scheduling: it waits for the policy most of the time."""
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ActorPool:
    """How many actors read, and how much each of them at a time."""

    min_actors: int = 1
    max_actors: int = 1
    """The pool grows up to here while documents wait, if the cluster has room."""
    documents_in_flight: int = 64
    """Of one actor."""
    cpus: float = CPUS
    """Of one actor."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_actors <= self.max_actors or self.documents_in_flight < 1 or self.cpus <= 0:
            raise CorpusError(
                f"there can be no pool of {self.min_actors} to {self.max_actors} actors with "
                f"{self.documents_in_flight} documents in flight and {self.cpus} CPUs each",
                hint="Use at least 1 of each, and no more at least than at most.",
            )

    def packed(self, plan: ActorPlan) -> bytes:
        """Each actor's share of a plan, pickled with the user's answer model.

        Other machines may not be able to import the model's module by its name.
        """
        pickler, share = ray_module("ray.cloudpickle"), plan.shared_by(self.max_actors)
        model = plan.response_format.model if plan.response_format else None
        module = sys.modules.get(model.__module__) if model is not None else None
        if module is None:
            return bytes(pickler.dumps(share))
        pickler.register_pickle_by_value(module)
        try:
            return bytes(pickler.dumps(share))
        finally:
            pickler.unregister_pickle_by_value(module)

    def mapped(self, dataset: Any, actor: type, plan: bytes, *arguments: Any) -> Any:
        """A dataset whose blocks, of one row each, go through these actors, which have a packed plan."""
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
    """Read documents on a cluster: a `ray.data.Dataset` with the rows of `memagent corpus`, and the same ids.

    Nothing is read before the result is used. Rows come in any order. A document that cannot be read is rows with an
    error; so is a policy that fails for it, and is tried again when the dataset is read again.

    Args:
        dataset: a `ray.data.Dataset` with a column of texts or of paths.
        plan: how documents are read.
        columns: which column is what. A column of ids is needed, or one of paths, which then name the documents.
        pool: how many actors read.
        table: where rows may be already: what has an answer there is not read again. Documents are opened all the same,
            as a row's id depends on the text.

    Raises:
        MissingExtraError: Ray is not installed.
        CorpusError: documents would have no names, or the table cannot be read.
        DocumentError: a column is missing.
    """
    pool = pool or ActorPool()
    chosen = (columns or Columns()).settled(dataset.columns(), "the dataset")
    if chosen.id is None and chosen.path is None:
        raise CorpusError(
            "the documents of the dataset have no names: its blocks come in any order, so there are no row numbers",
            hint="Name a column of ids: Columns(id=...).",
        )
    known = KnownRows.of(None if table is None else table_of(table))
    blocks = dataset.select_columns(chosen.needed).repartition(target_num_rows_per_block=1)
    return pool.mapped(blocks, ReadRows, pool.packed(plan), chosen, known)


def write_table(
    rows: Any, plan: ActorPlan, table: TableFolder | str | Path, *, description: str = "a dataset of Ray",
    rows_per_part: int = 10_000,
) -> int:  # fmt: skip
    """Write the rows of `read_corpus` to a table, each exactly once, whatever is killed and started again.

    A row goes to the table's ledger when it comes, and from there to parts that are written whole or not at all. A row
    that the table has, or that comes twice, replaces the one that was there.

    Args:
        rows: what `read_corpus` returned.
        plan: how they were read; the table keeps its settings, and others are refused.
        table: where they go.
        description: what the manifest says that was read.
        rows_per_part: how many rows a part has.

    Returns:
        How many rows came.

    Raises:
        CorpusError: the table has other settings, another run writes to it, or a disk is full.
    """
    folder = table_of(table)
    with exclusive(folder):
        folder.take_over(settings_of_plan(plan), description)
        writer = TableWriter(folder, rows_per_part)
        try:
            writer.recover()
            count = 0
            for block in rows.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                for values in block.to_pylist():
                    row = row_from(values)
                    writer.enter(row.document, "", [row])
                    count += 1
                if writer.is_part_due:
                    writer.write_parts()
            return count
        finally:
            writer.write_parts(all_rows=True)
            writer.close()


def settings_of_plan(plan: ActorPlan) -> Mapping[str, Any]:
    """What decides on rows, as `CorpusReader.settings` has it; asked from this machine."""
    import asyncio  # noqa: PLC0415
    import tempfile  # noqa: PLC0415

    async def ask(store: Path) -> Mapping[str, Any]:
        agent = plan.settings.make_reader(api_key=plan.api_key, store=store, run_log=False)
        reader = CorpusReader(agent, plan.questions, plan.access, response_format=plan.response_format)
        try:
            return await reader.settings()
        finally:
            await reader.aclose()

    with tempfile.TemporaryDirectory(prefix="memagent-ray-") as folder:
        return asyncio.run(ask(Path(folder)))


def table_of(table: TableFolder | str | Path) -> TableFolder:
    """The table of that name."""
    return table if isinstance(table, TableFolder) else TableFolder(str(table))

"""What happens around the training of an iteration: collections until there is enough, and the best policy kept."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Container, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from support.rl_loops import Recorder, measurement, small_job

from memagent_evaluation.statistics import Estimate
from memagent_graph import Usage
from memagent_graph.concurrency.background import run_sync
from memagent_training.data.rollouts import Rollout, RolloutGroup, TrainingConversation
from memagent_training.job.collect import CollectedGroup, Collection
from memagent_training.rl import collecting, loop
from memagent_training.rl.collecting import CollapsedError
from memagent_training.rl.loop_journal import LoopJournal, MeanReward, Measurement
from memagent_training.rl.online_trainer import EndOfLoop
from memagent_training.rl.policy_serving import ServerBackend
from memagent_training.rl.rl_job import prepare
from memagent_training.serving.policy_sync.sync import ServedPolicy, SyncMethod
from memagent_training.training_errors import ReplayError


class Sync:
    """Every version is served at once."""

    async def sync(self, policy: Path, version: str, logprobs: Any = None) -> ServedPolicy:
        return ServedPolicy("policy", version, SyncMethod.RELOAD, 1e-5)

    @asynccontextmanager
    async def hold_weights(self, served: ServedPolicy) -> AsyncIterator[None]:
        yield


@pytest.fixture
def source(tmp_path: Path) -> Iterator[loop._IterationSource]:
    prepared = prepare(small_job(tmp_path, lengths=(500, 1000), base_url="http://127.0.0.1:9/v1"))
    serving = ServerBackend(prepared)
    serving._sync = Sync()  # type: ignore[assignment]
    serving.policy_folder(0).mkdir(parents=True)
    asyncio.run(serving.serve(0))
    for number in range(4):
        serving.policy_folder(number).mkdir(exist_ok=True)
        (serving.policy_folder(number) / "weights").write_text(str(number))
    yield loop._IterationSource(prepared, serving, LoopJournal(tmp_path / "journal.jsonl"), Recorder())
    serving.run_log.close()


def measure_as(monkeypatch: pytest.MonkeyPatch, mean: float) -> None:
    async def measure(
        prepared: Any, agent: Any, iteration: int, temperature: float, *, as_deployed: bool = False
    ) -> Any:
        return measurement(iteration, mean, temperature=temperature, as_deployed=as_deployed)

    monkeypatch.setattr(loop, "measure", measure)


async def test_the_best_policy_is_kept_and_only_a_better_one_takes_its_place(
    source: loop._IterationSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = tmp_path / "best" / "weights"
    for iteration, mean, expected in ((0, 0.5, "0"), (1, 0.4, "0"), (2, 0.5, "0"), (3, 0.6, "3")):
        measure_as(monkeypatch, mean)
        await source._measure(iteration)
        assert best.read_text() == expected
    # Both as it will be used, with the rule for invented words in its profile, and as it is sampled.
    assert [(measurement.mean, measurement.as_deployed) for measurement in source.journal.measurements] == [
        (mean, as_deployed) for mean in (0.5, 0.4, 0.5, 0.6) for as_deployed in (True, False)
    ]


async def test_only_what_was_asked_alike_is_compared(
    source: loop._IterationSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on short documents alone, the first policy looks better than any does on long ones."""
    shorter = Estimate(mean=0.9, low=0.5, high=1.0, n=8)

    async def measure(
        prepared: Any, agent: Any, iteration: int, temperature: float, *, as_deployed: bool = False
    ) -> Any:
        return measurement(iteration, 0.5) if iteration else measurement(0, 0.9, accuracy={100: shorter})

    monkeypatch.setattr(loop, "measure", measure)
    for iteration in (0, 1):
        await source._measure(iteration)
        assert (tmp_path / "best" / "weights").read_text() == str(iteration)


async def test_a_best_policy_that_a_kill_left_aside_is_put_back(
    source: loop._IterationSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_as(monkeypatch, 0.5)
    await source._measure(1)
    (tmp_path / "best").rename(tmp_path / "best.before")
    loop._IterationSource(source._prepared, source.serving, source.journal, Recorder())
    assert (tmp_path / "best" / "weights").read_text() == "1"
    assert not (tmp_path / "best.before").exists()


async def test_a_measurement_is_in_the_journal_only_when_its_policy_is_kept(
    source: loop._IterationSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, the loop measures once more; the other way round it would never keep that policy."""
    was_kept: list[bool] = []
    original = LoopJournal.add_measurements

    def add(journal: LoopJournal, *measurements: Measurement) -> None:
        was_kept.append((tmp_path / "best").is_dir())
        original(journal, *measurements)

    monkeypatch.setattr(LoopJournal, "add_measurements", add)
    measure_as(monkeypatch, 0.5)
    await source._measure(0)
    assert was_kept == [True]


# Collections


CONVERSATION = TrainingConversation(
    array("I", [1]), array("I", [2]), array("f", [-0.5]), "answer", "", 0, False, "iteration-2"
)


def collected_as(
    monkeypatch: pytest.MonkeyPatch, *rewards_of_groups: tuple[float, ...], refused: Container[str] = ()
) -> list[str]:
    """What every collection finds, but for groups that replay refuses; the names of those that were begun."""
    names: list[str] = []

    async def collect(agent: Any, samples: Any, settings: Any, *, name: str, **_: Any) -> Collection:
        names.append(name)
        collection = Collection(usage=Usage(prompt_tokens=10, completion_tokens=2, turns=1))
        for number, rewards in enumerate(rewards_of_groups):
            run_ids = tuple(f"{name}-{number}-{place}" for place in range(len(rewards)))
            group = CollectedGroup(f"{name}-{number}", "task", 500, run_ids, rewards)
            (collection.groups if group.has_variance else collection.uniform_groups).append(group)
        return collection

    def load(source: collecting.Collector, number: int, stage: int, group_of: Mapping[str, str]) -> list[RolloutGroup]:
        """What training finds in the log: reads that earned 0, 1, and so on."""
        members: dict[str, list[str]] = {}
        for run_id, group in group_of.items():
            members.setdefault(group, []).append(run_id)
        return [
            RolloutGroup(group, tuple(Rollout(run, (CONVERSATION,), float(at)) for at, run in enumerate(runs)))
            for group, runs in members.items()
            if group not in refused
        ]

    monkeypatch.setattr(collecting, "collect", collect)
    monkeypatch.setattr(collecting.Collector, "_load", load)
    return names


async def test_what_was_collected_is_counted_in_the_journal(
    source: loop._IterationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected_as(monkeypatch, (0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    collection = await source._collector.collect(3, 2)
    assert source.journal.records == [collection]
    assert (collection.iteration, collection.version, collection.stage, collection.is_enough) == (3, 2, 0, True)
    assert (collection.groups, collection.failed_groups) == (1, 0)
    assert (collection.solved_groups, collection.uniform_groups) == (1, 2)
    assert collection.by_length == {500: MeanReward(3 / 8, 8)}
    assert (collection.prompt_tokens, collection.completion_tokens, collection.turns) == (10, 2, 1)


async def test_a_collection_that_went_on_with_newer_weights_bears_the_name_of_the_older(
    source: loop._IterationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was begun a version ahead of its iteration, and was killed after that iteration's checkpoint."""
    collected_as(monkeypatch, (0.0, 1.0), (1.0, 0.0))
    older, newer = (replace(CONVERSATION, policy_version=f"iteration-{number}") for number in (1, 2))
    groups = [
        RolloutGroup(name, (Rollout(f"{name}-0", (one,), 0.0), Rollout(f"{name}-1", (one,), 1.0)))
        for name, one in (("first", newer), ("second", older))
    ]
    monkeypatch.setattr(collecting.Collector, "_load", lambda *_: groups)
    assert (await source._collector.collect(2, 2)).version == 1


def test_closing_waits_for_what_is_collected_ahead(
    source: loop._IterationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that are cancelled still write to the run log, which must not be closed by then."""
    order: list[str] = []
    start = threading.Event()

    async def collect_until_cancelled(of: collecting.Collector, iteration: int, version: int) -> None:
        try:
            start.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            order.append("reads ended")

    async def close(of: ServerBackend) -> None:
        order.append("serving closed")

    monkeypatch.setattr(collecting.Collector, "collect", collect_until_cancelled)
    monkeypatch.setattr(ServerBackend, "close", close)
    run_sync(source._start_collection(1, 0))
    assert start.wait(10)
    source.close()
    assert order == ["reads ended", "serving closed"]


async def test_reads_that_no_longer_differ_end_the_loop_after_three_collections(
    source: loop._IterationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = collected_as(monkeypatch, (0.0, 0.0), (0.0, 0.0))
    with pytest.raises(EndOfLoop, match=r"of 2 questions, 0 were always answered right, 2 never"):
        await source._collector.collect(0, 0)
    assert names == ["collection-0", "collection-1", "collection-2"]
    with pytest.raises(EndOfLoop):  # resumed: one more try
        await source._collector.collect(0, 0)
    assert names[3:] == ["collection-3"]


async def test_reads_that_are_all_wrong_after_some_were_right_are_a_collapse_and_no_end(
    source: loop._IterationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected_as(monkeypatch, (0.0, 1.0), (1.0, 1.0))
    await source._collector.collect(0, 0)
    names = collected_as(monkeypatch, (0.0, 0.0), (0.0, 0.0))
    with pytest.raises(CollapsedError, match=r"last 3 collections is 0\.000") as refusal:
        await source._collector.collect(1, 1)
    assert names == ["collection-1", "collection-2", "collection-3"]
    assert "lower learning rate" in (refusal.value.hint or "")


async def test_while_the_curriculum_goes_on_the_loop_does(
    source: loop._IterationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short documents that are always answered right are no reason to end before long ones were tried."""
    names = collected_as(monkeypatch, (1.0, 1.0))
    with pytest.raises(EndOfLoop, match=r"1 were always answered right"):
        await source._collector.collect(0, 0)
    assert [record.stage for record in source.journal.records] == [0, 1, 1, 1]
    assert len(names) == 4


async def test_a_collection_of_which_nothing_can_be_trained_on_is_passed_over_when_the_loop_goes_on(
    source: loop._IterationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out of the journal, it would be taken whole from the log again, and refused again, for ever."""
    names = collected_as(monkeypatch, (0.0, 1.0), (1.0, 0.0))
    usable = collecting.Collector._load

    def refuse(*_: Any) -> list[RolloutGroup]:
        raise ReplayError("none of the 4 runs can be trained on", hint="Log ids.")

    monkeypatch.setattr(collecting.Collector, "_load", refuse)
    with pytest.raises(ReplayError):
        await source._collector.collect(0, 0)
    assert [record.is_enough for record in source.journal.records] == [False]
    monkeypatch.setattr(collecting.Collector, "_load", usable)
    assert (await source._collector.collect(0, 0)).is_enough
    assert names == ["collection-0", "collection-1"]


async def test_groups_that_cannot_be_trained_on_do_not_count_as_enough(
    source: loop._IterationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the iteration would be trained on too few, and fail at every resume in the same way."""
    names = collected_as(monkeypatch, (0.0, 1.0), refused={"collection-0-0"})
    collection = await source._collector.collect(0, 0)
    assert [record.is_enough for record in source.journal.records] == [False, True]
    assert (collection.number, names) == (1, ["collection-0", "collection-1"])

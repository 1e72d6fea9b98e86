"""Between the trainings of a loop: measuring, keeping the best policy, and collecting enough groups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from made_rollouts import make_conversation
from support.rl_loops import StatusRecorder, make_job, make_measurement
from test_rl_serving import FakeSync

from memagent_evaluation.score_statistics import Estimate
from memagent_graph import Usage
from memagent_graph.concurrency.background import run_sync
from memagent_training.data.rollouts import Rollout, RolloutGroup
from memagent_training.job.collect import CollectedGroup, Collection
from memagent_training.rl import collector, loop
from memagent_training.rl.collector import CollapsedError
from memagent_training.rl.loop_journal import LoopJournal, MeanReward, Measurement
from memagent_training.rl.online_trainer import EndOfLoop
from memagent_training.rl.policy_serving import ServerBackend
from memagent_training.rl.rl_job import prepare
from memagent_training.training_errors import ReplayError


@pytest.fixture
def source(tmp_path: Path) -> Iterator[loop._IterationSource]:
    prepared = prepare(make_job(tmp_path, lengths=(500, 1000), base_url="http://127.0.0.1:9/v1"))
    serving = ServerBackend(prepared)
    serving._sync = FakeSync()  # type: ignore[assignment]
    serving.get_policy_folder(0).mkdir(parents=True)
    asyncio.run(serving.serve(0))
    for number in range(4):
        serving.get_policy_folder(number).mkdir(exist_ok=True)
        (serving.get_policy_folder(number) / "weights").write_text(str(number))
    yield loop._IterationSource(prepared, serving, LoopJournal(tmp_path / "journal.jsonl"), StatusRecorder())
    serving.run_log.close()


@pytest.fixture
def set_measurement(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that sets the result of all later measurements."""

    def set_result(mean: float, **changes: Any) -> None:
        async def measure(prepared: Any, agent: Any, iteration: int, temperature: float, **options: Any) -> Measurement:
            return make_measurement(iteration, mean, temperature=temperature, **options, **changes)

        monkeypatch.setattr(loop, "measure", measure)

    return set_result


async def test_best_policy_is_replaced_only_by_a_better_one(source, tmp_path, set_measurement) -> None:
    best = tmp_path / "best" / "weights"
    for iteration, mean, expected in ((0, 0.5, "0"), (1, 0.4, "0"), (2, 0.5, "0"), (3, 0.6, "3")):
        set_measurement(mean)
        await source._measure(iteration)
        assert best.read_text() == expected
    # Each policy is measured as deployed, with the rules of its profile, and as sampled.
    assert [(entry.mean, entry.as_deployed) for entry in source.journal.measurements] == [
        (mean, as_deployed) for mean in (0.5, 0.4, 0.5, 0.6) for as_deployed in (True, False)
    ]


async def test_only_measurements_of_the_same_lengths_are_compared(source, tmp_path, set_measurement) -> None:
    """A policy measured only on short documents looks better than any measured on long ones."""
    set_measurement(0.9, accuracy={100: Estimate(mean=0.9, low=0.5, high=1.0, n=8)})
    await source._measure(0)
    set_measurement(0.5)
    await source._measure(1)
    assert (tmp_path / "best" / "weights").read_text() == "1"


async def test_best_policy_is_restored_after_a_kill_during_its_replacement(source, tmp_path, set_measurement) -> None:
    set_measurement(0.5)
    await source._measure(1)
    (tmp_path / "best").rename(tmp_path / "best.before")
    loop._IterationSource(source._prepared, source.backend, source.journal, StatusRecorder())
    assert (tmp_path / "best" / "weights").read_text() == "1"
    assert not (tmp_path / "best.before").exists()


async def test_measurement_is_journaled_after_its_policy_is_saved(
    source, tmp_path, set_measurement, monkeypatch
) -> None:
    """If it is killed in between, the loop measures again; in the other order, it would never keep that policy."""
    was_saved: list[bool] = []
    original = LoopJournal.add

    def add_and_check(journal: LoopJournal, *measurements: Measurement) -> None:
        was_saved.append((tmp_path / "best").is_dir())
        original(journal, *measurements)

    monkeypatch.setattr(LoopJournal, "add", add_and_check)
    set_measurement(0.5)
    await source._measure(0)
    assert was_saved == [True]


# Collections


CONVERSATION = make_conversation([1], [2], ("answer", "", 0), version="iteration-2")


@pytest.fixture
def set_collection(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A function that sets the result of all later collections, and returns a list of the names that are begun."""

    def set_result(*rewards_of_groups: tuple[float, ...], refusals: Container[str] = ()) -> list[str]:
        names: list[str] = []

        async def collect(agent: Any, samples: Any, settings: Any, *, name: str, **_: Any) -> Collection:
            names.append(name)
            collection = Collection(usage=Usage(prompt_tokens=10, completion_tokens=2, turns=1))
            for number, rewards in enumerate(rewards_of_groups):
                run_ids = tuple(f"{name}-{number}-{read}" for read in range(len(rewards)))
                group = CollectedGroup(f"{name}-{number}", "task", 500, run_ids, rewards)
                (collection.groups if group.has_variance else collection.uniform_groups).append(group)
            return collection

        def load(collector: Any, number: int, stage: int, group_of: Mapping[str, str]) -> list[RolloutGroup]:
            """Return groups whose rollouts have the rewards 0, 1, and so on."""
            members: dict[str, list[str]] = {}
            for run_id, group in group_of.items():
                members.setdefault(group, []).append(run_id)
            return [
                RolloutGroup(group, tuple(Rollout(run, (CONVERSATION,), float(n)) for n, run in enumerate(runs)))
                for group, runs in members.items()
                if group not in refusals
            ]

        monkeypatch.setattr(collector, "collect", collect)
        monkeypatch.setattr(collector.Collector, "_load", load)
        return names

    return set_result


async def test_journal_has_the_counts_of_a_collection(source, set_collection) -> None:
    set_collection((0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    collection = await source._collector.collect(3, 2)
    assert source.journal.records == [collection]
    assert (collection.iteration, collection.version, collection.stage, collection.is_enough) == (3, 2, 0, True)
    assert (collection.groups, collection.failed_groups) == (1, 0)
    assert (collection.solved_groups, collection.uniform_groups) == (1, 2)
    assert collection.by_length == {500: MeanReward(3 / 8, 8)}
    assert (collection.prompt_tokens, collection.completion_tokens, collection.turns) == (10, 2, 1)


async def test_collection_with_two_versions_has_the_older_one(source, set_collection, monkeypatch) -> None:
    """It was started one version ahead of its iteration, and killed after the checkpoint of that iteration."""
    set_collection((0.0, 1.0), (1.0, 0.0))
    older, newer = (replace(CONVERSATION, policy_version=f"iteration-{number}") for number in (1, 2))
    groups = [
        RolloutGroup(name, (Rollout(f"{name}-0", (conversation,), 0.0), Rollout(f"{name}-1", (conversation,), 1.0)))
        for name, conversation in (("first", newer), ("second", older))
    ]
    monkeypatch.setattr(collector.Collector, "_load", lambda *_: groups)
    assert (await source._collector.collect(2, 2)).version == 1


def test_close_waits_for_a_running_collection(source, monkeypatch) -> None:
    """Cancelled reads still write to the run log, so it must stay open until they end."""
    events: list[str] = []
    start = threading.Event()

    async def collect_until_cancelled(instance: collector.Collector, iteration: int, version: int) -> None:
        try:
            start.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            events.append("reads ended")

    async def close(instance: ServerBackend) -> None:
        events.append("serving closed")

    monkeypatch.setattr(collector.Collector, "collect", collect_until_cancelled)
    monkeypatch.setattr(ServerBackend, "close", close)
    run_sync(source._start_collection(1, 0))
    assert start.wait(10)
    source.close()
    assert events == ["reads ended", "serving closed"]


async def test_loop_ends_after_three_collections_without_variance(source, set_collection) -> None:
    names = set_collection((0.0, 0.0), (0.0, 0.0))
    with pytest.raises(EndOfLoop, match=r"of 2 questions, 0 were always answered right, 2 had equal"):
        await source._collector.collect(0, 0)
    assert names == ["collection-0", "collection-1", "collection-2"]
    with pytest.raises(EndOfLoop):  # resumed: one more collection
        await source._collector.collect(0, 0)
    assert names[3:] == ["collection-3"]


async def test_all_wrong_reads_after_right_ones_are_a_collapse(source, set_collection) -> None:
    set_collection((0.0, 1.0), (1.0, 1.0))
    await source._collector.collect(0, 0)
    names = set_collection((0.0, 0.0), (0.0, 0.0))
    with pytest.raises(CollapsedError, match=r"last 3 collections is 0\.000") as error:
        await source._collector.collect(1, 1)
    assert names == ["collection-1", "collection-2", "collection-3"]
    assert "lower learning rate" in (error.value.hint or "")


async def test_loop_continues_until_the_last_stage_of_the_curriculum(source, set_collection) -> None:
    """Long documents are tried even if short ones are always answered right."""
    names = set_collection((1.0, 1.0))
    with pytest.raises(EndOfLoop, match=r"1 were always answered right"):
        await source._collector.collect(0, 0)
    assert [entry.stage for entry in source.journal.records] == [0, 1, 1, 1]
    assert len(names) == 4


async def test_resumed_loop_skips_a_collection_without_trainable_groups(source, set_collection, monkeypatch) -> None:
    """If it were not in the journal, every resume would take it from the log and refuse it again."""
    names = set_collection((0.0, 1.0), (1.0, 0.0))
    original_load = collector.Collector._load

    def refuse_all(*_: Any) -> list[RolloutGroup]:
        raise ReplayError("none of the 4 runs can be trained on", hint="Log ids.")

    monkeypatch.setattr(collector.Collector, "_load", refuse_all)
    with pytest.raises(ReplayError):
        await source._collector.collect(0, 0)
    assert [entry.is_enough for entry in source.journal.records] == [False]
    monkeypatch.setattr(collector.Collector, "_load", original_load)
    assert (await source._collector.collect(0, 0)).is_enough
    assert names == ["collection-0", "collection-1"]


async def test_refused_groups_do_not_count_towards_enough_groups(source, set_collection) -> None:
    """Otherwise the iteration would have too few groups, and fail at every resume."""
    names = set_collection((0.0, 1.0), refusals={"collection-0-0"})
    collection = await source._collector.collect(0, 0)
    assert [entry.is_enough for entry in source.journal.records] == [False, True]
    assert (collection.number, names) == (1, ["collection-0", "collection-1"])

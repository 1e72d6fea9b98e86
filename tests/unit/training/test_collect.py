"""Rollouts come in whole groups, as many with variance as are wanted, and failures are counted."""

from __future__ import annotations

import asyncio
import itertools
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.evaluation import MadeTask
from support.scripts import make_completion

from memagent_evaluation.samples import Sample
from memagent_graph import Budget, Completion, MemAgent, PolicyError, ScriptedPolicy
from memagent_graph.errors import PolicyAuthenticationError, PolicyUnreachableError
from memagent_training.data.replay import load_groups
from memagent_training.data.training_runs import TrainingRun
from memagent_training.job.collect import Collection, CollectSettings, collect
from memagent_training.training_errors import TrainingError

Reply = Callable[[int, int], str | Exception]
"""What the n-th read of a question answers."""


def ask_for_number(length: int, index: int) -> tuple[str, str, str]:
    """Question k asks for the number k."""
    return f"What is the number of document {index}?", str(index), f"This is document {index}. Its number is {index}."


NUMBERED = MadeTask("numbered", ask_for_number)


def questions(count: int | None = None) -> Iterator[Sample]:
    numbers = itertools.count() if count is None else range(count)
    return (NUMBERED.sample(100, number) for number in numbers)


def reader(folder: Path, reply: Reply, answer_format: str = "boxed") -> MemAgent:
    reads: dict[int, int] = {}

    def script(prompt: str) -> str | Exception:
        number = int(re.search(r"number of document (\d+)", prompt)[1])  # type: ignore[index]
        if "Its number" in prompt:
            return "noted"
        reads[number] = reads.get(number, -1) + 1
        return reply(number, reads[number])

    return MemAgent(
        ScriptedPolicy(script),
        tokenizer="embedded",
        answer_format=answer_format,
        budget=Budget(context_window=2048, question_tokens=64, memory_tokens=64, chunk_tokens=256, answer_tokens=64),
        run_log=folder / "runs.sqlite",
        store=folder / "documents",
    )


async def gather(
    agent: MemAgent, count: int | None = None, *, rollouts: int = 2, groups: int = 0, max_questions: int = 0,
    name: str = "x", **options: Any,
) -> Collection:  # fmt: skip
    """Collect `count` groups of as many questions, or as many groups of at most as many questions as are named."""
    sizes = CollectSettings(rollouts, groups or count, max_questions or count)
    return await collect(agent, questions(count), sizes, name=name, **options)


def right(number: int) -> str:
    return rf"\boxed{{{number}}}"


def questions_of(agent: MemAgent) -> list[int]:
    """The documents of which an answer was asked for, once per read."""
    policy = agent.policy
    assert isinstance(policy, ScriptedPolicy)
    prompts = [prompt for prompt in policy.prompts if "Its number" not in prompt]
    return sorted(int(number) for prompt in prompts for number in re.findall(r"number of document (\d+)", prompt))


def half(number: int, read: int) -> str:
    """Every other read is right."""
    return right(number) if read % 2 else r"\boxed{wrong}"


async def test_every_question_is_read_n_times_and_rewarded_in_the_log(tmp_path: Path) -> None:
    agent = reader(tmp_path, half)
    collection = await gather(agent, 3, rollouts=4)
    assert [len(group.run_ids) for group in collection.groups] == [4, 4, 4]
    assert all(sorted(group.rewards) == [0, 0, 1, 1] for group in collection.groups)
    for group in collection.groups:
        for run_id, reward in zip(group.run_ids, group.rewards, strict=True):
            assert agent.run_log.latest_rewards(run_id)["exact_match"] == reward


async def test_further_questions_are_asked_until_enough_groups_have_variance(tmp_path: Path) -> None:
    agent = reader(tmp_path, lambda number, read: half(number, read) if number % 3 == 0 else right(number))
    collection = await gather(agent, groups=4, max_questions=50)
    assert sorted(int(group.name.split("-")[1]) % 3 for group in collection.groups) == [0, 0, 0, 0]
    assert collection.uniform_groups
    assert all(group.rewards == (1.0, 1.0) for group in collection.uniform_groups)
    assert collection.questions < 20
    assert set(collection.group_of.values()) == {group.name for group in collection.groups}


async def test_collection_stops_at_the_maximum_number_of_questions(tmp_path: Path) -> None:
    agent = reader(tmp_path, lambda number, read: right(number))
    collection = await gather(agent, groups=2, max_questions=7)
    assert (collection.questions, len(collection.groups), len(collection.uniform_groups)) == (7, 0, 7)
    assert len(list(agent.run_log.runs())) == 14


async def test_groups_without_variance_are_taken_where_more_than_outcomes_is_rewarded(tmp_path: Path) -> None:
    agent = reader(tmp_path, lambda number, read: right(number))
    collection = await gather(agent, groups=3, max_questions=9, keep_uniform=True)
    assert (len(collection.groups), len(collection.uniform_groups)) == (3, 0)
    assert len(collection.group_of) == 6


async def test_a_failed_read_is_tried_again_and_its_group_is_whole_in_the_log_too(tmp_path: Path) -> None:
    """The attempt that failed stayed in the log as an unfinished run, and replay refused its whole group."""
    calls = itertools.count()
    agent = reader(tmp_path, lambda number, read: PolicyError("gone") if next(calls) == 0 else half(number, read))
    script = agent.policy.script

    def reply_with_ids(prompt: str) -> Completion | Exception:
        reply = script(prompt)
        return make_completion(prompt, reply) if isinstance(reply, str) else reply

    agent.policy.script = reply_with_ids
    collection = await gather(agent, 1, rollouts=3)
    assert collection.groups[0].run_ids == ("x-0-0", "x-0-1", "x-0-2")
    assert not collection.failures
    (group,) = load_groups(agent.run_log, reward="exact_match").groups
    assert len(group.rollouts_G) == 3


async def test_a_failed_read_drops_its_group_and_is_repeated_on_resume(
    tmp_path: Path,
) -> None:
    def reply(number: int, read: int) -> str | Exception:
        return PolicyError("broken") if number == 1 else half(number, read)

    first = await gather(reader(tmp_path, reply), 3)
    assert set(first.failures) == {"x-1"}
    assert {group.name for group in first.groups} == {"x-0", "x-2"}
    assert first.questions == 3
    agent = reader(tmp_path, half)
    second = await gather(agent, 3)
    assert questions_of(agent) == [1, 1]
    assert not second.failures


async def test_when_everything_fails_the_first_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="broken"):
        await gather(reader(tmp_path, lambda number, read: PolicyError("broken")), 2)


def unsure(run: TrainingRun) -> float | None:
    return None if run.question.endswith("1?") else 1.0


def not_a_number(run: TrainingRun) -> float:
    return float("nan") if run.question.endswith("1?") else 1.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [(unsure, "'unsure' returned no reward"), (not_a_number, "the reward 'not_a_number' is nan")],
)
async def test_an_unknown_reward_is_an_error_with_its_run(reward: Any, message: str, tmp_path: Path) -> None:
    """One bad group among good ones was left out, and the mean reward was of the others."""
    with pytest.raises(TrainingError, match=message) as refusal:
        await gather(reader(tmp_path, half), 3, reward=reward)
    assert refusal.value.run_id == "x-1-0"


async def test_a_users_reward_is_logged_by_name_and_sees_the_gold_answer(tmp_path) -> None:
    def nearness(run: TrainingRun) -> float | None:
        assert run.gold is not None
        return float(run.answer in run.gold.answers) / 2

    agent = reader(tmp_path, half)
    collection = await gather(agent, 2, reward=nearness)
    assert [sorted(group.rewards) for group in collection.groups] == [[0, 0.5], [0, 0.5]]
    names = {name for run_id in collection.group_of for name in agent.run_log.latest_rewards(run_id)}
    assert names == {"nearness"}


async def test_plain_answers_are_scored_as_plain(tmp_path: Path) -> None:
    agent = reader(tmp_path, lambda number, nth: str(number) if nth else "none", answer_format="plain")
    assert [sorted(group.rewards) for group in (await gather(agent, 2)).groups] == [[0.0, 1.0]] * 2


async def test_a_reader_without_a_log_is_refused(tmp_path: Path) -> None:
    agent = MemAgent(ScriptedPolicy([]), tokenizer="embedded", run_log=False, store=tmp_path)
    with pytest.raises(TrainingError, match="run_log"):
        await gather(agent, 1)


async def test_a_collection_counts_the_cost_of_its_own_reads(tmp_path: Path) -> None:
    def reply(number: int, read: int) -> str | Exception:
        return PolicyError("broken") if number == 2 else half(number, read)

    agent = reader(tmp_path, reply)
    usage = (await gather(agent, 3)).usage
    totals = agent.run_log.totals([f"x-{number}-{place}" for number in range(2) for place in range(2)])
    assert usage.turns == 8  # an update and an answer in each of four reads that came to their end
    assert usage.prompt_tokens == sum(total.prompt_tokens for total in totals.values())
    assert usage.completion_tokens == sum(total.completion_tokens for total in totals.values())
    again = await gather(agent, 2)
    assert (again.usage.turns, again.usage.prompt_tokens) == (0, 0)


# Going on


async def test_whole_groups_come_from_the_log_without_a_read(tmp_path: Path) -> None:
    mixed: Reply = lambda number, read: right(number) if number == 1 else half(number, read)  # noqa: E731
    sizes = {"rollouts": 4, "groups": 3, "max_questions": 4}
    first = await gather(reader(tmp_path, mixed), **sizes)
    agent = reader(tmp_path, lambda number, read: AssertionError("read again"))  # type: ignore[arg-type,return-value]
    second = await gather(agent, **sizes)
    assert questions_of(agent) == []
    for one, other in ((first.groups, second.groups), (first.uniform_groups, second.uniform_groups)):
        assert sorted(one, key=lambda group: group.name) == sorted(other, key=lambda group: group.name)
    assert [group.name for group in second.uniform_groups] == ["x-1"]


async def test_a_group_with_a_missing_reward_is_read_again(tmp_path: Path) -> None:
    """Its collection was killed while it wrote them; an earlier reward of one read must not be taken for the new."""
    await gather(reader(tmp_path, half), 3, rollouts=3)
    with closing(sqlite3.connect(tmp_path / "runs.sqlite")) as connection, connection:
        connection.execute("DELETE FROM rewards WHERE run_id = 'x-1-2'")
    agent = reader(tmp_path, lambda number, read: right(number) if read == 0 else r"\boxed{wrong}")
    collection = await gather(agent, 3, rollouts=3)
    assert questions_of(agent) == [1, 1, 1]
    again = next(group for group in collection.groups if group.name == "x-1")
    assert sorted(again.rewards) == [0, 0, 1]
    for run_id, reward in zip(again.run_ids, again.rewards, strict=True):
        assert agent.run_log.latest_rewards(run_id)["exact_match"] == reward


async def test_another_collections_groups_are_not_mistaken_for_ones_own(tmp_path: Path) -> None:
    """Neither where one's name begins with the other's, nor where a question has the other's number in it."""
    await gather(reader(tmp_path, half), 12, name="x-1")
    for name in ("x", "x-11", "x-1-1", "y"):
        agent = reader(tmp_path, half)
        collection = await gather(agent, 12, name=name)
        assert len(questions_of(agent)) == 24, name
        names = {run_id.rpartition("-")[0] for run_id in collection.group_of}
        assert names == {f"{name}-{place}" for place in range(12)}


@pytest.mark.parametrize("kind", [PolicyUnreachableError, PolicyAuthenticationError])
async def test_an_unreachable_server_ends_the_collection_and_complete_groups_are_kept(
    kind: type[PolicyError], tmp_path: Path
) -> None:
    """Of no further question is asked, however many there are."""

    def gone_at(number: int, read: int) -> str | Exception:
        return kind("gone") if number >= 2 else half(number, read)

    settings = CollectSettings(rollouts=2, groups=2, max_questions=1000)
    indices = itertools.count()
    samples = (NUMBERED.sample(100, next(indices)) for _ in range(1000))
    mixed: Reply = lambda number, read: right(number) if number < 2 else gone_at(number, read)  # noqa: E731
    agent = reader(tmp_path, mixed)  # the first two have no variance, so further ones are asked
    with pytest.raises(kind, match="gone"):
        await collect(agent, samples, settings, name="x")
    assert next(indices) <= 4
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]

    agent = reader(tmp_path, half)
    collection = await collect(agent, questions(), settings, name="x")
    assert questions_of(agent) == [2, 2, 3, 3]
    assert {group.name for group in collection.uniform_groups} == {"x-0", "x-1"}
    assert {group.name for group in collection.groups} == {"x-2", "x-3"}


@pytest.mark.parametrize(
    "changes", [{"rollouts": 1}, {"groups": 0}, {"groups": 9, "max_questions": 8}, {"concurrency": 0}]
)
def test_invalid_settings_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(TrainingError):
        CollectSettings(**changes)

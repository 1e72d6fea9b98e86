"""Collection reads complete groups until enough have reward variance, retries failures, and resumes from the log."""

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
"""Returns the answer to the n-th read of a question: (question number, nth number) -> answer or error."""


def ask_for_number(length: int, index: int) -> tuple[str, str, str]:
    """Make question `index`, which asks for this number."""
    return f"What is the number of document {index}?", str(index), f"This is document {index}. Its number is {index}."


NUMBER_TASK = MadeTask("numbered", ask_for_number)


def make_questions(count: int | None = None) -> Iterator[Sample]:
    numbers = itertools.count() if count is None else range(count)
    return (NUMBER_TASK.sample(100, number) for number in numbers)


def make_reader(folder: Path, reply: Reply, answer_format: str = "boxed") -> MemAgent:
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


async def run_collection(
    agent: MemAgent, count: int | None = None, *, rollouts: int = 2, groups: int = 0, max_questions: int = 0,
    name: str = "x", **options: Any,
) -> Collection:  # fmt: skip
    """Collect `count` groups from `count` questions, or `groups` groups from at most `max_questions`."""
    settings = CollectSettings(rollouts, groups or count, max_questions or count)
    return await collect(agent, make_questions(count), settings, name=name, **options)


def box_answer(number: int) -> str:
    return rf"\boxed{{{number}}}"


def list_read_questions(agent: MemAgent) -> list[int]:
    """Return the numbers of the questions that were read, once per read."""
    policy = agent.policy
    assert isinstance(policy, ScriptedPolicy)
    prompts = [prompt for prompt in policy.prompts if "Its number" not in prompt]
    return sorted(int(number) for prompt in prompts for number in re.findall(r"number of document (\d+)", prompt))


def answer_half(number: int, nth: int) -> str:
    """Answer every second read of a question rightly."""
    return box_answer(number) if nth % 2 else r"\boxed{wrong}"


async def test_every_question_is_read_n_times_and_its_rewards_are_logged(tmp_path: Path) -> None:
    agent = make_reader(tmp_path, answer_half)
    collection = await run_collection(agent, 3, rollouts=4)
    assert [len(group.run_ids) for group in collection.groups] == [4, 4, 4]
    assert all(sorted(group.rewards) == [0, 0, 1, 1] for group in collection.groups)
    for group in collection.groups:
        for run_id, reward in zip(group.run_ids, group.rewards, strict=True):
            assert agent.run_log.latest_rewards(run_id)["exact_match"] == reward


async def test_questions_are_asked_until_enough_groups_have_variance(tmp_path: Path) -> None:
    agent = make_reader(tmp_path, lambda number, nth: box_answer(number) if number % 3 else answer_half(number, nth))
    collection = await run_collection(agent, groups=4, max_questions=50)
    assert sorted(int(group.name.split("-")[1]) % 3 for group in collection.groups) == [0, 0, 0, 0]
    assert collection.uniform_groups
    assert all(group.rewards == (1.0, 1.0) for group in collection.uniform_groups)
    assert collection.questions < 20
    assert set(collection.groups_by_run_id.values()) == {group.name for group in collection.groups}


async def test_collection_stops_at_the_maximum_number_of_questions(tmp_path: Path) -> None:
    agent = make_reader(tmp_path, lambda number, nth: box_answer(number))
    collection = await run_collection(agent, groups=2, max_questions=7)
    assert (collection.questions, len(collection.groups), len(collection.uniform_groups)) == (7, 0, 7)
    assert len(list(agent.run_log.runs())) == 14


async def test_groups_without_variance_count_with_keep_uniform(tmp_path: Path) -> None:
    agent = make_reader(tmp_path, lambda number, nth: box_answer(number))
    collection = await run_collection(agent, groups=3, max_questions=9, keep_uniform=True)
    assert (len(collection.groups), len(collection.uniform_groups)) == (3, 0)
    assert len(collection.groups_by_run_id) == 6


async def test_failed_read_is_retried_and_its_group_is_complete_in_the_log(tmp_path: Path) -> None:
    """Once, the failed attempt stayed in the log as an unfinished run, and replay refused its group."""
    calls = itertools.count()
    agent = make_reader(tmp_path, lambda *question: answer_half(*question) if next(calls) else PolicyError("gone"))
    script = agent.policy.script

    def reply_with_ids(prompt: str) -> Completion | Exception:
        reply = script(prompt)
        return make_completion(prompt, reply) if isinstance(reply, str) else reply

    agent.policy.script = reply_with_ids
    collection = await run_collection(agent, 1, rollouts=3)
    assert collection.groups[0].run_ids == ("x-0-0", "x-0-1", "x-0-2")
    assert not collection.failures
    (group,) = load_groups(agent.run_log, reward="exact_match").groups
    assert len(group.rollouts_G) == 3


async def test_failed_read_drops_its_group_and_is_repeated_on_resume(tmp_path: Path) -> None:
    def reply(number: int, nth: int) -> str | Exception:
        return PolicyError("broken") if number == 1 else answer_half(number, nth)

    first_collection = await run_collection(make_reader(tmp_path, reply), 3)
    assert set(first_collection.failures) == {"x-1"}
    assert {group.name for group in first_collection.groups} == {"x-0", "x-2"}
    assert first_collection.questions == 3
    agent = make_reader(tmp_path, answer_half)
    second_collection = await run_collection(agent, 3)
    assert list_read_questions(agent) == [1, 1]
    assert not second_collection.failures


async def test_first_error_is_raised_when_everything_fails(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="broken"):
        await run_collection(make_reader(tmp_path, lambda number, nth: PolicyError("broken")), 2)


def reward_or_none(run: TrainingRun) -> float | None:
    return None if run.question.endswith("1?") else 1.0


def reward_or_nan(run: TrainingRun, bad_value: Any = float("nan")) -> float:
    return bad_value if run.question.endswith("1?") else 1.0


def reward_or_list(run: TrainingRun) -> float:
    return reward_or_nan(run, [1.0])


@pytest.mark.parametrize(
    ("reward", "message"), [(reward_or_none, "no reward"), (reward_or_nan, "is nan"), (reward_or_list, r"is \(1\.0,\)")]
)
async def test_missing_or_wrong_reward_is_an_error_with_its_run(reward: Any, message: str, tmp_path: Path) -> None:
    """Once, a bad group was left out silently, and the mean reward was that of the others."""
    with pytest.raises(TrainingError, match=f"the reward '{reward.__name__}' .*{message}") as error:
        await run_collection(make_reader(tmp_path, answer_half), 3, reward=reward)
    assert error.value.run_id == "x-1-0"


async def test_user_reward_is_logged_by_name_and_gets_the_gold_answer(tmp_path) -> None:
    def half_reward(run: TrainingRun) -> float | None:
        assert run.gold is not None
        return float(run.answer in run.gold.answers) / 2

    agent = make_reader(tmp_path, answer_half)
    collection = await run_collection(agent, 2, reward=half_reward)
    assert [sorted(group.rewards) for group in collection.groups] == [[0, 0.5], [0, 0.5]]
    names = {name for run_id in collection.groups_by_run_id for name in agent.run_log.latest_rewards(run_id)}
    assert names == {"half_reward"}


async def test_plain_answers_are_scored_without_a_box(tmp_path: Path) -> None:
    agent = make_reader(tmp_path, lambda number, nth: str(number) if nth else "none", answer_format="plain")
    assert [sorted(group.rewards) for group in (await run_collection(agent, 2)).groups] == [[0.0, 1.0]] * 2


async def test_reader_without_a_log_is_refused(tmp_path: Path) -> None:
    agent = MemAgent(ScriptedPolicy([]), tokenizer="embedded", run_log=False, store=tmp_path)
    with pytest.raises(TrainingError, match="run_log"):
        await run_collection(agent, 1)


async def test_usage_counts_the_reads_of_this_collection_only(tmp_path: Path) -> None:
    def reply(number: int, nth: int) -> str | Exception:
        return PolicyError("broken") if number == 2 else answer_half(number, nth)

    agent = make_reader(tmp_path, reply)
    usage = (await run_collection(agent, 3)).usage
    totals = agent.run_log.totals([f"x-{number}-{read}" for number in range(2) for read in range(2)])
    assert usage.turns == 8  # an update and an answer in each of four finished reads
    assert usage.prompt_tokens == sum(total.prompt_tokens for total in totals.values())
    assert usage.completion_tokens == sum(total.completion_tokens for total in totals.values())
    second_collection = await run_collection(agent, 2)
    assert (second_collection.usage.turns, second_collection.usage.prompt_tokens) == (0, 0)


# Resuming


async def test_complete_groups_are_taken_from_the_log(tmp_path: Path) -> None:
    reply: Reply = lambda number, nth: box_answer(number) if number == 1 else answer_half(number, nth)  # noqa: E731
    sizes = {"rollouts": 4, "groups": 3, "max_questions": 4}
    first_collection = await run_collection(make_reader(tmp_path, reply), **sizes)
    agent = make_reader(tmp_path, lambda number, nth: AssertionError("read again"))  # type: ignore[arg-type,return-value]
    collections = (first_collection, await run_collection(agent, **sizes))
    assert list_read_questions(agent) == []
    for kind in ("groups", "uniform_groups"):
        first, second = ({group.name: group for group in getattr(collection, kind)} for collection in collections)
        assert first == second
    assert [group.name for group in collections[1].uniform_groups] == ["x-1"]


async def test_group_with_a_missing_reward_is_read_again(tmp_path: Path) -> None:
    """The collection was killed while it wrote rewards; old rewards must not be taken for those of new reads."""
    await run_collection(make_reader(tmp_path, answer_half), 3, rollouts=3)
    with closing(sqlite3.connect(tmp_path / "runs.sqlite")) as connection, connection:
        connection.execute("DELETE FROM rewards WHERE run_id = 'x-1-2'")
    agent = make_reader(tmp_path, lambda number, nth: box_answer(number) if nth == 0 else r"\boxed{wrong}")
    collection = await run_collection(agent, 3, rollouts=3)
    assert list_read_questions(agent) == [1, 1, 1]
    repeated_group = next(group for group in collection.groups if group.name == "x-1")
    assert sorted(repeated_group.rewards) == [0, 0, 1]
    for run_id, reward in zip(repeated_group.run_ids, repeated_group.rewards, strict=True):
        assert agent.run_log.latest_rewards(run_id)["exact_match"] == reward


async def test_groups_of_other_collections_are_not_taken(tmp_path: Path) -> None:
    """Even if one name is a prefix of the other, or contains a question number of the other."""
    await run_collection(make_reader(tmp_path, answer_half), 12, name="x-1")
    for name in ("x", "x-11", "x-1-1", "y"):
        agent = make_reader(tmp_path, answer_half)
        collection = await run_collection(agent, 12, name=name)
        assert len(list_read_questions(agent)) == 24, name
        names = {run_id.rpartition("-")[0] for run_id in collection.groups_by_run_id}
        assert names == {f"{name}-{number}" for number in range(12)}


@pytest.mark.parametrize("error_class", [PolicyUnreachableError, PolicyAuthenticationError])
async def test_unreachable_server_ends_the_collection_but_complete_groups_stay(
    error_class: type[PolicyError], tmp_path: Path
) -> None:
    """No further question is asked."""

    def fail_from_question_2(number: int, nth: int) -> str | Exception:
        return error_class("gone") if number >= 2 else answer_half(number, nth)

    settings = CollectSettings(rollouts=2, groups=2, max_questions=1000)
    indices = itertools.count()
    samples = (NUMBER_TASK.sample(100, next(indices)) for _ in range(1000))
    reply: Reply = lambda number, nth: box_answer(number) if number < 2 else fail_from_question_2(number, nth)  # noqa: E731
    agent = make_reader(tmp_path, reply)  # the first two have no variance, so further questions are asked
    with pytest.raises(error_class, match="gone"):
        await collect(agent, samples, settings, name="x")
    assert next(indices) <= 4
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]

    agent = make_reader(tmp_path, answer_half)
    collection = await collect(agent, make_questions(), settings, name="x")
    assert list_read_questions(agent) == [2, 2, 3, 3]
    assert {group.name for group in collection.uniform_groups} == {"x-0", "x-1"}
    assert {group.name for group in collection.groups} == {"x-2", "x-3"}


@pytest.mark.parametrize(
    "changes", [{"rollouts": 1}, {"groups": 0}, {"groups": 9, "max_questions": 8}, {"concurrency": 0}]
)
def test_invalid_settings_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(TrainingError):
        CollectSettings(**changes)

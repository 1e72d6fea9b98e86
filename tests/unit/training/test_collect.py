"""Rollouts come in whole groups, as many with variance as are wanted, and failures are counted."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memagent_evaluation.samples import LengthUnit, Metric, Sample
from memagent_graph import Budget, MemAgent, PolicyError, ScriptedPolicy
from memagent_graph.errors import PolicyAuthenticationError, PolicyUnreachableError
from memagent_training.data.training_runs import TrainingRun
from memagent_training.job.collect import CollectSettings, collect
from memagent_training.training_errors import TrainingError

Reply = Callable[[int, int], str | Exception]
"""What the n-th read of a question answers."""


class Numbered:
    """Question k asks for the number k."""

    name, metric, unit, answer_tokens = "numbered", Metric.ALL, LengthUnit.TOKENS, 8

    def sample(self, length: int, index: int) -> Sample:
        def text() -> Iterator[str]:
            yield f"This is document {index}. "
            yield f"Its number is {index}."

        return Sample(self, length, index, f"What is the number of document {index}?", (str(index),), text)


def questions(count: int | None = None) -> Iterator[Sample]:
    numbers = itertools.count() if count is None else range(count)
    return (Numbered().sample(100, number) for number in numbers)


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


def right(number: int) -> str:
    return rf"\boxed{{{number}}}"


def asked_by(agent: MemAgent) -> list[int]:
    """The documents of which an answer was asked for, once per read."""
    policy = agent.policy
    assert isinstance(policy, ScriptedPolicy)
    found = (re.search(r"number of document (\d+)", prompt) for prompt in policy.prompts if "Its number" not in prompt)
    return sorted(int(match[1]) for match in found if match)


def half(number: int, read: int) -> str:
    return right(number) if read % 2 else r"\boxed{wrong}"


async def test_every_question_is_read_so_often_and_rewarded_in_the_log(tmp_path: Path) -> None:
    agent = reader(tmp_path, half)
    found = await collect(agent, questions(3), CollectSettings(rollouts=4, groups=3, max_questions=3), name="first")
    assert [len(group.run_ids) for group in found.groups] == [4, 4, 4]
    assert all(sorted(group.rewards) == [0, 0, 1, 1] for group in found.groups)
    assert agent.run_log is not None
    logged = {run_id: agent.run_log.latest_rewards(run_id)["exact_match"] for run_id in found.group_of}
    assert logged == {
        run_id: reward for group in found.groups for run_id, reward in zip(group.run_ids, group.rewards, strict=True)
    }
    assert found.reward == 0.5


async def test_further_questions_are_asked_until_enough_groups_have_variance(tmp_path: Path) -> None:
    agent = reader(tmp_path, lambda number, read: half(number, read) if number % 3 == 0 else right(number))
    found = await collect(agent, questions(), CollectSettings(rollouts=2, groups=4, max_questions=50), name="x")
    assert sorted(int(group.name.split("-")[1]) % 3 for group in found.groups) == [0, 0, 0, 0]
    assert found.uniform_groups
    assert all(group.rewards == (1.0, 1.0) for group in found.uniform_groups)
    assert found.questions < 20
    assert set(found.group_of.values()) == {group.name for group in found.groups}


async def test_no_more_questions_than_allowed_and_no_more_reads_than_wanted(tmp_path: Path) -> None:
    agent = reader(tmp_path, lambda number, read: right(number))
    found = await collect(agent, questions(), CollectSettings(rollouts=2, groups=2, max_questions=7), name="x")
    assert (found.questions, len(found.groups), len(found.uniform_groups)) == (7, 0, 7)
    assert agent.run_log is not None
    assert len(list(agent.run_log.runs())) == 14


async def test_a_failed_read_is_tried_again_and_its_group_is_whole(tmp_path: Path) -> None:
    calls = itertools.count()

    def reply(number: int, read: int) -> str | Exception:
        return PolicyError("gone") if next(calls) == 0 else half(number, read)

    found = await collect(
        reader(tmp_path, reply), questions(1), CollectSettings(rollouts=3, groups=1, max_questions=1), name="x"
    )
    assert found.groups[0].run_ids == ("x-0-0", "x-0-1", "x-0-2")
    assert not found.failures


async def test_a_read_that_fails_for_good_takes_its_group_out_and_is_counted(tmp_path: Path) -> None:
    def reply(number: int, read: int) -> str | Exception:
        return PolicyError("broken") if number == 1 else half(number, read)

    found = await collect(
        reader(tmp_path, reply), questions(3), CollectSettings(rollouts=2, groups=3, max_questions=3), name="x"
    )
    assert set(found.failures) == {"x-1"}
    assert {group.name for group in found.groups} == {"x-0", "x-2"}
    assert found.questions == 3


async def test_when_everything_fails_the_first_error_is_raised(tmp_path: Path) -> None:
    agent = reader(tmp_path, lambda number, read: PolicyError("broken"))
    with pytest.raises(PolicyError, match="broken"):
        await collect(agent, questions(2), CollectSettings(rollouts=2, groups=2, max_questions=2), name="x")


async def test_a_reward_that_cannot_be_told_is_refused_with_its_run(tmp_path: Path) -> None:
    wanted = CollectSettings(rollouts=2, groups=1, max_questions=1)
    with pytest.raises(TrainingError, match=r"'unsure' returned no reward") as raised:
        await collect(reader(tmp_path, half), questions(1), wanted, name="x", reward=unsure)
    assert raised.value.run_id == "x-0-0"


def unsure(run: TrainingRun) -> float | None:
    return None


async def test_a_reward_of_one_s_own_is_logged_under_its_name_and_sees_what_the_answer_should_be(
    tmp_path: Path,
) -> None:
    def nearness(run: TrainingRun) -> float | None:
        assert run.gold is not None
        return float(run.answer in run.gold.answers) / 2

    agent = reader(tmp_path, half)
    found = await collect(
        agent, questions(2), CollectSettings(rollouts=2, groups=2, max_questions=2), name="x", reward=nearness
    )
    assert [sorted(group.rewards) for group in found.groups] == [[0, 0.5], [0, 0.5]]
    assert agent.run_log is not None
    assert {name for run_id in found.group_of for name in agent.run_log.latest_rewards(run_id)} == {"nearness"}


async def test_a_reader_without_a_log_is_refused(tmp_path: Path) -> None:
    agent = MemAgent(ScriptedPolicy([]), tokenizer="embedded", run_log=False, store=tmp_path)
    with pytest.raises(TrainingError, match="run_log"):
        await collect(agent, questions(1), CollectSettings(groups=1, max_questions=1), name="x")


async def test_what_the_reads_of_this_call_cost_is_counted(tmp_path: Path) -> None:
    def reply(number: int, read: int) -> str | Exception:
        return PolicyError("broken") if number == 2 else half(number, read)

    agent = reader(tmp_path, reply)
    found = await collect(agent, questions(3), CollectSettings(rollouts=2, groups=3, max_questions=3), name="x")
    assert agent.run_log is not None
    totals = agent.run_log.totals([f"x-{number}-{place}" for number in range(2) for place in range(2)])
    assert found.usage.turns == 8  # an update and an answer in each of four reads that came to their end
    assert found.usage.prompt_tokens == sum(total.prompt_tokens for total in totals.values())
    assert found.usage.completion_tokens == sum(total.completion_tokens for total in totals.values())
    again = await collect(agent, questions(2), CollectSettings(rollouts=2, groups=2, max_questions=2), name="x")
    assert (again.usage.turns, again.usage.prompt_tokens) == (0, 0)


# Going on

FOUR = CollectSettings(rollouts=2, groups=4, max_questions=4)


async def test_whole_groups_come_from_the_log_without_a_read(tmp_path: Path) -> None:
    mixed: Reply = lambda number, read: right(number) if number == 1 else half(number, read)  # noqa: E731
    wanted = CollectSettings(rollouts=4, groups=3, max_questions=4)
    first = await collect(reader(tmp_path, mixed), questions(), wanted, name="x")
    agent = reader(tmp_path, lambda number, read: AssertionError("read again"))  # type: ignore[arg-type,return-value]
    second = await collect(agent, questions(), wanted, name="x")
    assert asked_by(agent) == []
    for one, other in ((first.groups, second.groups), (first.uniform_groups, second.uniform_groups)):
        assert sorted(one, key=lambda each: each.name) == sorted(other, key=lambda each: each.name)
    assert [group.name for group in second.uniform_groups] == ["x-1"]


async def test_a_group_of_which_a_reward_is_missing_is_read_anew(tmp_path: Path) -> None:
    """Its collection was killed while it wrote them; an earlier reward of one read must not be taken for the new."""
    first = reader(tmp_path, half)
    await collect(first, questions(3), CollectSettings(rollouts=3, groups=3, max_questions=3), name="x")
    assert first.run_log is not None
    _delete_rewards(tmp_path, "x-1-2")
    agent = reader(tmp_path, lambda number, read: right(number) if read == 0 else r"\boxed{wrong}")
    wanted = CollectSettings(rollouts=3, groups=3, max_questions=3)
    found = await collect(agent, questions(3), wanted, name="x")
    assert asked_by(agent) == [1, 1, 1]
    again = next(group for group in found.groups if group.name == "x-1")
    assert sorted(again.rewards) == [0, 0, 1]
    assert agent.run_log is not None
    for run_id, reward in zip(again.run_ids, again.rewards, strict=True):
        assert agent.run_log.latest_rewards(run_id)["exact_match"] == reward


def _delete_rewards(folder: Path, run_id: str) -> None:
    import sqlite3

    with sqlite3.connect(folder / "runs.sqlite") as connection:
        connection.execute("DELETE FROM rewards WHERE run_id = ?", (run_id,))
    connection.close()


async def test_another_collections_groups_are_not_mistaken_for_ones_own(tmp_path: Path) -> None:
    """Neither where one's name begins with the other's, nor where a question has the other's number in it."""
    agent = reader(tmp_path, half)
    wanted = CollectSettings(rollouts=2, groups=12, max_questions=12)
    await collect(agent, questions(12), wanted, name="x-1")
    for name in ("x", "x-11", "x-1-1", "y"):
        agent = reader(tmp_path, half)
        found = await collect(agent, questions(12), wanted, name=name)
        assert len(asked_by(agent)) == 24, name
        assert {run_id.rpartition("-")[0] for run_id in found.group_of} == {f"{name}-{place}" for place in range(12)}


@pytest.mark.parametrize("kind", [PolicyUnreachableError, PolicyAuthenticationError])
async def test_a_server_that_is_gone_ends_the_collection_and_what_is_whole_is_kept(
    kind: type[PolicyError], tmp_path: Path
) -> None:
    """Of no further question is asked, however many there are."""

    def gone_at(number: int, read: int) -> str | Exception:
        return kind("gone") if number >= 2 else half(number, read)

    wanted = CollectSettings(rollouts=2, groups=2, max_questions=1000)
    asked = itertools.count()
    samples = (Numbered().sample(100, next(asked)) for _ in range(1000))
    mixed: Reply = lambda number, read: right(number) if number < 2 else gone_at(number, read)  # noqa: E731
    agent = reader(tmp_path, mixed)  # the first two have no variance, so further ones are asked
    with pytest.raises(kind, match="gone"):
        await collect(agent, samples, wanted, name="x")
    assert next(asked) <= 4
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]

    agent = reader(tmp_path, half)
    found = await collect(agent, questions(), wanted, name="x")
    assert asked_by(agent) == [2, 2, 3, 3]
    assert {group.name for group in found.uniform_groups} == {"x-0", "x-1"}
    assert {group.name for group in found.groups} == {"x-2", "x-3"}


async def test_a_question_that_failed_is_tried_again_when_the_collection_goes_on(tmp_path: Path) -> None:
    def broken(number: int, read: int) -> str | Exception:
        return PolicyError("broken") if number == 1 else half(number, read)

    first = await collect(reader(tmp_path, broken), questions(4), FOUR, name="x")
    assert set(first.failures) == {"x-1"}
    agent = reader(tmp_path, half)
    second = await collect(agent, questions(4), FOUR, name="x")
    assert asked_by(agent) == [1, 1]
    assert not second.failures


@pytest.mark.parametrize(
    "changes", [{"rollouts": 1}, {"groups": 0}, {"groups": 9, "max_questions": 8}, {"concurrency": 0}]
)
def test_settings_that_cannot_be(changes: dict[str, int]) -> None:
    with pytest.raises(TrainingError):
        CollectSettings(**changes)


async def test_groups_without_variance_are_taken_where_more_than_outcomes_is_rewarded(tmp_path: Path) -> None:
    agent = reader(tmp_path, lambda number, nth: right(number))
    settings = CollectSettings(rollouts=2, groups=3, max_questions=9)
    found = await collect(agent, questions(), settings, name="kept", keep_uniform=True)
    assert (len(found.groups), len(found.uniform_groups)) == (3, 0)
    assert len(found.group_of) == 6


async def test_an_answer_that_was_asked_for_plainly_is_scored_so(tmp_path: Path) -> None:
    agent = reader(tmp_path, lambda number, nth: str(number) if nth else "none", answer_format="plain")
    found = await collect(agent, questions(), CollectSettings(rollouts=2, groups=2), name="plain")
    assert [group.rewards for group in found.groups] == [(0.0, 1.0)] * 2


async def test_a_reward_that_is_no_number_is_no_failed_read(tmp_path: Path) -> None:
    """One bad group among good ones was left out, and the mean reward was of the others."""

    def broken(run: TrainingRun) -> float:
        return float("nan") if run.question.endswith("1?") else 1.0

    wanted = CollectSettings(rollouts=2, groups=3, max_questions=3)
    with pytest.raises(TrainingError, match=r"the reward 'broken' is nan") as raised:
        await collect(reader(tmp_path, half), questions(3), wanted, name="x", reward=broken)
    assert raised.value.run_id == "x-1-0"

"""Running an evaluation: a row for every question also after failures, many at once, little in memory, resumable."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
from support.evaluation import KeyTask
from support.scripts import read_perfectly

from memagent_evaluation.attempt_rows import make_run_id
from memagent_evaluation.harness import ATTEMPTS, Evaluation, EvaluationEnd, EvaluationProgress, evaluate
from memagent_evaluation.result_journal import ResultJournal, load_results, open_results
from memagent_evaluation.result_table import EvaluationPlan, QuestionOutcome, ResultRow
from memagent_evaluation.samples import Needle, Sample, Task
from memagent_evaluation.systems import Attempt, load_system
from memagent_graph import DocumentStore, ScriptedPolicy
from memagent_graph.errors import (
    EvaluationError,
    PolicyAuthenticationError,
    PolicyOverloadedError,
    PolicyRequestError,
    PolicyUnreachableError,
)
from memagent_graph.results import Usage
from memagent_graph.storage.checkpoints import open_checkpointer


class Oracle:
    """A system that waits, then looks the answer up in the document's text, unless `fail` returns an error."""

    def __init__(
        self, store: DocumentStore, name: str = "oracle", fail: Any = None, wait: Any = None, **attempt: Any
    ) -> None:
        self.name = name
        self.store = store
        self.fail = fail or (lambda number, run_id: None)
        self.wait = wait or (lambda number: asyncio.sleep(0.001))
        self.attempt_values = attempt
        self.run_ids: list[str] = []
        self.at_once = self.peak_concurrency = 0

    async def attempt(self, document: Any, question: str, *, run_id: str, answer_tokens: int, repeat: int) -> Attempt:
        assert answer_tokens == KeyTask.answer_tokens
        self.run_ids.append(run_id)
        self.at_once += 1
        self.peak_concurrency = max(self.peak_concurrency, self.at_once)
        try:
            number = len(self.run_ids) - 1
            await self.wait(number)
            if (error := self.fail(number, run_id)) is not None:
                raise error
            text = self.store.read(document, 0, document["size"])
        finally:
            self.at_once -= 1
        key = text.split(f"The key of {question.removeprefix('What is the key of ').rstrip('?')} is ")[1].split(".")[0]
        answer = f"\\boxed{{{key}}}"
        usage = Usage(100, 10, turns=1)
        values = {"outcome": QuestionOutcome.ANSWERED, "answer": key, "raw_answer": answer, "usage": usage}
        values |= self.attempt_values
        return Attempt(**values)


PLAN = EvaluationPlan.grid(("oracle",), ("keys",), (100, 400), 8)


class Hops(KeyTask):
    """As `KeyTask`, with a needle besides that the answer does not hold."""

    def sample(self, length: int, index: int) -> Sample:
        sample = super().sample(length, index)
        return replace(sample, task=self, needles=(Needle("The key of", "the lock", 0.0), *sample.needles))


@pytest.fixture
def run(tmp_path: Path, store: DocumentStore) -> Callable[..., Awaitable[tuple[EvaluationEnd, list[ResultRow]]]]:
    """Evaluate these systems; the results stay in the folder "out", and no document is left, also after an error."""

    async def run(
        *systems: Any,
        plan: EvaluationPlan = PLAN,
        progress: Any = None,
        task: Task | None = None,
        store: DocumentStore = store,
        **options: Any,
    ) -> tuple[EvaluationEnd, list[ResultRow]]:
        by_name = {system.name: system for system in systems}
        evaluation = Evaluation(
            replace(plan, systems=tuple(by_name)), {"keys": task or KeyTask()}, by_name, store=store, **options
        )
        try:
            with open_results(tmp_path / "out", {"a": 1}, resume=True) as journal:
                return await evaluate(evaluation, journal, progress), list(journal.results.rows)
        finally:
            assert list((store.root / "texts").iterdir()) == []

    return run


def questions(count: int, **more: Any) -> EvaluationPlan:
    """So many questions of one length."""
    return EvaluationPlan.grid((), ("keys",), (100,), count, **more)


async def test_every_system_answers_every_question_of_every_length(run, store) -> None:
    end, rows = await run(Oracle(store), Oracle(store, "second", chunks=7), task=Hops())
    assert end is EvaluationEnd.DONE
    assert Counter((row.system, row.length) for row in rows) == dict.fromkeys(
        [(system, length) for system in ("oracle", "second") for length in (100, 400)], 8
    )
    assert all(row.strict == row.lenient == row.string_match == row.token_f1 == 1.0 for row in rows)
    assert all((row.outcome, row.error, row.attempts, row.calls) == ("answered", None, 1, 1) for row in rows)
    sample = KeyTask().sample(100, 3)
    row = next(row for row in rows if row.sample_id == sample.id)
    assert (row.question, row.gold) == (sample.question, sample.gold)
    assert row.needle_depths == (0.0, sample.needles[0].depth)
    assert {row.needles_found for row in rows} == {(True, True)}, "what leads to the answer is found with it"
    assert {(row.system, row.chunks) for row in rows} == {("oracle", 0), ("second", 7)}
    assert row.document_bytes == len("".join(sample.text()).encode())


async def test_exactly_the_allowed_number_of_questions_runs_at_once(run, store) -> None:
    seven = asyncio.Barrier(7)
    oracle = Oracle(store, wait=lambda number: asyncio.wait_for(seven.wait(), 60))
    await run(oracle, plan=questions(28), concurrency=7)
    assert oracle.peak_concurrency == 7


async def test_a_document_is_stored_once_for_all_systems_and_gone_when_they_are_done(run, store) -> None:
    names: list[str] = []
    most = 0

    class Watched(DocumentStore):
        def add(self, document: Any, **options: Any) -> Any:
            nonlocal most
            names.append(document.name)
            reference = super().add(document, **options)
            most = max(most, sum(1 for _ in (self.root / "texts").iterdir()))
            return reference

    watched = Watched(store.root)
    systems = [Oracle(watched, name) for name in ("a", "b", "c")]
    await run(*systems, store=watched, plan=questions(50), concurrency=6)
    assert Counter(names) == {f"keys/100/{index}": 1 for index in range(50)}
    assert most < 25, "no more documents lie there than are read, and about as many that are ready"


async def test_samples_with_the_same_text_keep_it_until_all_are_done(run, store) -> None:
    class Same(KeyTask):
        def sample(self, length: int, index: int) -> Sample:
            return replace(super().sample(length, 0), index=index)

    _, rows = await run(Oracle(store), task=Same(), plan=questions(80), concurrency=3)
    assert [row.outcome for row in rows] == ["answered"] * 80


@pytest.mark.parametrize(
    "error",
    [PolicyRequestError("the server refused"), PolicyOverloadedError("the server refused"), RuntimeError("odd")],
)
async def test_a_failing_question_is_repeated_once_and_again_with_retry_failed(run, tmp_path, store, error) -> None:
    def fail(number: int, run_id: str) -> Exception | None:
        fails_once = run_id.endswith("-400-5") and oracle.run_ids.index(run_id) == number
        return error if fails_once or run_id.endswith("-400-3") else None

    oracle = Oracle(store, fail=fail)
    end, rows = await run(oracle)
    assert end is EvaluationEnd.DONE
    assert len(rows) == 16
    assert [(row.sample_id, row.lenient) for row in rows if row.attempts == 2] == [
        ("keys/400/3", 0.0), ("keys/400/5", 1.0)
    ]  # fmt: skip
    (row,) = [row for row in rows if row.outcome == "failed"]
    assert (row.sample_id, row.attempts, row.strict, row.lenient, row.string_match) == ("keys/400/3", 2, 0.0, 0.0, 0.0)
    assert row.error == ("RuntimeError: odd" if type(error) is RuntimeError else "the server refused")
    assert (row.answer, row.run_id) == (None, None)
    run_id = make_run_id(load_results(tmp_path / "out").evaluation, "oracle", "keys/400/3")
    assert Counter(oracle.run_ids)[run_id] == ATTEMPTS
    again = Oracle(store)
    assert await run(again) == (EvaluationEnd.DONE, rows)
    _, rows = await run(again, retry_failed=True)
    assert (again.run_ids, {row.outcome for row in rows}, len(rows)) == ([run_id], {"answered"}, 16)


@pytest.mark.parametrize(
    ("count", "right", "error"),
    [
        (128, 30, PolicyUnreachableError("no connection")),
        (16, 9, PolicyUnreachableError("no connection")),
        (16, 9, PolicyOverloadedError("engine died")),
        (5, 0, PolicyOverloadedError("engine died")),
        (5, 4, PolicyUnreachableError("no connection")),
        (5, 4, PolicyAuthenticationError("wrong key")),
    ],
)
async def test_an_unreachable_server_ends_the_evaluation_and_costs_no_row(
    run, tmp_path, store, count, right, error
) -> None:
    oracle = Oracle(store, fail=lambda number, run_id: error if number >= right else None)
    with pytest.raises(type(error)):
        await run(oracle, plan=questions(count), concurrency=1)
    assert len(oracle.run_ids) <= right + 32, "it does not go on asking"
    results = load_results(tmp_path / "out")
    assert ([row.outcome for row in results.rows], results.missing) == (["answered"] * right, count - right)
    end, rows = await run(Oracle(store), plan=questions(count))
    assert (end, {row.outcome for row in rows}, len(rows)) == (EvaluationEnd.DONE, {"answered"}, count)


async def test_the_last_failures_are_repeated_if_the_server_still_answers(run, store) -> None:
    """The last three fail, one of them for a moment only."""

    def fail(number: int, run_id: str) -> Exception | None:
        lasting = run_id.endswith(("-13", "-15")) or (run_id.endswith("-14") and number < 19)
        return PolicyOverloadedError("busy") if lasting else None

    end, rows = await run(Oracle(store, fail=fail), plan=questions(16), concurrency=1)
    assert end is EvaluationEnd.DONE
    assert [(row.outcome, row.attempts) for row in rows[12:]] == [
        ("answered", 1), ("failed", 4), ("answered", 3), ("failed", 4)
    ]  # fmt: skip


async def test_a_single_last_question_may_fail_by_itself_at_a_server_that_is_reached(run, store) -> None:
    oracle = Oracle(store, fail=lambda number, run_id: PolicyOverloadedError("bug") if number >= 4 else None)
    end, rows = await run(oracle, plan=questions(5), concurrency=1)
    assert end is EvaluationEnd.DONE
    assert Counter(row.outcome for row in rows) == {"answered": 4, "failed": 1}


async def test_failures_among_successes_do_not_stop_it(run, store) -> None:
    def fail(number: int, run_id: str) -> PolicyUnreachableError | None:
        sample = int(run_id.rpartition("-")[2])
        return PolicyUnreachableError("no connection") if sample % 2 and sample < 90 else None

    _, rows = await run(Oracle(store, fail=fail), plan=questions(100), concurrency=4)
    assert Counter(row.outcome for row in rows) == {"failed": 45, "answered": 55}


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        ({"max_questions": 5}, EvaluationEnd.MAX_QUESTIONS),
        ({"max_tokens": 500}, EvaluationEnd.MAX_TOKENS),
        ({"max_seconds": 1.5}, EvaluationEnd.MAX_SECONDS),
    ],
)
async def test_a_limit_stops_it_and_the_rest_is_done_later(run, store, limits, end) -> None:
    is_slow = "max_seconds" in limits  # from the fifth question on
    slow = Oracle(store, wait=lambda number: asyncio.sleep(3600 if is_slow and number > 3 else 0))
    reason, rows = await run(slow, **limits, concurrency=2)
    assert reason is end
    assert 0 < len(rows) <= 8
    assert "max_questions" not in limits or len(rows) == 5
    assert {row.length for row in rows} == {400}, "the longest documents come first"
    oracle = Oracle(store)
    reason, everything = await run(oracle)
    assert reason is EvaluationEnd.DONE
    assert len(oracle.run_ids) == 16 - len(rows)
    assert [row for row in everything if row in rows] == rows


async def test_wrong_and_missing_answers_score_zero_and_outcomes_are_counted(run, store) -> None:
    outcomes = (QuestionOutcome.NO_ANSWER, QuestionOutcome.UNFINISHED, QuestionOutcome.DOES_NOT_FIT)
    systems = [Oracle(store, outcome.value, outcome=outcome) for outcome in outcomes]
    wrong = Oracle(store, "answered", answer="the lock", raw_answer="the lock")
    _, rows = await run(*systems, wrong, task=Hops(), plan=questions(1))
    assert {(row.system, row.outcome) for row in rows} == {
        (outcome, outcome) for outcome in ("no_answer", "unfinished", "does_not_fit", "answered")
    }  # fmt: skip
    assert all(row.strict == row.lenient == row.string_match == row.token_f1 == 0.0 for row in rows)
    assert all(row.needles_found == (False, False) for row in rows), "what only leads to the answer is none"


@pytest.mark.parametrize(
    ("error", "in_text", "words"),
    [
        (
            EvaluationError("keys has 3 samples", hint="Ask for fewer."),
            False,
            ": keys has 3 samples. Ask for fewer.",
        ),
        (KeyError("no"), False, "sample() of the task keys failed at length 400, index 3, seed 7: KeyError: 'no'"),
        (OSError("no"), True, "text() of the task keys failed at length 400, index 3, seed 7: OSError: no. Fix the"),
    ],
)
async def test_failing_samples_are_reported_after_all_others(run, tmp_path, store, error, in_text, words) -> None:
    class Broken(KeyTask):
        def sample(self, length: int, index: int) -> Sample:
            def text() -> Iterator[str]:
                yield "The beginning. "
                raise error

            if index == 3 and not in_text:
                raise error
            sample = super().sample(length, index)
            return replace(sample, task=self, text=text) if index == 3 else sample

    for _ in range(2):
        with pytest.raises(EvaluationError, match=r"finished, except for 2 samples") as failure:
            await run(Oracle(store), task=Broken(), seed=7)
        assert words in str(failure.value)
        results = load_results(tmp_path / "out")
        assert [row.outcome for row in results.rows] == ["answered"] * 14
        assert results.missing == 2


async def test_the_reader_is_logged_under_ids_that_tell_the_question_and_losses_are_told(
    run, tmp_path, store, make_reader, log
) -> None:
    def forgetful(prompt: str) -> str:
        return "nothing yet" if "the end " in prompt else read_perfectly(prompt)

    class LastWord(KeyTask):
        def sample(self, length: int, index: int) -> Sample:
            sample = super().sample(length, index)
            fillers = [f" filler{number}" for number in range(99)]
            return replace(sample, text=lambda: iter([*sample.text(), *fillers, " the end "]))

    saver = await open_checkpointer(tmp_path / "checkpoints.sqlite")
    system = load_system(
        "memagent", make_reader(ScriptedPolicy(forgetful), run_log=log, store=store, checkpoints=saver)
    )
    _, rows = await run(system, task=LastWord(), plan=questions(4), run_log=log, saver=saver)
    for result in rows:
        assert result.run_id == make_run_id(load_results(tmp_path / "out").evaluation, "memagent", result.sample_id)
        assert log.get(result.run_id).question == result.question
        assert (result.outcome, result.lenient, result.where_lost) == ("answered", 0.0, ("overwritten",))
        assert result.lost_at == (result.chunks - 1,)
        assert result.calls == result.chunks + 1
    assert [checkpoint async for checkpoint in saver.alist(None)] == [], "checkpoints of finished questions are deleted"
    await saver.aclose()


async def test_progress_tells_rows_accuracy_failures_and_the_time_left_also_of_what_is_resumed(run, store) -> None:
    first, second = Mock(), Mock()
    await run(Oracle(store), progress=EvaluationProgress(first), max_questions=6)
    assert first.update.call_args_list == [call(0, total=16), *(call(done, ANY, total=16) for done in range(1, 7))]
    _, text = first.update.call_args_list[1].args
    assert text.startswith("400 100%, ") and "left" in text
    failing = Oracle(store, answer="?", fail=lambda number, run_id: PolicyRequestError("no") if number > 8 else None)
    await run(failing, progress=EvaluationProgress(second), concurrency=1)
    assert second.update.call_args_list == [call(6, total=16), *(call(done, ANY, total=16) for done in range(7, 17))]
    assert second.update.call_args.args[1].startswith("100 0% 400 75%, 1 failed, ")


async def test_a_journal_that_cannot_be_written_stops_it(run, store, monkeypatch) -> None:
    def full(self: ResultJournal, row: ResultRow) -> None:
        raise EvaluationError("no room")

    monkeypatch.setattr(ResultJournal, "add", full)
    with pytest.raises(EvaluationError, match="no room"):
        await run(Oracle(store))


async def test_each_question_is_asked_so_many_times_and_more_samples_may_be_asked_for_later(run, store) -> None:
    oracle = Oracle(store)
    _, rows = await run(oracle, plan=questions(3))
    assert [(row.index, row.repeat) for row in rows] == [(0, 0), (1, 0), (2, 0)]
    again = Oracle(store)
    end, rows = await run(again, plan=questions(3, repeats=3))
    assert end is EvaluationEnd.DONE
    assert [(row.index, row.repeat) for row in rows] == [(index, repeat) for index in range(3) for repeat in range(3)]
    assert len(again.run_ids) == len({*oracle.run_ids, *again.run_ids}) - 3 == 6, "each sample has a run of its own"

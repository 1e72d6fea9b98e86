"""Running an evaluation: a row for every question, retries, concurrency, few stored documents, and resumption."""

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


class OracleSystem:
    """A system that waits, then finds the answer in the document's text, unless `get_error` returns an error."""

    def __init__(
        self, store: DocumentStore, name: str = "oracle", get_error: Any = None, wait: Any = None, **changes: Any
    ) -> None:
        self.name = name
        self.store = store
        self.get_error = get_error or (lambda number, run_id: None)
        self.wait = wait or (lambda number: asyncio.sleep(0.001))
        self.attempt_changes = changes
        self.run_ids: list[str] = []
        self.concurrent = self.max_concurrent = 0

    async def attempt(self, document: Any, question: str, *, run_id: str, answer_tokens: int, repeat: int) -> Attempt:
        assert answer_tokens == KeyTask.answer_tokens
        self.run_ids.append(run_id)
        self.concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self.concurrent)
        try:
            number = len(self.run_ids) - 1
            await self.wait(number)
            if (error := self.get_error(number, run_id)) is not None:
                raise error
            text = self.store.read(document, 0, document["size"])
        finally:
            self.concurrent -= 1
        key = text.split(f"The key of {question.removeprefix('What is the key of ').rstrip('?')} is ")[1].split(".")[0]
        answer = f"\\boxed{{{key}}}"
        usage = Usage(100, 10, turns=1)
        values = {"outcome": QuestionOutcome.ANSWERED, "answer": key, "raw_answer": answer, "usage": usage}
        values |= self.attempt_changes
        return Attempt(**values)


PLAN = EvaluationPlan.grid(("oracle",), ("keys",), (100, 400), 8)


class KeysWithSecondNeedle(KeyTask):
    """Like `KeyTask`, with a second needle whose fact is not in the answer."""

    def sample(self, length: int, index: int) -> Sample:
        sample = super().sample(length, index)
        return replace(sample, task=self, needles=(Needle("The key of", "the lock", 0.0), *sample.needles))


@pytest.fixture
def run(tmp_path: Path, store: DocumentStore) -> Callable[..., Awaitable[tuple[EvaluationEnd, list[ResultRow]]]]:
    """Evaluate systems; results go to the folder "out", and no document stays in the store, even after an error."""

    async def evaluate_systems(
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

    return evaluate_systems


def make_plan(count: int, **options: Any) -> EvaluationPlan:
    """Plan questions of one length."""
    return EvaluationPlan.grid((), ("keys",), (100,), count, **options)


async def test_every_system_answers_every_question_of_every_length(run, store) -> None:
    end, rows = await run(OracleSystem(store), OracleSystem(store, "second", chunks=7), task=KeysWithSecondNeedle())
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
    assert {row.needles_found for row in rows} == {(True, True)}, "a right answer counts as finding both needles"
    assert {(row.system, row.chunks) for row in rows} == {("oracle", 0), ("second", 7)}
    assert row.document_bytes == len("".join(sample.text()).encode())


async def test_concurrency_is_the_number_of_questions_that_run_at_once(run, store) -> None:
    barrier = asyncio.Barrier(7)
    oracle = OracleSystem(store, wait=lambda number: asyncio.wait_for(barrier.wait(), 60))
    await run(oracle, plan=make_plan(28), concurrency=7)
    assert oracle.max_concurrent == 7


async def test_document_is_stored_once_for_all_systems_and_removed_afterwards(run, store) -> None:
    document_names: list[str] = []
    max_stored = 0

    class CountingStore(DocumentStore):
        def add(self, document: Any, **options: Any) -> Any:
            nonlocal max_stored
            document_names.append(document.name)
            reference = super().add(document, **options)
            max_stored = max(max_stored, sum(1 for _ in (self.root / "texts").iterdir()))
            return reference

    counting_store = CountingStore(store.root)
    systems = [OracleSystem(counting_store, name) for name in ("a", "b", "c")]
    await run(*systems, store=counting_store, plan=make_plan(50), concurrency=6)
    assert Counter(document_names) == {f"keys/100/{index}": 1 for index in range(50)}
    assert max_stored < 25, "no more documents are stored than are being read, and about as many that are ready"


async def test_text_shared_by_samples_is_kept_until_all_are_done(run, store) -> None:
    class SameText(KeyTask):
        def sample(self, length: int, index: int) -> Sample:
            return replace(super().sample(length, 0), index=index)

    _, rows = await run(OracleSystem(store), task=SameText(), plan=make_plan(80), concurrency=3)
    assert [row.outcome for row in rows] == ["answered"] * 80


@pytest.mark.parametrize(
    "error",
    [PolicyRequestError("the server refused"), PolicyOverloadedError("the server refused"), RuntimeError("odd")],
)
async def test_failed_question_is_retried_once_and_again_with_retry_failed(run, tmp_path, store, error) -> None:
    def get_error(number: int, run_id: str) -> Exception | None:
        fails_once = run_id.endswith("-400-5") and oracle.run_ids.index(run_id) == number
        return error if fails_once or run_id.endswith("-400-3") else None

    oracle = OracleSystem(store, get_error=get_error)
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
    run_id = make_run_id(load_results(tmp_path / "out").evaluation_id, "oracle", "keys/400/3")
    assert Counter(oracle.run_ids)[run_id] == ATTEMPTS
    second_oracle = OracleSystem(store)
    assert await run(second_oracle) == (EvaluationEnd.DONE, rows)
    _, rows = await run(second_oracle, retry_failed=True)
    assert (second_oracle.run_ids, {row.outcome for row in rows}, len(rows)) == ([run_id], {"answered"}, 16)


@pytest.mark.parametrize(
    ("count", "answered", "error"),
    [
        (128, 30, PolicyUnreachableError("no connection")),
        (16, 9, PolicyUnreachableError("no connection")),
        (16, 9, PolicyOverloadedError("engine died")),
        (5, 0, PolicyOverloadedError("engine died")),
        (5, 4, PolicyUnreachableError("no connection")),
        (5, 4, PolicyAuthenticationError("wrong key")),
    ],
)
async def test_unreachable_server_stops_the_evaluation_without_failed_rows(
    run, tmp_path, store, count, answered, error
) -> None:
    oracle = OracleSystem(store, get_error=lambda number, run_id: error if number >= answered else None)
    misfits = [OracleSystem(store, "misfit", outcome=QuestionOutcome.DOES_NOT_FIT)] * bool(answered)  # no sign of life
    with pytest.raises(type(error)):
        await run(oracle, *misfits, plan=make_plan(count), concurrency=1, max_questions=None if answered else 3)
    assert len(oracle.run_ids) <= answered + 32, "it does not go on asking"
    rows = load_results(tmp_path / "out").rows
    assert Counter(row.outcome for row in rows if row.system == "oracle") == Counter(answered=answered)
    end, rows = await run(OracleSystem(store), plan=make_plan(count))
    assert end is EvaluationEnd.DONE
    assert Counter(row.outcome for row in rows if row.system == "oracle") == Counter(answered=count)


async def test_last_failures_are_retried_if_the_server_still_answers(run, store) -> None:
    def get_error(number: int, run_id: str) -> Exception | None:  # the last three fail, one only temporarily
        should_fail = run_id.endswith(("-13", "-15")) or (run_id.endswith("-14") and number < 19)
        return PolicyOverloadedError("busy") if should_fail else None

    end, rows = await run(OracleSystem(store, get_error=get_error), plan=make_plan(16), concurrency=1)
    assert end is EvaluationEnd.DONE
    assert [(row.outcome, row.attempts) for row in rows[12:]] == [
        ("answered", 1), ("failed", 4), ("answered", 3), ("failed", 4)
    ]  # fmt: skip


async def test_single_last_question_may_fail_while_the_server_is_reachable(run, store) -> None:
    oracle = OracleSystem(store, get_error=lambda number, run_id: PolicyOverloadedError("bug") if number >= 4 else None)
    end, rows = await run(oracle, plan=make_plan(5), concurrency=1)
    assert (end, Counter(row.outcome for row in rows)) == (EvaluationEnd.DONE, {"answered": 4, "failed": 1})


async def test_failures_among_successes_do_not_stop_the_evaluation(run, store) -> None:
    def get_error(number: int, run_id: str) -> PolicyUnreachableError | None:
        sample = int(run_id.rpartition("-")[2])
        return PolicyUnreachableError("no connection") if sample % 2 and sample < 90 else None

    _, rows = await run(OracleSystem(store, get_error=get_error), plan=make_plan(100), concurrency=4)
    assert Counter(row.outcome for row in rows) == {"failed": 45, "answered": 55}


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        ({"max_questions": 5}, EvaluationEnd.MAX_QUESTIONS),
        ({"max_tokens": 500}, EvaluationEnd.MAX_TOKENS),
        ({"max_seconds": 1.5}, EvaluationEnd.MAX_SECONDS),
    ],
)
async def test_limit_stops_the_evaluation_and_the_next_run_finishes_it(run, store, limits, end) -> None:
    is_slow = "max_seconds" in limits  # from the fifth question on
    limited_oracle = OracleSystem(store, wait=lambda number: asyncio.sleep(3600 if is_slow and number > 3 else 0))
    actual_end, rows = await run(limited_oracle, **limits, concurrency=2)
    assert actual_end is end
    assert len(rows) == 5 if "max_questions" in limits else 0 < len(rows) <= 8
    assert {row.length for row in rows} == {400}, "the longest documents come first"
    oracle = OracleSystem(store)
    actual_end, all_rows = await run(oracle)
    assert actual_end is EvaluationEnd.DONE
    assert len(oracle.run_ids) == 16 - len(rows)
    assert [row for row in all_rows if row in rows] == rows


async def test_wrong_and_missing_answers_score_zero_and_outcomes_are_counted(run, store) -> None:
    outcomes = (QuestionOutcome.NO_ANSWER, QuestionOutcome.UNFINISHED, QuestionOutcome.DOES_NOT_FIT)
    systems = [OracleSystem(store, outcome.value, outcome=outcome) for outcome in outcomes]
    wrong_system = OracleSystem(store, "answered", answer="the lock", raw_answer="the lock")
    _, rows = await run(*systems, wrong_system, task=KeysWithSecondNeedle(), plan=make_plan(1))
    assert {(row.system, row.outcome) for row in rows} == {(name, name) for name in (*outcomes, "answered")}
    assert all(row.strict == row.lenient == row.string_match == row.token_f1 == 0.0 for row in rows)
    assert all(row.needles_found == (False, False) for row in rows), "the second needle is no answer"


@pytest.mark.parametrize(
    ("error", "fails_in_text", "message"),
    [
        (EvaluationError("keys has 3 samples", hint="Ask for fewer."), False, ": keys has 3 samples. Ask for fewer."),
        (KeyError("no"), False, "sample() of the task keys failed at length 400, index 3, seed 7: KeyError: 'no'"),
        (None, False, "index 3, seed 7: TypeError: its gold strings are '7', not a tuple of texts"),
        (OSError("no"), True, "text() of the task keys failed at length 400, index 3, seed 7: OSError: no. Fix the"),
    ],
)
async def test_broken_samples_are_reported_after_all_others(run, tmp_path, store, error, fails_in_text, message):
    class KeysWithBrokenSample(KeyTask):
        def sample(self, length: int, index: int) -> Sample:
            def text() -> Iterator[str]:
                yield "The beginning. "
                raise error

            if index == 3 and not fails_in_text and error:
                raise error
            sample = super().sample(length, index)
            return replace(sample, text=text, gold=sample.gold if error else "7") if index == 3 else sample

    for _ in range(2):
        with pytest.raises(EvaluationError, match=r"finished, except for 2 samples") as caught:
            await run(OracleSystem(store), task=KeysWithBrokenSample(), seed=7)
        assert message in str(caught.value)
        results = load_results(tmp_path / "out")
        assert [row.outcome for row in results.rows] == ["answered"] * 14
        assert results.missing == 2


async def test_run_ids_name_the_question_and_rows_name_the_losses(run, tmp_path, store, make_reader, log) -> None:
    def forget_at_the_end(prompt: str) -> str:
        return "nothing yet" if "the end " in prompt else read_perfectly(prompt)

    class KeysWithEnding(KeyTask):
        def sample(self, length: int, index: int) -> Sample:
            sample = super().sample(length, index)
            fillers = [f" filler{number}" for number in range(99)]
            return replace(sample, text=lambda: iter([*sample.text(), *fillers, " the end "]))

    checkpointer = await open_checkpointer(tmp_path / "checkpoints.sqlite")
    system = load_system(
        "memagent", make_reader(ScriptedPolicy(forget_at_the_end), run_log=log, store=store, checkpoints=checkpointer)
    )
    _, rows = await run(system, task=KeysWithEnding(), plan=make_plan(4), run_log=log, checkpointer=checkpointer)
    for row in rows:
        assert row.run_id == make_run_id(load_results(tmp_path / "out").evaluation_id, "memagent", row.sample_id)
        assert log.get(row.run_id).question == row.question
        assert (row.outcome, row.lenient, row.where_lost) == ("answered", 0.0, ("overwritten",))
        assert row.lost_at == (row.chunks - 1,)
        assert row.calls == row.chunks + 1
    assert not [item async for item in checkpointer.alist(None)], "checkpoints of finished questions are deleted"
    await checkpointer.aclose()


async def test_progress_shows_rows_accuracy_failures_and_time_left(run, store) -> None:
    first, second = Mock(), Mock()
    await run(OracleSystem(store), progress=EvaluationProgress(first), max_questions=6)
    assert first.update.call_args_list == [call(0, total=16), *(call(n, ANY, total=16) for n in range(1, 7))]
    _, text = first.update.call_args_list[1].args
    assert text.startswith("400 100%, ") and "left" in text
    error = PolicyRequestError("no")
    system = OracleSystem(store, answer="?", get_error=lambda number, run_id: error if number > 8 else None)
    await run(system, progress=EvaluationProgress(second), concurrency=1)
    assert second.update.call_args_list == [call(6, total=16), *(call(n, ANY, total=16) for n in range(7, 17))]
    assert second.update.call_args.args[1].startswith("100 0% 400 75%, 1 failed, ")


async def test_wrong_score_or_unwritable_journal_stops_the_evaluation(run, store, monkeypatch) -> None:
    def raise_error(self: ResultJournal, row: ResultRow) -> None:
        raise EvaluationError("no room")

    task_with_wrong_score = type("Keys", (KeyTask,), {"own_score": lambda *arguments: 7.0})()
    with pytest.raises(EvaluationError, match=r"the score 7\.0"):
        await run(OracleSystem(store), task=task_with_wrong_score)
    monkeypatch.setattr(ResultJournal, "add", raise_error)
    with pytest.raises(EvaluationError, match="no room"):
        await run(OracleSystem(store))


async def test_repeats_ask_each_question_again_and_can_be_raised_later(run, store) -> None:
    oracle = OracleSystem(store)
    _, rows = await run(oracle, plan=make_plan(3))
    assert [(row.index, row.repeat) for row in rows] == [(0, 0), (1, 0), (2, 0)]
    second_oracle = OracleSystem(store)
    end, rows = await run(second_oracle, plan=make_plan(3, repeats=3))
    assert end is EvaluationEnd.DONE
    assert [(row.index, row.repeat) for row in rows] == [(index, repeat) for index in range(3) for repeat in range(3)]
    assert len(second_oracle.run_ids) == len({*oracle.run_ids, *second_oracle.run_ids}) - 3 == 6, "a run each"

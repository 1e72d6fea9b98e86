"""Filings become a typed table by a schema, and its accuracy is what the faults of the policy make of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.fake_server import FakeServer
from support.scripts import extract

from benchmarks.filing_texts import QUESTION, Filing, GeneratedFiling, generate_filings, write_filings
from benchmarks.filings import FIELDS, compute_accuracies, judge_value, main
from memagent_corpus import CorpusReader, TableFolder, open_inputs
from memagent_corpus.corpus_run import CorpusSummary, lock_table, run_corpus
from memagent_graph import Budget, MemAgent, ScriptedPolicy, load_prompts

ROOMY = Budget(context_window=8000, question_tokens=600, memory_tokens=500, chunk_tokens=1200, answer_tokens=500)
MOST_RISKS = 4


def imperfect_reader(filings: Iterable[GeneratedFiling]) -> Callable[[str], str]:
    """A policy that keeps the beginning of the filing in memory, knows its facts by that, and has known faults."""
    known = {filing.text[:300].strip(): filing for filing in filings}

    def reply(prompt: str) -> str:
        if section := extract(prompt, "section"):
            memory = extract(prompt, "memory")
            return memory if memory in known else section[:300].strip()
        if "<memory>" not in prompt:  # a server's tokens are counted with a prompt of its own
            return "a text"
        filing = known[extract(prompt, "memory")]
        if filing.truth.company.endswith("Trust"):
            return "The trust reports a good year."
        answer = json.loads(filing.truth.model_dump_json()) | faults(filing)
        if filing.truth.company.endswith("Holdings") and not extract(prompt, "error"):
            answer["revenue"] = "a good one"  # at first: this answer is repaired
        return json.dumps(answer)

    return reply


def faults(filing: GeneratedFiling) -> dict[str, Any]:
    """The fields that the policy gets wrong, and what it says."""
    truth, values = filing.truth, dict[str, Any]()
    if filing.scale == "thousands":
        values["revenue"] = truth.revenue * 1000
    if truth.net_income is not None and filing.wording == 2:
        values["net_income"] = None
    elif truth.net_income is not None and truth.net_income < 0:
        values["net_income"] = -truth.net_income
    if truth.employees is None or filing.wording > 0:
        values["employees"] = 39
    if filing.has_former_auditor:
        values["auditor"] = "a former one"
    if len(truth.risks) > MOST_RISKS:
        values["risks"] = truth.risks[:MOST_RISKS]
    return values


def expected(filing: GeneratedFiling) -> dict[str, str]:
    """How `judge_value` must judge each field of a filing that this policy has read."""
    if filing.truth.company.endswith("Trust"):
        return dict.fromkeys(FIELDS, "missing")
    wrong = {
        field: "missing" if value is None else "invented" if getattr(filing.truth, field) is None else "wrong"
        for field, value in faults(filing).items()
    }
    return dict.fromkeys(FIELDS, "right") | wrong


def read(source: Path, out: Path, policy: Callable[[str], str]) -> CorpusSummary:
    async def all_of_it() -> CorpusSummary:
        inputs, table = open_inputs(str(source)), TableFolder(str(out))
        with lock_table(table) as work:
            agent = MemAgent(
                ScriptedPolicy(policy),
                tokenizer="embedded",
                budget=ROOMY,
                boundary="paragraph",
                prompts=load_prompts(),
                store=work / "documents",
                checkpoints=work / "checkpoints.sqlite",
                run_log=False,
            )
            reader = CorpusReader(agent, [QUESTION], inputs.access, response_format=Filing)
            try:
                return await run_corpus(inputs, reader, table, documents_in_flight=16, rows_per_part=100)
            finally:
                await reader.aclose()

    return asyncio.run(all_of_it())


def test_filings_become_a_typed_table_whose_accuracy_is_known_field_by_field(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    count, out = size(60, 1000), tmp_path / "out"
    truths = write_filings(tmp_path / "in", count, words=size(600, 1500))
    summary = read(tmp_path / "in", out, imperfect_reader(truths.values()))
    assert (summary.read, summary.rows) == (count, count)
    rows = {row["document"]: row for row in TableFolder(str(out)).rows()}

    for name, filing in truths.items():
        row = rows[name]
        truth, has_answer = filing.truth, not row["error"]
        judged = {field: judge_value(row[field], getattr(truth, field), has_answer=has_answer) for field in FIELDS}
        assert judged == expected(filing), name
        tries = Counter(event["kind"] for event in row["events"])["invalid_answer"]
        assert tries == {"Trust": 3, "Holdings": 1}.get(filing.truth.company.split()[-1], 0)

    fields = compute_accuracies(rows.values(), truths)
    outcomes = Counter(outcome for filing in truths.values() for outcome in expected(filing).values())
    assert min(outcomes.values()) > 0 and len(outcomes) == 4, "every kind of fault is among them"
    for column in fields:
        assert column.right == sum(expected(filing)[column.field] == "right" for filing in truths.values())
        record_property(column.field, round(column.right / column.rows, 4))
    record_property("errors", summary.failed_rows)


@pytest.mark.parametrize(
    ("value", "truth", "judgement"),
    [
        ("abelard  & FINCH llp", "Abelard & Finch LLP", "right"),
        ("Abelard & Finch", "Abelard & Finch LLP", "wrong"),
        (1234.51, 1234.5, "right"),
        (1235.9, 1234.5, "wrong"),
        (["b", "A"], ["a", "b"], "right"),
        (["a", "a"], ["a", "b"], "wrong"),
        ([], ["a"], "wrong"),
        (False, True, "wrong"),
        (0, None, "invented"),
        (None, 0, "missing"),
        (None, None, "right"),
    ],
)
def test_a_field_is_judged_by_what_it_says(value: Any, truth: Any, judgement: str) -> None:
    assert judge_value(value, truth, has_answer=True) == judgement
    assert judge_value(None, truth, has_answer=False) == "missing"


def test_the_benchmark_reads_with_the_policy_that_is_named_and_prints_a_line_for_each_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["5"]) == 2
    policy = imperfect_reader(generate_filings(5))
    with FakeServer(lambda body, _: policy(body["messages"][-1]["content"])) as server:
        options = ("--base-url", server.base_url, "--model", "fake", "--tokenizer", "embedded", "--quiet")
        budget = ("--context-window", "8000", "--question-tokens", "600", "--boundary", "paragraph")
        assert main(["5", *options, *budget]) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert {line[0] for line in lines if line} >= set(FIELDS), printed
    [company] = [line for line in lines if line and line[0] == "company"]
    rights = sum(not filing.truth.company.endswith("Trust") for filing in generate_filings(5))
    assert company[1] == f"{rights / 5:.1%}"


def test_a_generated_filing_is_the_same_every_time_and_no_two_are_equal(tmp_path: Path) -> None:
    once, again = write_filings(tmp_path / "a", 30), write_filings(tmp_path / "b", 30)
    assert once == again
    assert len({filing.text for filing in once.values()}) == 30


def test_a_generated_filing_has_what_it_is_asked_for() -> None:
    for filing in generate_filings(30):
        truth = filing.truth
        facts = [truth.company, truth.auditor, *truth.risks, f"{truth.period_end:%B} {truth.period_end.day}"]
        facts += [] if truth.employees is None else [f"{truth.employees:,}"]
        facts += [] if truth.net_income is None else [f"{abs(truth.net_income):,.1f} million"]
        assert [fact for fact in facts if fact not in filing.text] == []

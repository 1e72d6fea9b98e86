"""Filings become a typed table by a schema, and its accuracy agrees with the known faults of the policy."""

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

BUDGET = Budget(context_window=8000, question_tokens=600, memory_tokens=500, chunk_tokens=1200, answer_tokens=500)
MOST_RISKS = 4


def make_faulty_script(filings: Iterable[GeneratedFiling]) -> Callable[[str], str]:
    """Return a policy's script with known faults; the start of a filing in its memory identifies the filing."""
    filings_by_start = {filing.text[:300].strip(): filing for filing in filings}

    def reply(prompt: str) -> str:
        if section := extract(prompt, "section"):
            memory = extract(prompt, "memory")
            return memory if memory in filings_by_start else section[:300].strip()
        if "<memory>" not in prompt:  # a probe that counts the server's tokens
            return "a text"
        filing = filings_by_start[extract(prompt, "memory")]
        if filing.truth.company.endswith("Trust"):
            return "The trust reports a good year."
        answer = json.loads(filing.truth.model_dump_json()) | make_faults(filing)
        if filing.truth.company.endswith("Holdings") and not extract(prompt, "error"):
            answer["revenue"] = "a good one"  # in the first answer, which is repaired
        return json.dumps(answer)

    return reply


def make_faults(filing: GeneratedFiling) -> dict[str, Any]:
    """Return the wrong values that the policy gives for a filing, by field."""
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


def make_expected_judgements(filing: GeneratedFiling) -> dict[str, str]:
    """Return the expected judgement of each field of a filing that the policy has read."""
    if filing.truth.company.endswith("Trust"):
        return dict.fromkeys(FIELDS, "missing")
    wrong_fields = {
        field: "missing" if value is None else "invented" if getattr(filing.truth, field) is None else "wrong"
        for field, value in make_faults(filing).items()
    }
    return dict.fromkeys(FIELDS, "right") | wrong_fields


def read_filings(source: Path, out: Path, script: Callable[[str], str]) -> CorpusSummary:
    async def run() -> CorpusSummary:
        inputs, table = open_inputs(str(source)), TableFolder(str(out))
        with lock_table(table) as work:
            agent = MemAgent(
                ScriptedPolicy(script),
                tokenizer="embedded",
                budget=BUDGET,
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
                await reader.agent.aclose()

    return asyncio.run(run())


def test_filings_become_a_typed_table_with_the_expected_accuracy_of_each_field(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    filing_count, out = size(60, 1000), tmp_path / "out"
    truths = write_filings(tmp_path / "in", filing_count, words=size(600, 1500))
    summary = read_filings(tmp_path / "in", out, make_faulty_script(truths.values()))
    assert (summary.read, summary.rows) == (filing_count, filing_count)
    rows = {row["document"]: row for row in TableFolder(str(out)).rows()}

    for name, filing in truths.items():
        row = rows[name]
        truth, has_answer = filing.truth, not row["error"]
        judgements = {field: judge_value(row[field], getattr(truth, field), has_answer=has_answer) for field in FIELDS}
        assert judgements == make_expected_judgements(filing), name
        attempts = Counter(event["kind"] for event in row["events"])["invalid_answer"]
        assert attempts == {"Trust": 3, "Holdings": 1}.get(filing.truth.company.split()[-1], 0)

    fields = compute_accuracies(rows.values(), truths)
    outcomes = Counter(outcome for filing in truths.values() for outcome in make_expected_judgements(filing).values())
    assert min(outcomes.values()) > 0 and len(outcomes) == 4, "every kind of judgement occurs"
    for column in fields:
        assert column.right == sum(
            make_expected_judgements(filing)[column.field] == "right" for filing in truths.values()
        )
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
def test_a_value_is_judged_by_its_content(value: Any, truth: Any, judgement: str) -> None:
    assert judge_value(value, truth, has_answer=True) == judgement
    assert judge_value(None, truth, has_answer=False) == "missing"


def test_the_benchmark_reads_with_the_given_policy_and_prints_a_line_for_each_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["5"]) == 2
    script = make_faulty_script(generate_filings(5))
    with FakeServer(lambda body, _: script(body["messages"][-1]["content"])) as server:
        options = ("--base-url", server.base_url, "--model", "fake", "--tokenizer", "embedded", "--quiet")
        budget = ("--context-window", "8000", "--question-tokens", "600", "--boundary", "paragraph")
        assert main(["5", *options, *budget]) == 0
    output = capsys.readouterr().out
    lines = [line.split() for line in output.splitlines()]
    assert {line[0] for line in lines if line} >= set(FIELDS), output
    [company] = [line for line in lines if line and line[0] == "company"]
    right_count = sum(not filing.truth.company.endswith("Trust") for filing in generate_filings(5))
    assert company[1] == f"{right_count / 5:.1%}"


def test_generated_filings_are_reproducible_and_all_different(tmp_path: Path) -> None:
    filings = write_filings(tmp_path / "a", 30)
    assert filings == write_filings(tmp_path / "b", 30)
    assert len({filing.text for filing in filings.values()}) == 30


def test_a_generated_filing_contains_all_facts_of_the_schema() -> None:
    for filing in generate_filings(30):
        truth = filing.truth
        facts = [truth.company, truth.auditor, *truth.risks, f"{truth.period_end:%B} {truth.period_end.day}"]
        facts += [] if truth.employees is None else [f"{truth.employees:,}"]
        facts += [] if truth.net_income is None else [f"{abs(truth.net_income):,.1f} million"]
        assert [fact for fact in facts if fact not in filing.text] == []

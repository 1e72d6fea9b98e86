"""Filings become a typed table by a schema, and its accuracy is what the faults of the policy make of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fake_server import FakeServer
from support.filing_reader import expected, imperfect_reader

from benchmarks.filing_texts import QUESTION, Filing, generate_filings, write_filings
from benchmarks.filings import FIELDS, compute_accuracies, judge_value, main
from memagent_corpus import CorpusReader, TableFolder, open_inputs
from memagent_corpus.corpus_run import CorpusSummary, lock_table, run_corpus
from memagent_graph import Budget, MemAgent, ScriptedPolicy, load_prompts

ROOMY = Budget(context_window=8000, question_tokens=600, memory_tokens=500, chunk_tokens=1200, answer_tokens=500)
TYPES = {
    "company": pa.string(),
    "form": pa.string(),
    "period_end": pa.date32(),
    "currency": pa.string(),
    "revenue": pa.float64(),
    "net_income": pa.float64(),
    "employees": pa.int64(),
    "auditor": pa.string(),
    "risks": pa.list_(pa.string()),
    "material_weakness": pa.bool_(),
}


def read(source: Path, out: Path) -> CorpusSummary:
    async def all_of_it() -> CorpusSummary:
        inputs, table = open_inputs(str(source)), TableFolder(str(out))
        with lock_table(table) as work:
            agent = MemAgent(
                ScriptedPolicy(imperfect_reader),
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
    summary = read(tmp_path / "in", out)
    assert (summary.read, summary.rows) == (count, count)
    rows = {row["document"]: row for row in TableFolder(str(out)).rows()}

    for name, filing in truths.items():
        row = rows[name]
        truth = filing.truth
        found = {field: judge_value(row[field], getattr(truth, field), has_answer=not row["error"]) for field in FIELDS}
        assert found == expected(filing), name
        tries = Counter(event["kind"] for event in row["events"])["invalid_answer"]
        assert tries == {"Trust": 3, "Holdings": 1}.get(filing.truth.company.split()[-1], 0)
    for path in out.glob("*.parquet"):
        schema = pq.read_schema(path)
        assert {field: schema.field(field).type for field in FIELDS} == TYPES

    fields = compute_accuracies(rows.values(), truths)
    outcomes = Counter(found for filing in truths.values() for found in expected(filing).values())
    assert min(outcomes.values()) > 0 and len(outcomes) == 4, "every kind of fault is among them"
    for each in fields:
        assert each.right == sum(expected(filing)[each.field] == "right" for filing in truths.values())
        record_property(each.field, round(each.right / each.rows, 4))
    record_property("errors", summary.failed_rows)


@pytest.mark.parametrize(
    ("value", "truth", "found"),
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
def test_a_field_is_judged_by_what_it_says(value: Any, truth: Any, found: str) -> None:
    assert judge_value(value, truth, has_answer=True) == found
    assert judge_value(None, truth, has_answer=False) == "missing"


def test_the_benchmark_reads_with_the_policy_that_is_named_and_prints_a_line_for_each_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["5"]) == 2
    with FakeServer(lambda body, _: imperfect_reader(body["messages"][-1]["content"])) as server:
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
    assert len({each.text for each in once.values()}) == 30

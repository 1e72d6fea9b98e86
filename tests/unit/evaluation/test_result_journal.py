"""The journal of results: rows survive a round trip, and damaged or foreign journals are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.evaluation import make_failed_row, make_row

from memagent_evaluation.result_journal import JOURNAL, ResultJournal, load_results, open_results, require_no_results
from memagent_evaluation.result_table import TABLE, EvaluationPlan, make_results, write_table
from memagent_graph.errors import EvaluationError

SETTINGS = {"policy": {"model": "m", "temperature": 0.0}, "tasks": {"seed": 1, "haystack": None}}
PLAN = EvaluationPlan.grid(("memagent", "refine"), ("keys",), (1024, 4096), 2)

ROWS = st.builds(
    make_row,
    system=st.sampled_from(["memagent", "refine"]),
    length=st.sampled_from([1024, 4096]),
    index=st.integers(0, 1),
    right=st.booleans(),
    answer=st.none() | st.text(max_size=20),
    gold=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    flops=st.none() | st.floats(0, 1e30),
    needle_depths=st.lists(st.floats(0, 1), max_size=3).map(tuple),
    where_lost=st.lists(st.sampled_from(["overwritten", "never_written"]), max_size=2).map(tuple),
    lost_at=st.lists(st.none() | st.integers(0, 9), max_size=2).map(tuple),
)


def open_journal(folder: Path, *rows) -> ResultJournal:
    journal = open_results(folder, SETTINGS)
    journal.add_plan(PLAN)
    for result in rows:
        journal.add(result)
    return journal


@given(st.lists(ROWS, max_size=6))
@settings(max_examples=15)
def test_rows_loaded_from_the_journal_equal_those_added(tmp_path_factory, rows) -> None:
    folder = tmp_path_factory.mktemp("results")
    with open_journal(folder, *rows) as journal:
        results = journal.results
    assert load_results(folder) == results
    assert {row.key: row for row in results.rows} == {row.key: row for row in rows}


@pytest.mark.parametrize("plan_field", ["data", "identities"])
def test_resume_refuses_changed_systems_and_accepts_new_ones(tmp_path, plan_field) -> None:
    with open_journal(tmp_path) as journal:
        journal.add_plan(replace(PLAN, **{plan_field: (("one", "dev.json, 7 bytes"),)}))
        journal.add_plan(replace(PLAN, **{plan_field: (("two", "hotpot.json, 8 bytes"),)}))
    with open_results(tmp_path, SETTINGS, resume=True) as journal:
        journal.add_plan(replace(PLAN, **{plan_field: (("one", "dev.json, 7 bytes"), ("two", "hotpot.json, 8 bytes"))}))
        with pytest.raises(EvaluationError, match=rf'{plan_field}\.two is "hotpot\.json, 9 bytes" and was') as error:
            journal.add_plan(replace(PLAN, **{plan_field: (("two", "hotpot.json, 9 bytes"),)}))
    assert "(out)" in str(error.value)


def test_missing_questions_are_counted_from_the_plan(tmp_path) -> None:
    with open_journal(tmp_path, make_row(index=0)) as journal:
        assert journal.results.missing == 7
        journal.add_plan(EvaluationPlan.grid(("memagent",), ("keys",), (1024,), 4))
        assert journal.results.missing == 9


def test_rows_are_sorted_in_the_order_of_the_plan() -> None:
    plan = EvaluationPlan.grid(("refine", "memagent"), ("vt", "keys"), (4096, 1024), 1)
    keys = (("keys", "memagent", 4096), ("vt", "memagent", 1024), ("vt", "refine", 4096), ("vt", "refine", 1024))
    rows = [make_row(system, length, task=task) for task, system, length in keys]
    sorted_keys = [(row.task, row.length, row.system) for row in make_results(rows, [plan], {}, "e").rows]
    assert sorted_keys == [("vt", 1024, "refine"), ("vt", 1024, "memagent"), ("vt", 4096, "refine"),
                       ("keys", 4096, "memagent")]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("memagent-evaluation", "something"), "not the journal"),
        (lambda text: text.replace('"unit": "tokens"', '"unit": 7', 1), "line 3"),
        (lambda text: text.replace('"count": ', '"count": 99', 1), "line 2.*more than 100 rows"),
        (lambda text: text.replace('"reached_length": null', f'"reached_length": {10**30}', 1), "line 3"),
        (lambda text: text.replace('"calls": ', '"calls": "\\ud800", "x": ', 1), "line 3"),
        (
            lambda text: text.replace('"task": "keys", "length": 1024, "u', '"task": "o", "length": 1024, "u'),
            "in no plan",
        ),
        (lambda text: "no json\n", "line 1"),
    ],
)
def test_damaged_journal_error_names_the_line(tmp_path, monkeypatch, damage, message) -> None:
    monkeypatch.setattr("memagent_evaluation.result_journal._MAX_PLANNED_ROWS", 100)
    open_journal(tmp_path, make_row()).close()
    path = tmp_path / JOURNAL
    path.write_text(damage(path.read_text()))
    with pytest.raises(EvaluationError, match=message) as error:
        load_results(tmp_path)
    assert error.value.hint


def test_empty_journal_file_is_replaced_by_a_new_journal(tmp_path) -> None:
    (tmp_path / JOURNAL).touch()
    open_results(tmp_path, SETTINGS, resume=True).close()
    assert load_results(tmp_path).settings == SETTINGS


def test_parquet_file_has_the_rows_and_the_settings_as_metadata(tmp_path) -> None:
    """This includes an answer with a lone surrogate."""
    import pyarrow.parquet

    with open_journal(tmp_path, make_row(answer="a\ud800b"), make_failed_row(index=1)) as journal:
        write_table(journal.results, tmp_path / TABLE)
    assert load_results(tmp_path).rows[0].answer == "a\ud800b"
    table = pyarrow.parquet.read_table(tmp_path / TABLE)
    assert table.column("lenient").to_pylist() == [1.0, 0.0]
    assert table.column("answer").to_pylist() == ["a?b", None]
    assert table.schema.field("gold").type == pyarrow.list_(pyarrow.string())
    assert json.loads(table.schema.metadata[b"memagent.settings"]) == SETTINGS


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
def test_full_disk_at_close_is_an_error_with_a_hint(tmp_path) -> None:
    """Rows that could not be written stay in the file's buffer until it is closed."""
    import resource

    code = f"""
from pathlib import Path
from support.evaluation import make_row
from memagent_evaluation.result_journal import open_results
from memagent_evaluation.result_table import EvaluationPlan
with open_results(Path({str(tmp_path)!r}), {SETTINGS!r}) as journal:
    journal.add_plan(EvaluationPlan.grid(("memagent",), ("keys",), (1024,), 9))
    for index in range(9):
        journal.add(make_row(index=index))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2200, resource.RLIM_INFINITY)),
    )  # fmt: skip
    assert "resume continues" in result.stderr
    with open_results(tmp_path, SETTINGS, resume=True) as journal:
        assert len(journal.rows) == 2


@pytest.mark.parametrize("name", ["report.md", "results.parquet", "my_plot.png"])
def test_folder_with_files_that_would_be_replaced_is_refused(tmp_path, name) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(EvaluationError, match=re.escape(name)):
        require_no_results(tmp_path)
    assert (tmp_path / name).read_text() == "mine"

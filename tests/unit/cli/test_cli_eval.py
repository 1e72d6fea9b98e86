"""`memagent eval` and `eval-report` with a fake server, kills, interrupts and invalid input."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from pyarrow import parquet
from support.command_line import memagent
from support.fake_server import FakeServer
from support.programs import Program, kill_after
from support.scripts import extract
from support.server_faults import make_error

from memagent_evaluation.plots import draw_all
from memagent_evaluation.result_journal import JOURNAL, load_results
from memagent_graph import RunLog, load_tokenizer

TESTS = Path(__file__).parents[2]


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "tasks.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(TESTS)!r})\nfrom support.evaluation import KeyTask\n")
    return f"{path}:KeyTask"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def evaluate(task: str, options: tuple[str, ...], out: Path) -> Callable[..., Result]:
    """A function that runs `memagent eval` of the task with small budgets and extra options, which have priority."""
    own_options = (*options, "--lengths", "200", "--out", out)
    return lambda *extra_options, code=0: memagent("eval", task, *own_options, *extra_options, code=code)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no plots, because drawing takes as long as everything else."""
    monkeypatch.setattr("memagent_evaluation.report.draw_all", lambda results, folder: [])


def load_rows(folder: Path) -> list[Any]:
    """Load the rows of an evaluation without their durations and run ids."""
    return [replace(row, run_id=None, seconds=0.0) for row in load_results(folder).rows]


def test_an_evaluation_writes_table_report_plots_and_runs(evaluate, out, monkeypatch) -> None:
    monkeypatch.setattr("memagent_evaluation.report.draw_all", draw_all)
    options = ("--lengths", "200,600", "-n", 2, "--systems", "memagent,middle_truncation", "--header", "A: sk-secret")
    result = evaluate(*options)
    report = (out / "report.md").read_text()
    for text in ("## Systems side by side", "| 200 | memagent | 2 | 100.0 [", "## Cost per question"):
        assert text in result.stdout
        assert text in report
    assert "![accuracy](accuracy.png)" in report
    assert {path.stem for path in out.glob("*.png")} == {path.stem for path in out.glob("*.svg")}
    assert {path.stem for path in out.glob("*.png")} >= {"accuracy", "depth_memagent"}
    results = load_results(out)
    assert parquet.read_table(out / "results.parquet").column("run_id").to_pylist() == [
        row.run_id for row in results.rows
    ]
    assert (len(results.rows), results.missing) == (8, 0)
    assert {row.lenient for row in results.rows if row.system == "memagent"} == {1.0}
    assert not list(out.glob("*documents")) + list(out.glob("checkpoints*")), "they serve only a resume"
    row = next(row for row in results.rows if row.system == "memagent")
    run = memagent("show", row.run_id, "--log", out / "runs.sqlite", "--json")
    assert json.loads(run.stdout)["answer"] == row.answer
    assert "memagent eval" in report
    assert not any(b"sk-secret" in path.read_bytes() for path in out.rglob("*") if path.is_file())


def test_tasks_suites_and_systems_are_listed() -> None:
    result = memagent("eval", "--list")
    for name in ("niah_single_2", "vt", "memagent", "retrieval"):
        assert f"  {name}\n" in result.stdout
    assert "  ruler: niah_single_1, " in result.stdout
    values = json.loads(memagent("eval", "--list", "--json").stdout)
    assert "full_context" in values["systems"] and len(values["suites"]["ruler"]) == 13


def test_a_killed_and_resumed_evaluation_gives_the_same_table(evaluate, task, options, server, out, tmp_path) -> None:
    """Kills come at random moments; at most the requests in flight are repeated: one chunk of each read."""
    kill_count, concurrency, rng = 2, 4, random.Random(3)
    flags = ["--lengths", "300,700", "-n", "3", "--systems", "memagent,refine", "--quiet", "--concurrency", concurrency]
    evaluate(*flags, "--out", tmp_path / "expected")
    expected_counts = Counter(map(get_section_key, server.requests))
    server.requests.clear()
    server.delay = 0.1
    command = [sys.executable, "-m", "memagent_graph", "eval", task, *options, *flags, "--out", out, "--resume"]
    for kill in range(kill_count):
        request_count = len(server.requests) + rng.randrange(10, 25)
        with Program(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            assert kill_after(process, server.requests, request_count), process.stderr.read()
        row_count = (out / JOURNAL).read_bytes().count(b'"sample_id"')
        assert row_count < 12, f"the evaluation ended before kill {kill}"
    server.delay = 0.0
    evaluate(*flags, "--resume")
    counts = Counter(map(get_section_key, server.requests))
    assert load_rows(out) == load_rows(tmp_path / "expected")
    repetitions = sum(max(0, counts[text] - count) for text, count in expected_counts.items() if text)
    assert repetitions <= kill_count * concurrency, "a read is resumed at its chunk"
    runs = RunLog(out / "runs.sqlite")
    assert all(runs.get(row.run_id).stop_reason == "answered" for row in load_results(out).rows if row.run_id)


def get_section_key(body: dict[str, Any]) -> str:
    """Return a key of a request for a memory update: its question and section. Other requests have an empty key."""
    prompt = body["messages"][-1]["content"]
    return f"{extract(prompt, 'problem')}|{extract(prompt, 'section')}" if "<section>" in prompt else ""


def test_a_stopped_evaluation_can_be_resumed_and_extended_with_the_same_settings(evaluate, server, out) -> None:
    assert "--resume" in evaluate("-n", 4, "--max-questions", 2, code=5).stderr
    assert "2 questions not asked yet" in (out / "report.md").read_text()
    assert "--resume" in evaluate("-n", 4, code=7).stderr
    evaluate("-n", 4, "--resume")
    request_count = len(server.requests)
    evaluate("-n", 4, "--resume")
    refused_result = evaluate("--resume", "--temperature", 0.5, "--seed", 3, "--chunk-tokens", 90, code=7)
    assert len(server.requests) == request_count, "no request is repeated"
    for text in (
        "policy.temperature is 0.5 and was 0.0",
        "tasks.seed is 3 and was 0",
        "chunk_tokens is 90 and was 100",
    ):
        assert text in refused_result.stderr
    assert "continue with the same command" not in refused_result.stderr
    evaluate("-n", 5, "--resume", "--systems", "memagent,refine")
    assert Counter(row.system for row in load_results(out).rows) == {"memagent": 5, "refine": 5}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["niah_single_2", "--out", __file__], 7, "is a file, not a folder"),
        (["no_such_task"], 7, "there is no task 'no_such_task'"),
        (["niah_single_2", "--lengths", "20"], 7, "too small for niah_single_2"),
        (["vt", "--questions-per-document", "2"], 7, "vt has one question on each document"),
        (["hotpotqa", "--data", "nowhere.json"], 7, "nowhere.json"),
        (["niah_single_2", "--haystack", "nowhere"], 7, "nowhere"),
        (["niah_single_2", "--base-url", "http://127.0.0.1:9/v1", "--retries", "0"], 4, "Is the server running?"),
        ([], 2, "--list"),
    ],
)
def test_invalid_input_is_refused_before_a_request(options, server, out, arguments, code, message) -> None:
    result = memagent("eval", *options, "--lengths", "2k", "-n", 2, "--out", out, *arguments, code=code)
    assert server.requests == []
    assert message in result.stderr
    assert not out.exists(), "a refused evaluation writes no files"


def test_an_evaluation_is_resumed_after_a_server_failure(evaluate, server, out) -> None:
    original_respond, fail = server.respond, make_error(500, "died")
    server.respond = lambda body, number: original_respond(body, number) if number < 10 else fail()
    result = evaluate("-n", 8, "--retries", 0, "--concurrency", 4, code=4)
    assert "died" in result.stderr
    assert "continue with the same command and --resume" in result.stderr
    server.respond = original_respond
    evaluate("-n", 8, "--retries", 0, "--concurrency", 4, "--resume")
    assert [row.outcome for row in load_results(out).rows] == ["answered"] * 8


def test_an_interrupted_evaluation_keeps_its_results(task, options, server, out) -> None:
    server.delay = 0.1
    command = [sys.executable, "-m", "memagent_graph", "eval", task, *options, "--lengths", "400", "-n", "40",
               "--concurrency", "2", "--out", out]  # fmt: skip
    process = Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert kill_after(process, server.requests, 30, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; nothing in" in errors
    assert "Traceback" not in errors
    assert 0 < len(load_results(out).rows) < 40
    assert not list(out.glob("*documents"))


def test_a_report_can_be_written_again_and_two_evaluations_compared(evaluate, server, tmp_path) -> None:
    good_folder, bad_folder = tmp_path / "good", tmp_path / "bad"
    evaluate("--lengths", "200,400", "-n", 6, "--out", good_folder)
    original_respond = server.respond
    server.respond = lambda body, number: "\\boxed{12}" if number % 3 == 0 else original_respond(body, number)
    evaluate("--lengths", "200,400", "-n", 6, "--out", bad_folder)
    for name in ("report.md", "results.parquet"):
        (good_folder / name).unlink()
    assert "| 400 | memagent | 6 | 100.0 [" in memagent("eval-report", good_folder).stdout
    assert (good_folder / "report.md").read_text().startswith("# Evaluation")
    assert "12 questions in both; 0 rows without a partner." in memagent("eval-report", good_folder, bad_folder).stdout
    comparison = json.loads(memagent("eval-report", good_folder, bad_folder, "--json").stdout)
    good_row, bad_row = (standing for standing in comparison["standings"]["memagent"] if standing["length"] == "all")
    assert (good_row["accuracy"]["mean"], bad_row["against_first"]["n"]) == (1.0, 12)
    assert bad_row["against_first"]["first_mean"] < 1
    assert memagent("eval-report", tmp_path / "nowhere", code=7).stderr.count("no results") == 1


def test_runs_can_be_logged_with_logprobs_and_documents(evaluate, server, out, tmp_path) -> None:
    server.vllm = True
    log = tmp_path / "mine.sqlite"
    evaluate("-n", 1, "--logprobs", "--keep-documents", "--log", log)
    (row,) = load_results(out).rows
    assert all(conversation.has_ids for conversation in RunLog(log).conversations(row.run_id))
    run = json.loads(memagent("show", row.run_id, "--log", log, "--json").stdout)
    assert any(row.answer in item["quote"] for item in run["evidence"])
    assert load_tokenizer("embedded").fingerprint == load_results(out).settings["reader"]["tokenizer"]
    assert not (out / "runs.sqlite").exists()
    assert not list(out.glob("*documents*")), "documents of runs in another log are in the user's store"


def test_kept_documents_survive_a_resume_without_the_option(evaluate, out) -> None:
    evaluate("-n", 1, "--keep-documents")
    evaluate("-n", 2, "--resume")
    first_row, second_row = load_results(out).rows
    for row, has_text in ((first_row, True), (second_row, False)):
        result = memagent("show", row.run_id, "--log", out / "runs.sqlite", "--chunk", 1)
        assert ("and then" in result.stdout) is has_text
    assert [path.name for path in out.glob("*documents*")] == ["documents"]


def test_a_resume_with_changed_data_files_is_refused(options, server, out, isolated_home) -> None:
    def write_data_file(name: str, **fields: Any) -> None:
        (isolated_home / "evaluation" / name).write_text(json.dumps({"answers": ["7"], **fields}) + "\n")

    (isolated_home / "evaluation" / "qa_files").mkdir(parents=True)
    passage = {"context": "Document 1:\nThe key is 7.", "num_docs": 1}
    write_data_file("qa_files/mine.jsonl", question="What is it?", document=f"The key is 7.{' Nothing.' * 100}")
    write_data_file("eval_50.jsonl", input="What is it?", **passage)
    options = (*options, "--out", out, "--resume")
    memagent("eval", "qa_files", *options)
    memagent("eval", "qa_files", "ruler_hqa_files", *options)
    request_count = len(server.requests)
    write_data_file("eval_50.jsonl", input="What is the key?", **passage)
    error_text = memagent("eval", "ruler_hqa_files", *options, code=7).stderr
    assert len(server.requests) == request_count
    assert 'data.ruler_hqa_files is "eval_50.jsonl, ' in error_text
    assert "--out" in error_text
    memagent("eval", "qa_files", *options)


def test_repeated_samples_are_graded_by_another_model_and_priced(evaluate, server, out) -> None:
    def grade(body: dict[str, Any], number: int) -> str:
        assert body["model"] == "grader"
        return "\\boxed{8}"

    server.authorization = "Bearer sk-policy"
    with FakeServer(grade, model="grader", key="sk-judge") as judge:
        flags = ("--api-key", "sk-policy", "-n", 3, "--repeats", 2, "--judge-base-url", judge.base_url, "--judge-model",
                "grader", "--judge-api-key", "sk-judge", "--price-in", 1, "--price-out", 2)  # fmt: skip
        assert "at temperature 0 all samples of an answer are alike" in evaluate(*flags, code=7).stderr
        values = json.loads(evaluate(*flags, "--temperature", 0.7, "--json").stdout)
    assert len({body["seed"] for body in server.requests}) >= 2
    (cell,) = values["results"]
    assert (values["ended"], values["rows"], values["missing"], len(judge.requests)) == ("done", 6, 0, 6)
    assert values["settings"]["reader"]["chunk_tokens"] == 100
    assert (cell["length"], cell["n"], cell["outcomes"]) == (200, 6, {"answered": 6})
    assert cell["scores"]["judged"]["mean"] == pytest.approx(0.8)
    assert cell["pass_at"]["lenient"]["2"]["mean"] == 1.0
    assert cell["price"] > 0
    assert {row.judge for row in load_results(out).rows} == {"grader"}
    assert "| judge |" in (out / "report.md").read_text()
    assert not any(b"sk-judge" in path.read_bytes() for path in out.rglob("*") if path.is_file())

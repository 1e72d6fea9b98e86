"""`memagent eval` and `eval-report` as a user meets them: a real server, real crashes, every kind of bad input."""

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
    """`memagent eval` of the task, with small budgets and these options besides, of which the last one counts."""
    return lambda *more, code=0: memagent("eval", task, *options, "--lengths", "200", "--out", out, *more, code=code)


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes as long as all the rest."""
    monkeypatch.setattr("memagent_evaluation.report.draw_all", lambda results, folder: [])


def table(folder: Path) -> list[Any]:
    """All of the results but what depends on the clock and on the evaluation's name."""
    return [replace(row, run_id=None, seconds=0.0) for row in load_results(folder).rows]


def test_an_evaluation_leaves_table_report_plots_and_runs_that_open(evaluate, out, monkeypatch) -> None:
    monkeypatch.setattr("memagent_evaluation.report.draw_all", draw_all)
    more = ("--lengths", "200,600", "-n", 2, "--systems", "memagent,middle_truncation", "--api-key", "sk-secret")
    result = evaluate(*more)
    report = (out / "report.md").read_text()
    for words in ("## Systems side by side", "| 200 | memagent | 2 | 100.0 [", "## Cost per question"):
        assert words in result.stdout
        assert words in report
    assert "![accuracy](accuracy.png)" in report
    assert {path.stem for path in out.glob("*.png")} == {path.stem for path in out.glob("*.svg")}
    assert {path.stem for path in out.glob("*.png")} >= {"accuracy", "depth_memagent"}
    results = load_results(out)
    assert parquet.read_table(out / "results.parquet").column("run_id").to_pylist() == [
        row.run_id for row in results.rows
    ]
    assert (len(results.rows), results.missing) == (8, 0)
    assert {row.lenient for row in results.rows if row.system == "memagent"} == {1.0}
    assert not list(out.glob("*documents")) + list(out.glob("checkpoints*")), "what served resuming is gone"
    row = next(row for row in results.rows if row.system == "memagent")
    run = memagent("show", row.run_id, "--log", out / "runs.sqlite", "--json")
    assert json.loads(run.stdout)["answer"] == row.answer
    assert "memagent eval" in report
    assert not any(b"sk-secret" in path.read_bytes() for path in out.rglob("*") if path.is_file())


def test_tasks_suites_and_systems_are_named() -> None:
    result = memagent("eval", "--list")
    for name in ("niah_single_2", "vt", "memagent", "retrieval"):
        assert f"  {name}\n" in result.stdout
    assert "  ruler: niah_single_1, " in result.stdout
    values = json.loads(memagent("eval", "--list", "--json").stdout)
    assert "full_context" in values["systems"] and len(values["suites"]["ruler"]) == 13


def test_a_killed_evaluation_resumed_gives_the_same_table_as_one_that_was_left_alone(
    evaluate, task, options, server, out, tmp_path
) -> None:
    """Killed at random moments. What is asked again is at most what was under way, for the reader one chunk each."""
    kills, concurrency, moments = 2, 4, random.Random(3)
    more = ["--lengths", "300,700", "-n", "3", "--systems", "memagent,refine", "--quiet", "--concurrency", concurrency]
    evaluate(*more, "--out", tmp_path / "whole")
    undisturbed = Counter(map(section, server.requests))
    server.requests.clear()
    server.delay = 0.1
    command = [sys.executable, "-m", "memagent_graph", "eval", task, *options, *more, "--out", out, "--resume"]
    for kill in range(kills):
        enough = len(server.requests) + moments.randrange(10, 25)
        with Program(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            assert kill_after(process, server.requests, enough), process.stderr.read()
        rows = (out / JOURNAL).read_bytes().count(b'"sample_id"')
        assert rows < 12, f"it was over before it could be killed ({kill})"
    server.delay = 0.0
    evaluate(*more, "--resume")
    disturbed = Counter(map(section, server.requests))
    assert table(out) == table(tmp_path / "whole")
    again = sum(max(0, disturbed[text] - count) for text, count in undisturbed.items() if text)
    assert again <= kills * concurrency, "the reader continues at the chunk it was at"
    runs = RunLog(out / "runs.sqlite")
    assert all(runs.get(row.run_id).stop_reason == "answered" for row in load_results(out).rows if row.run_id)


def section(body: dict[str, Any]) -> str:
    """What tells the reader's requests for memory apart; empty for all others."""
    prompt = body["messages"][-1]["content"]
    return f"{extract(prompt, 'problem')}|{extract(prompt, 'section')}" if "<section>" in prompt else ""


def test_a_limit_stops_it_resumably_and_more_may_be_asked_later_with_the_same_settings(evaluate, server, out) -> None:
    stop = evaluate("-n", 4, "--max-questions", 2, code=5)
    assert "--resume" in stop.stderr
    assert "2 questions not asked yet" in (out / "report.md").read_text()
    assert "--resume" in evaluate("-n", 4, code=7).stderr
    evaluate("-n", 4, "--resume")
    count = len(server.requests)
    evaluate("-n", 4, "--resume")
    other = evaluate("--resume", "--temperature", 0.5, "--seed", 3, "--chunk-tokens", 90, code=7)
    assert len(server.requests) == count, "nothing is asked twice"
    for words in (
        "policy.temperature is 0.5 and was 0.0",
        "tasks.seed is 3 and was 0",
        "chunk_tokens is 90 and was 100",
    ):
        assert words in other.stderr
    assert "continue with the same command" not in other.stderr
    evaluate("-n", 5, "--resume", "--systems", "memagent,refine")
    assert Counter(row.system for row in load_results(out).rows) == {"memagent": 5, "refine": 5}


@pytest.mark.parametrize(
    ("words", "code", "reason"),
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
def test_bad_input_is_refused_with_a_remedy_before_any_work(options, server, out, words, code, reason) -> None:
    result = memagent("eval", *options, "--lengths", "2k", "-n", 2, "--out", out, *words, code=code)
    assert server.requests == []
    assert reason in result.stderr
    assert not out.exists(), "what is refused leaves nothing behind"


def test_a_server_that_dies_stops_it_and_nothing_is_lost(evaluate, server, out) -> None:
    good, fail = server.respond, make_error(500, "died")
    server.respond = lambda body, number: good(body, number) if number < 10 else fail()
    result = evaluate("-n", 8, "--retries", 0, "--concurrency", 4, code=4)
    assert "died" in result.stderr
    assert "continue with the same command and --resume" in result.stderr
    server.respond = good
    evaluate("-n", 8, "--retries", 0, "--concurrency", 4, "--resume")
    assert [row.outcome for row in load_results(out).rows] == ["answered"] * 8


def test_an_interrupted_evaluation_says_how_to_go_on(task, options, server, out) -> None:
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


def test_a_report_is_made_anew_and_two_evaluations_are_compared(evaluate, server, tmp_path) -> None:
    one, other = tmp_path / "good", tmp_path / "bad"
    evaluate("--lengths", "200,400", "-n", 6, "--out", one)
    good = server.respond
    server.respond = lambda body, number: "\\boxed{12}" if number % 3 == 0 else good(body, number)
    evaluate("--lengths", "200,400", "-n", 6, "--out", other)
    for name in ("report.md", "results.parquet"):
        (one / name).unlink()
    anew = memagent("eval-report", one)
    assert "| 400 | memagent | 6 | 100.0 [" in anew.stdout
    assert (one / "report.md").read_text().startswith("# Evaluation")
    assert "12 questions in both; 0 rows without a partner." in memagent("eval-report", one, other).stdout
    as_json = json.loads(memagent("eval-report", one, other, "--json").stdout)
    first, second = (standing for standing in as_json["standings"]["memagent"] if standing["length"] == "all")
    assert (first["accuracy"]["mean"], second["against_first"]["n"]) == (1.0, 12)
    assert second["against_first"]["first_mean"] < 1
    assert memagent("eval-report", tmp_path / "nowhere", code=7).stderr.count("no results") == 1


def test_runs_can_be_logged_for_training_and_documents_be_kept(evaluate, server, out, tmp_path) -> None:
    server.vllm = True
    log = tmp_path / "mine.sqlite"
    evaluate("-n", 1, "--logprobs", "--keep-documents", "--log", log)
    (row,) = load_results(out).rows
    assert all(conversation.has_ids for conversation in RunLog(log).conversations(row.run_id))
    run = json.loads(memagent("show", row.run_id, "--log", log, "--json").stdout)
    assert any(row.answer in item["quote"] for item in run["evidence"])
    assert load_tokenizer("embedded").fingerprint == load_results(out).settings["reader"]["tokenizer"]
    assert not (out / "runs.sqlite").exists()
    assert not list(out.glob("*documents*")), "a log elsewhere has its documents in the user's own store"


def test_kept_documents_lie_in_the_folder_and_survive_going_on_without_them(evaluate, out) -> None:
    evaluate("-n", 1, "--keep-documents")
    evaluate("-n", 2, "--resume")
    first, second = load_results(out).rows
    for row, chunks in ((first, True), (second, False)):
        result = memagent("show", row.run_id, "--log", out / "runs.sqlite", "--chunk", 1)
        assert ("and then" in result.stdout) is chunks
    assert [path.name for path in out.glob("*documents*")] == ["documents"]


def test_data_files_that_changed_in_the_data_folder_are_refused_and_more_tasks_may_read_it(
    options, server, out, isolated_home
) -> None:
    def write(name: str, **fields: Any) -> None:
        (isolated_home / "evaluation" / name).write_text(json.dumps({"answers": ["7"], **fields}) + "\n")

    (isolated_home / "evaluation" / "qa_files").mkdir(parents=True)
    passage = {"context": "Document 1:\nThe key is 7.", "num_docs": 1}
    write("qa_files/mine.jsonl", question="What is it?", document=f"The key is 7.{' Nothing.' * 100}")
    write("eval_50.jsonl", input="What is it?", **passage)
    options = (*options, "--out", out, "--resume")
    memagent("eval", "qa_files", *options)
    memagent("eval", "qa_files", "ruler_hqa_files", *options)
    count = len(server.requests)
    write("eval_50.jsonl", input="What is the key?", **passage)
    refusal = memagent("eval", "ruler_hqa_files", *options, code=7).stderr
    assert len(server.requests) == count
    assert 'data.ruler_hqa_files is "eval_50.jsonl, ' in refusal
    assert "--out" in refusal
    memagent("eval", "qa_files", *options)


def test_samples_are_drawn_repeatedly_graded_by_another_model_and_priced(evaluate, server, out) -> None:
    def judge(body: dict[str, Any], number: int) -> str:
        assert body["model"] == "grader"
        return "\\boxed{8}"

    server.authorization = "Bearer sk-policy"
    with FakeServer(judge, model="grader", key="sk-judge") as other:
        more = ("--api-key", "sk-policy", "-n", 3, "--repeats", 2, "--judge-base-url", other.base_url, "--judge-model",
                "grader", "--judge-api-key", "sk-judge", "--price-in", 1, "--price-out", 2)  # fmt: skip
        assert "at temperature 0 all samples of an answer are alike" in evaluate(*more, code=7).stderr
        values = json.loads(evaluate(*more, "--temperature", 0.7, "--json").stdout)
    assert len({body["seed"] for body in server.requests}) >= 2
    (cell,) = values["results"]
    assert (values["ended"], values["rows"], values["missing"], len(other.requests)) == ("done", 6, 0, 6)
    assert values["settings"]["reader"]["chunk_tokens"] == 100
    assert (cell["length"], cell["n"], cell["outcomes"]) == (200, 6, {"answered": 6})
    assert cell["scores"]["judged"]["mean"] == pytest.approx(0.8)
    assert cell["pass_at"]["lenient"]["2"]["mean"] == 1.0
    assert cell["price"] > 0
    assert {row.judge for row in load_results(out).rows} == {"grader"}
    assert "| judge |" in (out / "report.md").read_text()
    assert not any(b"sk-judge" in path.read_bytes() for path in out.rglob("*") if path.is_file())

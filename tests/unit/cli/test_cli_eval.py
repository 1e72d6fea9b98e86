"""`memagent eval` and `eval-report` as a user meets them: a real server, real crashes, every kind of bad input."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pyarrow import parquet
from support.command_line import memagent
from support.fake_server import FakeServer
from support.programs import Program, run_program
from support.scripts import part, perfect_reader

from memagent_evaluation.result_journal import JOURNAL, load_results
from memagent_graph import RunLog, load_tokenizer

TESTS = Path(__file__).parents[2]
SMALL = ["--tokenizer", "embedded", "--context-window", "900", "--question-tokens", "50", "--memory-tokens", "60",
         "--chunk-tokens", "100", "--answer-tokens", "60"]  # fmt: skip
PLOTS = {"accuracy", "depth_memagent"}


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "tasks.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(TESTS)!r})\nfrom support.evaluation import Keys\n")
    return f"{path}:Keys"


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of something else: drawing takes as long as all the rest."""
    monkeypatch.setattr("memagent_evaluation.report.draw_all", lambda results, folder: [])


def respond(body: dict[str, Any], number: int) -> str:
    return perfect_reader(body["messages"][-1]["content"])


def table(folder: Path) -> list[tuple[Any, ...]]:
    """All of the results but what depends on the clock."""
    return [
        (row.system, row.sample_id, row.question, row.gold, row.answer, row.raw_answer, row.outcome, row.strict,
         row.lenient, row.string_match, row.token_f1, row.prompt_tokens, row.completion_tokens, row.calls, row.chunks,
         row.document_bytes, row.needle_depths, row.needles_found, row.where_lost, row.lost_at)
        for row in load_results(folder).rows
    ]  # fmt: skip


def test_an_evaluation_leaves_table_report_plots_and_runs_that_open(task, tmp_path) -> None:
    out = tmp_path / "out"
    with FakeServer(respond) as server:
        options = ["--base-url", server.base_url, *SMALL, "--lengths", "200,600", "-n", 4, "--out", out]
        done = memagent("eval", task, *options, "--systems", "memagent,middle_truncation", "--api-key", "sk-secret")
    report = (out / "report.md").read_text()
    for words in (
        "## Systems side by side",
        "| 200 | memagent | 4 | 100.0 [",
        "## Cost per question",
        "| 600 | memagent | 4 |",
    ):
        assert words in done.stdout
        assert words in report
    assert "![accuracy](accuracy.png)" in report
    assert {path.stem for path in out.glob("*.png")} == {path.stem for path in out.glob("*.svg")}
    assert {path.stem for path in out.glob("*.png")} >= PLOTS
    results = load_results(out)
    assert parquet.read_table(out / "results.parquet").column("run_id").to_pylist() == [
        row.run_id for row in results.rows
    ]
    assert (len(results.rows), results.missing) == (16, 0)
    assert {row.lenient for row in results.rows if row.system == "memagent"} == {1.0}
    assert not list(out.glob("*documents")) + list(out.glob("checkpoints*")), "what served resuming is gone"
    run_id = next(row.run_id for row in results.rows if row.system == "memagent")
    shown = memagent("show", run_id, "--log", out / "runs.sqlite", "--json")
    assert json.loads(shown.stdout)["answer"] == next(row.answer for row in results.rows if row.run_id == run_id)
    assert "memagent eval" in report
    assert not any(b"sk-secret" in path.read_bytes() for path in out.rglob("*") if path.is_file())


def test_tasks_suites_and_systems_are_named() -> None:
    done = memagent("eval", "--list")
    for name in ("niah_single_2", "vt", "memagent", "retrieval"):
        assert f"  {name}\n" in done.stdout
    assert "  ruler: niah_single_1, " in done.stdout
    values = json.loads(memagent("eval", "--list", "--json").stdout)
    assert "full_context" in values["systems"] and len(values["suites"]["ruler"]) == 13


@pytest.mark.usefixtures("without_plots")
def test_a_killed_evaluation_resumed_gives_the_same_table_as_one_that_was_left_alone(task, tmp_path) -> None:
    """Killed at random moments. What is asked again is at most what was under way, for the reader one chunk each."""
    kills, concurrency, moments = 2, 4, random.Random(3)
    options = [*SMALL, "--lengths", "300,900", "-n", "4", "--systems", "memagent,refine", "--quiet",
               "--concurrency", str(concurrency)]  # fmt: skip
    with FakeServer(respond) as server:
        memagent("eval", task, "--base-url", server.base_url, *options, "--out", tmp_path / "whole")
        undisturbed = Counter(map(section, server.requests))
    journal = tmp_path / "killed" / JOURNAL
    with FakeServer(respond, delay=0.1) as server:
        command = [sys.executable, "-m", "memagent_graph", "eval", task, "--base-url", server.base_url, *options,
                   "--out", str(tmp_path / "killed"), "--resume"]  # fmt: skip
        for round_ in range(kills):
            asked = len(server.requests)
            with Program(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
                enough = asked + moments.randrange(15, 35)
                while len(server.requests) < enough:
                    assert process.poll() is None, process.stderr and process.stderr.read()
                    time.sleep(0.005)
                os.kill(process.pid, signal.SIGKILL)
            rows = journal.read_bytes().count(b'"sample_id"')
            assert rows < 16, f"it was over before it could be killed ({round_})"
        server.delay = 0.0
        done = run_program(command, capture_output=True)
        assert done.returncode == 0, done.stderr
        disturbed = Counter(map(section, server.requests))
    assert table(tmp_path / "killed") == table(tmp_path / "whole")
    readers = {text: count for text, count in undisturbed.items() if text}
    again = sum(max(0, disturbed[text] - count) for text, count in readers.items())
    assert again <= kills * concurrency, "the reader continues at the chunk it was at"
    runs = RunLog(tmp_path / "killed" / "runs.sqlite")
    assert all(
        runs.get(row.run_id).stop_reason == "answered" for row in load_results(tmp_path / "killed").rows if row.run_id
    )


def section(body: dict[str, Any]) -> str:
    """What tells the reader's requests for memory apart; empty for all others."""
    prompt = body["messages"][-1]["content"]
    return f"{part(prompt, 'problem')}|{part(prompt, 'section')}" if "<section>" in prompt else ""


@pytest.mark.usefixtures("without_plots")
def test_a_limit_stops_it_resumably_and_more_may_be_asked_later(task, tmp_path) -> None:
    out = tmp_path / "out"
    with FakeServer(respond) as server:
        base = ["eval", task, "--base-url", server.base_url, *SMALL, "--out", out, "--lengths", "200"]
        stopped = memagent(*base, "-n", 6, "--max-questions", 2, code=5)
        assert "--resume" in stopped.stderr
        assert "4 questions have not been asked" in (out / "report.md").read_text()
        refused = memagent(*base, "-n", 6, code=7)
        assert "--resume" in refused.stderr
        memagent(*base, "-n", 6, "--resume")
        first = len(server.requests)
        memagent(*base, "-n", 6, "--resume")
        assert len(server.requests) == first, "nothing is asked twice"
        memagent(*base, "-n", 8, "--resume", "--systems", "memagent,refine")
    results = load_results(out)
    assert Counter(row.system for row in results.rows) == {"memagent": 8, "refine": 8}


@pytest.mark.usefixtures("without_plots")
def test_other_settings_are_refused_before_any_question(task, tmp_path) -> None:
    out = tmp_path / "out"
    with FakeServer(respond) as server:
        base = ["eval", task, "--base-url", server.base_url, *SMALL, "--out", out, "--lengths", "200", "-n", 2]
        memagent(*base)
        asked = len(server.requests)
        refused = memagent(*base, "--resume", "--temperature", 0.5, "--seed", 3, "--chunk-tokens", 90, code=7)
        assert len(server.requests) == asked
    for words in (
        "policy.temperature is 0.5 and was 0.0",
        "tasks.seed is 3 and was 0",
        "chunk_tokens is 90 and was 100",
    ):
        assert words in refused.stderr
    assert "continue with the same command" not in refused.stderr


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["niah_single_2", "--out", __file__], 7, "is a file, not a folder"),
        (["no_such_task"], 7, "there is no task 'no_such_task'"),
        (["niah_single_2", "--lengths", "20"], 7, "too small for niah_single_2"),
        (["niah_single_2", "--lengths", "8k,many"], 7, "'many' is not a length"),
        (["niah_single_2", "--systems", "memagent,magic"], 7, "there is no system 'magic'"),
        (["niah_single_2", "--context-window", "300"], 7, "context window"),
        (["vt", "--questions-per-document", "2"], 7, "vt has one question on each document"),
        (["state_2:rooms=3"], 7, "state_2 has no option 'rooms'"),
        (["squad"], 7, "--data"),
        (["hotpotqa", "--data", "nowhere.json"], 7, "nowhere.json"),
        (["niah_single_2", "--haystack", "nowhere"], 7, "nowhere"),
        (["niah_single_2", "--base-url", "http://127.0.0.1:9/v1", "--retries", "0"], 4, "Is the server running?"),
        (["niah_single_2", "niah_single_2", "nowhere.py:Task"], 7, "nowhere.py"),
        ([], 2, "--list"),
    ],
)
def test_bad_input_is_refused_with_a_remedy_before_any_work(tmp_path, options, code, words) -> None:
    out = tmp_path / "out"
    with FakeServer(respond) as server:
        tasks = [option for option in options[:2] if not option.startswith("-")]
        done = memagent(
            "eval", *tasks, "--base-url", server.base_url, *SMALL, "--lengths", "2k", "-n", 2, "--out", out,
            *options[len(tasks) :], code=code,
        )  # fmt: skip
        assert server.requests == []
    assert words in done.stderr
    assert not out.exists(), "what is refused leaves nothing behind"


@pytest.mark.usefixtures("without_plots")
def test_a_server_that_dies_stops_it_and_nothing_is_lost(task, tmp_path) -> None:
    dead = False

    def dying(body: dict[str, Any], number: int) -> Any:
        nonlocal dead
        dead = dead or number > 80
        return web.json_response({"error": {"message": "engine died"}}, status=500) if dead else respond(body, number)

    with FakeServer(dying) as server:
        base = ["eval", task, "--base-url", server.base_url, *SMALL, "--lengths", "200", "-n", 40, "--retries", 0,
                "--concurrency", 4, "--out", tmp_path / "out"]  # fmt: skip
        done = memagent(*base, code=4)
        assert "engine died" in done.stderr
        assert "continue with the same command and --resume" in done.stderr
        server.respond = respond
        memagent(*base, "--resume")
    results = load_results(tmp_path / "out")
    assert [row.error for row in results.rows if row.outcome != "answered"] == []
    assert len(results.rows) == 40


def test_an_interrupted_evaluation_says_how_to_go_on(task, tmp_path) -> None:
    out = tmp_path / "out"
    with FakeServer(respond, delay=0.1) as server:
        command = [sys.executable, "-m", "memagent_graph", "eval", task, "--base-url", server.base_url, *SMALL,
                   "--lengths", "400", "-n", "40", "--concurrency", "2", "--out", str(out)]  # fmt: skip
        process = Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while len(server.requests) < 30:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; nothing in" in errors
    assert "Traceback" not in errors
    assert 0 < len(load_results(out).rows) < 40
    assert not list(out.glob("*documents"))


@pytest.mark.usefixtures("without_plots")
def test_a_report_is_made_anew_and_two_evaluations_are_compared(task, tmp_path) -> None:
    def blind(body: dict[str, Any], number: int) -> str:
        return "\\boxed{12}" if number % 3 == 0 else respond(body, number)

    for name, script in (("good", respond), ("bad", blind)):
        with FakeServer(script) as server:
            memagent("eval", task, "--base-url", server.base_url, *SMALL, "--lengths", "200,400", "-n", 6,
                     "--out", tmp_path / name)  # fmt: skip
    for name in ("report.md", "results.parquet"):
        (tmp_path / "good" / name).unlink()
    anew = memagent("eval-report", tmp_path / "good")
    assert "| 400 | memagent | 6 | 100.0 [" in anew.stdout
    assert (tmp_path / "good" / "report.md").read_text().startswith("# Evaluation")
    compared = memagent("eval-report", tmp_path / "good", tmp_path / "bad")
    assert "12 questions in both; 0 rows without a partner." in compared.stdout
    as_json = json.loads(memagent("eval-report", tmp_path / "good", tmp_path / "bad", "--json").stdout)
    good, bad = (each for each in as_json["standings"]["memagent"] if each["length"] == "all")
    assert (good["accuracy"]["mean"], bad["against_first"]["n"]) == (1.0, 12)
    assert bad["against_first"]["first_mean"] < 1
    assert memagent("eval-report", tmp_path / "nowhere", code=7).stderr.count("no results") == 1


@pytest.mark.usefixtures("without_plots")
def test_runs_can_be_logged_for_training_and_documents_be_kept(task, tmp_path, own_home) -> None:
    out = tmp_path / "out"
    with FakeServer(respond, vllm=True) as server:
        memagent("eval", task, "--base-url", server.base_url, *SMALL, "--lengths", "200", "-n", 1, "--out", out,
                 "--logprobs", "--keep-documents", "--log", tmp_path / "mine.sqlite")  # fmt: skip
    (row,) = load_results(out).rows
    log = RunLog(tmp_path / "mine.sqlite")
    assert all(conversation.has_ids for conversation in log.conversations(row.run_id))
    shown = json.loads(memagent("show", row.run_id, "--log", tmp_path / "mine.sqlite", "--json").stdout)
    assert any(row.answer in item["quote"] for item in shown["evidence"])
    assert load_tokenizer("embedded").fingerprint == load_results(out).settings["reader"]["tokenizer"]
    assert not (out / "runs.sqlite").exists()
    assert not list(out.glob("*documents*")), "a log elsewhere has its documents in the user's own store"


@pytest.mark.usefixtures("without_plots")
def test_kept_documents_lie_in_the_folder_and_survive_going_on_without_them(task, tmp_path) -> None:
    out = tmp_path / "out"
    with FakeServer(respond) as server:
        base = ["eval", task, "--base-url", server.base_url, *SMALL, "--lengths", "200", "--out", out]
        memagent(*base, "-n", 1, "--keep-documents")
        memagent(*base, "-n", 2, "--resume")
    kept, gone = load_results(out).rows
    for row, chunks in ((kept, True), (gone, False)):
        done = memagent("show", row.run_id, "--log", out / "runs.sqlite", "--chunk", 1)
        assert ("and then" in done.stdout) is chunks
    assert [path.name for path in out.glob("*documents*")] == ["documents"]


@pytest.mark.usefixtures("without_plots")
def test_data_files_that_changed_in_the_data_folder_are_refused_and_more_tasks_may_read_it(tmp_path, own_home) -> None:
    folder, out = own_home / "evaluation", tmp_path / "out"
    (folder / "qa_files").mkdir(parents=True)

    def write_own(words: int) -> None:
        line = {"question": "What is it?", "document": f"The key is 7.{' Nothing.' * words}", "answers": ["7"]}
        (folder / "qa_files" / "mine.jsonl").write_text(json.dumps(line) + "\n")

    def write_hqa(question: str) -> None:
        line = {"index": 0, "input": question, "context": "Document 1:\nThe key is 7.", "answers": ["7"], "num_docs": 1}
        (folder / "eval_50.jsonl").write_text(json.dumps(line) + "\n")

    write_own(100)
    write_hqa("What is it?")
    with FakeServer(respond) as server:
        options = ["--base-url", server.base_url, *SMALL, "--out", out, "--resume"]
        memagent("eval", "qa_files", *options)
        memagent("eval", "qa_files", "ruler_hqa_files", *options)
        asked = len(server.requests)
        write_hqa("What is the key?")
        refused = memagent("eval", "ruler_hqa_files", *options, code=7)
        assert len(server.requests) == asked
        memagent("eval", "qa_files", *options)
        write_own(90)
        refused_too = memagent("eval", "qa_files", *options, code=7)
    assert 'data.ruler_hqa_files is "eval_50.jsonl, ' in refused.stderr
    assert 'data.qa_files is "mine.jsonl, ' in refused_too.stderr
    assert "--out" in refused.stderr


@pytest.mark.usefixtures("without_plots")
def test_samples_are_drawn_repeatedly_graded_by_another_model_and_priced(task, tmp_path) -> None:
    out = tmp_path / "out"
    graded: list[str] = []

    def judge(body: dict[str, Any], number: int) -> str:
        assert body["model"] == "grader"
        graded.append(body["messages"][-1]["content"])
        return "\\boxed{8}"

    with FakeServer(respond, key="sk-policy") as server, FakeServer(judge, model="grader", key="sk-judge") as other:
        options = ["--base-url", server.base_url, "--api-key", "sk-policy", *SMALL, "--lengths", 200, "-n", 3,
                   "--out", out, "--judge-base-url", other.base_url, "--judge-model", "grader", "--judge-api-key",
                   "sk-judge", "--price-in", 1, "--price-out", 2]  # fmt: skip
        refused = memagent("eval", task, *options, "--repeats", 2, code=7)
        assert "at temperature 0 all samples of an answer are alike" in refused.stderr
        done = memagent("eval", task, *options, "--repeats", 2, "--temperature", 0.7, "--json")
        seeds = {body["seed"] for body in server.requests}
    assert len(seeds) >= 2
    values = json.loads(done.stdout)
    (cell,) = values["results"]
    assert (values["ended"], values["rows"], values["missing"], len(graded)) == ("done", 6, 0, 6)
    assert values["settings"]["reader"]["chunk_tokens"] == 100
    assert (cell["length"], cell["n"], cell["outcomes"]) == (200, 6, {"answered": 6})
    assert cell["scores"]["judged"]["mean"] == pytest.approx(0.8)
    assert cell["pass_at"]["lenient"]["2"]["mean"] == 1.0
    assert cell["price"] > 0
    assert {row.judge for row in load_results(out).rows} == {"grader"}
    assert "| judge |" in (out / "report.md").read_text()
    assert not any(b"sk-judge" in path.read_bytes() for path in out.rglob("*") if path.is_file())

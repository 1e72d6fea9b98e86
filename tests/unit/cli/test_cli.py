"""`memagent read`, `resume` and `doctor` with a fake server, with invalid input and interrupts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from typing import Any

import pytest
from support.command_line import memagent
from support.document_files import make_pdf
from support.programs import Program, kill_after, parse_answers, parse_records
from support.scripts import extract, read_perfectly
from support.server_faults import make_error

from memagent_graph.cli.console import Console
from memagent_graph.errors import make_install_command

QUESTION = "What is the key of harbor?"


def test_retrieval_reports_how_much_of_the_document_it_showed(read_book, server) -> None:
    def respond(body: dict[str, Any], number: int) -> str:
        return f"\\boxed{{{'4711' if 'harbor is 4711' in extract(body['messages'][-1]['content'], 'text') else '?'}}}"

    server.respond, server.window = respond, 900
    result = read_book("--strategy", "retrieval:chunks=2:chunk_tokens=60", "--run-id", "r")
    failed_result = read_book("--strategy", "full_context", code=7)
    assert parse_answers(result.stdout) == ["4711"]
    assert re.search(r"\b\d{2,3} of \d,\d{3} tokens shown by fake \(retrieval\), ", result.stderr), result.stderr
    run = json.loads(memagent("show", "r", "--json").stdout)
    assert (run["strategy"], run["answer"]) == ("retrieval", "4711")
    assert "Read it in chunks" in failed_result.stderr and "continue with" not in failed_result.stderr


def test_a_run_is_resumed_on_another_machine_from_a_shared_folder(book, read_book, tmp_path, monkeypatch) -> None:
    files = ["--checkpoints", tmp_path / "c.sqlite", "--log", tmp_path / "r.sqlite"]
    shared = ["--store", f"{tmp_path}/shared", *files]
    stopped_result = read_book("--run-id", "r", "--max-chunks", 4, *shared, code=5)
    expected_options = map(str, (files[:2] + shared[:2] + files[2:]))
    assert shlex.join(["memagent", "resume", "r", *expected_options]) in stopped_result.stderr
    monkeypatch.setenv("MEMAGENT_HOME", str(tmp_path / "another"))
    book.unlink()
    resumed_result = memagent("resume", "r", *shared)
    run = json.loads(memagent("show", "r", "--json", *shared[:2], *files[2:]).stdout)
    assert parse_answers(resumed_result.stdout) == ["4711"]
    assert any("harbor is 4711" in quote["quote"] for quote in run["evidence"])


def test_several_questions_are_answered_in_one_pass(book, options, tmp_path) -> None:
    (tmp_path / "questions.txt").write_text("What is the key of harbor?\n\n  What is the key of tower?\n")
    arguments = ["read", book, "-q", "Which harbor has a key?", "-q", f"@{tmp_path}/questions.txt", *options]
    result = memagent(*arguments)
    json_result = memagent(*arguments, "--json", "--run-id", "r")
    stopped_result = memagent(*arguments, "--max-chunks", 2, code=5)
    latest_result = memagent("resume", "latest")
    resumed_result = memagent("resume", "r-1")
    assert sorted(parse_answers(latest_result.stdout)) == ["4711", "4711", "yet"], "all questions of the read"
    assert parse_answers(result.stdout) == ["4711", "4711", "yet"]
    assert [record["question"] for record in parse_records(result.stdout)][2] == ["What is the key of tower?"]
    assert all(record["stopped"] == ["max_chunks after 2 chunks"] for record in parse_records(stopped_result.stdout))
    results = json.loads(json_result.stdout)["results"]
    assert [result["run_id"] for result in results] == ["r-0", "r-1", "r-2"]
    assert [result["question"] for result in results][2] == "What is the key of tower?"
    assert parse_answers(resumed_result.stdout) == ["4711"]
    assert stopped_result.stderr.count("continue with: memagent resume") == 3


def test_a_failed_question_does_not_stop_the_others(read_book, server) -> None:
    respond, refuse = server.respond, make_error(400, "no towers")
    server.respond = lambda body, n: refuse() if "tower" in body["messages"][0]["content"] else respond(body, n)
    result = read_book("-q", "What is the key of tower?", "--json", code=4)
    answered_question, failed_question = json.loads(result.stdout)["results"]
    assert answered_question["answer"] == "4711"
    error = failed_question["error"]
    assert error["type"] == "PolicyRequestError" and "no towers" in error["message"]


def test_the_printed_resume_command_works(book, read_book, tmp_path) -> None:
    options = ("--max-chunks", 2, "--log", tmp_path / "my runs.sqlite", "--checkpoints", tmp_path / "c.sqlite")
    read_book("--run-id", "report-2023", *options, code=5)
    book.write_text(f"{book.read_text()} The end.")
    stopped_result = read_book("--run-id", "report-2024", *options, code=5)
    command = shlex.split(stopped_result.stderr.rpartition("continue with: memagent ")[2])
    result = memagent(*command)
    assert parse_answers(result.stdout) == ["4711"] and "of the same read" not in result.stderr
    result_without_log = read_book("--max-chunks", 2, "--no-log", code=5)
    assert "continue with" not in result_without_log.stderr, "a run without a log cannot be resumed"


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_read_prints_the_resume_command(book, options, server, signal_number) -> None:
    server.delay = 0.2
    command = [sys.executable, "-m", "memagent_graph", "read", book, "-q", QUESTION, "--run-id", "mine", *options]
    process = Program(command, stderr=subprocess.PIPE)
    assert kill_after(process, server.requests, 3, signal_number)
    _, errors = process.communicate(timeout=30)
    server.delay = 0
    assert process.returncode == 130
    assert "memagent resume mine" in errors and "Traceback" not in errors
    assert parse_answers(memagent("resume", "mine").stdout) == ["4711"]


def test_an_interrupted_resume_of_several_questions_can_be_repeated(read_book, monkeypatch) -> None:
    async def cancel(console, read):
        raise asyncio.CancelledError

    questions = ("-q", "Which harbor has a key?", "-q", "What is the key of tower?")
    read_book(*questions, "--run-id", "r", "--max-chunks", 2, code=5)
    single_result = memagent("resume", "r-1")
    with monkeypatch.context() as patch:
        patch.setattr(Console, "follow_questions", cancel)
        interrupted_result = memagent("resume", "latest", code=130)
    resumed_result = memagent("resume", "r")
    repeated_result = memagent("resume", "r", code=6)
    assert "2 more questions of the same read without an answer; for all: memagent resume r" in single_result.stderr
    assert interrupted_result.stderr.strip().endswith("continue with: memagent resume r")
    assert parse_answers(resumed_result.stdout) == ["4711", "yet"], "the unanswered questions in their order"
    assert "several runs" in repeated_result.stderr


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{folder}/missing.txt", "standard input"),
        ("{folder}/my files", "memagent corpus '{folder}/my files' -q"),
        ("{folder}/binary.txt", "binary"),
        ("https://example.com/x.txt", "a web address was given"),
        (os.fsdecode(b"nope\xe9.txt"), "does not exist"),
    ],
)
def test_invalid_documents_are_refused_with_a_hint(tmp_path, document, message) -> None:
    (tmp_path / "my files").mkdir()
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 40)
    arguments = ["read", document.format(folder=tmp_path), "-q", "x", "--model", "embedded"]
    result = memagent(*arguments, code=3)
    assert message.format(folder=tmp_path) in result.stderr
    assert "what to do:" in result.stderr and "Document." not in result.stderr
    assert result.stdout == ""
    assert json.loads(memagent(*arguments, "--json", code=3).stdout)["error"]["message"]


def test_undecodable_bytes_can_be_replaced(book, read_book) -> None:
    book.write_bytes(b"plain text, then \xff\xfe\xfd broken \x81\x8d" + b" and more plain text" * 50)
    assert "--replace-undecodable" in read_book("--encoding", "utf-8", code=3).stderr
    read_book("--encoding", "utf-8", "--replace-undecodable")


@pytest.mark.parametrize(
    ("extra_options", "code", "message"),
    [
        (["--store", "s3://me:secret@host/texts"], 10, "--store must be a folder, got the address s3://..."),
        (["--store", "/proc/nowhere/texts"], 10, "/proc/nowhere/texts cannot be written"),
        (["--question", " "], 2, "question is empty"),
        (["--question", "@{folder}/many.txt"], 2, "more than 10,000"),
        (["--question", "@{folder}/endless.txt"], 2, "more than 1,048,576 bytes"),
        (["--question", "@{folder}/none.txt"], 2, "one question per line"),
        (["--question", "@~nobody-here/none.txt"], 2, "one question per line"),
        (["--question", "@{folder}/empty.txt"], 2, "contains no questions"),
        (["--layout", "upside_down"], 2, "upside_down"),
        (["--header", "X-Key secret"], 2, "begins with 'X-Key' has no colon"),
        (["--updates"], 2, "'--updates'"),
    ],
)
def test_invalid_options_are_refused_without_showing_secrets(
    read_book, tmp_path, extra_options: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "many.txt").write_text("Who?\n" * 10_001)
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    result = read_book(*(option.format(folder=tmp_path) for option in extra_options), code=code)
    assert result.stdout == "" and message in " ".join(result.stderr.split()) and "secret" not in result.stderr


def test_finished_chunks_are_kept_when_the_server_fails(read_book, server) -> None:
    original_respond, fail = server.respond, make_error(500, "boom")
    server.respond = lambda body, number: fail() if number >= 3 else original_respond(body, number)
    result = read_book("--retries", 0, "--run-id", "r", "--json", code=4)
    error = json.loads(result.stdout)["error"]
    assert (error["run_id"], error["chunk_index"]) == ("r", 3)
    assert "boom" in error["message"] and "memagent resume r" in result.stderr
    server.respond = original_respond
    result = json.loads(memagent("resume", "r", "--json").stdout)
    assert result["answer"] == "4711"
    assert len(server.requests) == result["chunks_read"] + 2


def test_the_resume_command_after_a_wrong_model_names_the_served_one(read_book, server) -> None:
    server.model = "its model"
    failed_result = read_book("--model", "wrong", code=4)
    assert "it serves its model" in failed_result.stderr
    result = memagent(*shlex.split(failed_result.stderr.rpartition("continue with: memagent ")[2]))
    assert parse_answers(result.stdout) == ["4711"]


def test_a_document_passed_to_resume_is_read_in_its_charset(book, read_book) -> None:
    book.write_text("Der Leuchtturm wurde 1843 gebaut. Über ihn weiß man wenig. " * 40, encoding="utf-16-le")
    read_book("--encoding", "utf-16-le", "--run-id", "r", "--max-chunks", 1, code=5)
    arguments = ("resume", "r", "--document", book)
    assert "Pass --encoding utf-16-le" in memagent(*arguments, code=3).stderr
    memagent(*arguments, "--encoding", "utf-16-le")


def test_doctor_reports_what_a_server_lacks(server) -> None:
    def get_statuses() -> dict[str, str]:
        result = memagent("doctor", "--base-url", server.base_url, "--tokenizer", "embedded", "--json")
        return {check["subject"]: check["status"] for check in json.loads(result.stdout)["checks"]}

    server.respond, server.vllm = lambda body, number: "fine" if server.vllm or "logprobs" not in body else {}, True
    subjects = ("server", "model", "window", "budget", "completion", "token ids", "tokenizer", "longest prompt")
    assert get_statuses() == dict.fromkeys(subjects, "ok")
    server.vllm, server.window, server.count_tokens = False, None, lambda text: len(text.split())
    assert {"window", "token ids", "tokenizer"} <= {name for name, status in get_statuses().items() if status == "note"}
    assert "\n    ok  model: " in memagent("doctor", "--base-url", server.base_url, "--tokenizer", "embedded").stdout
    unreachable_result = memagent("doctor", "--base-url", "http://127.0.0.1:9/v1", "--tokenizer", "embedded", code=4)
    assert "no connection" in unreachable_result.stdout


def test_the_error_without_the_extra_local_names_it(book, monkeypatch) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    result = memagent("read", book, "-q", QUESTION, "--model", "embedded", code=7)
    assert make_install_command("local") in result.stderr


def test_the_exit_code_says_whether_the_answer_matches_the_schema(read_book, server, tmp_path) -> None:
    def respond(body: dict[str, Any], number: int) -> str:
        prompt = body["messages"][-1]["content"]
        return '{"place": "harbor", "key": 4711}' if "<schema>" in prompt else read_perfectly(prompt)

    server.respond = respond
    schema = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}
    (tmp_path / "keys.py").write_text("from pydantic import BaseModel\nclass Key(BaseModel):\n    key: int\n")
    (tmp_path / "keys.json").write_text(json.dumps(schema))
    (tmp_path / "castles.json").write_text(json.dumps({**schema, "required": ["castle"]}))
    options = ("--context-window", 1500, "--question-tokens", 100, "--schema")
    result = read_book(*options, tmp_path / "keys.py:Key")
    assert json.loads(*parse_answers(result.stdout))["key"] == 4711
    json_result = json.loads(read_book(*options, tmp_path / "keys.json", "--json").stdout)
    assert json_result["value"] == {"place": "harbor", "key": 4711}
    assert "key" in json_result["response_format"]["properties"]
    invalid_result = read_book(*options, tmp_path / "castles.json", code=8)
    assert json.loads(*parse_answers(invalid_result.stdout))["key"] == 4711
    assert "the answer does not fit the schema: the answer does not have the required form" in invalid_result.stderr
    assert "'castle' is a required property" in invalid_result.stderr


def test_pages_of_a_pdf_can_be_chosen_and_are_in_the_evidence(options, tmp_path) -> None:
    file = tmp_path / "a.pdf"
    file.write_bytes(make_pdf("The key of tower is 1.", "4.2 Keys", "The key of harbor is 4711."))
    result = memagent("read", file, "--pages", "2-", "-q", QUESTION, *options, "--json")
    [quote] = json.loads(result.stdout)["evidence"]
    assert (quote["page"], quote["section"]) == (3, "4.2 Keys")
    assert quote["link"] == f"{file.as_uri()}#page=3"
    assert "page 3, 4.2 Keys" in " ".join(memagent("show", "latest").stdout.split())


def test_without_a_writable_home_only_reads_without_a_log_work(book, read_book, monkeypatch) -> None:
    monkeypatch.setenv("MEMAGENT_HOME", str(book / "home"))  # below a file
    assert "what to do:" in read_book(code=10).stderr
    assert parse_answers(read_book("--no-log").stdout) == ["4711"]

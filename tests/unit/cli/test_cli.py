"""The command line as a user meets it: a real server, every kind of bad input, processes where they matter."""

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


def test_retrieval_reads_a_part_of_the_document_and_says_how_much_that_was(read, server) -> None:
    def respond(body: dict[str, Any], number: int) -> str:
        return f"\\boxed{{{'4711' if 'harbor is 4711' in extract(body['messages'][-1]['content'], 'text') else '?'}}}"

    server.respond, server.window = respond, 900
    result = read("--strategy", "retrieval:chunks=2:chunk_tokens=60", "--run-id", "r")
    too_long = read("--strategy", "full_context", code=7)
    assert parse_answers(result.stdout) == ["4711"]
    assert re.search(r"\b\d{2,3} of \d,\d{3} tokens shown by fake \(retrieval\), ", result.stderr), result.stderr
    run = json.loads(memagent("show", "r", "--json").stdout)
    assert (run["strategy"], run["answer"]) == ("retrieval", "4711")
    assert "Read it in chunks" in too_long.stderr
    assert "continue with" not in too_long.stderr


def test_a_run_continues_on_another_machine_from_a_folder_that_both_mount(book, read, tmp_path, monkeypatch) -> None:
    files = ["--checkpoints", tmp_path / "c.sqlite", "--log", tmp_path / "r.sqlite"]
    shared = ["--store", f"{tmp_path}/shared", *files]
    stop = read("--run-id", "r", "--max-chunks", 4, *shared, code=5)
    assert shlex.join(["memagent", "resume", "r", *map(str, (files[:2] + shared[:2] + files[2:]))]) in stop.stderr
    monkeypatch.setenv("MEMAGENT_HOME", str(tmp_path / "another"))
    book.unlink()
    resumed = memagent("resume", "r", *shared)
    run = json.loads(memagent("show", "r", "--json", *shared[:2], *files[2:]).stdout)
    assert parse_answers(resumed.stdout) == ["4711"]
    assert any("harbor is 4711" in item["quote"] for item in run["evidence"])


def test_several_questions_are_read_for_in_one_pass(book, options, tmp_path) -> None:
    (tmp_path / "questions.txt").write_text("What is the key of harbor?\n\n  What is the key of tower?\n")
    read = ["read", book, "-q", "Which harbor has a key?", "-q", f"@{tmp_path}/questions.txt", *options]
    result = memagent(*read)
    as_json = memagent(*read, "--json", "--run-id", "r")
    stop = memagent(*read, "--max-chunks", 2, code=5)
    latest = memagent("resume", "latest")
    resumed = memagent("resume", "r-1")
    assert sorted(parse_answers(latest.stdout)) == ["4711", "4711", "yet"], "all questions of the read"
    assert parse_answers(result.stdout) == ["4711", "4711", "yet"]
    assert [record["question"] for record in parse_records(result.stdout)][2] == ["What is the key of tower?"]
    assert all(record["stopped"] == ["max_chunks after 2 chunks"] for record in parse_records(stop.stdout))
    results = json.loads(as_json.stdout)["results"]
    assert [result["run_id"] for result in results] == ["r-0", "r-1", "r-2"]
    assert [result["question"] for result in results][2] == "What is the key of tower?"
    assert parse_answers(resumed.stdout) == ["4711"]
    assert stop.stderr.count("continue with: memagent resume") == 3


def test_one_question_that_fails_leaves_the_others(read, server) -> None:
    good, refuse = server.respond, make_error(400, "no towers")
    server.respond = lambda body, n: refuse() if "tower" in body["messages"][0]["content"] else good(body, n)
    result = read("-q", "What is the key of tower?", "--json", code=4)
    answered, failed = json.loads(result.stdout)["results"]
    assert answered["answer"] == "4711"
    assert failed["error"]["type"] == "PolicyRequestError" and "no towers" in failed["error"]["message"]


def test_the_command_that_goes_on_is_the_one_that_works(read, tmp_path) -> None:
    stop = read("--max-chunks", 2, "--log", tmp_path / "my runs.sqlite", "--checkpoints", tmp_path / "c.sqlite", code=5)
    command = shlex.split(stop.stderr.rpartition("continue with: memagent ")[2])
    assert parse_answers(memagent(*command).stdout) == ["4711"]
    without = read("--max-chunks", 2, "--no-log", code=5)
    assert "continue with" not in without.stderr, "no log, so no command could find it"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_read_says_how_to_go_on(book, options, server, ending) -> None:
    server.delay = 0.2
    command = [sys.executable, "-m", "memagent_graph", "read", book, "-q", QUESTION, "--run-id", "mine", *options]
    process = Program(command, stderr=subprocess.PIPE)
    assert kill_after(process, server.requests, 3, ending)
    _, errors = process.communicate(timeout=30)
    server.delay = 0
    assert process.returncode == 130
    assert "memagent resume mine" in errors
    assert "Traceback" not in errors
    assert parse_answers(memagent("resume", "mine").stdout) == ["4711"]


def test_an_interrupted_resume_of_several_questions_names_those_that_are_left(read, monkeypatch) -> None:
    async def follow(console, read):
        raise asyncio.CancelledError

    read("-q", "Which harbor has a key?", "-q", "What is the key of tower?", "--run-id", "r", "--max-chunks", 2, code=5)
    one = memagent("resume", "r-1")
    with monkeypatch.context() as patch:
        patch.setattr(Console, "follow_questions", follow)
        interrupted = memagent("resume", "latest", code=130)
    resumed = memagent("resume", "r")
    again = memagent("resume", "r", code=6)
    assert "2 more questions of the same read without an answer; for all: memagent resume r" in one.stderr
    assert interrupted.stderr.strip().endswith("continue with: memagent resume r")
    assert parse_answers(resumed.stdout) == ["4711", "yet"], "of those that are left, in the order of the questions"
    assert "several runs" in again.stderr


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{folder}/missing.txt", "standard input"),
        ("{folder}", "memagent corpus {folder}"),
        ("{folder}/binary.txt", "binary"),
        ("https://example.com/x.txt", "a web address was given"),
        (os.fsdecode(b"nope\xe9.txt"), "does not exist"),
    ],
)
def test_invalid_documents_are_refused_with_a_remedy(tmp_path, document, words) -> None:
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 40)
    read = ["read", document.format(folder=tmp_path), "-q", "x", "--model", "embedded"]
    result = memagent(*read, code=3)
    assert words.format(folder=tmp_path) in result.stderr
    assert "what to do:" in result.stderr and "Document." not in result.stderr
    assert result.stdout == ""
    assert json.loads(memagent(*read, "--json", code=3).stdout)["error"]["message"]


def test_undecodable_bytes_can_be_replaced(book, read) -> None:
    book.write_bytes(b"plain text, then \xff\xfe\xfd broken \x81\x8d" + b" and more plain text" * 50)
    assert "--replace-undecodable" in read("--encoding", "utf-8", code=3).stderr
    read("--encoding", "utf-8", "--replace-undecodable")


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--store", "s3://me:secret@host/texts"], 10, "--store must be a folder, got the address s3://..."),
        (["--store", "/proc/nowhere/texts"], 10, "/proc/nowhere/texts cannot be written"),
        (["--question", " "], 2, "question is empty"),
        (["--question", "@{folder}/many.txt"], 2, "more than 10,000"),
        (["--question", "@{folder}/endless.txt"], 2, "more than 1,048,576 bytes"),
        (["--question", "@{folder}/none.txt"], 2, "one question per line"),
        (["--question", "@{folder}/empty.txt"], 2, "contains no questions"),
        (["--layout", "upside_down"], 2, "upside_down"),
        (["--header", "X-Key secret"], 2, "begins with 'X-Key' has no colon"),
        (["--updates"], 2, "'--updates'"),
    ],
)
def test_options_that_cannot_be_used_are_refused_and_their_secrets_not_shown(
    read, tmp_path, more: list[str], code: int, words: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "many.txt").write_text("Who?\n" * 10_001)
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    result = read(*(word.format(folder=tmp_path) for word in more), code=code)
    assert result.stdout == ""
    assert words in " ".join(result.stderr.split()) and "secret" not in result.stderr


def test_a_failing_server_costs_no_finished_chunk(read, server) -> None:
    good, fail = server.respond, make_error(500, "boom")
    server.respond = lambda body, number: fail() if number >= 3 else good(body, number)
    result = read("--retries", 0, "--run-id", "r", "--json", code=4)
    failure = json.loads(result.stdout)["error"]
    assert "boom" in failure["message"]
    assert (failure["run_id"], failure["chunk_index"]) == ("r", 3)
    assert "memagent resume r" in result.stderr
    server.respond = good
    result = json.loads(memagent("resume", "r", "--json").stdout)
    assert result["answer"] == "4711"
    assert len(server.requests) == result["chunks_read"] + 2


def test_after_a_wrong_model_the_printed_command_reads_on_with_the_one_that_is_served(read) -> None:
    wrong = read("--model", "wrong", code=4)
    assert "it serves fake" in wrong.stderr
    result = memagent(*shlex.split(wrong.stderr.rpartition("continue with: memagent ")[2]))
    assert parse_answers(result.stdout) == ["4711"]


def test_a_document_given_again_is_read_in_its_charset(book, read) -> None:
    book.write_text("Der Leuchtturm wurde 1843 gebaut. Über ihn weiß man wenig. " * 40, encoding="utf-16-le")
    read("--encoding", "utf-16-le", "--run-id", "r", "--max-chunks", 1, code=5)
    again = ("resume", "r", "--document", book)
    assert "Pass --encoding utf-16-le" in memagent(*again, code=3).stderr
    memagent(*again, "--encoding", "utf-16-le")


def test_doctor_finds_a_healthy_server_healthy_and_else_what_is_wrong(server) -> None:
    def check() -> dict[str, str]:
        result = memagent("doctor", "--base-url", server.base_url, "--tokenizer", "embedded", "--json")
        return {check["subject"]: check["status"] for check in json.loads(result.stdout)["checks"]}

    server.respond, server.vllm = lambda body, number: "fine", True
    subjects = ("server", "model", "window", "budget", "completion", "token ids", "tokenizer", "longest prompt")
    assert check() == dict.fromkeys(subjects, "ok")
    server.vllm, server.window, server.count_tokens = False, None, lambda text: len(text.split())
    status = check()
    assert (status["window"], status["token ids"], status["tokenizer"]) == ("note", "note", "note")
    gone = memagent("doctor", "--base-url", "http://127.0.0.1:9/v1", "--tokenizer", "embedded", code=4)
    assert "no connection" in gone.stdout


def test_without_the_local_extra_the_remedy_is_named(book, monkeypatch) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    result = memagent("read", book, "-q", QUESTION, "--model", "embedded", code=7)
    assert make_install_command("local") in result.stderr


def test_the_exit_code_says_whether_an_answer_has_its_form(read, server, tmp_path) -> None:
    def respond(body: dict[str, Any], number: int) -> str:
        prompt = body["messages"][-1]["content"]
        return '{"place": "harbor", "key": 4711}' if "<schema>" in prompt else read_perfectly(prompt)

    server.respond = respond
    schema = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}
    (tmp_path / "keys.py").write_text("from pydantic import BaseModel\nclass Key(BaseModel):\n    key: int\n")
    (tmp_path / "keys.json").write_text(json.dumps(schema))
    (tmp_path / "castles.json").write_text(json.dumps({**schema, "required": ["castle"]}))
    form = ("--context-window", 1500, "--question-tokens", 100, "--schema")
    result = read(*form, tmp_path / "keys.py:Key")
    assert json.loads(*parse_answers(result.stdout))["key"] == 4711
    values = json.loads(read(*form, tmp_path / "keys.json", "--json").stdout)
    assert values["value"] == {"place": "harbor", "key": 4711}
    assert "key" in values["response_format"]["properties"]
    unfit = read(*form, tmp_path / "castles.json", code=8)
    assert json.loads(*parse_answers(unfit.stdout))["key"] == 4711
    assert "the answer does not fit the schema: the answer does not have the required form" in unfit.stderr
    assert "'castle' is a required property" in unfit.stderr


def test_pages_are_chosen_of_a_pdf_and_named_in_the_evidence(options, tmp_path) -> None:
    file = tmp_path / "a.pdf"
    file.write_bytes(make_pdf("The key of tower is 1.", "4.2 Keys", "The key of harbor is 4711."))
    result = memagent("read", file, "--pages", "2-", "-q", QUESTION, *options, "--json")
    [quote] = json.loads(result.stdout)["evidence"]
    assert (quote["page"], quote["section"]) == (3, "4.2 Keys")
    assert quote["link"] == f"{file.as_uri()}#page=3"
    assert "page 3, 4.2 Keys" in " ".join(memagent("show", "latest").stdout.split())


def test_without_a_writable_home_folder_only_reads_that_keep_nothing_work(book, read, monkeypatch) -> None:
    monkeypatch.setenv("MEMAGENT_HOME", str(book / "home"))  # below a file
    assert "what to do:" in read(code=10).stderr
    assert parse_answers(read("--no-log").stdout) == ["4711"]

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
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web
from support.command_line import invoke
from support.document_files import pdf
from support.fake_server import FakeServer
from support.programs import Program, answers, records
from support.scripts import document_with, part, perfect_reader
from support.server_dialects import counting_server

from memagent_graph.cli.console import Console
from memagent_graph.errors import install_command
from memagent_graph.tokenizers import load_tokenizer

TEXT = document_with({0.3: "The key of harbor is 4711.", 0.62: "The key of harbor is 4711."}, words=1000)
QUESTION = "What is the key of harbor?"
SMALL = ["--tokenizer", "embedded", "--context-window", "900", "--question-tokens", "50", "--memory-tokens", "60",
         "--chunk-tokens", "100", "--answer-tokens", "60"]  # fmt: skip


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


def test_read_prints_question_answer_and_the_sentence_behind_it_on_standard_output(tmp_path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("The harbor is old.\n\nThe key of harbor is 4711. The key of tower is 22.\n\nNobody knows why.")
    with FakeServer() as server:
        done = invoke("read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL)
    assert done.exit_code == 0
    assert done.stdout == f'question: {QUESTION}\nanswer: 4711\nevidence: "The key of harbor is 4711." (chunk 1)\n'
    assert "1 chunk by " in done.stderr and "(overwrite)" in done.stderr


def test_retrieval_reads_a_part_of_the_document_and_says_how_much_that_was(book, tmp_path) -> None:
    options = ["--strategy", "retrieval:chunks=2:chunk_tokens=60", "--run-id", "r", "--log", tmp_path / "runs.sqlite"]

    def from_the_text(body: dict[str, Any], number: int) -> str:
        return f"\\boxed{{{'4711' if 'harbor is 4711' in part(body['messages'][-1]['content'], 'text') else '?'}}}"

    with FakeServer(from_the_text, window=900) as server:
        done = invoke("read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL, *options)
        too_long = invoke(
            "read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL, "--strategy", "full_context"
        )
    assert (done.exit_code, answers(done.stdout)) == (0, ["4711"]), done.stderr
    assert re.search(r"\b\d{2,3} of \d,\d{3} tokens shown by fake \(retrieval\), ", done.stderr), done.stderr
    shown = json.loads(invoke("show", "r", "--json", *options[-2:]).stdout)
    assert (shown["strategy"], shown["answer"]) == ("retrieval", "4711")
    assert too_long.exit_code == 7 and "Read it in chunks" in too_long.stderr
    assert "continue with" not in too_long.stderr


def test_read_as_json_is_one_object_with_everything(book) -> None:
    with FakeServer() as server:
        done = invoke("read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL, "--json", "--updates")
    result = json.loads(done.stdout)
    assert {"answer", "memory", "stop_reason", "usage", "run_id"} <= set(result)
    assert (result["answer"], result["stop_reason"], result["model"]) == ("4711", "answered", "fake")
    assert len(result["updates"]) == result["chunks_read"]
    assert result["usage"]["turns"] == result["chunks_read"] + 1


def test_a_run_continues_on_another_machine_from_a_folder_that_both_mount(book, tmp_path, monkeypatch) -> None:
    files = ["--checkpoints", tmp_path / "c.sqlite", "--log", tmp_path / "r.sqlite"]
    shared = ["--store", f"{tmp_path}/shared", *files]
    with FakeServer() as server:
        options = ["--base-url", server.base_url, *SMALL, *shared]
        stopped = invoke("read", book, "-q", QUESTION, "--run-id", "r", "--max-chunks", 4, *options)
        assert stopped.exit_code == 5
        assert (
            shlex.join(["memagent", "resume", "r", *map(str, (files[:2] + shared[:2] + files[2:]))]) in stopped.stderr
        )
        monkeypatch.setenv("MEMAGENT_HOME", str(tmp_path / "another"))
        book.unlink()
        resumed = invoke("resume", "r", *shared)
        shown = json.loads(invoke("show", "r", "--json", *shared[:2], *files[2:]).stdout)
    assert (resumed.exit_code, answers(resumed.stdout)) == (0, ["4711"]), resumed.stderr
    assert any("harbor is 4711" in item["quote"] for item in shown["evidence"])


@pytest.mark.parametrize(
    ("store", "reason", "remedy"),
    [
        ("s3://me:secret@host/texts", "--store must be a folder, got the address s3://...", "Use a folder"),
        ("/proc/nowhere/texts", "/proc/nowhere/texts cannot be written", "set MEMAGENT_HOME"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_with_a_remedy(book, store: str, reason: str, remedy: str) -> None:
    done = invoke("read", book, "-q", QUESTION, "--base-url", "http://127.0.0.1:9", *SMALL, "--store", store)
    assert done.exit_code == 10
    assert reason in " ".join(done.stderr.split()) and remedy in " ".join(done.stderr.split())
    assert "secret" not in done.stderr


def test_several_questions_are_read_for_in_one_pass(book, tmp_path) -> None:
    (tmp_path / "questions.txt").write_text("What is the key of harbor?\n\n  What is the key of tower?\n")
    with FakeServer() as server:
        options = ["--base-url", server.base_url, *SMALL]
        asked = ["-q", "Which harbor has a key?", "-q", f"@{tmp_path}/questions.txt"]
        done = invoke("read", book, *asked, *options)
        as_json = invoke("read", book, *asked, *options, "--json", "--run-id", "r")
        stopped = invoke("read", book, *asked, *options, "--max-chunks", 2)
        latest = invoke("resume", "latest")
        resumed = invoke("resume", "r-1")
    assert sorted(answers(latest.stdout)) == ["4711", "4711", "yet"], "all questions of the read"
    assert (done.exit_code, answers(done.stdout)) == (0, ["4711", "4711", "yet"])
    assert [record["question"] for record in records(done.stdout)][2] == ["What is the key of tower?"]
    assert all(record["stopped"] == ["max_chunks after 2 chunks"] for record in records(stopped.stdout))
    results = json.loads(as_json.stdout)["results"]
    assert [result["run_id"] for result in results] == ["r-0", "r-1", "r-2"]
    assert [result["question"] for result in results][2] == "What is the key of tower?"
    assert answers(resumed.stdout) == ["4711"]
    assert stopped.exit_code == 5
    assert stopped.stderr.count("continue with: memagent resume") == 3


def test_one_question_that_fails_leaves_the_others(book) -> None:
    def respond(body, number):
        if "tower" in body["messages"][0]["content"]:
            return web.json_response({"error": {"message": "no towers"}}, status=400)
        return FakeServer().respond(body, number)

    with FakeServer(respond) as server:
        asked = ["-q", QUESTION, "-q", "What is the key of tower?"]
        done = invoke("read", book, *asked, "--base-url", server.base_url, *SMALL, "--json")
    assert done.exit_code == 4
    found, failed = json.loads(done.stdout)["results"]
    assert found["answer"] == "4711"
    assert failed["error"]["type"] == "PolicyRequestError" and "no towers" in failed["error"]["message"]


def test_no_question_and_files_without_questions_are_refused(book, tmp_path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "many.txt").write_text("Who?\n" * 10_001)
    (tmp_path / "large.txt").write_text("x" * 2**20 + "x")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    for options, told in (
        (["-q", f"@{tmp_path}/many.txt"], "more than 10,000"),
        (["-q", f"@{tmp_path}/large.txt"], "more than 1,048,576 bytes"),
        (["-q", f"@{tmp_path}/endless.txt"], "more than 1,048,576 bytes"),
        ([], "Missing option '--question' / '-q'"),
        (["-q", f"@{tmp_path}/none.txt"], "one question per line"),
        (["-q", f"@{tmp_path}/empty.txt"], "contains no questions"),
    ):
        done = invoke("read", book, *options, *SMALL)
        assert done.exit_code == 2
        assert told in done.stderr


def test_the_document_can_come_from_standard_input(book) -> None:
    with FakeServer() as server:
        done = invoke("read", "-", "-q", QUESTION, "--base-url", server.base_url, *SMALL, text=book.read_text())
    assert answers(done.stdout) == ["4711"]


def test_a_read_that_stops_at_a_limit_is_resumed_from_its_id_alone(book) -> None:
    with FakeServer() as server:
        options = ["--base-url", server.base_url, *SMALL]
        stopped = invoke("read", book, "-q", QUESTION, *options, "--max-chunks", 2, "--json")
        assert stopped.exit_code == 5
        run = json.loads(stopped.stdout)
        assert (run["stop_reason"], run["answer"], run["chunks_read"]) == ("max_chunks", None, 2)
        book.unlink()
        finished = invoke("resume", run["run_id"], "--json")
        again = invoke("resume", run["run_id"])
    assert finished.exit_code == 0
    assert json.loads(finished.stdout)["answer"] == "4711"
    assert answers(again.stdout) == ["4711"]


def test_the_command_that_goes_on_is_the_one_that_works(book, tmp_path) -> None:
    with FakeServer() as server:
        options = ["--base-url", server.base_url, *SMALL, "--max-chunks", 2]
        places = ["--log", tmp_path / "my runs.sqlite", "--checkpoints", tmp_path / "c.sqlite"]
        stopped = invoke("read", book, "-q", QUESTION, *options, *places)
        (told,) = [line for line in stopped.stderr.splitlines() if "continue with: memagent " in line]
        command = shlex.split(told.partition("memagent ")[2])
        assert answers(invoke(*command).stdout) == ["4711"]
        without = invoke("read", book, "-q", QUESTION, *options, "--no-log")
        assert without.exit_code == 5
        assert "continue with" not in without.stderr, "no log, so no command could find it"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_read_says_how_to_go_on(book, ending) -> None:
    with FakeServer(delay=0.2) as server:
        process = Program(
            [sys.executable, "-m", "memagent_graph", "read", str(book), "-q", QUESTION, "--run-id", "mine",
             "--base-url", server.base_url, *SMALL],
            stderr=subprocess.PIPE,
        )  # fmt: skip
        while len(server.requests) < 3:
            time.sleep(0.02)
        process.send_signal(ending)
        _, errors = process.communicate(timeout=30)
        server.delay = 0
        assert process.returncode == 130
        assert "memagent resume mine" in errors
        assert "Traceback" not in errors
        assert answers(invoke("resume", "mine").stdout) == ["4711"]


def test_an_interrupted_resume_of_several_questions_names_those_that_are_left(book, monkeypatch) -> None:
    options = ["-q", QUESTION, "-q", "Which harbor has a key?", "-q", "What is the key of tower?", "--run-id", "r"]
    with FakeServer() as server:
        invoke("read", book, *options, "--base-url", server.base_url, *SMALL, "--max-chunks", 2)
        one = invoke("resume", "r-1")

        async def follow(console, read):
            raise asyncio.CancelledError

        with monkeypatch.context() as patch:
            patch.setattr(Console, "follow_questions", follow)
            interrupted = invoke("resume", "latest")
        resumed = invoke("resume", "r")
        again = invoke("resume", "r")
    assert "2 more questions of the same read without an answer; for all: memagent resume r" in one.stderr
    assert interrupted.exit_code == 130
    assert interrupted.stderr.strip().endswith("continue with: memagent resume r")
    assert answers(resumed.stdout) == ["4711", "yet"], "of those that are left, in the order of the questions"
    assert (again.exit_code, "several runs" in again.stderr) == (6, True)


def test_keys_are_never_stored(book, own_home) -> None:
    with FakeServer(key="sk-very-secret") as server:
        url = server.base_url.replace("http://", "http://user:sk-very-secret@")
        for options in (["--api-key", "sk-very-secret", "--base-url", server.base_url], ["--base-url", url]):
            invoke("read", book, "-q", QUESTION, *options, *SMALL)
    stored = [path for path in own_home.rglob("*") if path.is_file()]
    assert len(stored) >= 3
    assert not any(b"sk-very-secret" in path.read_bytes() for path in stored)


def bad_document(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "document.txt"
    if kind == "binary":
        path.write_bytes(bytes(range(256)) * 40)
    elif kind == "undecodable":
        path.write_bytes(b"plain text, then \xff\xfe\xfd broken \x81\x8d" + b" and more plain text" * 50)
    elif kind == "directory":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "does not exist"),
        ("directory", "`memagent corpus "),
        ("binary", "binary"),
    ],
)
def test_a_bad_document_is_refused_with_a_remedy(tmp_path, kind, words) -> None:
    done = invoke("read", bad_document(tmp_path, kind), "-q", "x", "--base-url", "http://127.0.0.1:9/v1", *SMALL)
    assert done.exit_code == 3
    assert words in done.stderr
    assert "what to do:" in done.stderr
    assert done.stdout == ""


def test_undecodable_bytes_can_be_replaced(tmp_path) -> None:
    path = bad_document(tmp_path, "undecodable")
    with FakeServer() as server:
        options = ["read", path, "-q", "x", "--base-url", server.base_url, *SMALL, "--encoding", "utf-8"]
        refused = invoke(*options)
        assert refused.exit_code == 3
        assert "--replace-undecodable" in refused.stderr or "replace" in refused.stderr
        assert invoke(*options, "--replace-undecodable").exit_code == 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--question", " "], 2, "question is empty"),
        (["--context-window", "300"], 7, "--chunk-tokens"),
        (["--layout", "upside_down"], 2, "upside_down"),
        (["--model", "other"], 4, "serves fake"),
        (["--base-url", "http://127.0.0.1:9/v1"], 4, "Is the server running?"),
        (["--header", "X-Key secret"], 2, "begins with 'X-Key' has no colon"),
    ],
)
def test_bad_settings_are_refused_with_a_remedy(book, options, code, words) -> None:
    with FakeServer() as server:
        base = ["read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL]
        done = invoke(*base, "--retries", 0, *options)
    assert done.exit_code == code, done.stderr
    assert words in done.stderr
    assert done.stdout == ""


def test_a_failing_server_costs_no_finished_chunk(book) -> None:
    good = FakeServer().respond
    failing = True

    def respond(body: dict[str, Any], number: int) -> Any:
        boom = web.json_response({"error": {"message": "boom"}}, status=500)
        return boom if failing and number >= 3 else good(body, number)

    with FakeServer(respond) as server:
        options = ["--base-url", server.base_url, *SMALL, "--retries", 0, "--run-id", "r"]
        done = invoke("read", book, "-q", QUESTION, *options, "--json")
        assert done.exit_code == 4
        error = json.loads(done.stdout)["error"]
        assert "boom" in error["message"]
        assert (error["run_id"], error["chunk_index"]) == ("r", 3)
        assert "memagent resume r" in done.stderr
        failing = False
        finished = invoke("resume", "r", "--json")
    result = json.loads(finished.stdout)
    assert result["answer"] == "4711"
    assert len(server.requests) == result["chunks_read"] + 2


def test_after_a_wrong_model_the_printed_command_reads_on_with_the_one_that_is_served(book) -> None:
    with FakeServer() as server:
        wrong = invoke("read", book, "-q", QUESTION, "--base-url", server.base_url, "--model", "wrong", *SMALL)
        assert wrong.exit_code == 4 and "it serves fake" in wrong.stderr
        command = wrong.stderr.rpartition("continue with: memagent ")[2]
        done = invoke(*shlex.split(command))
    assert (done.exit_code, answers(done.stdout)) == (0, ["4711"]), done.stderr


def test_an_unknown_run_is_named_with_those_that_exist(book) -> None:
    nothing = invoke("resume", "nope")
    assert nothing.exit_code == 6
    assert "no runs in it yet" in nothing.stderr
    with FakeServer() as server:
        invoke("read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL, "--run-id", "mine")
    done = invoke("resume", "nope")
    assert (done.exit_code, done.stdout) == (6, "")
    assert "newest are mine" in done.stderr


def test_a_document_given_again_is_read_in_its_charset(tmp_path) -> None:
    text = "Der Leuchtturm wurde 1843 gebaut. Über ihn weiß man wenig. " * 40
    (tmp_path / "old.txt").write_text(text, encoding="utf-16-le")
    read = ("read", tmp_path / "old.txt", "--encoding", "utf-16-le", "-q", QUESTION, *SMALL)
    with FakeServer() as server:
        invoke(*read, "--base-url", server.base_url, "--run-id", "r", "--max-chunks", 1)
        again = ("resume", "r", "--document", tmp_path / "old.txt")
        assert "Pass --encoding utf-16-le" in invoke(*again).stderr
        assert invoke(*again, "--encoding", "utf-16-le").exit_code == 0


def test_a_file_name_that_is_no_text_is_told_in_json() -> None:
    done = invoke("read", os.fsdecode(b"nope\xe9.txt"), "-q", QUESTION, "--json")
    assert done.exit_code == 3
    assert "nope" in json.loads(done.stdout)["error"]["message"]


def test_a_folder_an_address_and_an_option_without_effect_are_refused(book) -> None:
    folder = invoke("read", book.parent, "-q", "x", "--model", "embedded")
    assert folder.exit_code == 3 and f"memagent corpus {book.parent}" in folder.stderr
    address = invoke("read", "https://example.com/x.txt", "-q", "x", "--model", "embedded")
    assert address.exit_code == 3 and "a web address was given" in address.stderr
    alone = invoke("read", book, "-q", "x", "--model", "embedded", "--updates")
    assert alone.exit_code == 2 and "'--updates'" in alone.stderr


def test_doctor_finds_a_healthy_server_healthy() -> None:
    def count(body, number):
        from memagent_graph import load_tokenizer

        reply = server.completion(body, "fine")
        tokens = sum(load_tokenizer("embedded").count(message["content"]) for message in body["messages"])
        reply["usage"]["prompt_tokens"] = tokens + 7
        return reply

    with FakeServer(count, vllm=True) as server:
        done = invoke("doctor", "--base-url", server.base_url, "--tokenizer", "embedded", "--json")
    findings = {finding["subject"]: finding["health"] for finding in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 0, done.stdout
    assert set(findings.values()) == {"ok"}
    assert {"server", "model", "window", "budget", "completion", "token ids", "tokenizer", "longest prompt"} == set(
        findings
    )


def test_doctor_finds_what_is_wrong() -> None:
    with FakeServer(lambda body, number: "fine", window=None, count=lambda text: len(text.split())) as server:
        done = invoke("doctor", "--base-url", server.base_url, "--tokenizer", "embedded", "--json")
        findings = {finding["subject"]: finding["health"] for finding in json.loads(done.stdout)["findings"]}
        assert done.exit_code == 0, "it can read"
        assert (findings["window"], findings["token ids"], findings["tokenizer"]) == ("note", "note", "note")
    gone = invoke("doctor", "--base-url", "http://127.0.0.1:9/v1", "--tokenizer", "embedded")
    assert gone.exit_code == 4
    assert "no connection" in gone.stdout


def test_a_server_that_cuts_prompts_as_ollama_does_is_found_out(tmp_path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(document_with({0.3: "The key of harbor is 4711."}, words=10000))
    with counting_server(load_tokenizer("embedded").count, window=1500) as server:
        options = [
            "--base-url", server.base_url, "--model", "fake", "--tokenizer", "embedded", "--question-tokens", "50",
            "--memory-tokens", "60", "--answer-tokens", "60", "--chunk-tokens",
        ]  # fmt: skip
        health = invoke("doctor", *options, 2500)
        cut = invoke("read", book, "-q", QUESTION, *options, 2500)
        stopped = invoke("read", book, "-q", QUESTION, *options, 2500, "--on-incomplete", "stop")
        whole = invoke("read", book, "-q", QUESTION, *options, 600, "--context-window", 1500)
    assert health.exit_code == 4
    assert "it cut the prompt" in health.stdout and "OLLAMA_CONTEXT_LENGTH" in health.stdout
    assert cut.exit_code == 0
    assert "prompt_cut" in cut.stderr
    assert stopped.exit_code == 4
    assert "the server cut the prompt" in stopped.stderr
    assert whole.exit_code == 0
    assert "answer: 4711" in whole.stdout and "prompt_cut" not in whole.stderr


def test_without_the_local_extra_the_remedy_is_named(book, monkeypatch) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    done = invoke("read", book, "-q", QUESTION, "--model", "embedded")
    assert done.exit_code == 7
    assert install_command("local") in done.stderr


class TestStructuredAnswers:
    MODEL = "from pydantic import BaseModel\nclass Key(BaseModel):\n    place: str\n    key: int\n"
    SCHEMA: ClassVar = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}
    WIDE = (*SMALL[:2], "--context-window", 1500, "--question-tokens", 100, *SMALL[6:])

    @staticmethod
    def respond(body: dict[str, Any], number: int) -> str:
        prompt = body["messages"][-1]["content"]
        return '{"place": "harbor", "key": 4711}' if "<schema>" in prompt else perfect_reader(prompt)

    def test_a_model_or_a_schema_gives_json(self, book, tmp_path) -> None:
        (tmp_path / "keys.py").write_text(self.MODEL)
        (tmp_path / "keys.json").write_text(json.dumps(self.SCHEMA))
        with FakeServer(self.respond) as server:
            for name in ("keys.py:Key", "keys.json"):
                options = ["--base-url", server.base_url, *self.WIDE, "--schema", tmp_path / name]
                done = invoke("read", book, "-q", QUESTION, *options)
                assert (done.exit_code, json.loads(*answers(done.stdout))["key"]) == (0, 4711)
                values = json.loads(invoke("read", book, "-q", QUESTION, *options, "--json").stdout)
                assert values["value"] == {"place": "harbor", "key": 4711}
                assert "key" in values["response_format"]["properties"]

    def test_an_answer_that_never_fits_is_printed_and_the_exit_code_says_so(self, book, tmp_path) -> None:
        (tmp_path / "keys.json").write_text(json.dumps({**self.SCHEMA, "required": ["castle"]}))
        with FakeServer(self.respond) as server:
            options = ["--base-url", server.base_url, *self.WIDE, "--schema", tmp_path / "keys.json"]
            done = invoke("read", book, "-q", QUESTION, *options)
        assert (done.exit_code, json.loads(*answers(done.stdout))["key"]) == (8, 4711)
        assert "the answer does not fit the schema: the answer does not have the required form" in done.stderr
        assert "'castle' is a required property" in done.stderr

    def test_a_schema_that_cannot_be_used_is_an_error_before_anything_is_read(self, book, tmp_path) -> None:
        (tmp_path / "keys.json").write_text('{"type"')
        with FakeServer() as server:
            options = ["--base-url", server.base_url, *self.WIDE, "--schema", tmp_path / "keys.json"]
            done = invoke("read", book, "-q", QUESTION, *options)
        assert (done.exit_code, done.stdout, server.requests) == (7, "", [])
        assert "is not JSON" in done.stderr
        assert "what to do:" in done.stderr


class TestPages:
    def test_are_chosen_of_a_pdf_and_named_in_the_evidence(self, tmp_path) -> None:
        (tmp_path / "a.pdf").write_bytes(pdf("The key of tower is 1.", "4.2 Keys", "The key of harbor is 4711."))
        with FakeServer() as server:
            options = ["--base-url", server.base_url, *SMALL, "--json"]
            done = invoke("read", tmp_path / "a.pdf", "--pages", "2-", "-q", QUESTION, *options)
            shown = invoke("show", "latest")
            beyond = invoke("read", tmp_path / "a.pdf", "--pages", "3-4", "-q", QUESTION, *options)
        [quote] = json.loads(done.stdout)["evidence"]
        assert (quote["page"], quote["section"]) == (3, "4.2 Keys")
        assert quote["link"] == f"{(tmp_path / 'a.pdf').as_uri()}#page=3"
        assert "page 3, 4.2 Keys" in " ".join(shown.stdout.split())
        assert beyond.exit_code == 3
        assert "has 3 pages, and 3-4 was asked for" in beyond.stderr

    def test_of_a_text_file_are_an_error_with_the_remedy(self, book) -> None:
        done = invoke("read", book, "--pages", "1-2", "-q", QUESTION, *SMALL)
        assert done.exit_code == 3
        assert "has no pages to choose" in done.stderr
        assert "Leave out the pages" in done.stderr


def test_where_the_home_folder_cannot_be_written_a_read_says_so_and_one_that_keeps_nothing_works(
    book, monkeypatch
) -> None:
    monkeypatch.setenv("MEMAGENT_HOME", str(book / "home"))  # below a file
    with FakeServer() as server:
        read = ["read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL]
        refused = invoke(*read)
        assert refused.exit_code != 0
        assert "what to do:" in refused.stderr
        assert answers(invoke(*read, "--no-log").stdout) == ["4711"]


def test_two_questions_in_a_pipe_and_on_a_narrow_terminal_are_labelled_lines(book, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    questions = [QUESTION, "What is the key of nowhere?"]
    with FakeServer() as server:
        done = invoke("read", book, "-q", questions[0], "-q", questions[1], "--base-url", server.base_url, *SMALL)
    assert [record["question"] for record in records(done.stdout)] == [[question] for question in questions]
    run_ids = re.findall(r"run (\d\S+)", done.stderr)
    assert len(run_ids) == 2
    shown = invoke("show", run_ids[0]).stdout
    assert max(map(len, shown.splitlines())) <= 24
    assert "4711" in shown

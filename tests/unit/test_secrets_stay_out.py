"""Credentials appear only in requests, never in files, errors, traces or output."""

from __future__ import annotations

import itertools
import json
import sqlite3
import subprocess
import sys
import traceback
import zlib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from pydantic import SecretStr
from support.fake_server import HELLO, FakeServer
from support.programs import parse_answers, run_program
from support.scripts import SMALL_OPTIONS, make_document

from memagent_graph import Budget, ChatModelPolicy, MemAgent, OpenAICompatiblePolicy, SamplingParams
from memagent_graph.errors import PolicyAuthenticationError, PolicyError, PolicyRequestError, PolicyResponseError
from memagent_graph.policies.redaction import HIDDEN, make_redactor

KEY = 'sk-proj-4f"9a/b7&c1+d2=e3'
PASSWORD = "tr0ub4dor&3/é"
TEXT = make_document({0.3: "The key of harbor is 4711."}, words=400)
QUESTION = "What is the key of harbor?"
BASIC_TOKEN = b64encode(f"reader:{PASSWORD}".encode()).decode()
ENCODED_SECRETS = [
    spelling
    for secret in (KEY, PASSWORD)
    for spelling in (secret, json.dumps(secret)[1:-1], quote(secret, ""), escape(secret))
] + [BASIC_TOKEN]


def iter_stored_bytes(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the bytes of all files under a folder, and the decompressed blobs of its databases."""
    for path in filter(Path.is_file, folder.rglob("*")):
        content = path.read_bytes()
        yield path, content
        if content.startswith(b"SQLite format 3"):
            with closing(sqlite3.connect(path)) as database:
                tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
                for row in (row for name in tables for row in database.execute(f"SELECT * FROM {name}")):
                    for value in filter(lambda value: isinstance(value, bytes), row):
                        try:
                            yield path, zlib.decompress(value)
                        except zlib.error:
                            continue


def find_secrets(texts: Iterator[tuple[Any, bytes]]) -> list[tuple[Any, str]]:
    return [
        (origin, spelling) for origin, content in texts for spelling in ENCODED_SECRETS if spelling.encode() in content
    ]


def test_the_search_finds_a_key_in_a_compressed_blob(tmp_path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.sqlite")) as database:
        database.execute("CREATE TABLE t (v BLOB)")
        database.execute("INSERT INTO t VALUES (?)", [zlib.compress(f"… {KEY} …".encode())])
        database.commit()
    assert find_secrets(iter_stored_bytes(tmp_path)) == [(tmp_path / "x.sqlite", KEY)]


def make_error(status: int, text: str, kind: str = "message") -> web.Response:
    """Return an error response that contains `text`."""
    if kind == "message":
        return web.json_response({"error": {"message": text}}, status=status)
    if kind == "object":
        return web.json_response({"error": {"message": {"you sent": text, "headers": [text]}}}, status=status)
    if kind == "page":
        return web.Response(text=f"<html>{escape(text)} {quote(text, '')} {json.dumps(text)}</html>", status=status)
    return web.Response(status=307, headers={"Location": f"http://{quote(text, '')}@elsewhere.example/{quote(text)}"})


def run_read_command(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (home.parent / "book.txt").write_text(TEXT)
    command = [sys.executable, "-m", "memagent_graph", "read", str(home.parent / "book.txt"), "-q", QUESTION]
    process = run_program(
        [*command, "--tokenizer", "embedded", *SMALL_OPTIONS, "--retries", "0", "--run-id", "r", *options],
        capture_output=True,
    )
    assert "Traceback" not in process.stderr, process.stderr
    return process


@pytest.mark.parametrize(("status", "kind"), [(401, "message"), (500, "object"), (200, "page"), (307, "redirect")])
def test_a_key_in_a_servers_error_reaches_no_file_and_no_output(isolated_home, status, kind) -> None:
    def respond(body, number):
        return good(body, number) if number < 3 else make_error(status, f"Incorrect API key provided: {KEY}.", kind)

    good = FakeServer().respond
    key_options = ("--header", f"authorization: Bearer {KEY}") if kind == "object" else ("--api-key", KEY)
    with FakeServer(respond) as server:
        process = run_read_command(isolated_home, "--base-url", server.base_url, *key_options, "--json")
    assert process.returncode == 4
    assert json.loads(process.stdout)["error"]["chunk_index"] == 3
    assert {"checkpoints.sqlite", "runs.sqlite"} <= {path.name for path in isolated_home.rglob("*")}
    assert find_secrets(iter_stored_bytes(isolated_home)) == []
    assert find_secrets(iter([("stdout", process.stdout.encode()), ("stderr", process.stderr.encode())])) == []
    if kind == "message":
        assert HIDDEN in process.stderr


def test_a_user_name_and_password_in_an_address_are_sent_but_shown_nowhere(isolated_home) -> None:
    def respond(body, number):
        return good(body, number) if number != 5 else make_error(400, f"{BASIC_TOKEN} is reader:{PASSWORD}")

    good = FakeServer().respond
    with FakeServer(respond, authorization=f"Basic {BASIC_TOKEN}") as server:
        address = server.base_url.replace("//", f"//reader:{quote(PASSWORD, '')}@")
        process = run_read_command(isolated_home, "--base-url", address, "--json")
        command = [sys.executable, "-m", "memagent_graph", "resume", "r", "--base-url", address]
        resume_process = run_program(command, capture_output=True)
    assert (process.returncode, parse_answers(resume_process.stdout)) == (4, ["4711"]), resume_process.stderr
    assert server.base_url in process.stdout
    outputs = {"read": process.stdout + process.stderr, "resume": resume_process.stdout + resume_process.stderr}
    assert find_secrets((name, text.encode()) for name, text in outputs.items()) == []
    assert find_secrets(iter_stored_bytes(isolated_home)) == []


async def test_credentials_in_an_address_replace_the_key_and_wrong_ones_are_refused_with_the_format() -> None:
    with FakeServer(lambda body, number: "x", authorization=f"Basic {BASIC_TOKEN}") as server:
        address = server.base_url.replace("//", f"//reader:{quote(PASSWORD, '')}@")
        assert (await server.ask(base_url=address, api_key=KEY)).text == "x"
        assert OpenAICompatiblePolicy(base_url=address).base_url == server.base_url
        with pytest.raises(PolicyAuthenticationError, match="http://USER:PASSWORD@HOST"):
            await server.ask(base_url=server.base_url.replace("//", "//reader:pw@"))


@pytest.mark.parametrize(
    "address",
    [
        f"ftp://reader:{PASSWORD}@host/v1",
        f"http://reader:{PASSWORD}@:0/v1",
        f"reader:{PASSWORD}//@host",
        f"reader:{PASSWORD}@host",
        *("localhost:8000/v1", "http://", "http://[::1", "http://host:port/v1", "ftp://host/v1"),
    ],
)
def test_a_malformed_address_is_refused_with_the_format_and_without_its_password(address) -> None:
    with pytest.raises(PolicyRequestError, match=r"not the address of a server.*http://HOST:PORT/v1") as error:
        OpenAICompatiblePolicy(base_url=address)
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize("key", ["sk-1\nX-Injected: yes", "ключ", "sk-\x00"])
def test_a_key_that_is_not_valid_in_a_header_is_refused_without_showing_it(key) -> None:
    with pytest.raises(PolicyRequestError, match="API key") as error:
        OpenAICompatiblePolicy(base_url="http://host/v1", api_key=key)
    assert key not in str(error.value)


async def test_a_trailing_newline_in_a_key_is_ignored() -> None:
    with FakeServer(lambda body, number: "x", key="sk-1") as server:
        assert (await server.ask(api_key="sk-1\n")).text == "x"


class ErrorRecorder(BaseCallbackHandler):
    """Records what tracers record of an error: its message, and its traceback with all causes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def _record(self, error: BaseException, **kwargs: Any) -> None:
        self.texts += [repr(error), "".join(traceback.format_exception(error)), str(kwargs)]

    on_llm_error = on_chain_error = _record


@pytest.mark.parametrize("message", [f"wrong key {KEY}", f"Bearer {KEY}"])
async def test_a_key_is_not_in_the_trace_of_an_error_or_of_its_causes(message, tmp_path) -> None:
    recorder = ErrorRecorder()
    with FakeServer(lambda body, number: make_error(401, message)) as server:
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url, api_key=KEY, max_retries=0)
        agent = MemAgent(policy, tokenizer="embedded", budget=Budget(chunk_tokens=60), run_log=False, store=tmp_path)
        graph = await agent.agraph()
        with pytest.raises(PolicyAuthenticationError):
            await graph.ainvoke({"question": QUESTION, "document": TEXT}, {"callbacks": [recorder]})
        await agent.aclose()
    assert recorder.texts
    assert find_secrets(("trace", text.encode()) for text in recorder.texts) == []


async def test_a_malformed_reply_with_the_key_does_not_put_it_into_the_error() -> None:
    replies = [f"{'x' * 190}{KEY}", json.dumps({"error": KEY}), f"{KEY} " * 20]
    for reply, place in itertools.product(replies, ({"api_key": KEY}, {"default_query": {"code": KEY, "n": 1}})):
        server = FakeServer(lambda body, number, reply=reply: web.Response(text=reply))
        with server, pytest.raises(PolicyResponseError) as error:
            await server.ask(**place, max_retries=0)
        output = "".join(traceback.format_exception(error.value))
        assert not any(KEY[:length] in output for length in range(9, len(KEY) + 1))


async def test_a_chat_models_key_stays_out_of_its_error() -> None:
    class Model(GenericFakeChatModel):
        api_key: SecretStr = SecretStr(KEY)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"Incorrect API key provided: {KEY}")

    with pytest.raises(PolicyError, match=r"Incorrect API key provided: \[hidden\]") as error:
        await ChatModelPolicy(Model(messages=iter([]))).complete(HELLO, SamplingParams())
    assert KEY not in "".join(traceback.format_exception(error.value))


def test_short_secrets_are_hidden_only_as_whole_words() -> None:
    redact = make_redactor(["pw", "", "long-enough"])
    assert redact("pw, a pwn and (pw) xlong-enoughx") == f"{HIDDEN}, a pwn and ({HIDDEN}) x{HIDDEN}x"
    assert make_redactor([])("nothing to hide") == "nothing to hide"

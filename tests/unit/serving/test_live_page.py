"""Requests of the live page over a real socket: access, reading, pausing, editing, and attacks."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.fake_server import FakeServer
from support.scripts import make_document
from support.serving import ALICE, BOB, KEYS, Server, ServingProcess, serve
from unit.serving.test_attacks import JSON_HEADER, block_conversions, make_request_head, wait_until
from unit.serving.test_reads import count_sections

from memagent_graph.run_log.records import describe_edit
from memagent_serve.ledger import Entry

FACTS = {0.2: "The key of harbor is 4711.", 0.6: "The key of castle is 12."}
LONG_TEXT = make_document(FACTS, words=900)
QUESTION = "What is the key of harbor?"
PAGE_HEADERS = {"X-Memagent-Page": "1"}


class Browser:
    """Sends the requests of the page's script, without a browser."""

    def __init__(self, url: str, token: str | None) -> None:
        self.client = httpx2.Client(base_url=url, headers=PAGE_HEADERS, timeout=30)
        assert self.client.post("/page/session", json={"token": token}).status_code == 204

    @classmethod
    def sign_in(cls, server: Server, key: str | None = None) -> Browser:
        return cls(server.url, key or server.sessions.token)

    @classmethod
    def sign_in_by_link(cls, process: ServingProcess) -> Browser:
        """Sign in with the link that the process printed."""
        return cls(*process.page.split("/#token="))

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.client.post(f"/page/{path}", json=body)

    def get(self, path: str, **query: Any) -> Any:
        reply = self.client.get(f"/page/{path}", params=query)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def upload(self, name: str, data: bytes | str) -> httpx2.Response:
        return self.client.post(
            "/page/files", files={"file": (name, data if isinstance(data, bytes) else data.encode())}
        )

    def start_reads(self, *questions: str, document: str = LONG_TEXT, read_again: bool = False) -> list[str]:
        file = self.upload("annals.txt", document).json()["id"]
        reply = self.post("reads", files=[file], questions=list(questions or (QUESTION,)), read_again=read_again)
        assert reply.status_code == 200, reply.text
        return reply.json()["reads"]

    def read(self, run_id: str) -> dict[str, Any]:
        return next(read for read in self.get("reads", q=run_id)["reads"] if read["id"] == run_id)

    def edit(self, run_id: str, update: dict[str, Any], text: str) -> httpx2.Response:
        """Replace the memory of an update by a text."""
        return self.post(f"reads/{run_id}/memory", chunk=update["chunk"], before=update["memory"], text=text)

    @contextmanager
    def events(self, run_id: str) -> Iterator[Callable[[str], Any]]:
        """Yield a function that waits for the next event of a name and returns its value."""
        with self.client.stream("GET", "/page/events", params={"run": run_id}, timeout=20) as reply:
            assert reply.status_code == 200
            lines = reply.iter_lines()

            def wait_for(name: str) -> Any:
                for line in lines:
                    if line == f"event: {name}":
                        return json.loads(next(lines).removeprefix("data: "))
                raise AssertionError(f"there was no {name}")

            yield wait_for


@pytest.fixture
def server(upstream: FakeServer, tmp_path: Path) -> Iterator[Server]:
    with serve(upstream.base_url, tmp_path, page=True) as running_server:
        yield running_server


@pytest.fixture
def browser(server: Server) -> Browser:
    return Browser.sign_in(server)


def pause_after_chunks(browser: Browser, run_id: str, chunk_count: int = 2) -> dict[str, Any]:
    """Pause a read after at least so many chunks; return its newest update."""
    with browser.events(run_id) as wait_for:
        shown_count = len(wait_for("snapshot")["updates"])
        for _ in range(max(1, chunk_count - shown_count)):
            update = wait_for("update")
    assert browser.post(f"reads/{run_id}/pause").status_code == 204
    newest = list_updates(browser, run_id)[-1]
    assert newest["chunk"] >= update["chunk"] - 1  # the newest may not have been checkpointed before the pause
    return newest


def list_updates(browser: Browser, run_id: str) -> list[dict[str, Any]]:
    """Return the updates that the page shows."""
    with browser.events(run_id) as wait_for:
        return wait_for("snapshot")["updates"]


def wait_until_finished(browser: Browser, run_id: str) -> dict[str, Any]:
    """Wait for the end of a read; return its state."""
    wait_until(lambda: browser.read(run_id)["state"] == "finished")
    with browser.events(run_id) as wait_for:
        return wait_for("state")


# Reading


def test_events_show_each_chunk_until_the_answer(browser: Browser) -> None:
    (run_id,) = browser.start_reads()
    with browser.events(run_id) as wait_for:
        events = wait_for("snapshot")["updates"]
        while not any("4711" in update["memory"] for update in events):
            events.append(wait_for("update"))
    assert ["insert", "\nharbor 4711"] in [change for update in events for change in update["diff"]]
    state = wait_until_finished(browser, run_id)
    assert (state["answer"], state["document"]) == ("4711", "annals.txt")
    chunks = [update["chunk"] for update in list_updates(browser, run_id)]
    assert chunks == list(range(len(chunks)))
    assert browser.start_reads() == [run_id] != browser.start_reads(read_again=True), "unless it asks for a new read"


def test_each_question_is_a_read_and_several_documents_are_one_text(browser: Browser) -> None:
    first_id = browser.upload("one.txt", make_document({0.5: FACTS[0.2]}, words=400)).json()["id"]
    second_id = browser.upload("two.html", "<p>The key of castle is 12.</p>").json()["id"]
    questions = [QUESTION, "What is the key of castle?"]
    run_ids = browser.post("reads", files=[first_id, second_id], questions=questions).json()["reads"]
    finished_ids: set[str] = set()
    with browser.events(run_ids[0]) as wait_for:
        while finished_ids != set(run_ids):
            finished_ids |= {read["id"] for read in wait_for("reads") if read["state"] == "finished"}
    reads_by_id = {read["id"]: read for read in browser.get("reads")["reads"]}
    assert [reads_by_id[run_id]["answer"] for run_id in run_ids] == ["4711", "12"], "the list shows answers, too"
    assert reads_by_id[run_ids[0]]["document"] == "2 texts: one.txt, two.html"


@pytest.mark.usefixtures("slow_upstream")
def test_paused_and_stopped_read_continues_at_its_chunk(browser: Browser, upstream: FakeServer) -> None:
    (run_id,) = browser.start_reads()
    pause_after_chunks(browser, run_id)
    assert browser.read(run_id)["state"] == "paused"
    time.sleep(0.2)  # the request that the pause cut short may still reach the server
    calls_before = count_sections(upstream).total()
    time.sleep(0.2)
    assert count_sections(upstream).total() == calls_before
    assert browser.post(f"reads/{run_id}/stop").status_code == 204
    assert browser.read(run_id)["state"] == "cancelled"
    assert browser.post(f"reads/{run_id}/continue").status_code == 204
    assert wait_until_finished(browser, run_id)["answer"] == "4711"
    # Each chunk was read once, except the one that the pause interrupted.
    assert count_sections(upstream).total() <= len(list_updates(browser, run_id)) + 1


@pytest.mark.usefixtures("slow_upstream")
def test_queued_read_can_be_paused_and_continued(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, page=True, max_reads=1) as server:
        browser = Browser.sign_in(server)
        _, queued_id = browser.start_reads(QUESTION, "What is the key of castle?")
        assert browser.post(f"reads/{queued_id}/pause").status_code == 204
        assert browser.read(queued_id)["state"] == "paused"
        assert browser.post(f"reads/{queued_id}/continue").status_code == 204
        assert wait_until_finished(browser, queued_id)["answer"] == "12"


# Edits, answers and thumbs


@pytest.mark.usefixtures("slow_upstream")
def test_read_continues_from_an_edited_memory_and_logs_the_editor(server: Server, browser: Browser) -> None:
    (run_id,) = browser.start_reads()
    newest = pause_after_chunks(browser, run_id, 8)
    reply = browser.edit(run_id, newest, "harbor 99")
    assert reply.status_code == 204, reply.text
    assert browser.read(run_id)["edited"]
    browser.post(f"reads/{run_id}/continue")
    assert wait_until_finished(browser, run_id)["answer"] == "99"
    (event,) = server.resources.reader.run_log.events(run_id)
    assert (event.detail, event.text) == (describe_edit("local"), "harbor 99")
    (other_id,) = browser.start_reads()
    assert other_id != run_id, "an edited read answers no request"
    assert wait_until_finished(browser, other_id)["answer"] == "4711"


@pytest.mark.usefixtures("slow_upstream")
def test_chunk_without_a_checkpoint_is_not_shown_and_cannot_be_edited(browser: Browser, tmp_path: Path) -> None:
    (run_id,) = browser.start_reads()
    unsaved_update = pause_after_chunks(browser, run_id, 5)
    with closing(sqlite3.connect(tmp_path / "checkpoints.sqlite", timeout=30, isolation_level=None)) as checkpoints:
        while list_updates(browser, run_id)[-1] == unsaved_update:  # as if the pause had come before its checkpoint
            for table in ("writes", "checkpoints"):
                checkpoints.execute(
                    f"DELETE FROM {table} WHERE thread_id = ?1 AND checkpoint_id = "
                    "(SELECT max(checkpoint_id) FROM checkpoints WHERE thread_id = ?1)",
                    [run_id],
                )
    with browser.events(run_id) as wait_for:
        newest = wait_for("snapshot")["updates"][-1]
        assert newest["chunk"] == unsaved_update["chunk"] - 1
        assert browser.edit(run_id, unsaved_update, "harbor 99").status_code == 409
        assert wait_for("snapshot")["updates"][-1] == newest, "the page gets a new snapshot"
    assert browser.edit(run_id, newest, "harbor 99").status_code == 204
    browser.post(f"reads/{run_id}/continue")
    assert wait_until_finished(browser, run_id)["answer"] == "99"


def test_edit_of_a_finished_read_gives_a_new_answer(browser: Browser) -> None:
    (run_id,) = browser.start_reads()
    wait_until_finished(browser, run_id)
    browser.edit(run_id, list_updates(browser, run_id)[-1], "harbor 5")
    assert browser.read(run_id)["state"] == "paused"
    browser.post(f"reads/{run_id}/continue")
    assert wait_until_finished(browser, run_id)["answer"] == "5"


@pytest.mark.usefixtures("slow_upstream")
def test_edit_of_a_running_read_or_old_memory_or_too_long_is_refused(browser: Browser) -> None:
    (run_id,) = browser.start_reads()
    first_update = {"chunk": 0, "memory": ""}
    assert browser.edit(run_id, first_update, "x").status_code == 409
    newest = pause_after_chunks(browser, run_id)
    assert browser.edit(run_id, first_update, "x").status_code == 409
    reply = browser.edit(run_id, newest, "word " * 200)
    assert (reply.status_code, "tokens" in reply.json()["error"]["message"]) == (400, True)
    assert not browser.read(run_id)["edited"], "so an equal request still gets this read"


@pytest.mark.usefixtures("slow_upstream")
def test_question_during_a_read_is_answered_and_the_read_goes_on(browser: Browser) -> None:
    (run_id,) = browser.start_reads()
    with browser.events(run_id) as wait_for:
        while "4711" not in wait_for("update")["memory"]:
            pass
        reply = browser.post(f"reads/{run_id}/answer", question=QUESTION).json()
    assert (reply["answer"], reply["memory"]) == ("4711", "nothing yet\nharbor 4711")
    for question in ("", "word " * 100):
        assert browser.post(f"reads/{run_id}/answer", question=question).status_code == 400
    assert wait_until_finished(browser, run_id)["answer"] == "4711"


def test_thumb_is_logged_as_a_reward_of_the_key(server: Server, browser: Browser) -> None:
    (run_id,) = browser.start_reads()
    wait_until_finished(browser, run_id)
    assert browser.post(f"reads/{run_id}/thumbs", up=False).status_code == 204
    (reward,) = server.resources.reader.run_log.rewards(run_id)
    assert (reward.name, reward.value, reward.source) == ("thumbs", 0.0, "local")
    assert wait_until_finished(browser, run_id)["thumb"] == 0.0


# Sources and lists


def test_sources_link_to_the_passage_in_the_document(browser: Browser) -> None:
    (run_id,) = browser.start_reads()
    wait_until_finished(browser, run_id)
    page = browser.client.get(f"/page/reads/{run_id}/page")
    assert f'"documentLink":"/#document/{run_id}"' in page.text
    start = LONG_TEXT.index("The key of harbor")
    excerpt = browser.get(f"reads/{run_id}/passage", start=start, end=start + 26)
    assert excerpt["passage"] == FACTS[0.2]
    assert excerpt["before"] + excerpt["passage"] + excerpt["after"] in LONG_TEXT
    assert browser.client.get(f"/page/reads/{run_id}/passage", params={"start": 10**9}).status_code == 404
    lines = browser.get(f"reads/{run_id}/sources")["lines"]
    assert [line["line"] for line in lines] == ["nothing yet", "harbor 4711"] or lines[-1]["line"] == "harbor 4711"


def test_list_of_reads_has_pages_and_a_search(server: Server, browser: Browser) -> None:
    ledger = server.resources.ledger
    for number in range(500):
        ledger.begin(Entry(f"run-{number}", "local", f"r{number}", f"Frage {number}: ÄRGER?", "b.txt", float(number)))
    first_page = browser.get("reads", newest=50)
    assert (first_page["total"], len(first_page["reads"]), first_page["reads"][0]["id"]) == (500, 50, "run-499")
    assert browser.get("reads", newest=50, skip=490)["reads"][-1]["id"] == "run-0"
    (read,) = browser.get("reads", q="frage 123: ärger")["reads"]
    assert (read["id"], read["state"], read["answer"]) == ("run-123", "interrupted", None)
    assert len(browser.get("reads", newest=10**9)["reads"]) == 200


def test_reads_of_a_killed_server_continue_after_a_restart(tmp_path: Path) -> None:
    with (
        FakeServer(delay=0.1) as upstream,
        ServingProcess(upstream.base_url, tmp_path, "--chunk-tokens", "200") as process,
    ):
        browser = Browser.sign_in_by_link(process)
        (run_id,) = browser.start_reads()
        wait_until(lambda: count_sections(upstream).total() > 3)
        process.kill()
        process.start()
        new_browser = Browser.sign_in_by_link(process)
        assert browser.client.get("/page/reads").status_code == 401  # its session ended with the process
        assert new_browser.read(run_id)["state"] == "interrupted"
        assert new_browser.post(f"reads/{run_id}/continue").status_code == 204
        assert wait_until_finished(new_browser, run_id)["answer"] == "4711"
        assert count_sections(upstream).total() <= len(list_updates(new_browser, run_id)) + 1


# Attacks


PRIVATE_PATHS = ("/page/session", "/page/reads", "/page/events", "/page/reads/x/page")


def test_page_is_public_and_its_data_is_not(server: Server) -> None:
    assert httpx2.get(f"{server.url}/").status_code == 200
    for path in PRIVATE_PATHS:
        assert httpx2.get(f"{server.url}{path}", headers=PAGE_HEADERS).status_code == 401
    for path in ("/page/files", "/page/reads", "/page/reads/x/pause", "/page/nothing"):
        assert httpx2.post(f"{server.url}{path}", headers=PAGE_HEADERS).status_code == 401
    for token in ("", "x", "Bearer", "\ud800"):
        reply = httpx2.post(
            f"{server.url}/page/session", content=json.dumps({"token": token}),
            headers={**PAGE_HEADERS, "Content-Type": "application/json"},
        )  # fmt: skip
        assert reply.status_code in {400, 401}
        assert "set-cookie" not in reply.headers


def test_session_cookie_is_strict_and_http_only(server: Server) -> None:
    reply = httpx2.post(f"{server.url}/page/session", json={"token": server.sessions.token}, headers=PAGE_HEADERS)
    cookie = reply.headers["set-cookie"].lower()
    assert cookie.startswith(f"memagent_page_{server.port}=")
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip() for part in cookie.split(";")}
    assert server.sessions.token.lower() not in cookie


def test_requests_from_other_origins_are_refused_despite_the_cookie(browser: Browser) -> None:
    foreign_origins = ("http://localhost:1", "null", "https://evil.example")
    foreign_headers = [{"Origin": origin} for origin in foreign_origins] + [
        {"Sec-Fetch-Site": f"{site}-site"} for site in ("same", "cross")
    ]
    for headers in foreign_headers:
        assert browser.client.get("/page/reads", headers=headers).status_code == 403
    del browser.client.headers["X-Memagent-Page"]
    for headers in ({}, *({**PAGE_HEADERS, **headers} for headers in foreign_headers)):
        for path in ("/page/reads", "/page/files", "/page/session"):
            assert browser.client.post(path, headers=headers, json={}).status_code == 403


def test_content_security_policy_allows_no_foreign_scripts(browser: Browser) -> None:
    for path in ("/", "/page/static/live.js", "/page/static/live.css", "/page/static/page.css"):
        reply = browser.client.get(path)
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
    (run_id,) = browser.start_reads()
    wait_until_finished(browser, run_id)
    page = browser.client.get(f"/page/reads/{run_id}/page")
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert "default-src 'none'" in page.text


SCRIPT = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


def test_scripts_in_names_documents_and_answers_are_sent_as_data(browser: Browser, upstream: FakeServer) -> None:
    def respond(body: dict[str, Any], number: int) -> str:
        return f"harbor {SCRIPT}" if "<section>" in body["messages"][-1]["content"] else f"\\boxed{{{SCRIPT}}}"

    upstream.respond = respond
    file = browser.upload(f"{SCRIPT}.txt", f"{SCRIPT} {LONG_TEXT}").json()["id"]
    (run_id,) = browser.post("reads", files=[file], questions=[f"{SCRIPT}?"]).json()["reads"]
    assert SCRIPT in wait_until_finished(browser, run_id)["answer"]
    for path in ("reads", f"reads/{run_id}/sources", f"reads/{run_id}/passage"):
        reply = browser.client.get(f"/page/{path}")
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
    page = browser.client.get(f"/page/reads/{run_id}/page").text
    assert "alert(2)" in page
    assert "<img" not in page
    assert "<script>alert" not in page


def test_request_bodies_are_limited_in_size_and_time(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, page=True, idle_seconds=0.3, storage=100_000) as server:
        browser = Browser.sign_in(server)
        assert browser.upload("a.txt", "The town. " * 6000).status_code == 413, "with its text"
        assert not any((tmp_path / "serve").rglob("*.bin"))
        sizes = {"reads": 2**20, "session": 2**12}
        assert {browser.post(path, token="x" * size).status_code for path, size in sizes.items()} == {413}
        lines = ("POST /page/session HTTP/1.1", "X-Memagent-Page: 1", JSON_HEADER, "Content-Length: 4096")
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(make_request_head(*lines) + b"{")
            for _ in range(200):  # a client that is never idle
                if select.select([connection], [], [], 0.05)[0]:
                    break
                connection.sendall(b" ")
            connection.settimeout(0)
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_static_names_cannot_leave_the_folder(browser: Browser) -> None:
    for name in ("../page_sessions.py", "..%2f..%2fpage_sessions.py", "page_routes.py", "%2e%2e/x", ""):
        assert browser.client.get(f"/page/static/{name}").status_code in {401, 404}


def test_sessions_belong_to_one_key_and_end_on_sign_out(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, page=True, keys=KEYS) as server:
        assert server.sessions.token is None
        alice, bob = Browser.sign_in(server, ALICE), Browser.sign_in(server, BOB)
        (run_id,) = alice.start_reads()
        assert bob.get("reads")["total"] == 0
        with bob.events(run_id) as wait_for:
            assert wait_for("gone") == "there is no such read"
        for _ in range(100):
            Browser.sign_in(server, ALICE)
        assert bob.client.get("/page/reads").status_code == 200, "sign-ins of one key end no session of another"
        assert alice.client.get("/page/reads").status_code == 401
        # The page's cookie does not authorise requests to the API.
        assert alice.client.get("/v1/reads").status_code == 401
        assert bob.client.delete("/page/session").status_code == 204
        assert bob.client.get("/page/reads").status_code == 401


def test_invalid_requests_are_refused_and_store_nothing(browser: Browser) -> None:
    for body in ({}, {"files": [], "questions": ["?"]}, {"files": ["file-" + "0" * 32], "questions": ["?"]},
                 {"files": 1, "questions": []}, {"files": ["../x"], "questions": ["?"]}):  # fmt: skip
        reply = browser.post("reads", **body)
        assert reply.status_code in {400, 404}
        assert reply.json()["error"]["message"]
    assert browser.upload("bad.pdf", b"%PDF-1.4 nothing").status_code == 400
    file = browser.upload("a.txt", LONG_TEXT).json()["id"]
    for question in ("", "word " * 100):
        assert browser.post("reads", files=[file], questions=[question]).status_code == 400
    assert browser.get("reads")["total"] == 0


async def test_event_streams_opened_at_once_are_limited(browser: Browser) -> None:
    (run_id,) = browser.start_reads()
    statuses: list[int] = []
    async with httpx2.AsyncClient(base_url=browser.client.base_url, cookies=browser.client.cookies) as client:

        async def open_stream(all_opened: asyncio.Barrier) -> None:
            async with client.stream("GET", "/page/events", params={"run": run_id}, timeout=30) as reply:
                statuses.append(reply.status_code)
                await all_opened.wait()

        all_opened = asyncio.Barrier(60)
        await asyncio.gather(*(open_stream(all_opened) for _ in range(60)))
    assert (statuses.count(200), statuses.count(429)) == (32, 28)


@pytest.mark.parametrize("path", ["files", "reads"])
def test_conversion_is_cancelled_when_its_client_disconnects(
    server: Server, browser: Browser, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    conversions = block_conversions(monkeypatch)
    files = {"file": ("a.txt", b"A text.")}
    file = httpx2.post(f"{server.api}/files", files=files, data={"purpose": "user_data"}).json()["id"]
    body: dict[str, Any] = {"files": files}
    if path == "reads":
        body = {"json": {"files": [file], "questions": ["Who?"]}}
    request = browser.client.build_request("POST", f"/page/{path}", **body)
    header_lines = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"POST /page/{path} HTTP/1.1\r\n{header_lines}\r\n".encode() + request.read())
        wait_until(lambda: conversions == ["begun"])
    wait_until(lambda: conversions == ["begun", "ended"])

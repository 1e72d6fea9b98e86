"""The live page's requests over a real socket: whom they let in, and what a person can do with a read."""

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
from unit.serving.test_attacks import OF_JSON, endless_conversions, head, until
from unit.serving.test_reads import sections

from memagent_graph.run_log.records import describe_edit
from memagent_serve.ledger import Entry

FACTS = {0.2: "The key of harbor is 4711.", 0.6: "The key of castle is 12."}
LONG = make_document(FACTS, words=900)
QUESTION = "What is the key of harbor?"
OWN = {"X-Memagent-Page": "1"}


class Browser:
    """What the page's script does, without a browser."""

    def __init__(self, url: str, token: str | None) -> None:
        self.client = httpx2.Client(base_url=url, headers=OWN, timeout=30)
        assert self.client.post("/page/session", json={"token": token}).status_code == 204

    @classmethod
    def of(cls, server: Server, key: str | None = None) -> Browser:
        return cls(server.url, key or server.sessions.token)

    @classmethod
    def at(cls, process: ServingProcess) -> Browser:
        """By the link that the process printed."""
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

    def begin(self, *questions: str, document: str = LONG, read_again: bool = False) -> list[str]:
        file = self.upload("annals.txt", document).json()["id"]
        reply = self.post("reads", files=[file], questions=list(questions or (QUESTION,)), read_again=read_again)
        assert reply.status_code == 200, reply.text
        return reply.json()["reads"]

    def read(self, run_id: str) -> dict[str, Any]:
        return next(read for read in self.get("reads", q=run_id)["reads"] if read["id"] == run_id)

    def edit(self, run_id: str, update: dict[str, Any], text: str) -> httpx2.Response:
        """Put a text in place of the memory of an update."""
        return self.post(f"reads/{run_id}/memory", chunk=update["chunk"], before=update["memory"], text=text)

    @contextmanager
    def events(self, run_id: str) -> Iterator[Callable[[str], Any]]:
        """Gives a function that waits for the next event of a name, and gives its value."""
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
    with serve(upstream.base_url, tmp_path, page=True) as running:
        yield running


@pytest.fixture
def browser(server: Server) -> Browser:
    return Browser.of(server)


def pause(browser: Browser, run_id: str, chunks: int = 2) -> dict[str, Any]:
    """Pause a read behind so many chunks; gives its newest update."""
    with browser.events(run_id) as wait_for:
        number = len(wait_for("snapshot")["updates"])
        for _ in range(max(1, chunks - number)):
            update = wait_for("update")
    assert browser.post(f"reads/{run_id}/pause").status_code == 204
    newest = updates(browser, run_id)[-1]
    assert newest["chunk"] >= update["chunk"] - 1  # the pause may fall before the newest is in the checkpoints
    return newest


def updates(browser: Browser, run_id: str) -> list[dict[str, Any]]:
    """The updates that the page shows."""
    with browser.events(run_id) as wait_for:
        return wait_for("snapshot")["updates"]


def finish(browser: Browser, run_id: str) -> dict[str, Any]:
    """Wait for the end of a read; gives its state."""
    until(lambda: browser.read(run_id)["state"] == "finished")
    with browser.events(run_id) as wait_for:
        return wait_for("state")


# Reading


def test_a_document_is_read_chunk_by_chunk_to_its_answer(browser: Browser) -> None:
    (run_id,) = browser.begin()
    with browser.events(run_id) as wait_for:
        events = wait_for("snapshot")["updates"]
        while not any("4711" in update["memory"] for update in events):
            events.append(wait_for("update"))
    assert ["insert", "\nharbor 4711"] in [change for update in events for change in update["diff"]]
    state = finish(browser, run_id)
    assert (state["answer"], state["document"]) == ("4711", "annals.txt")
    chunks = [update["chunk"] for update in updates(browser, run_id)]
    assert chunks == list(range(len(chunks)))
    assert browser.begin() == [run_id] != browser.begin(read_again=True), "the same again is the same read, unless told"


def test_several_questions_are_reads_side_by_side_on_one_stream_and_several_documents_are_one(
    browser: Browser,
) -> None:
    first = browser.upload("one.txt", make_document({0.5: FACTS[0.2]}, words=400)).json()["id"]
    second = browser.upload("two.html", "<p>The key of castle is 12.</p>").json()["id"]
    questions = [QUESTION, "What is the key of castle?"]
    reads = browser.post("reads", files=[first, second], questions=questions).json()["reads"]
    ended: set[str] = set()
    with browser.events(reads[0]) as wait_for:
        while ended != set(reads):
            ended |= {read["id"] for read in wait_for("reads") if read["state"] == "finished"}
    listed = {read["id"]: read for read in browser.get("reads")["reads"]}
    assert [listed[run_id]["answer"] for run_id in reads] == ["4711", "12"], "the list shows answers, too"
    assert listed[reads[0]]["document"] == "2 texts: one.txt, two.html"


@pytest.mark.usefixtures("slow")
def test_a_read_paused_and_stopped_continues_where_it_was(browser: Browser, upstream: FakeServer) -> None:
    (run_id,) = browser.begin()
    pause(browser, run_id)
    assert browser.read(run_id)["state"] == "paused"
    time.sleep(0.2)  # the request that the pause cut short may still reach the server
    calls = sections(upstream).total()
    time.sleep(0.2)
    assert sections(upstream).total() == calls
    assert browser.post(f"reads/{run_id}/stop").status_code == 204
    assert browser.read(run_id)["state"] == "cancelled"
    assert browser.post(f"reads/{run_id}/continue").status_code == 204
    assert finish(browser, run_id)["answer"] == "4711"
    # But for the one that the pause interrupted, each was read once.
    assert sections(upstream).total() <= len(updates(browser, run_id)) + 1


@pytest.mark.usefixtures("slow")
def test_a_read_that_waits_can_be_paused_and_continued(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, page=True, max_reads=1) as server:
        browser = Browser.of(server)
        _, waiting = browser.begin(QUESTION, "What is the key of castle?")
        assert browser.post(f"reads/{waiting}/pause").status_code == 204
        assert browser.read(waiting)["state"] == "paused"
        assert browser.post(f"reads/{waiting}/continue").status_code == 204
        assert finish(browser, waiting)["answer"] == "12"


# A person's hand


@pytest.mark.usefixtures("slow")
def test_an_edited_memory_is_what_is_read_on_from_and_says_who_did_it(server: Server, browser: Browser) -> None:
    (run_id,) = browser.begin()
    newest = pause(browser, run_id, 8)
    reply = browser.edit(run_id, newest, "harbor 99")
    assert reply.status_code == 204, reply.text
    assert browser.read(run_id)["edited"]
    browser.post(f"reads/{run_id}/continue")
    assert finish(browser, run_id)["answer"] == "99"
    log = server.resources.reader.run_log
    (event,) = log.events(run_id)
    assert (event.detail, event.text) == (describe_edit("local"), "harbor 99")
    (other,) = browser.begin()
    assert other != run_id, "an edited read answers no request"
    assert finish(browser, other)["answer"] == "4711"


@pytest.mark.usefixtures("slow")
def test_a_chunk_that_was_logged_but_is_in_no_checkpoint_is_not_shown_and_cannot_be_edited(
    browser: Browser, tmp_path: Path
) -> None:
    (run_id,) = browser.begin()
    ahead = pause(browser, run_id, 5)
    with closing(sqlite3.connect(tmp_path / "checkpoints.sqlite", timeout=30, isolation_level=None)) as checkpoints:
        while updates(browser, run_id)[-1] == ahead:  # as if the pause had come just before the newest was written
            for table in ("writes", "checkpoints"):
                checkpoints.execute(
                    f"DELETE FROM {table} WHERE thread_id = ?1 AND checkpoint_id = "
                    "(SELECT max(checkpoint_id) FROM checkpoints WHERE thread_id = ?1)",
                    [run_id],
                )
    with browser.events(run_id) as wait_for:
        newest = wait_for("snapshot")["updates"][-1]
        assert newest["chunk"] == ahead["chunk"] - 1
        assert browser.edit(run_id, ahead, "harbor 99").status_code == 409
        assert wait_for("snapshot")["updates"][-1] == newest, "the page looks again"
    assert browser.edit(run_id, newest, "harbor 99").status_code == 204
    browser.post(f"reads/{run_id}/continue")
    assert finish(browser, run_id)["answer"] == "99"


def test_an_answered_read_is_corrected_and_answers_again(browser: Browser) -> None:
    (run_id,) = browser.begin()
    finish(browser, run_id)
    browser.edit(run_id, updates(browser, run_id)[-1], "harbor 5")
    assert browser.read(run_id)["state"] == "paused"
    browser.post(f"reads/{run_id}/continue")
    assert finish(browser, run_id)["answer"] == "5"


@pytest.mark.usefixtures("slow")
def test_an_edit_is_refused_while_it_reads_of_another_memory_and_beyond_the_budget(browser: Browser) -> None:
    (run_id,) = browser.begin()
    first = {"chunk": 0, "memory": ""}
    assert browser.edit(run_id, first, "x").status_code == 409
    newest = pause(browser, run_id)
    assert browser.edit(run_id, first, "x").status_code == 409
    reply = browser.edit(run_id, newest, "word " * 200)
    assert (reply.status_code, "tokens" in reply.json()["error"]["message"]) == (400, True)
    assert not browser.read(run_id)["edited"], "so the same request still gets this read"


@pytest.mark.usefixtures("slow")
def test_one_can_ask_before_the_end_and_the_read_goes_on(browser: Browser) -> None:
    (run_id,) = browser.begin()
    with browser.events(run_id) as wait_for:
        while "4711" not in wait_for("update")["memory"]:
            pass
        reply = browser.post(f"reads/{run_id}/answer", question=QUESTION).json()
    assert (reply["answer"], reply["memory"]) == ("4711", "nothing yet\nharbor 4711")
    for question in ("", "word " * 100):
        assert browser.post(f"reads/{run_id}/answer", question=question).status_code == 400
    assert finish(browser, run_id)["answer"] == "4711"


def test_a_thumb_is_a_reward_under_the_keys_name(server: Server, browser: Browser) -> None:
    (run_id,) = browser.begin()
    finish(browser, run_id)
    assert browser.post(f"reads/{run_id}/thumbs", up=False).status_code == 204
    (reward,) = server.resources.reader.run_log.rewards(run_id)
    assert (reward.name, reward.value, reward.source) == ("thumbs", 0.0, "local")
    assert finish(browser, run_id)["thumb"] == 0.0


# Looking


def test_sources_lead_to_the_passage_in_the_document(browser: Browser) -> None:
    (run_id,) = browser.begin()
    finish(browser, run_id)
    page = browser.client.get(f"/page/reads/{run_id}/page")
    assert f'"documentLink":"/#document/{run_id}"' in page.text
    start = LONG.index("The key of harbor")
    place = browser.get(f"reads/{run_id}/passage", start=start, end=start + 26)
    assert place["passage"] == FACTS[0.2]
    assert place["before"] + place["passage"] + place["after"] in LONG
    assert browser.client.get(f"/page/reads/{run_id}/passage", params={"start": 10**9}).status_code == 404
    lines = browser.get(f"reads/{run_id}/sources")["lines"]
    assert [line["line"] for line in lines] == ["nothing yet", "harbor 4711"] or lines[-1]["line"] == "harbor 4711"


def test_many_reads_are_listed_and_searched_by_pages(server: Server, browser: Browser) -> None:
    ledger = server.resources.ledger
    for number in range(500):
        ledger.begin(
            Entry(f"run-{number}", "local", f"r{number}", f"Frage {number}: ÄRGER?", "buch.txt", float(number))
        )
    first = browser.get("reads", newest=50)
    assert (first["total"], len(first["reads"]), first["reads"][0]["id"]) == (500, 50, "run-499")
    assert browser.get("reads", newest=50, skip=490)["reads"][-1]["id"] == "run-0"
    (read,) = browser.get("reads", q="frage 123: ärger")["reads"]
    assert (read["id"], read["state"], read["answer"]) == ("run-123", "interrupted", None)
    assert len(browser.get("reads", newest=10**9)["reads"]) == 200


def test_a_killed_server_leaves_reads_that_continue_from_the_page(tmp_path: Path) -> None:
    with (
        FakeServer(delay=0.1) as upstream,
        ServingProcess(upstream.base_url, tmp_path, "--chunk-tokens", "200") as process,
    ):
        before = Browser.at(process)
        (run_id,) = before.begin()
        until(lambda: sections(upstream).total() > 3)
        process.kill()
        process.start()
        after = Browser.at(process)
        assert before.client.get("/page/reads").status_code == 401  # its session ended with the process
        assert after.read(run_id)["state"] == "interrupted"
        assert after.post(f"reads/{run_id}/continue").status_code == 204
        assert finish(after, run_id)["answer"] == "4711"
        assert sections(upstream).total() <= len(updates(after, run_id)) + 1


# Attacks


DATA = ("/page/session", "/page/reads", "/page/events", "/page/reads/x/page")


def test_the_page_is_open_and_nothing_behind_it(server: Server) -> None:
    assert httpx2.get(f"{server.url}/").status_code == 200
    for path in DATA:
        assert httpx2.get(f"{server.url}{path}", headers=OWN).status_code == 401
    for path in ("/page/files", "/page/reads", "/page/reads/x/pause", "/page/nothing"):
        assert httpx2.post(f"{server.url}{path}", headers=OWN).status_code == 401
    for token in ("", "x", "Bearer", "\ud800"):
        reply = httpx2.post(
            f"{server.url}/page/session", content=json.dumps({"token": token}),
            headers={**OWN, "Content-Type": "application/json"},
        )  # fmt: skip
        assert reply.status_code in {400, 401}
        assert "set-cookie" not in reply.headers


def test_the_cookie_is_for_this_site_alone_and_no_script_reads_it(server: Server) -> None:
    reply = httpx2.post(f"{server.url}/page/session", json={"token": server.sessions.token}, headers=OWN)
    cookie = reply.headers["set-cookie"].lower()
    assert cookie.startswith(f"memagent_page_{server.port}=")
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip() for part in cookie.split(";")}
    assert server.sessions.token.lower() not in cookie


def test_other_pages_cannot_use_a_persons_cookie(browser: Browser) -> None:
    others = ("http://localhost:1", "null", "https://evil.example")
    foreign = [{"Origin": origin} for origin in others] + [
        {"Sec-Fetch-Site": f"{site}-site"} for site in ("same", "cross")
    ]
    for headers in foreign:
        assert browser.client.get("/page/reads", headers=headers).status_code == 403
    del browser.client.headers["X-Memagent-Page"]
    for headers in ({}, *({**OWN, **headers} for headers in foreign)):
        for path in ("/page/reads", "/page/files", "/page/session"):
            assert browser.client.post(path, headers=headers, json={}).status_code == 403


def test_everything_is_sent_with_a_policy_that_runs_no_foreign_script(browser: Browser) -> None:
    for path in ("/", "/page/static/live.js", "/page/static/live.css", "/page/static/page.css"):
        reply = browser.client.get(path)
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
    (run_id,) = browser.begin()
    finish(browser, run_id)
    page = browser.client.get(f"/page/reads/{run_id}/page")
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert "default-src 'none'" in page.text


SCRIPT = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


def test_script_in_names_documents_questions_memories_and_answers_is_sent_as_data_alone(
    browser: Browser, upstream: FakeServer
) -> None:
    def respond(body: dict[str, Any], number: int) -> str:
        return f"harbor {SCRIPT}" if "<section>" in body["messages"][-1]["content"] else f"\\boxed{{{SCRIPT}}}"

    upstream.respond = respond
    file = browser.upload(f"{SCRIPT}.txt", f"{SCRIPT} {LONG}").json()["id"]
    (run_id,) = browser.post("reads", files=[file], questions=[f"{SCRIPT}?"]).json()["reads"]
    assert SCRIPT in finish(browser, run_id)["answer"]
    for path in ("reads", f"reads/{run_id}/sources", f"reads/{run_id}/passage"):
        reply = browser.client.get(f"/page/{path}")
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
    page = browser.client.get(f"/page/reads/{run_id}/page").text
    assert "alert(2)" in page
    assert "<img" not in page
    assert "<script>alert" not in page


def test_bodies_of_the_page_are_bounded_in_size_and_time(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, page=True, idle_seconds=0.3) as server:
        browser = Browser.of(server)
        assert browser.post("reads", files=["x" * 2**20], questions=["?"]).status_code == 413
        sign_in = head("POST /page/session HTTP/1.1", "X-Memagent-Page: 1", OF_JSON, "Content-Length: 10000")
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(sign_in + b"{")
            for _ in range(200):  # a client that is never idle
                if select.select([connection], [], [], 0.05)[0]:
                    break
                connection.sendall(b" ")
            connection.settimeout(0)
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_no_static_name_leads_to_another_file(browser: Browser) -> None:
    for name in ("../page_sessions.py", "..%2f..%2fpage_sessions.py", "page_routes.py", "%2e%2e/x", ""):
        assert browser.client.get(f"/page/static/{name}").status_code in {401, 404}


def test_sessions_are_those_of_their_key_and_end_with_signing_out(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, page=True, keys=KEYS) as server:
        assert server.sessions.token is None
        alice, bob = Browser.of(server, ALICE), Browser.of(server, BOB)
        (run_id,) = alice.begin()
        assert bob.get("reads")["total"] == 0
        with bob.events(run_id) as wait_for:
            assert wait_for("gone") == "there is no such read"
        for _ in range(100):
            Browser.of(server, ALICE)
        assert bob.client.get("/page/reads").status_code == 200, "sign-ins of one key end no session of another"
        assert alice.client.get("/page/reads").status_code == 401
        # A key that a page has is one of the API, and the page's cookie is none.
        assert alice.client.get("/v1/reads").status_code == 401
        assert bob.client.delete("/page/session").status_code == 204
        assert bob.client.get("/page/reads").status_code == 401


def test_invalid_requests_of_the_page_are_refused_and_store_nothing(browser: Browser) -> None:
    for body in ({}, {"files": [], "questions": ["?"]}, {"files": ["file-" + "0" * 32], "questions": ["?"]},
                 {"files": 1, "questions": []}, {"files": ["../x"], "questions": ["?"]}):  # fmt: skip
        reply = browser.post("reads", **body)
        assert reply.status_code in {400, 404}
        assert reply.json()["error"]["message"]
    assert browser.upload("bad.pdf", b"%PDF-1.4 nothing").status_code == 400
    file = browser.upload("a.txt", LONG).json()["id"]
    for question in ("", "word " * 100):
        assert browser.post("reads", files=[file], questions=[question]).status_code == 400
    assert browser.get("reads")["total"] == 0


async def test_streams_that_are_opened_all_at_once_are_as_many_as_may_be(browser: Browser) -> None:
    (run_id,) = browser.begin()
    statuses: list[int] = []
    async with httpx2.AsyncClient(base_url=browser.client.base_url, cookies=browser.client.cookies) as client:

        async def open_stream(everyone_came: asyncio.Barrier) -> None:
            async with client.stream("GET", "/page/events", params={"run": run_id}, timeout=30) as reply:
                statuses.append(reply.status_code)
                await everyone_came.wait()

        everyone_came = asyncio.Barrier(60)
        await asyncio.gather(*(open_stream(everyone_came) for _ in range(60)))
    assert (statuses.count(200), statuses.count(429)) == (32, 28)


@pytest.mark.parametrize("path", ["files", "reads"])
def test_a_conversion_ends_with_its_client(
    server: Server, browser: Browser, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    states = endless_conversions(monkeypatch)
    content = {"file": ("a.txt", b"A text.")}
    file = httpx2.post(f"{server.api}/files", files=content, data={"purpose": "user_data"}).json()["id"]
    body: dict[str, Any] = {"files": content}
    if path == "reads":
        body = {"json": {"files": [file], "questions": ["Who?"]}}
    request = browser.client.build_request("POST", f"/page/{path}", **body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"POST /page/{path} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
        until(lambda: states == ["begun"])
    until(lambda: states == ["begun", "ended"])

"""Faulty replies of a server are retried, or reported as errors and events."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import zlib

import pytest
from aiohttp import web
from support.fake_server import HELLO, FakeServer
from support.server_faults import EMPTY_TEXTS, FINAL_ERRORS, MALFORMED, OTHER_SERVER, OVERSIZED, RETRIED_ERRORS

from memagent_graph import Budget, MemAgent, OpenAICompatiblePolicy, RunLog, SamplingParams, UpdateRule
from memagent_graph.errors import (
    PolicyAuthenticationError,
    PolicyError,
    PolicyOverloadedError,
    PolicyRequestError,
    PolicyResponseError,
)
from memagent_graph.events import EventKind

pytestmark = pytest.mark.usefixtures("nobody_sleeps")
TEXT = "The key of harbor is 4711. " + "and then some words " * 60
QUESTION = "What is the key of harbor?"
RETRIES = 2


@pytest.mark.parametrize("name", [*MALFORMED, *OVERSIZED, *RETRIED_ERRORS])
async def test_temporary_faults_are_retried_and_then_become_an_error(name) -> None:
    fault, fault_count = (MALFORMED | OVERSIZED | RETRIED_ERRORS)[name], 2 * RETRIES + 1
    with FakeServer(lambda body, number: fault() if number < fault_count else "at last") as server:
        with pytest.raises(PolicyError, match=f"after {RETRIES} retries|no connection to") as error:
            await server.ask(max_retries=RETRIES)
        assert len(server.requests) == RETRIES + 1
        completion = await server.ask(max_retries=RETRIES)
    assert (completion.text, completion.retries) == ("at last", RETRIES)
    assert error.value.hint and len(str(error.value)) < 1200
    if name in RETRIED_ERRORS:
        assert isinstance(error.value, PolicyOverloadedError)
        assert ("it broke" in str(error.value)) is name.isdigit(), "the error has the server's message"
    elif "gzip" not in name:
        assert isinstance(error.value, PolicyResponseError)
        assert ("still failed during a reply" in str(error.value)) is ("an error" in name)


@pytest.mark.parametrize("name", FINAL_ERRORS)
async def test_permanent_faults_are_not_retried(name) -> None:
    with (
        FakeServer(lambda body, number: FINAL_ERRORS[name]()) as server,
        pytest.raises((PolicyRequestError, PolicyResponseError, PolicyAuthenticationError)) as error,
    ):
        await server.ask(max_retries=RETRIES)
    assert error.value.hint and len(server.requests) == (6 if name == "307 to itself" else 1)
    if "another" in name:
        assert f"redirects to another server, {OTHER_SERVER}; the request was not sent there" in error.value.message
        assert error.value.hint.endswith("--base-url http://elsewhere.example:8000/v1")


async def test_a_redirect_to_another_server_or_scheme_is_not_followed() -> None:
    with FakeServer() as other_server:
        targets = [
            other_server.base_url + "/chat/completions?key=secret",
            "https" + other_server.base_url[4:],
            "//elsewhere.example/v1",
        ]
        for target in targets:
            headers = {"Location": target}
            with (
                FakeServer(lambda body, number, headers=headers: web.Response(status=307, headers=headers)) as server,
                pytest.raises(PolicyResponseError, match="another server") as error,
            ):
                policy = OpenAICompatiblePolicy("fake", base_url=server.base_url)
                async with policy.relay("POST", "chat/completions", b'{"model": "fake"}') as relayed:
                    assert relayed.status == 307
                await policy.aclose()
                await server.ask(max_retries=RETRIES)
            assert "secret" not in str(error.value)
        with FakeServer() as server:
            server.models = lambda: web.Response(status=307, headers={"Location": f"{other_server.base_url}/models"})
            with pytest.raises(PolicyResponseError, match="another server"):
                await OpenAICompatiblePolicy(base_url=server.base_url, max_retries=0).describe()
    assert other_server.requests == []


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_within_the_server_is_followed_with_the_same_request(status) -> None:
    def respond(body, number):
        return web.Response(status=status, headers={"Location": "completions?again"}) if number == 0 else "there"

    with FakeServer(respond, key="right") as server:
        completion = await server.ask(api_key="right")
    assert (completion.text, completion.retries) == ("there", 0)
    assert server.requests[0] == server.requests[1]


def make_agent(server: FakeServer, **options) -> MemAgent:
    policy = OpenAICompatiblePolicy("fake", base_url=server.base_url, max_retries=RETRIES)
    return MemAgent(policy, tokenizer="embedded", budget=Budget(chunk_tokens=60, memory_tokens=64), **options)


@pytest.mark.parametrize("name", EMPTY_TEXTS)
def test_a_completion_without_text_keeps_the_memory_and_reports_the_rule(name) -> None:
    good = FakeServer().respond
    with (
        FakeServer(lambda body, number: EMPTY_TEXTS[name]() if number == 2 else good(body, number)) as server,
        make_agent(server, run_log=False) as agent,
    ):
        result = agent.read(TEXT, QUESTION)
    (event,) = result.events
    assert event.kind is (EventKind.REFUSED if "refused" in name or "filter" in name else EventKind.EMPTY)
    assert (event.chunk_index, event.rule) == (2, UpdateRule.KEEP_PREVIOUS)
    assert result.answer == "4711"


@pytest.mark.parametrize("is_compressed", [False, True])
async def test_a_reply_of_50_mb_is_read_only_up_to_the_limit(is_compressed) -> None:
    sent_bytes = 0

    async def serve(incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        await incoming.readuntil(b"\r\n\r\n")
        head = "HTTP/1.1 200 OK\r\n" + ("Content-Encoding: gzip\r\n" if is_compressed else "")
        outgoing.write(f"{head}Connection: close\r\n\r\n".encode())
        compressor, block = zlib.compressobj(wbits=31), b" " * 65_536
        try:
            for _ in range(50_000_000 // len(block)):
                outgoing.write(compressor.compress(block) if is_compressed else block)
                sent_bytes += len(block)
                await outgoing.drain()
            outgoing.write(compressor.flush() if is_compressed else b"")
        except ConnectionError:
            return
        finally:
            outgoing.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    policy = OpenAICompatiblePolicy("fake", base_url=url, max_retries=0)
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(PolicyResponseError, match=r"a reply that is too long: it has more than [0-9,]{9} bytes"):
            await policy.complete(HELLO, SamplingParams())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        await policy.aclose()
        server.close()
    assert peak_bytes < 8_000_000
    assert is_compressed or sent_bytes < 30_000_000


async def test_logprobs_that_are_missing_or_differ_in_number_from_the_tokens_are_dropped(tmp_path) -> None:
    good = FakeServer(vllm=True)

    def respond(body, number):
        reply = good.make_reply(body, good.respond(body, number))
        if number == 2:
            reply["choices"][0]["logprobs"]["content"].append({"token": "x", "logprob": -0.5})
        if number == 3:
            reply["choices"][0]["logprobs"] = None
        return reply

    with FakeServer(respond, vllm=True) as server:
        async with make_agent(server, run_log=tmp_path / "runs.sqlite") as agent:
            result = await agent.aread(TEXT, QUESTION, run_id="r")
    dropped = [event for event in result.events if event.kind is EventKind.LOGPROBS_DROPPED]
    assert [event.chunk_index for event in dropped] == [2, 3]
    assert "log-probs for" in dropped[0].detail and "sent no log-probs" in dropped[1].detail
    rows = RunLog(tmp_path / "runs.sqlite").conversations("r")
    presence = [(row.token_ids is not None, row.logprobs is not None) for row in rows]
    assert [index for index, row in enumerate(presence) if row != (True, True)] == [2, 3]
    assert presence[2] == (True, False)

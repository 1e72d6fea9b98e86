"""The fact is found in every dialect of the API, and events report what the server left out."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from aiohttp import web
from support.fake_server import HELLO, FakeServer
from support.server_dialects import DIALECTS, LENGTH_REFUSALS, make_counting_server

from memagent_graph import Budget, MemAgent, OpenAICompatiblePolicy, ReadResult, SamplingParams
from memagent_graph.cli.policy_checks import CheckStatus, check_policy
from memagent_graph.errors import PolicyRequestError, PromptCutError
from memagent_graph.events import EventKind
from memagent_graph.policies.api_variants import parse_finish_reason
from memagent_graph.policy import FinishReason
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.tokenizers import load_tokenizer
from memagent_serve.chat_replies import describe_read
from memagent_serve.live.live_events import format_update

pytestmark = pytest.mark.usefixtures("nobody_sleeps")
TEXT = "The key of harbor is 4711. " + "and then some words " * 20
QUESTION = "What is the key of harbor?"
BUDGET = Budget(context_window=4096, question_tokens=64, memory_tokens=40, chunk_tokens=60, answer_tokens=40)


async def read(server: FakeServer, text: str = TEXT, budget: Budget = BUDGET, **settings: Any) -> ReadResult:
    settings = {"model": "fake", "retries": 2, **settings}
    async with MemAgent(
        base_url=server.base_url, tokenizer="embedded", budget=budget, run_log=False, **settings
    ) as reader:
        return await reader.aread(text, QUESTION)


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_dialect_is_understood_and_causes_only_the_expected_events(name: str) -> None:
    dialect = DIALECTS[name]
    with dialect.make_server() as server:
        result = await read(server, **dialect.settings)
    assert result.answer == "4711"
    assert {event.kind.value for event in result.events} == dialect.events


@pytest.mark.parametrize(
    ("reason", "spellings"),
    [
        (FinishReason.LENGTH, "maxTokens model_length FinishReason.MAX_TOKENS FINISH_REASON_MAX_TOKENS token-limit"),
        (FinishReason.REFUSED, "refusal content-filter RECITATION guardrail_intervened blocked ContentFiltered"),
        (FinishReason.FAILED, "error cancelled network_error insufficient_system_resource TIMEOUT"),
        (FinishReason.STOP, "end_turn STOP eos_token"),
    ],
)
def test_a_finish_reason_is_understood_in_any_spelling(reason: FinishReason, spellings: str) -> None:
    assert {parse_finish_reason(spelling) for spelling in spellings.split()} == {reason}


@pytest.mark.parametrize("name", LENGTH_REFUSALS)
async def test_a_refusal_for_length_is_not_retried_and_names_the_remedy(name: str) -> None:
    status, message = LENGTH_REFUSALS[name]
    refusal = {"error": {"message": message}}
    with (
        FakeServer(lambda body, number: web.json_response(refusal, status=status)) as server,
        pytest.raises(PolicyRequestError, match="Lower chunk_tokens") as error,
    ):
        await read(server)
    assert message[:40] in error.value.message and len(server.requests) == 1


async def test_a_refused_field_is_renamed_in_all_later_requests() -> None:
    with DIALECTS["refused field: max_tokens"].make_server() as server:
        await read(server)
    refused_request, *later_requests = server.requests
    assert "max_tokens" in refused_request
    assert {(body["max_completion_tokens"], "max_tokens" in body) for body in later_requests} == {(40, False)}


async def test_a_field_may_be_refused_to_several_requests_at_once() -> None:
    def respond(body: dict[str, Any], number: int) -> web.Response | str:
        return web.json_response({"error": "seed is unknown"}, status=400) if "seed" in body else "ok"

    with FakeServer(respond) as server:
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url)
        await asyncio.gather(*(policy.complete(HELLO, SamplingParams(seed=1)) for _ in range(3)))
        await policy.aclose()
    assert len(server.requests) == 6


async def test_a_field_is_sent_again_if_leaving_it_out_does_not_help() -> None:
    with (
        FakeServer(lambda body, number: web.json_response({"error": "seed, or something else"}, status=400)) as server,
        pytest.raises(PolicyRequestError) as error,
    ):
        await read(server, seed=1)
    assert [("seed" in body) for body in server.requests] == [True, False]
    assert str(error.value).endswith("If it does not accept seed: unsupported seed."), "it is not about length"


LONG_TEXT = "The key of harbor is 4711. " + "and then some words " * 2000
LONG_BUDGET = Budget(context_window=8192, question_tokens=64, memory_tokens=100, chunk_tokens=2500, answer_tokens=40)
COUNT_TOKENS = load_tokenizer("embedded").count
TOKEN_COUNTERS = {
    "tokens": COUNT_TOKENS,
    "words, which are fewer": lambda text: len(text.split()),
    "characters, which are more": len,
    "zero": lambda text: 0,
    "a constant": lambda text: 7,
}


async def test_a_prompt_cut_by_the_server_is_an_event_in_every_view() -> None:
    with make_counting_server(COUNT_TOKENS, window=1500) as server:
        result = await read(server, LONG_TEXT, LONG_BUDGET)
    cuts = [event for event in result.events if event.kind is EventKind.PROMPT_CUT]
    assert [event.chunk_index for event in cuts] == list(range(len(cuts)))
    assert len(cuts) >= 3
    assert re.search(r"it counts 1,[45]\d\d tokens, and about 1,\d\d\d more were sent", cuts[0].detail)
    details = format_update(result.updates[0], ""), describe_read(result, ["upload"])
    assert "prompt_cut" in render_page(build_timeline(result.view()))
    assert all("prompt_cut" in json.dumps(values) for values in details)


SHORT_BUDGET = Budget(context_window=1024, question_tokens=32, memory_tokens=60, chunk_tokens=500, answer_tokens=40)


async def test_a_prompt_cut_by_a_small_window_is_an_event_and_the_probes_count_as_turns() -> None:
    with make_counting_server(COUNT_TOKENS, window=400) as server:
        result = await read(server, "and then some words " * 300, SHORT_BUDGET)
    assert {event.kind for event in result.events} == {EventKind.PROMPT_CUT}
    probes = [body for body in server.requests if "<section>" not in body["messages"][0]["content"]]
    assert len(probes) == 3, "two probes and the answer"
    assert result.usage.completion_tokens == 5 * result.usage.turns == 5 * len(server.requests)


async def test_a_read_can_be_set_to_stop_at_a_cut_prompt() -> None:
    with make_counting_server(COUNT_TOKENS, window=1500) as server, pytest.raises(PromptCutError, match="window"):
        await read(server, LONG_TEXT, LONG_BUDGET, on_incomplete="stop")


@pytest.mark.parametrize("name", TOKEN_COUNTERS)
async def test_a_server_that_counts_differently_causes_no_event(name: str) -> None:
    with make_counting_server(TOKEN_COUNTERS[name]) as server:
        result = await read(server, LONG_TEXT, LONG_BUDGET)
    assert (result.answer, result.events) == ("4711", ())


@pytest.mark.parametrize(("window", "status"), [(1500, CheckStatus.FAILED), (100_000, CheckStatus.OK)])
async def test_doctor_checks_that_the_server_takes_the_longest_prompt(window: int, status: CheckStatus) -> None:
    with make_counting_server(COUNT_TOKENS, window) as server:
        async with MemAgent(
            base_url=server.base_url, model="fake", tokenizer="embedded", budget=LONG_BUDGET, run_log=False
        ) as reader:
            *_, last_check = [check async for check in check_policy(reader)]
    assert (last_check.subject, last_check.status) == ("longest prompt", status)
    assert ("--context-window" in (last_check.remedy or "")) is (status is CheckStatus.FAILED)

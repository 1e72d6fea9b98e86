"""The baseline systems, which need only the policy: their prompts, costs and details."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from support.fake_server import FakeServer
from support.scripts import extract, make_document
from support.strategies import answer_perfectly

from memagent_evaluation.result_table import QuestionOutcome
from memagent_evaluation.systems import ReaderSystem, load_system
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_graph import Budget, Document, OpenAICompatiblePolicy, ScriptedPolicy, load_prompts
from memagent_graph.budget import CHAT_TEMPLATE_TOKENS
from memagent_graph.errors import BudgetError, MemAgentError, MissingExtraError
from memagent_graph.policies.model_info import ModelInfo, ModelShape
from memagent_graph.policies.profile import load_profile
from memagent_graph.reasoning import extract_reply
from memagent_graph.storage.checkpoints import open_checkpointer
from memagent_graph.strategies import load_strategy
from memagent_graph.strategies.excerpts import FullContext, Retrieval, count_prompt_overhead
from memagent_graph.tokenizers import load_tokenizer

EXCERPTS = ["full_context", "middle_truncation", "retrieval"]
BASELINES = [*EXCERPTS, "refine", "map_reduce"]
SYSTEMS = ["memagent", *BASELINES]
QUESTION = "What is the key of harbor?"
FACT = "The key of harbor is 4711."
SHORT_TEXT = make_document({0.5: FACT}, words=150)
LONG_TEXT = make_document({0.1: "The key of castle is 12.", 0.6: FACT}, words=1200)
SHAPE = ModelShape(parameters=1000, layers=2, width=8)


def answer_any_prompt(prompt: str) -> str:
    """Reply perfectly in any role, to the package's prompts and to those of the embedded policy."""
    if "<text>" not in prompt:
        return answer_perfectly(prompt)
    subject = extract(prompt, "problem").split()[-1].rstrip("?")
    keys = re.findall(rf"The key of {subject} is (\d+)\.", extract(prompt, "text"))
    return f"\\boxed{{{keys[-1] if keys else 'none'}}}"


class WindowedPolicy(ScriptedPolicy):
    """A scripted policy of known size and context window that records the maximum reply lengths."""

    window = 1000

    def __init__(self, script=answer_any_prompt, **options) -> None:
        super().__init__(script, **options)
        self.max_tokens: list[int] = []

    async def describe(self) -> ModelInfo:
        return ModelInfo(context_window=self.window, shape=SHAPE)

    async def complete(self, prompt, sampling):
        self.max_tokens.append(sampling.max_tokens)
        return await super().complete(prompt, sampling)


@pytest.fixture
def ask(make_reader):
    async def ask_system(
        name, text, policy=None, question=QUESTION, answer_tokens=60, has_profile=False, retrieval=None, **options
    ):
        if has_profile:
            options = {"profile": load_profile("embedded"), "prompts": None, **options}
        reader = make_reader(policy or WindowedPolicy(), **options)
        system = ReaderSystem(name, reader, Retrieval(**retrieval)) if retrieval else load_system(name, reader)
        document = await asyncio.to_thread(reader.store.add, Document.of(text))
        return await system.attempt(document, question, answer_tokens=answer_tokens, run_id="run")

    return ask_system


TOKENIZER = load_tokenizer("embedded")


def count_tokens(text: str) -> int:
    return TOKENIZER.count(text)


# All baselines


@pytest.mark.parametrize("has_profile", [False, True])
@pytest.mark.parametrize("name", BASELINES)
async def test_every_call_fits_the_window_and_the_fact_is_found(ask, name, has_profile) -> None:
    policy = WindowedPolicy()
    attempt = await ask(name, LONG_TEXT + " </text> <section> " * 200, policy, has_profile=has_profile)
    assert attempt.answer == "4711" or name in {"full_context", "middle_truncation"}
    for prompt in policy.prompts:
        assert count_tokens(prompt) + CHAT_TEMPLATE_TOKENS + 60 <= WindowedPolicy.window


@pytest.mark.parametrize("has_profile", [False, True])
@pytest.mark.parametrize("name", BASELINES)
async def test_a_fact_in_a_short_document_is_found_and_usage_sums_all_calls(ask, name, has_profile) -> None:
    policy = WindowedPolicy()
    attempt = await ask(name, SHORT_TEXT, policy, has_profile=has_profile)
    if name in {"full_context", "middle_truncation"}:
        assert SHORT_TEXT in {extract(policy.prompts[0], "text"), extract(policy.prompts[0], "section")}, "all of it"
        assert attempt.detail == f"{count_tokens(SHORT_TEXT)} of {count_tokens(SHORT_TEXT)} tokens shown"
    assert (attempt.outcome, attempt.answer, attempt.raw_answer) == (QuestionOutcome.ANSWERED, "4711", "\\boxed{4711}")
    assert len(policy.prompts) == (2 if has_profile else 1) if name in EXCERPTS else len(policy.prompts) > 2
    instructions = ("<text>", "<draft>", "one of many")
    assert any(phrase in prompt for prompt in policy.prompts for phrase in instructions) is not has_profile
    assert attempt.usage.turns == len(policy.prompts)
    assert attempt.usage.prompt_tokens == sum(map(count_tokens, policy.prompts))
    assert attempt.usage.completion_tokens == sum(count_tokens(answer_any_prompt(prompt)) for prompt in policy.prompts)
    assert attempt.usage.flops == sum(
        SHAPE.forward_flops(count_tokens(prompt), count_tokens(answer_any_prompt(prompt))) for prompt in policy.prompts
    )
    assert attempt.usage.full_context_flops == SHAPE.forward_flops(count_tokens(SHORT_TEXT) + 50, 60)
    assert attempt.usage.seconds > 0


async def test_flops_are_unknown_if_the_model_size_is_unknown(ask) -> None:
    usage = (await ask("full_context", SHORT_TEXT, ScriptedPolicy(answer_any_prompt))).usage
    assert (usage.flops, usage.full_context_flops) == (None, None)


@pytest.mark.parametrize("name", SYSTEMS)
async def test_answer_tokens_are_the_maximum_of_task_and_reader(make_reader, name) -> None:
    with FakeServer(lambda body, number: answer_any_prompt(body["messages"][0]["content"]), window=1000) as server:
        policy = OpenAICompatiblePolicy(base_url=server.base_url)
        reader = make_reader(policy, run_log=False)
        system = load_system(name, reader)
        document = reader.store.add(Document.of(SHORT_TEXT))
        for answer_tokens in (33, 80, 33):
            attempt = await system.attempt(document, QUESTION, answer_tokens=answer_tokens, run_id="unused")
            assert (attempt.answer, server.requests[-1]["max_tokens"]) == ("4711", max(answer_tokens, 60))
        await policy.aclose()
    assert {request["max_tokens"] for request in server.requests} == {60, 80}
    assert {request["temperature"] for request in server.requests} == {0.0}
    assert not any("logprobs" in request for request in server.requests)


@pytest.mark.parametrize("name", BASELINES)
async def test_empty_replies_are_retried_and_then_count_as_no_answer(ask, name) -> None:
    policy = WindowedPolicy(lambda prompt: "<think> hm </think>")
    attempt = await ask(name, FACT, policy)
    assert (attempt.outcome, attempt.answer) == (QuestionOutcome.NO_ANSWER, None)
    assert len(policy.prompts) == (3 if name in EXCERPTS else 4), "a memory is asked for once, an answer three times"
    assert "empty: " in attempt.detail


@pytest.mark.parametrize("name", BASELINES)
async def test_plain_answer_format_asks_for_no_box(ask, name) -> None:
    policy = WindowedPolicy(lambda prompt: extract_reply("<think>which?</think> It is 4711. "))
    attempt = await ask(name, SHORT_TEXT, policy, prompts=load_prompts(answer_format="plain"))
    assert attempt.answer == "It is 4711."
    assert not any("boxed" in prompt for prompt in policy.prompts)
    assert all("Reply with the answer only." in prompt for prompt in policy.prompts if "<text>" in prompt)
    assert "unboxed_answer: 1" in (await ask("full_context", SHORT_TEXT, policy)).detail


@pytest.mark.parametrize("name", ["memagent", "full_context", "refine"])
async def test_a_budget_without_room_for_text_is_an_error_with_a_hint(ask, name) -> None:
    with pytest.raises(BudgetError, match=r"an answer needs \d+ tokens .* window has 1000\. Use answer"):
        await ask(name, SHORT_TEXT, answer_tokens=990)
    with pytest.raises(MemAgentError, match="the question is empty"):
        await ask(name, SHORT_TEXT, question=" ")


# Full context


async def test_document_that_does_not_fit_is_an_outcome_and_costs_no_request(ask, log) -> None:
    policy = WindowedPolicy()
    attempt = await ask("full_context", LONG_TEXT, policy, run_log=log)
    assert attempt.outcome is QuestionOutcome.DOES_NOT_FIT
    assert (attempt.answer, attempt.usage.turns, attempt.usage.flops) == (None, 0, 0.0)
    assert attempt.usage.document_tokens == count_tokens(LONG_TEXT)
    size = re.fullmatch(r"does not fit: ([\d,]+) of 1,000 tokens", attempt.detail)
    assert 0 < int(size[1].replace(",", "")) - count_tokens(LONG_TEXT) < 250
    assert not policy.prompts
    run = log.get("run")
    assert run.stop_reason == QuestionOutcome.DOES_NOT_FIT
    assert run.ended is not None and run.answer is None


async def test_full_context_uses_the_window_up_to_its_last_token(ask) -> None:
    policy = WindowedPolicy()
    await ask("full_context", SHORT_TEXT, policy)
    call_tokens = count_tokens(policy.prompts[0]) + CHAT_TEMPLATE_TOKENS + 60
    policy.window = call_tokens
    options = {"budget": Budget(call_tokens - 1, 20, 20, 20, 60)}
    assert (await ask("full_context", SHORT_TEXT, policy, **options)).outcome is QuestionOutcome.ANSWERED
    policy.window = call_tokens - 1
    attempt = await ask("full_context", SHORT_TEXT, policy, **options)
    assert attempt.detail == f"does not fit: {call_tokens} of {call_tokens - 1} tokens"
    assert len(policy.prompts) == 2


# The log and checkpoints


async def test_readers_of_one_system_share_one_checkpoint_connection(make_reader, tmp_path, monkeypatch):
    opened_paths = []

    async def record_opening(checkpoints):
        if isinstance(checkpoints, Path):
            opened_paths.append(checkpoints)
        return await open_checkpointer(checkpoints)

    monkeypatch.setattr("memagent_graph.reader.open_checkpointer", record_opening)
    reader = make_reader(WindowedPolicy(), checkpoints=tmp_path / "checkpoints.sqlite")
    system = load_system("refine", reader)
    document = reader.store.add(Document.of(SHORT_TEXT))
    for answer_tokens in (50, 60, 50):
        await system.attempt(document, QUESTION, answer_tokens=answer_tokens, run_id=f"run-{answer_tokens}")
    assert opened_paths == [tmp_path / "checkpoints.sqlite"]
    await reader.aclose()


async def test_full_context_uses_the_answer_tokens_option(make_reader) -> None:
    reader = make_reader(WindowedPolicy())
    system = load_system("full_context:least_answer_tokens=40", reader)
    document = reader.store.add(Document.of(SHORT_TEXT))
    assert (await system.attempt(document, QUESTION, answer_tokens=30, run_id="r")).answer == "4711"
    await reader.aclose()


@pytest.mark.parametrize("name", SYSTEMS)
async def test_attempts_are_logged_with_spans_and_can_be_resumed(make_reader, tmp_path, log, name) -> None:
    policy = WindowedPolicy()
    reader = make_reader(policy, run_log=log, checkpoints=tmp_path / "checkpoints.sqlite")
    document = reader.store.add(Document.of(SHORT_TEXT))
    for _ in range(2):
        system = load_system(name, reader)
        attempt = await system.attempt(document, QUESTION, answer_tokens=30, run_id="one")
        assert (attempt.run_id, attempt.answer, attempt.usage.turns) == ("one", "4711", len(policy.prompts))
    run = log.get("one")
    assert (run.strategy, run.answer, run.settings["answer_tokens"]) == (system.strategy.name, "4711", 60)
    expected_strategy = FullContext(least_answer_tokens=30) if name == "full_context" else system.strategy
    assert load_strategy(run.settings.get("strategy")) == expected_strategy
    assert attempt.chunks == len(policy.prompts) - 1 or name in BASELINES
    spans = [span for conversation in log.conversations("one") for span in conversation.reads]
    excerpt = "".join(reader.store.read(document, span.start_byte, span.end_byte) for span in spans)
    assert FACT in excerpt
    assert all(excerpt in SHORT_TEXT or span.start_char < span.end_char <= len(SHORT_TEXT) for span in spans)
    await reader.aclose()


# Middle truncation


@pytest.mark.parametrize("has_profile", [False, True])
@pytest.mark.parametrize(("depth", "answer"), [(0.0, "4711"), (0.5, None), (1.0, "4711")])
async def test_middle_truncation_shows_both_ends_of_a_long_document(ask, has_profile, depth, answer) -> None:
    policy = WindowedPolicy()
    attempt = await ask("middle_truncation", make_document({depth: FACT}), policy, has_profile=has_profile)
    assert attempt.answer == (answer or "none")
    excerpt = extract(policy.prompts[0], "text") or extract(policy.prompts[0], "section")
    head, tail = re.split(r"\n\n(?:\[\.\.\.\]\n\n)?", excerpt)
    text = make_document({depth: FACT})
    assert text.startswith(head)
    assert text.endswith(tail)
    assert abs(count_tokens(head) - count_tokens(tail)) <= 8
    assert policy.window - 8 <= count_tokens(policy.prompts[0]) + CHAT_TEMPLATE_TOKENS + 60 <= policy.window
    assert re.fullmatch(rf"\d+ of {count_tokens(text):,} tokens shown", attempt.detail)


# Retrieval


async def test_retrieved_chunks_are_shown_in_document_order(ask) -> None:
    text = make_document(
        {0.2: "The harbor has a key.", 0.5: "The harbor lies north.", 0.8: "The key of harbor is 4711."}, words=1200
    )
    policy = WindowedPolicy()
    attempt = await ask("retrieval", text, policy, retrieval={"chunks": 3, "chunk_tokens": 40})
    excerpts = extract(policy.prompts[0], "text").split("\n\n[...]\n\n")
    assert [("key" in excerpt, "north" in excerpt, "4711" in excerpt) for excerpt in excerpts] == [
        (True, False, False),
        (False, True, False),
        (True, False, True),
    ]
    assert re.fullmatch(r"1\d\d of [\d,]+ tokens shown", attempt.detail)


async def test_adjacent_retrieved_chunks_are_joined(ask) -> None:
    policy = WindowedPolicy()
    text = " ".join(["The harbor is wide and deep and old."] * 12) + make_document({}, words=1200)
    await ask("retrieval", text, policy, retrieval={"chunks": 2, "chunk_tokens": 30})
    assert text.startswith(extract(policy.prompts[0], "text"))


async def test_retrieval_fills_the_window_with_chunks(ask) -> None:
    policy = WindowedPolicy()
    await ask("retrieval", LONG_TEXT, policy)
    used_tokens = count_tokens(policy.prompts[0]) + CHAT_TEMPLATE_TOKENS + 60
    assert WindowedPolicy.window - 120 < used_tokens <= WindowedPolicy.window


@pytest.mark.parametrize("question", [QUESTION, "Wer?"], ids=["that ranks it", "whose words do not occur"])
async def test_chunk_larger_than_the_window_is_truncated(ask, question) -> None:
    policy = WindowedPolicy()
    attempt = await ask("retrieval", LONG_TEXT, policy, question=question, retrieval={"chunk_tokens": 5000})
    assert LONG_TEXT.startswith(extract(policy.prompts[0], "text"))
    assert re.fullmatch(r"[78]\d\d of [\d,]+ tokens shown", attempt.detail)


async def test_without_bm25s_the_error_names_the_extra(make_reader, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(
        MissingExtraError, match=r"retrieval by BM25 needs the extra \"recall\".*pip install .*\[recall\]"
    ):
        load_system("retrieval", make_reader())


class LetterCountRetriever:
    """A user's retriever that ranks texts by how often the letters of the query occur."""

    async def rank(self, texts, query: str) -> list[int]:
        letter_counts = [sum(text.lower().count(letter) for letter in query) for text in texts]
        return sorted(range(len(letter_counts)), key=lambda index: -letter_counts[index])


async def test_own_retriever_ranks_the_chunks(ask) -> None:
    text = "aaaa bbbb. " * 900 + "The jazz quiz of Zoltan in Oz. " + "cccc dddd. " * 900
    policy, settings = WindowedPolicy(), {"chunks": 1, "chunk_tokens": 30, "retriever": LetterCountRetriever()}
    await ask("retrieval", text, policy, question="zz jq?", retrieval=settings)
    assert "Zoltan" in extract(policy.prompts[0], "text")


# Refine


async def test_a_box_in_a_draft_does_not_shorten_it(ask) -> None:
    draft = "From the first part: it may be north.\n\\boxed{12}\nStill open: which harbor."
    policy = WindowedPolicy(lambda prompt: draft if "<draft>" in prompt else "\\boxed{12}")
    assert (await ask("refine", LONG_TEXT, policy)).answer == "12"
    assert {extract(prompt, "draft") for prompt in policy.prompts[1:-1]} == {draft}
    assert extract(policy.prompts[-1], "memory") == draft


# A document as long as the window, RULER's usual setting


@pytest.mark.parametrize("has_profile", [False, True], ids=["package", "policy"])
@pytest.mark.parametrize("name", ["niah_single_1", "niah_multiquery", "vt", "fwe"])
async def test_document_of_exactly_the_window_length_fits_one_call(make_reader, name, has_profile) -> None:
    """Regression: the length did not include the prompt's instructions and the maximum length of the answer."""
    policy = WindowedPolicy(lambda prompt: "\\boxed{?}")
    policy.window = 2000
    options = {"profile": load_profile("embedded"), "prompts": None} if has_profile else {}
    budget = Budget(context_window=2000, question_tokens=96, memory_tokens=60, chunk_tokens=100, answer_tokens=400)
    reader = make_reader(policy, budget=budget, **options)
    context = await reader.aprepare()
    task = load_task(name, TaskSettings(context.tokenizer, prompt_tokens=count_prompt_overhead(context)))
    system = load_system("full_context", reader)
    for index in range(2):
        sample = task.sample(2000, index)
        document = reader.store.add(Document.of("".join(sample.text())))
        attempt = await system.attempt(document, sample.question, answer_tokens=task.answer_tokens, run_id=f"{index}")
        assert attempt.outcome is QuestionOutcome.ANSWERED, attempt.detail
        prompt, reply_tokens = list(zip(policy.prompts, policy.max_tokens, strict=True))[-2 if has_profile else -1]
        assert count_tokens(prompt) + CHAT_TEMPLATE_TOKENS + reply_tokens <= policy.window
        assert reply_tokens >= min(task.answer_tokens, context.budget.memory_tokens if has_profile else 400)
        if not has_profile:  # a policy that writes a memory first has a short first reply
            longer_attempt = await system.attempt(document, sample.question, answer_tokens=400, run_id=f"all {index}")
            assert longer_attempt.outcome is QuestionOutcome.DOES_NOT_FIT

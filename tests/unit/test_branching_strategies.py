"""Strategies with parallel branches: order, merges in rounds, limits of concurrency, resumed runs, segments."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from support.scripts import SMALL_BUDGET, extract, make_document
from support.strategies import answer_perfectly

from memagent_graph import Budget, Document, ScriptedPolicy, load_prompts
from memagent_graph.budget import CHAT_TEMPLATE_TOKENS
from memagent_graph.documents import chunking
from memagent_graph.errors import BudgetError, MemAgentError, PolicyError, StrategyError
from memagent_graph.policies.profile import load_profile
from memagent_graph.reading.execution import Execution
from memagent_graph.reading.graph import build_graph
from memagent_graph.reading.steps import StepContext
from memagent_graph.strategies.map_reduce import Finding, MapReduce, group_findings, join_findings, parse_finding
from memagent_graph.strategies.segments import Segments
from memagent_graph.tokenizers import load_tokenizer

QUESTION = "What is the key of harbor?"
HARBOR_FACT = "The key of harbor is 4711."
LONG_TEXT = make_document({0.1: "The key of castle is 12.", 0.6: HARBOR_FACT}, words=900)
TOKENIZER = load_tokenizer("embedded")


class ConcurrencyCounter(ScriptedPolicy):
    """A script that counts its requests in flight. Requests with `slow_text` take longer."""

    slow_text = "nowhere"

    def __init__(self, script=answer_perfectly, **options) -> None:
        super().__init__(script, **options)
        self.max_in_flight = self.in_flight = 0

    async def complete(self, prompt, sampling):
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0.05 if self.slow_text in prompt[0]["content"] else 0)
            return await super().complete(prompt, sampling)
        finally:
            self.in_flight -= 1


@pytest.fixture
def make_agent(make_reader):
    def make(policy, strategy=None, **options):
        return make_reader(policy, strategy=strategy or MapReduce(), run_log=False, **options)

    return make


def list_map_prompts(policy) -> list[str]:
    return [prompt for prompt in policy.prompts if "one of many parts" in prompt]


def list_merge_prompts(policy) -> list[str]:
    return [prompt for prompt in policy.prompts if "<findings>" in prompt]


@pytest.mark.parametrize("limit", [1, 3])
async def test_chunks_are_read_concurrently_up_to_the_limit(make_agent, limit) -> None:
    policy = ConcurrencyCounter(delay=0.01)
    result = await make_agent(policy, branches=limit).aread(LONG_TEXT, QUESTION)
    assert (result.answer, policy.max_in_flight) == ("4711", limit)
    assert sum(call.seconds for call in result.trace.calls) > limit / 2 * result.usage.seconds
    assert len(list_map_prompts(policy)) > 10


async def test_after_a_failure_running_calls_finish_and_no_other_starts(make_agent) -> None:
    def script(prompt: str):
        return PolicyError("broken") if "word30 " in prompt else answer_perfectly(prompt)

    policy = ConcurrencyCounter(script, delay=0.002)
    with pytest.raises(MemAgentError, match="broken"):
        await make_agent(policy, MapReduce(width=8), branches=2).aread(LONG_TEXT, QUESTION)
    await asyncio.sleep(0.05)
    assert 2 <= len(policy.prompts) <= 3
    assert policy.in_flight == 0


async def test_findings_are_combined_in_document_order_without_loss(make_agent) -> None:
    policy = ConcurrencyCounter()
    policy.slow_text = "harbor is 1."
    text = make_document({number / 10: f"The key of harbor is {number}." for number in (1, 5, 9)})
    result = await make_agent(policy).aread(text, QUESTION)
    assert extract(policy.prompts[-1], "memory") == "harbor 1\nharbor 5\nharbor 9"
    assert result.answer == "9"
    assert not list_merge_prompts(policy)


async def test_without_findings_the_question_is_answered_from_an_empty_memory(make_agent) -> None:
    policy = ConcurrencyCounter()
    result = await make_agent(policy).aread(LONG_TEXT, "What is the key of nowhere?")
    assert (result.answer, result.memory) == ("unknown", "")
    assert extract(policy.prompts[-1], "memory") == "(empty)"
    assert not list_merge_prompts(policy)


async def test_one_chunk_takes_one_map_call_and_its_finding_is_not_shortened(make_agent) -> None:
    finding = " ".join(f"n{word_number}" for word_number in range(14))
    policy = ConcurrencyCounter(lambda prompt: finding if "<section>" in prompt else "\\boxed{4711}")
    budget = replace(SMALL_BUDGET, chunk_tokens=40)
    assert TOKENIZER.count(finding) > 40 // 2
    result = await make_agent(policy, budget=budget).aread(HARBOR_FACT, QUESTION)
    assert (len(policy.prompts), result.chunks_read, result.answer) == (2, 1, "4711")
    assert extract(policy.prompts[-1], "memory") == finding


async def test_a_finding_keeps_its_text_outside_a_box(make_agent) -> None:
    """The boxed format is for answers; a finding is not reduced to the content of a box in it."""
    finding = "North of the harbor:\n\\boxed{12}\nand more."

    def script(prompt: str) -> str:
        if "<findings>" in prompt:
            return "merged " + finding
        return finding if "one of many parts" in prompt else "\\boxed{12}"

    policy = ConcurrencyCounter(script)
    await make_agent(policy).aread(LONG_TEXT, QUESTION)
    assert finding in extract(list_merge_prompts(policy)[0], "findings")
    assert "and more." in extract(policy.prompts[-1], "memory")


@pytest.mark.parametrize("with_profile", [False, True])
async def test_findings_that_do_not_fit_are_merged_in_rounds_and_in_order(make_agent, with_profile) -> None:
    def script(prompt: str) -> str:
        facts = re.findall(r"F\d+", prompt)
        if "<section>" in prompt and "word" in prompt:
            return " ".join([*facts, "and " * 20]) if facts else "none"
        return " ".join(dict.fromkeys(facts)) if "<section>" in prompt or "<findings>" in prompt else "\\boxed{done}"

    policy = ConcurrencyCounter(script)
    text = make_document({number / 80: f"F{number}" for number in range(80)}, words=2400)
    options = {"profile": load_profile("embedded"), "prompts": None, "budget": SMALL_BUDGET} if with_profile else {}
    result = await make_agent(policy, **options).aread(text, QUESTION)
    merges = [update for update in result.updates if update.chunk_index is None]
    assert {len(update.branch.split("-")) for update in merges} == {2}
    starts_by_round = {}
    for update in merges:
        starts_by_round.setdefault(update.branch.split("-")[0], []).append(int(update.branch.split("-")[1]))
    assert max(map(len, starts_by_round.values())) > 1, "a merge is merged again"
    assert all(round_starts == sorted(set(round_starts)) for round_starts in starts_by_round.values())
    for prompt in policy.prompts:
        assert TOKENIZER.count(prompt) + CHAT_TEMPLATE_TOKENS + 60 <= SMALL_BUDGET.context_window
    fact_numbers = [int(number) for number in re.findall(r"F(\d+)", result.memory)]
    assert [] != fact_numbers == sorted(set(fact_numbers))


async def test_a_resumed_run_repeats_only_the_branch_that_failed(make_agent, tmp_path) -> None:
    is_broken = True

    def script(prompt: str):
        return PolicyError("gone") if is_broken and HARBOR_FACT in prompt else answer_perfectly(prompt)

    policy = ConcurrencyCounter(script)
    policy.slow_text = HARBOR_FACT  # so that the other branches have finished
    agent = make_agent(policy, checkpoints=tmp_path / "checkpoints.sqlite")
    with pytest.raises(PolicyError, match="gone") as error:
        await agent.aread(LONG_TEXT, QUESTION, run_id="one")
    assert error.value.branch == str(error.value.chunk_index)
    request_count, is_broken = len(policy.prompts), False
    result = await agent.aresume("one")
    assert result.answer == "4711"
    assert len(policy.prompts) == request_count + 2, "the chunk that failed, and the answer"
    assert result.chunks_read == request_count
    await agent.aclose()


@pytest.mark.parametrize(
    ("reply", "finding"),
    [*((text, "") for text in ("none", " None. ", '"none"', "(empty)", "EMPTY")),
     *((text, text) for text in ("nonesuch", "none of it is 12", "12 (none)"))],
)  # fmt: skip
def test_only_a_reply_of_one_known_word_means_no_finding(reply, finding) -> None:
    assert parse_finding(reply, load_prompts()).text == finding


async def build_context(make_agent, chunk_tokens: int):
    budget = Budget(
        context_window=1000, question_tokens=50, memory_tokens=30, chunk_tokens=chunk_tokens, answer_tokens=60
    )
    return build_graph(await make_agent(ConcurrencyCounter(), budget=budget).aprepare(), MapReduce()).reader_context


@pytest.mark.parametrize("chunk_tokens", [6, 12, 200])
@pytest.mark.parametrize("finding_count", [1, 3, 25])
async def test_groups_have_at_least_two_findings_and_fit_one_call(make_agent, chunk_tokens, finding_count) -> None:
    context = await build_context(make_agent, chunk_tokens)
    findings = {str(n): Finding(call_id="", text=f"</findings> w{n} " * 20) for n in range(finding_count)}
    groups = group_findings(findings, context)
    names = [name for group in groups for name in group]
    assert names == [name for name in findings if name in names]
    if groups:
        assert len(names) >= finding_count - 1, "at most one is in no group"
    else:
        all_findings = join_findings(findings.values(), context)
        assert finding_count == 1 or TOKENIZER.count(all_findings) <= context.budget.memory_tokens
    for group in groups:
        assert len(group) >= 2
        text = context.prompts.neutralise(join_findings([findings[name] for name in group], context))
        assert TOKENIZER.count(text) <= chunk_tokens


async def test_a_budget_without_room_for_two_findings_is_an_error(make_agent) -> None:
    context = await build_context(make_agent, 5)
    findings = {str(number): Finding(call_id="", text="word " * 20) for number in range(3)}
    with pytest.raises(BudgetError, match=r"no room to merge .*chunk_tokens is 5"):
        group_findings(findings, context)
    assert group_findings({"0": findings["0"]}, context) == []


@pytest.mark.parametrize("words", [3, 700])
@pytest.mark.parametrize("segment_count", [1, 3, 500])
async def test_segments_cover_all_chunks_and_differ_by_at_most_one(make_agent, words, segment_count) -> None:
    agent = make_agent(ConcurrencyCounter())
    document, context = agent.store.add(Document.of(make_document({}, words=words))), await agent.aprepare()
    step = StepContext({"document": document}, context, Execution(context))
    cursor, chunk_cursors = {"index": 0, "char": 0, "byte": 0, "piece_char": 0, "piece_byte": 0, "piece_tokens": 0}, []
    while (choice := await step.next_chunk(cursor, needs_text=False)) is not None:
        chunk_cursors.append(cursor)
        cursor = choice[1]
    other_tasks: list[str] = []
    asyncio.get_running_loop().call_soon(other_tasks.append, "has run")
    segments = (await Segments(segment_count)._cut_segments({}, step))["segments"]
    assert (len(segments), other_tasks) == (min(segment_count, len(chunk_cursors)), ["has run"])
    first_chunks = [segment["cursor"]["index"] for segment in segments]
    end_chunks = [segment["end"] for segment in segments]
    assert [*first_chunks, len(chunk_cursors)] == [0, *end_chunks]
    assert [segment["cursor"] for segment in segments] == [chunk_cursors[chunk] for chunk in first_chunks]
    lengths = [end - start for start, end in zip(first_chunks, end_chunks, strict=True)]
    assert max(lengths) - min(lengths) <= 1


async def test_a_document_that_shrinks_while_its_segments_are_read_is_an_error(make_agent) -> None:
    def script(prompt: str) -> str:
        agent.store._find_path(reference, "text").write_text("short")
        chunking._newest_pieces.clear()
        return answer_perfectly(prompt)

    agent = make_agent(ScriptedPolicy(script), strategy="segments:count=2", branches=1)
    reference = agent.store.add(Document.from_text(LONG_TEXT * 20))
    with pytest.raises(StrategyError, match=r"longer than the rest of the document.*stored document was changed"):
        await agent.aread(reference, QUESTION)

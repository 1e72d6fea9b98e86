"""Branches side by side: order, merges in rounds, bounds, waves that broke off, segments."""

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
from memagent_graph.reading.branching import Finding, group_findings, join_findings, parse_finding, split_into_segments
from memagent_graph.reading.execution import Execution
from memagent_graph.reading.graph import build_graph
from memagent_graph.reading.steps import StepContext
from memagent_graph.strategies.map_reduce import MapReduce
from memagent_graph.tokenizers import load_tokenizer

QUESTION = "What is the key of harbor?"
FACT = "The key of harbor is 4711."
LONG = make_document({0.1: "The key of castle is 12.", 0.6: FACT}, words=900)
TOKENIZER = load_tokenizer("embedded")


class ConcurrencyCounter(ScriptedPolicy):
    """A script that counts its requests in flight. Requests with the text `slow` take longer."""

    slow = "nowhere"

    def __init__(self, script=answer_perfectly, **options) -> None:
        super().__init__(script, **options)
        self.highest = self.in_flight = 0

    async def complete(self, prompt, sampling):
        self.in_flight += 1
        self.highest = max(self.highest, self.in_flight)
        try:
            await asyncio.sleep(0.05 if self.slow in prompt[0]["content"] else 0)
            return await super().complete(prompt, sampling)
        finally:
            self.in_flight -= 1


@pytest.fixture
def reader(make_reader):
    def reader(policy, strategy=None, **options):
        return make_reader(policy, strategy=strategy or MapReduce(), run_log=False, **options)

    return reader


def map_prompts(policy) -> list[str]:
    return [prompt for prompt in policy.prompts if "one of many parts" in prompt]


def merge_prompts(policy) -> list[str]:
    return [prompt for prompt in policy.prompts if "<findings>" in prompt]


@pytest.mark.parametrize("bound", [1, 3])
async def test_chunks_are_asked_side_by_side_within_the_bound(reader, bound) -> None:
    policy = ConcurrencyCounter()
    assert (await reader(policy, branches=bound).aread(LONG, QUESTION)).answer == "4711"
    assert policy.highest == bound
    assert len(map_prompts(policy)) > 10


async def test_a_failure_ends_the_read_once_those_at_work_have_finished_and_no_other_begins(reader) -> None:
    def script(prompt: str):
        return PolicyError("broken") if "word30 " in prompt else answer_perfectly(prompt)

    policy = ConcurrencyCounter(script, delay=0.002)
    with pytest.raises(MemAgentError, match="broken"):
        await reader(policy, MapReduce(width=8), branches=2).aread(LONG, QUESTION)
    await asyncio.sleep(0.05)
    assert 2 <= len(policy.prompts) <= 3
    assert policy.in_flight == 0


async def test_findings_are_combined_in_document_order_without_loss(reader) -> None:
    policy = ConcurrencyCounter()
    policy.slow = "harbor is 1."
    text = make_document(
        {0.1: "The key of harbor is 1.", 0.5: "The key of harbor is 2.", 0.9: "The key of harbor is 3."}
    )
    result = await reader(policy).aread(text, QUESTION)
    assert extract(policy.prompts[-1], "memory") == "harbor 1\nharbor 2\nharbor 3"
    assert result.answer == "3"
    assert not merge_prompts(policy)


async def test_where_no_chunk_contributes_the_answer_is_asked_from_an_empty_memory(reader) -> None:
    policy = ConcurrencyCounter()
    result = await reader(policy).aread(LONG, "What is the key of nowhere?")
    assert (result.answer, result.memory) == ("unknown", "")
    assert extract(policy.prompts[-1], "memory") == "(empty)"
    assert not merge_prompts(policy)


async def test_a_document_of_one_chunk_is_asked_about_once_and_its_finding_is_kept_whole(reader) -> None:
    finding = " ".join(f"n{number}" for number in range(14))
    policy = ConcurrencyCounter(lambda prompt: finding if "<section>" in prompt else "\\boxed{4711}")
    budget = replace(SMALL_BUDGET, chunk_tokens=40)
    assert TOKENIZER.count(finding) > 40 // 2
    result = await reader(policy, budget=budget).aread(FACT, QUESTION)
    assert (len(policy.prompts), result.chunks_read, result.answer) == (2, 1, "4711")
    assert extract(policy.prompts[-1], "memory") == finding


async def test_findings_keep_the_text_outside_a_box(reader) -> None:
    """The boxed format is for answers; a finding is not cut down to what a box in it holds."""
    finding = "North of the harbor:\n\\boxed{12}\nand more."

    def script(prompt: str) -> str:
        if "<findings>" in prompt:
            return "merged " + finding
        return finding if "one of many parts" in prompt else "\\boxed{12}"

    policy = ConcurrencyCounter(script)
    await reader(policy).aread(LONG, QUESTION)
    assert finding in extract(merge_prompts(policy)[0], "findings")
    assert "and more." in extract(policy.prompts[-1], "memory")


@pytest.mark.parametrize("own", [False, True])
async def test_findings_that_do_not_fit_are_merged_in_rounds_and_in_order(reader, own) -> None:
    def script(prompt: str) -> str:
        facts = re.findall(r"F\d+", prompt)
        if "<section>" in prompt and "word" in prompt:
            return " ".join([*facts, "and " * 20]) if facts else "none"
        return " ".join(dict.fromkeys(facts)) if "<section>" in prompt or "<findings>" in prompt else "\\boxed{done}"

    policy = ConcurrencyCounter(script)
    text = make_document({number / 80: f"F{number}" for number in range(80)}, words=2400)
    options = {"profile": load_profile("embedded"), "prompts": None, "budget": SMALL_BUDGET} if own else {}
    result = await reader(policy, **options).aread(text, QUESTION)
    merges = [update for update in result.updates if update.chunk_index is None]
    assert {len(update.branch.split("-")) for update in merges} == {2}
    starts = {}
    for update in merges:
        starts.setdefault(update.branch.split("-")[0], []).append(int(update.branch.split("-")[1]))
    assert max(map(len, starts.values())) > 1, "a merge is merged again"
    assert all(ends == sorted(set(ends)) for ends in starts.values())
    for prompt in policy.prompts:
        assert TOKENIZER.count(prompt) + CHAT_TEMPLATE_TOKENS + 60 <= SMALL_BUDGET.context_window
    numbers = [int(number) for number in re.findall(r"F(\d+)", result.memory)]
    assert numbers == sorted(set(numbers))
    assert numbers


async def test_a_wave_that_broke_off_asks_only_for_what_is_missing_when_it_is_resumed(reader, tmp_path) -> None:
    is_broken = True

    def script(prompt: str):
        return PolicyError("gone") if is_broken and FACT in prompt else answer_perfectly(prompt)

    policy = ConcurrencyCounter(script)
    policy.slow = FACT  # so that the others of its wave are done
    agent = reader(policy, checkpoints=tmp_path / "checkpoints.sqlite")
    with pytest.raises(PolicyError, match="gone") as failure:
        await agent.aread(LONG, QUESTION, run_id="one")
    assert failure.value.branch == str(failure.value.chunk_index)
    requests, is_broken = len(policy.prompts), False
    result = await agent.aresume("one")
    assert result.answer == "4711"
    assert len(policy.prompts) == requests + 2, "the chunk that failed, and the answer"
    assert result.chunks_read == requests
    await agent.aclose()


@pytest.mark.parametrize(
    ("reply", "finding"),
    [*((text, "") for text in ("none", " None. ", '"none"', "(empty)", "EMPTY")),
     *((text, text) for text in ("nonesuch", "none of it is 12", "12 (none)"))],
)  # fmt: skip
def test_one_word_alone_says_that_there_is_nothing(reply, finding) -> None:
    assert parse_finding(reply, load_prompts()).text == finding


async def context_of(reader, chunk_tokens: int):
    budget = Budget(
        context_window=1000, question_tokens=50, memory_tokens=30, chunk_tokens=chunk_tokens, answer_tokens=60
    )
    return build_graph(await reader(ConcurrencyCounter(), budget=budget).aprepare(), MapReduce()).reader_context


@pytest.mark.parametrize("chunk_tokens", [6, 12, 200])
@pytest.mark.parametrize("count", [1, 3, 25])
async def test_groups_have_two_findings_at_least_and_fit_one_call(reader, chunk_tokens, count) -> None:
    context = await context_of(reader, chunk_tokens)
    findings = {str(number): Finding(call_id="", text=f"</findings> w{number} " * 20) for number in range(count)}
    groups = group_findings(findings, context)
    names = [name for group in groups for name in group]
    assert names == [name for name in findings if name in names]
    if groups:
        assert len(names) >= count - 1, "all but one that is left over"
    else:
        assert count == 1 or TOKENIZER.count(join_findings(findings.values(), context)) <= context.budget.memory_tokens
    for group in groups:
        assert len(group) >= 2
        text = context.prompts.neutralise(join_findings([findings[name] for name in group], context))
        assert TOKENIZER.count(text) <= chunk_tokens


async def test_a_budget_without_room_for_two_findings_is_an_error_that_says_so(reader) -> None:
    context = await context_of(reader, 5)
    findings = {str(number): Finding(call_id="", text="word " * 20) for number in range(3)}
    with pytest.raises(BudgetError, match=r"no room to merge .*chunk_tokens is 5"):
        group_findings(findings, context)
    assert group_findings({"0": findings["0"]}, context) == []


@pytest.mark.parametrize("words", [3, 700])
@pytest.mark.parametrize("count", [1, 3, 500])
async def test_segments_have_all_chunks_once_and_are_as_long_as_each_other_up_to_one(reader, words, count) -> None:
    agent = reader(ConcurrencyCounter())
    document, context = agent.store.add(Document.of(make_document({}, words=words))), await agent.aprepare()
    step = StepContext({"document": document}, context, Execution(context))
    cursor, starts = {"index": 0, "char": 0, "byte": 0, "piece_char": 0, "piece_byte": 0, "piece_tokens": 0}, []
    while (choice := await step.next_chunk(cursor, needs_text=False)) is not None:
        starts.append(cursor)
        cursor = choice[1]
    segments = await split_into_segments(step, count)
    assert len(segments) == min(count, len(starts))
    begins = [segment["cursor"]["index"] for segment in segments]
    ends = [segment["end"] for segment in segments]
    assert [*begins, len(starts)] == [0, *ends]
    assert [segment["cursor"] for segment in segments] == [starts[begin] for begin in begins]
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    assert max(lengths) - min(lengths) <= 1


async def test_a_document_that_becomes_shorter_while_its_segments_are_read_is_an_error(reader, monkeypatch) -> None:
    def script(prompt: str) -> str:
        agent.store._get_text_path(reference).write_text("short")
        monkeypatch.setattr(chunking, "_PIECE_CACHE", chunking._PieceCache(0))
        return answer_perfectly(prompt)

    agent = reader(ScriptedPolicy(script), strategy="segments:count=2", branches=1)
    reference = agent.store.add(Document.from_text(LONG * 20))
    with pytest.raises(StrategyError, match=r"longer than the rest of the document.*stored document was changed"):
        await agent.aread(reference, QUESTION)

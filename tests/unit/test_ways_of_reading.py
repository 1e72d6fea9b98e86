"""Behaviour of single strategies that ship; common behaviour is in test_every_strategy."""

from __future__ import annotations

import re

import pytest
from support.scripts import extract, make_document, read_perfectly

from memagent_graph import (
    Budget,
    Completion,
    FinishReason,
    Limits,
    MemAgent,
    ScriptedPolicy,
    StopReason,
    UpdateRules,
    load_tokenizer,
)
from memagent_graph.errors import BudgetError, RetrievalError, StrategyError
from memagent_graph.events import UpdateRule
from memagent_graph.policies.model_info import ModelInfo, ModelShape
from memagent_graph.strategies import load_strategy
from memagent_graph.strategies.recall import Recall

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=800)
LONGER_TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=2000)
QUESTION = "What is the key of harbor?"


def list_event_kinds(result) -> list[str]:
    return [event.kind.value for event in result.events]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gated:stop=maybe", "stop=maybe is not valid for gated. Input should be a valid boolean"),
        ("gated:exit=yes", "gated has no option 'exit'. Its options: passes, stop"),
        ("parallel:passes=two", "passes=two is not valid for parallel. Input should be a valid integer"),
        ("parallel:passes=0", "parallel:passes must be at least 1, got 0. Use 1 or more"),
        ("retrieval:chunks=-1", "retrieval:chunks must be at least 0, got -1"),
        ("parallel:passes=2:passes=3", "parallel:passes=2:passes=3 has an option twice"),
        ("gatd:stop=yes", "Did you mean gated"),
    ],
)
def test_an_invalid_option_of_a_strategy_is_refused_with_the_remedy(name, words) -> None:
    with pytest.raises(StrategyError, match=re.escape(words)):
        load_strategy(name)


@pytest.mark.parametrize("name", ["gated:stop=yes", "parallel", "recall", "reread", "segments"])
def test_a_strategy_with_longer_prompts_has_shorter_chunks_unless_their_size_is_set(name) -> None:
    reader = MemAgent(ScriptedPolicy([]), tokenizer="embedded", strategy=name, run_log=False)
    assert reader.graph().reader_context.budget.chunk_tokens <= Budget().chunk_tokens
    reader = MemAgent(ScriptedPolicy([]), tokenizer="embedded", strategy="recall", budget=Budget(), run_log=False)
    with pytest.raises(BudgetError, match=r"recall_update.*Use chunk_tokens 3934"):
        reader.graph()


def gate(prompt: str) -> str:
    if "<section>" not in prompt:
        return read_perfectly(prompt)
    return f"REWRITE\n{read_perfectly(prompt)}" if "harbor" in extract(prompt, "section") else "KEEP"


def test_a_gate_that_keeps_the_memory_keeps_every_byte(make_reader, log) -> None:
    memory = "  harbor 4711\twith  odd   blanks"

    def script(prompt: str) -> str:
        return f"REWRITE\n{memory}" if "harbor" in extract(prompt, "section") else gate(prompt)

    policy = ScriptedPolicy(script)
    result = make_reader(policy, strategy="gated", run_log=log).read(TEXT, QUESTION, run_id="r")
    unchanged = [update for update in result.updates if not update.changed]
    assert len(unchanged) == result.chunks_read - 1
    assert {update.memory for update in result.updates} == {"", memory.strip()}
    outcomes = {conversation.text: conversation.outcome.value for conversation in log.conversations("r")}
    assert outcomes["KEEP"] == "kept_previous"
    assert not result.events


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        ("maybe", "the first line is 'maybe'"),
        ("KEEP\nharbor 4711", "there is a new memory below KEEP"),
        ("REWRITE", "there is no new memory below REWRITE"),
        ("keep", "the first line is 'keep'"),
        ("STOP", "the first line is 'STOP', not KEEP, REWRITE"),
    ],
)
def test_an_invalid_gate_reply_is_asked_for_again_and_then_keeps_the_memory(make_reader, reply, detail) -> None:
    policy = ScriptedPolicy(lambda prompt: reply if "castle is" in extract(prompt, "section") else gate(prompt))
    result = make_reader(policy, strategy="gated").read(TEXT, QUESTION)
    assert result.answer == "4711"
    assert list_event_kinds(result) == ["malformed", "resampled"] * 2 + ["malformed"]
    assert detail in result.events[0].detail
    assert result.events[-1].rule is not None and result.events[-1].rule.value == "keep_previous"


def test_a_gate_can_stop_the_read_if_the_option_stop_is_set(make_reader, tmp_path) -> None:
    policy = ScriptedPolicy(lambda prompt: gate(prompt).replace("REWRITE", "STOP"))
    reader = make_reader(policy, strategy="gated:stop=yes", checkpoints=tmp_path / "checkpoints.sqlite")
    result = reader.read(TEXT, QUESTION, run_id="r")
    full_result = make_reader(ScriptedPolicy(gate), strategy="gated").read(TEXT, QUESTION)
    assert (result.answer, result.stop_reason) == ("4711", StopReason.ENOUGH)
    assert result.chunks_read < full_result.chunks_read / 2
    assert result.usage.document_tokens < full_result.usage.document_tokens / 2
    assert not result.stop_reason.resumable
    calls = len(policy.prompts)
    assert reader.resume("r").answer == "4711"
    assert len(policy.prompts) == calls


def test_a_stop_at_the_last_chunk_is_not_an_early_stop(make_reader) -> None:
    last_word = TEXT.split()[-3]
    policy = ScriptedPolicy(lambda prompt: "STOP" if last_word in extract(prompt, "section") else gate(prompt))
    result = make_reader(policy, strategy="gated:stop=yes").read(TEXT, QUESTION)
    assert (result.answer, result.stop_reason) == ("4711", StopReason.ANSWERED)


def merge_without_shortening(prompt: str) -> str:
    """Find much in every section, and merge findings without making them shorter."""
    if "<findings>" in prompt:
        return extract(prompt, "findings")
    return " ".join(extract(prompt, "section").split()[:40]) if "<section>" in prompt else "\\boxed{x}"


@pytest.mark.parametrize("strategy", ["parallel", "segments:count=9", "map_reduce"])
def test_a_merge_that_does_not_shorten_the_findings_ends_and_fits_the_window(make_reader, strategy) -> None:
    policy, count_tokens = ScriptedPolicy(merge_without_shortening), load_tokenizer("embedded").count
    result = make_reader(policy, strategy=strategy).read(TEXT, QUESTION)
    assert result.stop_reason is StopReason.ANSWERED
    merges = [prompt for prompt in policy.prompts if "<findings>" in prompt]
    assert merges
    assert max(map(count_tokens, policy.prompts)) + 60 + 24 <= 1000
    assert max(count_tokens(extract(prompt, "findings")) for prompt in merges) <= 100


def test_a_later_pass_sees_earlier_findings_and_passes_end_when_nothing_new_is_found(make_reader) -> None:
    text = make_document({0.2: "The chest stands at the pier.", 0.8: "Anna owns a chest."}, words=800)

    def script(prompt: str) -> str:
        section, memory = extract(prompt, "section"), extract(prompt, "memory")
        if "<section>" not in prompt:
            return "\\boxed{pier}" if "pier" in memory else "\\boxed{unknown}"
        if "Anna owns" in section and "chest" not in memory:
            return "Anna owns a chest"
        is_second_fact = "pier" in section and "chest" in memory and "pier" not in memory
        return "The chest is at the pier" if is_second_fact else "none"

    results = {}
    for passes in (1, 2, 5):
        reader = make_reader(ScriptedPolicy(script), strategy=f"parallel:passes={passes}")
        results[passes] = reader.read(text, "Where does Anna keep what she owns?")
    assert [results[passes].answer for passes in (1, 2, 5)] == ["unknown", "pier", "pier"]
    chunks = results[1].chunks_read
    assert [results[passes].chunks_read for passes in (2, 5)] == [2 * chunks, 3 * chunks]
    call = next(call for call in results[2].trace.calls if "pier" in (call.text or "") and call.reads)
    assert call.branch.startswith("2.")
    assert [results[2].trace.calls_by_id[parent].text for parent in call.parents] == ["Anna owns a chest"]
    assert "Anna owns a chest" in {quote.quote for quote in results[2].view().provenance.evidence}, "of the memory"
    assert [quote.quote for quote in results[2].evidence] == ["The chest stands at the pier"], "of the answer"


def test_a_document_has_at_most_as_many_segments_as_chunks(make_reader) -> None:
    result = make_reader(strategy="segments:count=50").read(make_document({}, words=300), QUESTION)
    assert {update.branch for update in result.updates if update.chunk_index is not None} == {
        str(chunk) for chunk in range(result.chunks_read)
    }


HOPS = make_document({0.2: "The chest stands at the pier.", 0.8: "Anna owns a chest."}, words=800)
HOPS_QUESTION = "Where does Anna keep what she owns?"


def follow_two_hops(prompt: str) -> str:
    """Keep facts about names in the problem and the memory, and ask for the missing fact if the strategy allows it."""
    memory, section, problem = extract(prompt, "memory"), extract(prompt, "section"), extract(prompt, "problem")
    lines = [line for line in memory.splitlines() if line != "(empty)"]
    if prompt.rstrip().endswith("ANSWER or ASK:"):
        return "ASK\nWhere is the chest?" if "chest" in memory and "pier" not in memory else "ANSWER"
    text = section + extract(prompt, "found") + extract(prompt, "recalled")
    if "Anna owns a chest" in text and "Anna" in problem:
        lines.append("Anna owns a chest")
    if "chest stands at the pier" in text.replace("is at", "stands at") and "chest" in "".join(lines) + problem:
        lines.append("The chest stands at the pier")
    if "<section>" not in prompt and "<recalled>" not in prompt and "<found>" not in prompt:
        return "\\boxed{pier}" if "pier" in memory else "\\boxed{unknown}"
    should_recall = "RECALL:" in prompt and "Anna owns a chest" in section
    return "\n".join([*dict.fromkeys(lines), *(["RECALL: chest stands"] if should_recall else [])]) or "nothing yet"


@pytest.mark.parametrize(("strategy", "answer"), [("overwrite", "unknown"), ("reread", "pier"), ("recall", "pier")])
def test_only_reread_and_recall_find_a_second_hop_that_comes_first(make_reader, log, strategy, answer) -> None:
    reader = make_reader(ScriptedPolicy(follow_two_hops), strategy=strategy, run_log=log)
    result = reader.read(HOPS, HOPS_QUESTION, run_id="r")
    assert result.answer == answer
    if answer == "pier":
        assert any("chest stands at the pier" in quote.quote for quote in result.evidence)
        quote = result.evidence[-1]
        assert HOPS[quote.start_char : quote.end_char] == quote.quote
    assert log.trace("r").final_memory == result.memory


def test_a_reread_is_a_branch_with_its_own_question(make_reader) -> None:
    policy = ScriptedPolicy(follow_two_hops)
    result = make_reader(policy, strategy="reread").read(HOPS, HOPS_QUESTION)
    reread_calls = [call for call in result.trace.calls if call.branch == "1"]
    assert [call.chunk_index for call in reread_calls] == list(range(result.chunks_read // 2))
    assert {extract(prompt, "problem") for prompt in policy.prompts if "<section>" in prompt} == {
        HOPS_QUESTION, "Where is the chest?",
    }  # fmt: skip
    integration = next(call for call in result.trace.calls if call.role == "integrate")
    assert {result.trace.calls_by_id[parent].branch for parent in integration.parents} == {"", "1"}
    assert [result.trace.calls_by_id[parent].role for parent in reread_calls[0].parents] == ["decompose"]
    assert [result.trace.calls_by_id[parent].role for parent in reread_calls[1].parents] == ["update", "decompose"]


@pytest.mark.parametrize("reply", ["ASK\nwhere does  Anna keep what she owns", "ASK", "Perhaps", "ANSWER\nwhat?"])
def test_invalid_sub_questions_are_asked_for_again_and_then_end_the_reread(make_reader, reply) -> None:
    def script(prompt: str) -> str:
        return reply if prompt.rstrip().endswith("ANSWER or ASK:") else follow_two_hops(prompt)

    result = make_reader(ScriptedPolicy(script), strategy="reread").read(HOPS, HOPS_QUESTION)
    assert (result.answer, result.stop_reason) == ("unknown", StopReason.ANSWERED)
    kind = "repeated" if "Anna keep" in reply else "malformed"
    assert list_event_kinds(result) == [kind, "resampled", kind, "resampled", kind]


def test_the_option_rounds_limits_the_rereads(make_reader) -> None:
    numbers = iter(range(100))

    def script(prompt: str) -> str:
        should_ask = prompt.rstrip().endswith("ANSWER or ASK:")
        return f"ASK\nWhat is {next(numbers)}?" if should_ask else follow_two_hops(prompt)

    result = make_reader(ScriptedPolicy(script), strategy="reread:rounds=3").read(HOPS, HOPS_QUESTION)
    assert {call.branch for call in result.trace.calls} == {"", "1", "2", "3"}
    assert next(numbers) == 3


def test_recalled_chunks_are_logged_as_reads_and_parents(make_reader, log) -> None:
    def script(prompt: str) -> str:
        section = extract(prompt, "section")
        if "<section>" not in prompt:
            return f"\\boxed{{{'4711' if '4711' in extract(prompt, 'memory') else 'unknown'}}}"
        if "harbor is" in section:
            return "harbor 4711"
        recall = "\nRECALL: harbor" if "castle is" in section else ""
        return ("harbor 4711 again" if "4711" in extract(prompt, "recalled") else "castle") + recall

    result = make_reader(ScriptedPolicy(script), strategy="recall", run_log=log).read(TEXT, QUESTION, run_id="r")
    call = next(call for call in result.trace.calls if call.text == "harbor 4711 again")
    assert any("4711" in (result.trace.calls_by_id[parent].text or "") for parent in call.parents)
    assert any("4711" in TEXT[span.start_char : span.end_char] for span in call.reads[1:])
    logged_call = log.trace("r").calls_by_id[call.id]
    assert (logged_call.reads, logged_call.parents) == (call.reads, call.parents)
    row = next(conversation for conversation in log.conversations("r") if conversation.call_id == call.id)
    assert row.slot == call.reads[0].index


@pytest.mark.parametrize("reply", ["RECALL: zebra", "harbor 1\nRECALL: zebra"])
def test_a_lookup_that_finds_nothing_is_an_event(make_reader, reply) -> None:
    policy = ScriptedPolicy(lambda prompt: reply if "castle is" in prompt else read_perfectly(prompt))
    result = make_reader(policy, strategy="recall").read(TEXT, QUESTION)
    assert list_event_kinds(result) == ["not_recalled"]
    assert "(nothing)" in extract(policy.prompts[-2], "recalled")


def test_lookups_are_limited_and_one_after_the_last_chunk_has_no_chunk_index(make_reader, tmp_path) -> None:
    policy = ScriptedPolicy(lambda prompt: "word1\nRECALL: word1" if "<section>" in prompt else read_perfectly(prompt))
    reader = make_reader(policy, strategy="recall:lookups=4", checkpoints=tmp_path / "checkpoints.sqlite")
    result = reader.read(TEXT, QUESTION, run_id="r")
    assert [call.role for call in result.trace.calls][-2:] == ["recall_last", "answer"]
    passages = [extract(prompt, "recalled") for prompt in policy.prompts if "<recalled>" in prompt]
    assert sum(passage != "(nothing)" for passage in passages) == 4
    assert list_event_kinds(result).count("not_recalled") == result.chunks_read - 4
    assert [update.chunk_index for update in result.updates] == [*range(result.chunks_read), None]
    reader.edit_memory("r", 0, "an edit")
    assert [update.memory for update in reader.history("r")] == ["an edit"]


def test_a_resumed_run_can_recall_chunks_from_before_the_resume(make_reader, tmp_path) -> None:
    options = {"strategy": "recall", "checkpoints": tmp_path / "checkpoints.sqlite"}
    reader = make_reader(ScriptedPolicy(follow_two_hops), **options)
    expected = reader.read(HOPS, HOPS_QUESTION, run_id="uninterrupted")
    reader.read(HOPS, HOPS_QUESTION, run_id="r", limits=Limits(max_chunks=expected.chunks_read // 2))
    result = make_reader(ScriptedPolicy(follow_two_hops), **options).resume("r")
    assert (result.answer, result.memory) == ("pier", expected.memory)


def test_recalled_passages_are_limited_to_the_memory_budget(make_reader) -> None:
    count_tokens = load_tokenizer("embedded").count
    policy = ScriptedPolicy(
        lambda prompt: (
            f"{extract(prompt, 'section')[:40]}\nRECALL: word7 and then" if "<section>" in prompt else "\\boxed{x}"
        )
    )
    make_reader(policy, strategy="recall").read(TEXT, QUESTION)
    assert 0 < max(count_tokens(extract(prompt, "recalled")) for prompt in policy.prompts) <= 60
    assert max(map(count_tokens, policy.prompts)) + 60 + 24 <= 1000


@pytest.mark.parametrize("strategy", ["segments:count=9", "map_reduce", "parallel"])
def test_a_refused_merge_keeps_the_findings(make_reader, log, strategy) -> None:
    def script(prompt: str):
        if "<findings>" in prompt:
            return Completion("", FinishReason.REFUSED, "scripted")
        if "<section>" not in prompt:
            return "\\boxed{4711}" if "4711" in extract(prompt, "memory") else "\\boxed{unknown}"
        section = extract(prompt, "section")
        return "harbor 4711" if "harbor" in section else " ".join(section.split()[:20])

    result = make_reader(ScriptedPolicy(script), strategy=strategy, run_log=log).read(TEXT, QUESTION, run_id="r")
    assert "refused" in list_event_kinds(result)
    assert result.memory
    assert {call.id: call.text for call in log.trace("r").calls} == {call.id: call.text for call in result.trace.calls}


@pytest.mark.parametrize("reply", ["", "maybe"], ids=["empty", "malformed"])
@pytest.mark.parametrize("rule", [UpdateRule.ACCEPT, UpdateRule.RETRY])
@pytest.mark.parametrize("strategy", ["gated:stop=yes", "map_reduce", "parallel", "segments", "reread", "recall"])
def test_empty_and_malformed_replies_never_stop_a_read(make_reader, log, strategy, rule, reply) -> None:
    policy = ScriptedPolicy(lambda prompt: reply)
    rules = UpdateRules(empty=rule, refused=rule, malformed=rule, retries=1)
    result = make_reader(policy, strategy=strategy, rules=rules, run_log=log).read(TEXT, QUESTION, run_id="r")
    assert not result.stop_reason.resumable
    texts = {call.id: call.text for call in log.trace("r").calls}
    assert texts == {call.id: call.text for call in result.trace.calls}


def test_the_memory_of_the_first_pass_can_be_edited_after_a_reread(make_reader, tmp_path) -> None:
    reader = make_reader(
        ScriptedPolicy(follow_two_hops), strategy="reread", checkpoints=tmp_path / "checkpoints.sqlite"
    )
    reader.read(HOPS, HOPS_QUESTION, run_id="r")
    reader.edit_memory("r", 2, "Anna owns a bag", branch="")
    updates = [update for update in reader.resume("r").updates if not update.branch]
    assert [update.memory for update in updates if update.chunk_index == 2] == ["Anna owns a bag"]
    assert "Anna owns a bag" in updates[-1].memory


@pytest.mark.parametrize("strategy", ["map_reduce:width=3", "parallel:width=3", "segments:count=3", "reread"])
def test_a_read_that_a_limit_stops_returns_its_memory(make_reader, strategy) -> None:
    policy = ScriptedPolicy(lambda prompt: "a note" if "<section>" in prompt else "ANSWER")
    result = make_reader(policy, strategy=strategy).read(TEXT, QUESTION, limits=Limits(max_chunks=3))
    assert "a note" in result.memory


class FaultyRetriever:
    def __init__(self, order) -> None:
        self.order = order

    async def rank(self, texts, query):
        assert list(texts)
        return self.order() if callable(self.order) else self.order


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([10**6], "returned index 1000000 for .* must return"),
        (lambda: {}["x"], "FaultyRetriever failed: KeyError: .* Correct its method"),
        (None, "FaultyRetriever failed: TypeError"),
    ],
)
def test_an_error_of_a_retriever_names_the_retriever(make_reader, order, words) -> None:
    policy = ScriptedPolicy(lambda prompt: "word1\nRECALL: word1" if "<section>" in prompt else "x")
    with pytest.raises(RetrievalError, match=words):
        make_reader(policy, strategy=Recall(retriever=FaultyRetriever(order))).read(TEXT, QUESTION)
    reader = make_reader(policy, strategy=Recall(retriever=FaultyRetriever([0, 0, 1])))
    assert reader.read(TEXT, QUESTION).stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize("strategy", ["parallel", "reread", "gated:stop=yes", "map_reduce"])
def test_the_full_context_estimate_is_for_the_whole_document_once(make_reader, strategy) -> None:
    """The number of passes and an early stop do not change it."""

    def script(prompt: str) -> str:
        if prompt.rstrip().endswith("KEEP, REWRITE or STOP:"):
            return "STOP" if "harbor is" in extract(prompt, "section") else "KEEP"
        if prompt.rstrip().endswith("ANSWER or ASK:"):
            return "ASK\nWhere is the chest?" if "castle" not in prompt else "ANSWER"
        return "harbor 4711" if "harbor is" in extract(prompt, "section") else "none"

    class PolicyWithShape(ScriptedPolicy):
        async def describe(self) -> ModelInfo:
            return ModelInfo(shape=ModelShape(parameters=10**6, layers=4, width=64))

    token_count = load_tokenizer("embedded").count(LONGER_TEXT)
    one_pass = make_reader(PolicyWithShape(script), strategy="overwrite").read(LONGER_TEXT, QUESTION).usage
    usage = make_reader(PolicyWithShape(script), strategy=strategy).read(LONGER_TEXT, QUESTION).usage
    assert one_pass.document_tokens == pytest.approx(token_count, rel=0.01)
    assert (usage.document_tokens == one_pass.document_tokens) is (strategy == "map_reduce")
    assert usage.full_context_flops == pytest.approx(one_pass.full_context_flops, rel=0.05)

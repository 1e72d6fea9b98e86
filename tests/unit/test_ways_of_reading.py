"""What is peculiar to each way of reading that ships; what all have in common is in test_every_strategy."""

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
LONGER = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=2000)
QUESTION = "What is the key of harbor?"


def kinds(result) -> list[str]:
    return [event.kind.value for event in result.events]


# Names and options


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "gated:stop=maybe",
            "stop=maybe is not valid for gated. Input should be a valid boolean",
        ),
        ("gated:exit=yes", "gated has no option 'exit'. Its options: passes, stop"),
        ("parallel:passes=two", "passes=two is not valid for parallel. Input should be a valid integer"),
        ("parallel:passes=0", "parallel:passes must be at least 1, got 0. Use 1 or more"),
        ("retrieval:chunks=-1", "retrieval:chunks must be at least 0, got -1"),
        ("parallel:passes=2:passes=3", "parallel:passes=2:passes=3 has an option twice"),
        ("gatd:stop=yes", "Did you mean gated"),
    ],
)
def test_a_wrong_option_after_a_strategys_name_is_refused_with_the_remedy(name, words) -> None:
    with pytest.raises(StrategyError, match=re.escape(words)):
        load_strategy(name)


@pytest.mark.parametrize("name", ["gated:stop=yes", "parallel", "recall", "reread", "segments"])
def test_a_strategy_with_longer_prompts_takes_shorter_chunks_where_nobody_chose_their_size(name) -> None:
    reader = MemAgent(ScriptedPolicy([]), tokenizer="embedded", strategy=name, run_log=False)
    assert reader.graph().reader_context.budget.chunk_tokens <= Budget().chunk_tokens
    chosen = MemAgent(ScriptedPolicy([]), tokenizer="embedded", strategy="recall", budget=Budget(), run_log=False)
    with pytest.raises(BudgetError, match=r"recall_update.*Use chunk_tokens 3934"):
        chosen.graph()


# gated


def gate(prompt: str) -> str:
    if "<section>" not in prompt:
        return read_perfectly(prompt)
    return f"REWRITE\n{read_perfectly(prompt)}" if "harbor" in extract(prompt, "section") else "KEEP"


def test_a_gate_keeps_memory_byte_for_byte_for_a_word_a_chunk(make_reader, log) -> None:
    memory = "  harbor 4711\twith  odd   blanks"
    policy = ScriptedPolicy(
        lambda prompt: f"REWRITE\n{memory}" if "harbor" in extract(prompt, "section") else gate(prompt)
    )
    result = make_reader(policy, strategy="gated", run_log=log).read(TEXT, QUESTION, run_id="r")
    unchanged = [update for update in result.updates if not update.changed]
    assert len(unchanged) == result.chunks_read - 1
    assert {update.memory for update in result.updates} == {"", memory.strip()}
    counts = {conversation.text: conversation.outcome.value for conversation in log.conversations("r")}
    assert counts["KEEP"] == "kept_previous"
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
def test_a_gate_outside_its_grammar_is_asked_again_and_then_keeps(make_reader, reply, detail) -> None:
    policy = ScriptedPolicy(lambda prompt: reply if "castle is" in extract(prompt, "section") else gate(prompt))
    result = make_reader(policy, strategy="gated").read(TEXT, QUESTION)
    assert result.answer == "4711"
    assert kinds(result) == ["malformed", "resampled"] * 2 + ["malformed"]
    assert detail in result.events[0].detail
    assert result.events[-1].rule is not None and result.events[-1].rule.value == "keep_previous"


def test_a_gate_may_stop_where_it_is_allowed_to(make_reader, tmp_path) -> None:
    policy = ScriptedPolicy(lambda prompt: gate(prompt).replace("REWRITE", "STOP"))
    reader = make_reader(policy, strategy="gated:stop=yes", checkpoints=tmp_path / "checkpoints.sqlite")
    result = reader.read(TEXT, QUESTION, run_id="r")
    whole = make_reader(ScriptedPolicy(gate), strategy="gated").read(TEXT, QUESTION)
    assert (result.answer, result.stop_reason) == ("4711", StopReason.ENOUGH)
    assert result.chunks_read < whole.chunks_read / 2
    assert result.usage.document_tokens < whole.usage.document_tokens / 2
    assert not result.stop_reason.resumable
    calls = len(policy.prompts)
    assert reader.resume("r").answer == "4711"
    assert len(policy.prompts) == calls


def test_stopping_at_the_last_chunk_is_no_early_stop(make_reader) -> None:
    last = TEXT.split()[-3]
    policy = ScriptedPolicy(lambda prompt: "STOP" if last in extract(prompt, "section") else gate(prompt))
    result = make_reader(policy, strategy="gated:stop=yes").read(TEXT, QUESTION)
    assert (result.answer, result.stop_reason) == ("4711", StopReason.ANSWERED)


# parallel and segments


def never_shorter(prompt: str) -> str:
    """Finds much in every section, and brings nothing together in fewer words."""
    if "<findings>" in prompt:
        return extract(prompt, "findings")
    return " ".join(extract(prompt, "section").split()[:40]) if "<section>" in prompt else "\\boxed{x}"


@pytest.mark.parametrize("strategy", ["parallel", "segments:count=9", "map_reduce"])
def test_a_merge_that_never_shrinks_ends_and_never_fills_the_window(make_reader, strategy) -> None:
    policy, count = ScriptedPolicy(never_shorter), load_tokenizer("embedded").count
    result = make_reader(policy, strategy=strategy).read(TEXT, QUESTION)
    assert result.stop_reason is StopReason.ANSWERED
    merges = [prompt for prompt in policy.prompts if "<findings>" in prompt]
    assert merges
    assert max(map(count, policy.prompts)) + 60 + 24 <= 1000
    assert max(count(extract(prompt, "findings")) for prompt in merges) <= 100


def test_a_later_pass_sees_what_the_earlier_found_and_ends_when_there_is_nothing_new(make_reader) -> None:
    text = make_document({0.2: "The chest stands at the pier.", 0.8: "Anna owns a chest."}, words=800)

    def reads(prompt: str) -> str:
        section, known = extract(prompt, "section"), extract(prompt, "memory")
        if "<section>" in prompt:
            if "Anna owns" in section and "chest" not in known:
                return "Anna owns a chest"
            return (
                "The chest is at the pier" if "pier" in section and "chest" in known and "pier" not in known else "none"
            )
        return "\\boxed{pier}" if "pier" in known else "\\boxed{unknown}"

    answers = {}
    for passes in (1, 2, 5):
        reader = make_reader(ScriptedPolicy(reads), strategy=f"parallel:passes={passes}")
        answers[passes] = reader.read(text, "Where does Anna keep what she owns?")
    assert [answers[passes].answer for passes in (1, 2, 5)] == ["unknown", "pier", "pier"]
    chunks = answers[1].chunks_read
    assert [answers[passes].chunks_read for passes in (2, 5)] == [2 * chunks, 3 * chunks]
    call = next(step for step in answers[2].trace.calls if "pier" in (step.text or "") and step.reads)
    assert call.branch.startswith("2.")
    assert [answers[2].trace.calls_by_id[parent].text for parent in call.parents] == ["Anna owns a chest"]
    assert "Anna owns a chest" in {item.quote for item in answers[2].view().provenance.evidence}, "of all the memory"
    assert [item.quote for item in answers[2].evidence] == ["The chest stands at the pier"], "what the answer rests on"


def test_a_document_of_few_chunks_has_no_more_segments(make_reader) -> None:
    result = make_reader(strategy="segments:count=50").read(make_document({}, words=300), QUESTION)
    assert {update.branch for update in result.updates if update.chunk_index is not None} == {
        str(chunk) for chunk in range(result.chunks_read)
    }


# reread and recall: a second fact that only makes sense after the first


HOPS = make_document({0.2: "The chest stands at the pier.", 0.8: "Anna owns a chest."}, words=800)
HOPS_QUESTION = "Where does Anna keep what she owns?"


def two_hops(prompt: str) -> str:
    """Notes what belongs to the names in its problem and memory, and asks in each way for what is missing."""
    memory, section, problem = extract(prompt, "memory"), extract(prompt, "section"), extract(prompt, "problem")
    known = [line for line in memory.splitlines() if line != "(empty)"]
    if prompt.rstrip().endswith("ANSWER or ASK:"):
        return "ASK\nWhere is the chest?" if "chest" in memory and "pier" not in memory else "ANSWER"
    text = section + extract(prompt, "found") + extract(prompt, "recalled")
    if "Anna owns a chest" in text and "Anna" in problem:
        known.append("Anna owns a chest")
    if "chest stands at the pier" in text.replace("is at", "stands at") and "chest" in "".join(known) + problem:
        known.append("The chest stands at the pier")
    if "<section>" not in prompt and "<recalled>" not in prompt and "<found>" not in prompt:
        return "\\boxed{pier}" if "pier" in memory else "\\boxed{unknown}"
    asks = "RECALL:" in prompt and "Anna owns a chest" in section
    return "\n".join([*dict.fromkeys(known), *(["RECALL: chest stands"] if asks else [])]) or "nothing yet"


@pytest.mark.parametrize(("strategy", "answer"), [("overwrite", "unknown"), ("reread", "pier"), ("recall", "pier")])
def test_a_second_hop_before_the_first_needs_a_look_back(make_reader, log, strategy, answer) -> None:
    result = make_reader(ScriptedPolicy(two_hops), strategy=strategy, run_log=log).read(HOPS, HOPS_QUESTION, run_id="r")
    assert result.answer == answer
    if answer == "pier":
        assert any("chest stands at the pier" in item.quote for item in result.evidence)
        pier = result.evidence[-1]
        assert HOPS[pier.start_char : pier.end_char] == pier.quote
    assert log.trace("r").final_memory == result.memory


def test_a_reread_is_a_line_of_its_own_with_its_own_question(make_reader) -> None:
    policy = ScriptedPolicy(two_hops)
    result = make_reader(policy, strategy="reread").read(HOPS, HOPS_QUESTION)
    again = [call for call in result.trace.calls if call.branch == "1"]
    assert [step.chunk_index for step in again] == list(range(result.chunks_read // 2))
    assert {extract(prompt, "problem") for prompt in policy.prompts if "<section>" in prompt} == {
        HOPS_QUESTION, "Where is the chest?",
    }  # fmt: skip
    integrated = next(call for call in result.trace.calls if call.role == "integrate")
    assert {result.trace.calls_by_id[parent].branch for parent in integrated.parents} == {"", "1"}
    assert [result.trace.calls_by_id[parent].role for parent in again[0].parents] == ["decompose"]
    assert [result.trace.calls_by_id[parent].role for parent in again[1].parents] == ["update", "decompose"]


@pytest.mark.parametrize("reply", ["ASK\nwhere does  Anna keep what she owns", "ASK", "Perhaps", "ANSWER\nwhat?"])
def test_unusable_sub_questions_are_asked_again_and_then_end_the_reread(make_reader, reply) -> None:
    policy = ScriptedPolicy(lambda prompt: reply if prompt.rstrip().endswith("ANSWER or ASK:") else two_hops(prompt))
    result = make_reader(policy, strategy="reread").read(HOPS, HOPS_QUESTION)
    assert (result.answer, result.stop_reason) == ("unknown", StopReason.ANSWERED)
    kind = "repeated" if "Anna keep" in reply else "malformed"
    assert kinds(result) == [kind, "resampled", kind, "resampled", kind]


def test_rereads_end_after_so_many(make_reader) -> None:
    numbers = iter(range(100))
    policy = ScriptedPolicy(
        lambda prompt: (
            f"ASK\nWhat is {next(numbers)}?" if prompt.rstrip().endswith("ANSWER or ASK:") else two_hops(prompt)
        )
    )
    result = make_reader(policy, strategy="reread:rounds=3").read(HOPS, HOPS_QUESTION)
    assert {call.branch for call in result.trace.calls} == {"", "1", "2", "3"}
    assert next(numbers) == 3


def test_recalled_chunks_are_logged_as_reads_and_parents(make_reader, log) -> None:

    def forgets(prompt: str) -> str:
        section = extract(prompt, "section")
        if "<section>" not in prompt:
            return f"\\boxed{{{'4711' if '4711' in extract(prompt, 'memory') else 'unknown'}}}"
        if "harbor is" in section:
            return "harbor 4711"
        asks = "\nRECALL: harbor" if "castle is" in section else ""
        return ("harbor 4711 again" if "4711" in extract(prompt, "recalled") else "castle") + asks

    result = make_reader(ScriptedPolicy(forgets), strategy="recall", run_log=log).read(TEXT, QUESTION, run_id="r")
    call = next(call for call in result.trace.calls if call.text == "harbor 4711 again")
    assert any("4711" in (result.trace.calls_by_id[parent].text or "") for parent in call.parents)
    assert any("4711" in TEXT[span.start_char : span.end_char] for span in call.reads[1:])
    row_of_log = log.trace("r").calls_by_id[call.id]
    assert (row_of_log.reads, row_of_log.parents) == (call.reads, call.parents)
    row = next(conversation for conversation in log.conversations("r") if conversation.call_id == call.id)
    assert row.slot == call.reads[0].index


@pytest.mark.parametrize("reply", ["RECALL: zebra", "harbor 1\nRECALL: zebra"])
def test_a_look_up_that_finds_nothing_is_an_event(make_reader, reply) -> None:
    policy = ScriptedPolicy(lambda prompt: reply if "castle is" in prompt else read_perfectly(prompt))
    result = make_reader(policy, strategy="recall").read(TEXT, QUESTION)
    assert kinds(result) == ["not_recalled"]
    assert "(nothing)" in extract(policy.prompts[-2], "recalled")


def test_look_ups_are_bounded_and_one_after_the_last_chunk_counts_and_belongs_to_none(make_reader, tmp_path) -> None:
    policy = ScriptedPolicy(lambda prompt: "word1\nRECALL: word1" if "<section>" in prompt else read_perfectly(prompt))
    reader = make_reader(policy, strategy="recall:lookups=4", checkpoints=tmp_path / "checkpoints.sqlite")
    result = reader.read(TEXT, QUESTION, run_id="r")
    roles = [call.role for call in result.trace.calls]
    assert roles[-2:] == ["recall_last", "answer"]
    passages = [extract(prompt, "recalled") for prompt in policy.prompts if "<recalled>" in prompt]
    assert sum(item != "(nothing)" for item in passages) == 4
    assert kinds(result).count("not_recalled") == result.chunks_read - 4
    assert [update.chunk_index for update in result.updates] == [*range(result.chunks_read), None]
    reader.edit_memory("r", 0, "an edit")
    assert [update.memory for update in reader.history("r")] == ["an edit"]


def test_a_resumed_run_remembers_what_it_had_before(make_reader, tmp_path) -> None:
    reader = make_reader(ScriptedPolicy(two_hops), strategy="recall", checkpoints=tmp_path / "checkpoints.sqlite")
    whole = reader.read(HOPS, HOPS_QUESTION, run_id="whole")
    reader.read(HOPS, HOPS_QUESTION, run_id="r", limits=Limits(max_chunks=whole.chunks_read // 2))
    resumed = make_reader(
        ScriptedPolicy(two_hops), strategy="recall", checkpoints=tmp_path / "checkpoints.sqlite"
    ).resume("r")
    assert (resumed.answer, resumed.memory) == (whole.answer, whole.memory) == ("pier", whole.memory)


def test_a_recalled_passage_never_fills_more_than_a_memory(make_reader) -> None:
    count = load_tokenizer("embedded").count
    policy = ScriptedPolicy(
        lambda prompt: (
            f"{extract(prompt, 'section')[:40]}\nRECALL: word7 and then" if "<section>" in prompt else "\\boxed{x}"
        )
    )
    make_reader(policy, strategy="recall").read(TEXT, QUESTION)
    assert 0 < max(count(extract(prompt, "recalled")) for prompt in policy.prompts) <= 60
    assert max(map(count, policy.prompts)) + 60 + 24 <= 1000


# What a review found


@pytest.mark.parametrize("strategy", ["segments:count=9", "map_reduce", "parallel"])
def test_a_refused_merge_keeps_what_was_to_be_merged(make_reader, log, strategy) -> None:

    def reads(prompt: str):
        if "<findings>" in prompt:
            return Completion("", FinishReason.REFUSED, "scripted")
        if "<section>" not in prompt:
            return "\\boxed{4711}" if "4711" in extract(prompt, "memory") else "\\boxed{unknown}"
        return (
            "harbor 4711"
            if "harbor" in extract(prompt, "section")
            else " ".join(extract(prompt, "section").split()[:20])
        )

    result = make_reader(ScriptedPolicy(reads), strategy=strategy, run_log=log).read(TEXT, QUESTION, run_id="r")
    assert "refused" in kinds(result)
    assert result.memory
    assert {call.id: call.text for call in log.trace("r").calls} == {call.id: call.text for call in result.trace.calls}


@pytest.mark.parametrize("reply", ["", "maybe"], ids=["empty", "no form"])
@pytest.mark.parametrize("rule", [UpdateRule.ACCEPT, UpdateRule.RETRY])
@pytest.mark.parametrize("strategy", ["gated:stop=yes", "map_reduce", "parallel", "segments", "reread", "recall"])
def test_no_reply_ends_a_read_under_any_rule(make_reader, log, strategy, rule, reply) -> None:
    policy = ScriptedPolicy(lambda prompt: reply)
    rules = UpdateRules(empty=rule, refused=rule, malformed=rule, retries=1)
    result = make_reader(policy, strategy=strategy, rules=rules, run_log=log).read(TEXT, QUESTION, run_id="r")
    assert not result.stop_reason.resumable
    texts = {call.id: call.text for call in log.trace("r").calls}
    assert texts == {call.id: call.text for call in result.trace.calls}


def test_the_memory_of_the_first_read_can_be_edited_after_a_reread(make_reader, tmp_path) -> None:
    reader = make_reader(ScriptedPolicy(two_hops), strategy="reread", checkpoints=tmp_path / "checkpoints.sqlite")
    reader.read(HOPS, HOPS_QUESTION, run_id="r")
    reader.edit_memory("r", 2, "Anna owns a bag", branch="")
    first = [update for update in reader.resume("r").updates if not update.branch]
    assert [update.memory for update in first if update.chunk_index == 2] == ["Anna owns a bag"]
    assert "Anna owns a bag" in first[-1].memory


@pytest.mark.parametrize("strategy", ["map_reduce:width=3", "parallel:width=3", "segments:count=3", "reread"])
def test_a_read_that_a_limit_stops_shows_what_it_has(make_reader, strategy) -> None:
    def reads(prompt: str) -> str:
        return "a note" if "<section>" in prompt else "ANSWER"

    result = make_reader(ScriptedPolicy(reads), strategy=strategy).read(TEXT, QUESTION, limits=Limits(max_chunks=3))
    assert "a note" in result.memory


class Odd:
    def __init__(self, order) -> None:
        self.order = order

    async def rank(self, texts, query):
        assert list(texts)
        return self.order() if callable(self.order) else self.order


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([10**6], "returned index 1000000 for"),
        (lambda: {}["x"], "Odd failed: KeyError"),
        (None, "Odd failed: TypeError"),
    ],
)
def test_a_retriever_that_fails_is_named(make_reader, order, words) -> None:
    policy = ScriptedPolicy(lambda prompt: "word1\nRECALL: word1" if "<section>" in prompt else "x")
    with pytest.raises(RetrievalError, match=words):
        make_reader(policy, strategy=Recall(retriever=Odd(order))).read(TEXT, QUESTION)
    twice = make_reader(policy, strategy=Recall(retriever=Odd([0, 0, 1])))
    assert twice.read(TEXT, QUESTION).stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize("strategy", ["parallel", "reread", "gated:stop=yes", "map_reduce"])
def test_one_call_with_all_is_estimated_for_the_document_once_and_whole(make_reader, strategy) -> None:
    """However many passes there were, and wherever the read ended."""

    def reads(prompt: str) -> str:
        if prompt.rstrip().endswith("KEEP, REWRITE or STOP:"):
            return "STOP" if "harbor is" in extract(prompt, "section") else "KEEP"
        if prompt.rstrip().endswith("ANSWER or ASK:"):
            return "ASK\nWhere is the chest?" if "castle" not in prompt else "ANSWER"
        return "harbor 4711" if "harbor is" in extract(prompt, "section") else "none"

    class Sized(ScriptedPolicy):
        async def describe(self) -> ModelInfo:
            return ModelInfo(shape=ModelShape(parameters=10**6, layers=4, width=64))

    count = load_tokenizer("embedded").count(LONGER)
    once = make_reader(Sized(reads), strategy="overwrite").read(LONGER, QUESTION).usage
    other = make_reader(Sized(reads), strategy=strategy).read(LONGER, QUESTION).usage
    assert once.document_tokens == pytest.approx(count, rel=0.01)
    assert (other.document_tokens == once.document_tokens) is (strategy == "map_reduce")
    assert other.full_context_flops == pytest.approx(once.full_context_flops, rel=0.05)

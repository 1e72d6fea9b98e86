"""Many questions in one pass, where the read is a part of somebody else's agent or graph."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import MessagesState
from langgraph.prebuilt import ToolNode
from support.chat_models import calls, in_turn
from support.scripts import document_with, part, perfect_reader
from typing_extensions import TypedDict
from unit.test_tool import asking, told

from langchain_memagent.middleware import MemAgentMiddleware
from langchain_memagent.node import memagent_node
from langchain_memagent.read_long_document import ReadLongDocument
from memagent_graph import Limits, RunLog, ScriptedPolicy, StopReason
from memagent_graph.errors import BudgetError, MemAgentError, PolicyError

NAMES = ["harbor", "castle", "tower", "bridge", "market", "chapel", "garden", "mill"]
QUESTIONS = [f"What is the key of {name}?" for name in NAMES]
KEYS = [str(100 + number) for number in range(len(NAMES))]
TEXT = document_with(
    {
        # Twice, so that no end of a chunk can hide it.
        place + 0.05 + 0.1 * number: f"The key of {name} is {100 + number}."
        for number, name in enumerate(NAMES)
        for place in (0, 0.037)
    },
    words=500,
)
CONFIG: Any = {"configurable": {"thread_id": "t"}, "recursion_limit": 25}
ASK: Any = {"messages": [("user", "?")]}


class Uneven(ScriptedPolicy):
    """Slower for every second question; while it is `broken`, it fails at the harbor's fact if that is asked for."""

    def __init__(self) -> None:
        self.broken = False
        super().__init__(self._reply)

    def _reply(self, prompt: str) -> Any:
        if self.broken and "harbor" in part(prompt, "problem") and "harbor is 100" in part(prompt, "section"):
            return PolicyError("gone")
        return perfect_reader(prompt)

    async def complete(self, prompt: Any, sampling: Any) -> Any:
        number = next((n for n, name in enumerate(NAMES) if name in part(prompt[0]["content"], "problem")), 0)
        await asyncio.sleep(0.004 * (number % 2))
        return await super().complete(prompt, sampling)

    @property
    def sections(self) -> list[str]:
        return [part(prompt, "section") for prompt in self.prompts if "<section>" in prompt]

    @property
    def asked(self) -> Counter[tuple[str, str]]:
        return Counter((part(prompt, "problem"), part(prompt, "section")) for prompt in self.prompts)

    def shared_one_pass(self, questions: int = len(QUESTIONS)) -> bool:
        """Whether every section was shown to all questions before the next was shown to any."""
        different = list(dict.fromkeys(self.sections))
        assert len(different) > 5
        return self.sections == [section for section in different for _ in range(questions)]


class Asked(TypedDict, total=False):
    question: Any
    document: Any
    answer: Any
    notes: list[str]
    run: list[str]
    quotes: list[list[dict[str, Any]]]
    why: list[str]


def graph_of(node: Any, state: Any = Asked) -> StateGraph:
    builder = StateGraph(state)
    builder.add_node("read", node)
    builder.add_edge(START, "read")
    builder.add_edge("read", END)
    return builder


async def called(graph: Any, given: Any, config: Any = CONFIG) -> Any:
    return await graph.ainvoke(given, config)


class TestTheTool:
    @pytest.mark.parametrize("kept", ["agent's", "reader's"])
    async def test_eight_questions_share_one_pass(self, make_reader, kept) -> None:
        policy = Uneven()
        own = {"checkpoints": InMemorySaver()} if kept == "reader's" else {}
        tool = ReadLongDocument(agent=make_reader(policy, run_log=False, **own))
        saver = InMemorySaver() if kept == "agent's" else None
        agent = create_agent(asking({"questions": QUESTIONS, "text": TEXT}), [tool], checkpointer=saver)
        (message,) = told(await called(agent, ASK))
        assert [reading["answer"] for reading in message.artifact["readings"]] == KEYS
        for number, (question, key) in enumerate(zip(QUESTIONS, KEYS, strict=True), 1):
            assert f"Question {number}: {question}\nAnswer: {key}\nEvidence" in message.text
        assert policy.shared_one_pass()

    @pytest.mark.parametrize("own", [False, True])
    async def test_raised_a_failure_costs_the_others_nothing_and_all_continue(self, make_reader, own) -> None:
        policy = Uneven()
        policy.broken = True
        reader = make_reader(policy, run_log=False, **({"checkpoints": InMemorySaver()} if own else {}))
        tool = ReadLongDocument(agent=reader, on_failure="raise")
        agent = create_agent(asking({"questions": QUESTIONS, "text": TEXT}), [tool], checkpointer=InMemorySaver())
        with pytest.raises(PolicyError, match="gone") as failure:
            await called(agent, ASK)
        policy.broken = False
        (message,) = told(await called(agent, None))
        assert [reading["answer"] for reading in message.artifact["readings"]] == KEYS
        assert all(reading["evidence"] for reading in message.artifact["readings"])
        assert message.artifact["readings"][0]["run_id"] == failure.value.run_id
        again = {question for (question, _), count in policy.asked.items() if count > 1}
        assert max(policy.asked.values()) == 2
        assert again == {QUESTIONS[0]}, "the others had ended before the error was raised"
        assert sum(policy.asked.values()) == len(policy.asked) + 1

    async def test_told_of_a_failure_the_model_has_the_other_answers_and_asks_that_one_again(self, make_reader) -> None:
        policy = Uneven()
        policy.broken = True
        tool, saver = ReadLongDocument(agent=make_reader(policy, run_log=False)), InMemorySaver()
        agent = create_agent(asking({"questions": QUESTIONS[:3], "text": TEXT}), [tool], checkpointer=saver)
        (first,) = told(await called(agent, ASK))
        assert first.status == "success"
        assert [reading["answer"] for reading in first.artifact["readings"]] == [None, *KEYS[1:3]]
        assert "The read failed: gone" in first.text
        policy.broken = False
        agent = create_agent(asking({"questions": QUESTIONS[:1], "text": TEXT}), [tool], checkpointer=saver)
        _, second = told(await called(agent, ASK))
        assert second.artifact["readings"][0]["answer"] == KEYS[0]
        assert second.artifact["readings"][0]["run_id"] == first.artifact["readings"][0]["run_id"]
        assert sum(policy.asked.values()) == len(policy.asked) + 1, "only the chunk that failed was read again"

    async def test_equal_questions_are_read_for_once_and_answered_each(self, make_reader) -> None:
        policy = Uneven()
        tool = ReadLongDocument(agent=make_reader(policy, run_log=False))
        asked = [QUESTIONS[0], QUESTIONS[1], f" {QUESTIONS[0]} "]
        agent = create_agent(asking({"questions": asked, "text": TEXT}), [tool])
        (message,) = told(await called(agent, ASK))
        first, _, third = message.artifact["readings"]
        assert first == third
        assert policy.shared_one_pass(2)

    async def test_in_a_plain_tool_node_each_call_has_a_pass_of_its_own(self, make_reader) -> None:
        policy = Uneven()
        tool = ReadLongDocument(agent=make_reader(policy, run_log=False))
        texts = [TEXT, TEXT.replace("word", "term")]
        wanted = [
            {"name": tool.name, "args": {"questions": QUESTIONS, "text": text}, "id": f"c{n}", "type": "tool_call"}
            for n, text in enumerate(texts)
        ]
        graph = graph_of(ToolNode([tool]), MessagesState).compile(checkpointer=InMemorySaver())
        messages = told(await called(graph, {"messages": [AIMessage("", tool_calls=wanted)]}))
        for message in messages:
            assert [reading["answer"] for reading in message.artifact["readings"]] == KEYS
        for word in ("word", "term"):
            sections = [section for section in policy.sections if word in section]
            assert sections == [section for section in dict.fromkeys(sections) for _ in QUESTIONS]

    async def test_a_caller_who_bounds_concurrency_has_it_bounded(self, make_reader) -> None:
        tool = ReadLongDocument(agent=make_reader(Uneven(), run_log=False))
        agent = create_agent(asking({"questions": QUESTIONS[:3], "text": TEXT}), [tool], checkpointer=InMemorySaver())
        (message,) = told(await called(agent, ASK, {**CONFIG, "max_concurrency": 2}))
        assert [reading["answer"] for reading in message.artifact["readings"]] == KEYS[:3]


class TestTheNode:
    async def test_a_list_of_questions_gives_lists_in_their_order(self, make_reader) -> None:
        policy = Uneven()
        node = memagent_node(
            make_reader(policy), memory="notes", run_id="run", evidence="quotes", stop_reason="why",
            write=lambda state, results: {"document": [result.chunks_read for result in results]},
        )  # fmt: skip
        given = {"question": QUESTIONS, "document": TEXT}
        out = await called(graph_of(node).compile(), given)
        assert out["answer"] == KEYS
        assert [notes.split()[-1] for notes in out["notes"]] == KEYS
        assert [quotes[0]["quote"].split()[-1] for quotes in out["quotes"]] == KEYS
        assert len(set(out["run"])) == len(QUESTIONS)
        assert out["why"] == [StopReason.ANSWERED] * len(QUESTIONS)
        assert len(set(out["document"])) == 1
        assert policy.shared_one_pass()

    async def test_a_list_of_one_gives_lists_too_and_equal_questions_are_read_for_once(self, make_reader) -> None:
        policy = Uneven()
        graph = graph_of(memagent_node(make_reader(policy), run_id="run")).compile()
        out = await called(graph, {"question": QUESTIONS[:1], "document": TEXT})
        assert out["answer"] == KEYS[:1]
        policy.prompts.clear()
        asked = (QUESTIONS[0], QUESTIONS[1], QUESTIONS[0])
        out = await called(graph, {"question": asked, "document": TEXT})
        assert out["answer"] == [KEYS[0], KEYS[1], KEYS[0]]
        assert out["run"][0] == out["run"][2] != out["run"][1]
        assert policy.shared_one_pass(2)

    @pytest.mark.parametrize(
        ("question", "kind", "words"),
        [
            ([], MemAgentError, "Pass at least one"),
            ([QUESTIONS[0], " "], MemAgentError, "the question is empty"),
            ([QUESTIONS[0], 5], MemAgentError, "a question is of type int"),
            ([QUESTIONS[0], "why " * 200], BudgetError, "its budget is 50"),
            ({"q": QUESTIONS[0]}, MemAgentError, "of type dict, not a text or a list of texts"),
        ],
    )
    async def test_what_is_no_question_is_refused_before_anything_is_read(
        self, make_reader, question, kind, words
    ) -> None:
        policy = Uneven()
        graph = graph_of(memagent_node(make_reader(policy))).compile()
        with pytest.raises(kind, match=words):
            await called(graph, {"question": question, "document": TEXT})
        assert not policy.prompts

    async def test_limits_stop_each_question_and_progress_names_its_run(self, make_reader) -> None:
        reader = make_reader(limits=Limits(max_chunks=3))
        graph = graph_of(memagent_node(reader, run_id="run", stop_reason="why")).compile(checkpointer=InMemorySaver())
        given, modes = {"question": QUESTIONS[:3], "document": TEXT}, ["custom", "values"]
        parts = [each async for each in graph.astream(given, CONFIG, stream_mode=modes, subgraphs=True)]
        out = [part for place, mode, part in parts if mode == "values" and not place][-1]
        assert out["why"] == ["max_chunks"] * 3
        events = [part for _, mode, part in parts if mode == "custom" and part["type"] == "memagent.memory_update"]
        assert Counter(event["run_id"] for event in events) == dict.fromkeys(out["run"], 3)

    async def test_nested_one_that_fails_is_raised_once_the_others_have_ended_and_alone_continues(
        self, make_reader, tmp_path
    ) -> None:
        policy = Uneven()
        log = RunLog(tmp_path / "runs.sqlite")
        node = memagent_node(make_reader(policy, run_log=log), evidence="quotes", run_id="run")
        outer = graph_of(graph_of(node).compile()).compile(checkpointer=InMemorySaver())
        policy.broken = True
        with pytest.raises(PolicyError, match="gone"):
            await called(outer, {"question": QUESTIONS, "document": TEXT})
        others = [question for question, section in policy.asked if not section]
        assert sorted(others) == sorted(QUESTIONS[1:]), "the others were answered"
        policy.broken = False
        out = await called(outer, None)
        assert out["answer"] == KEYS
        assert all(out["quotes"])
        again = [question for (question, _), count in policy.asked.items() if count > 1]
        assert again == QUESTIONS[:1]
        assert sum(policy.asked.values()) == len(policy.asked) + 1, "only the chunk that failed was read again"
        assert [log.get(run_id).question for run_id in out["run"]] == QUESTIONS
        log.close()


async def test_a_tool_result_is_asked_several_questions_in_one_pass(make_reader) -> None:
    policy = Uneven()
    middleware, saver = MemAgentMiddleware(make_reader(policy), result_tokens=500), InMemorySaver()

    def fetch() -> str:
        """Fetch a text."""
        return TEXT

    def agent(*replies: Any) -> Any:
        return create_agent(in_turn(*replies), [fetch], middleware=[middleware], checkpointer=saver)

    (first,) = told(await called(agent(calls(("fetch", {})), "read"), ASK))
    policy.prompts.clear()
    policy.broken = True
    more = {"run_id": first.response_metadata["memagent"]["run_id"], "questions": QUESTIONS[:3]}
    *_, asked = told(await called(agent(calls(("ask_tool_result", more), prefix="b"), "done"), ASK))
    for number in (1, 2):
        assert f"Question {number + 1}: {QUESTIONS[number]}\nAnswer: {KEYS[number]}" in asked.text
    assert f"Question 1: {QUESTIONS[0]}\nThe result could not be read: gone" in asked.text
    failed, *others = asked.artifact["readings"]
    assert "gone" in failed["error"]
    assert [reading["answer"] for reading in others] == KEYS[1:3]
    policy.prompts.clear()
    policy.broken = False
    *_, asked = told(await called(agent(calls(("ask_tool_result", more), prefix="c"), "done"), ASK))
    assert [reading["answer"] for reading in asked.artifact["readings"]] == KEYS[:3]
    assert policy.shared_one_pass(3)
    policy.broken = True
    alone = {**more, "questions": QUESTIONS[:1]}
    *_, asked = told(await called(agent(calls(("ask_tool_result", alone), prefix="d"), "done"), ASK))
    assert (asked.status, "The result could not be read: gone" in asked.text) == ("error", True)
    many = {**more, "questions": QUESTIONS * 2}
    *_, asked = told(await called(agent(calls(("ask_tool_result", many), prefix="e"), "done"), ASK))
    assert "at most 8 items" in asked.text

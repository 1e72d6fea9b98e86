"""Many questions in one pass, in a read that is a part of another agent or graph."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from support.chat_models import make_chat_model, make_tool_calls
from support.scripts import extract, make_document, read_perfectly
from typing_extensions import TypedDict
from unit.test_node import build_parent
from unit.test_tool import find_tool_messages, make_caller

from langchain_memagent.middleware import MemAgentMiddleware
from langchain_memagent.node import memagent_node
from langchain_memagent.read_long_document import ReadLongDocument
from memagent_graph import ScriptedPolicy, StopReason
from memagent_graph.errors import MemAgentError, PolicyError

NAMES = ["harbor", "castle", "tower", "bridge", "market", "chapel", "garden", "mill"]
QUESTIONS = [f"What is the key of {name}?" for name in NAMES]
KEYS = [str(100 + number) for number in range(len(NAMES))]
TEXT = make_document(
    {
        # Twice, because a chunk may end inside one of them.
        offset + 0.05 + 0.1 * number: f"The key of {name} is {100 + number}."
        for number, name in enumerate(NAMES)
        for offset in (0, 0.037)
    },
    words=500,
)
CONFIG: Any = {"configurable": {"thread_id": "t"}, "recursion_limit": 25}
ASK: Any = {"messages": [("user", "?")]}


class UnevenPolicy(ScriptedPolicy):
    """Slower for every second question; while `is_failing`, it fails at the fact of the question about the harbor."""

    def __init__(self, script: Callable[[str], str] = read_perfectly, *, is_failing: bool = False) -> None:
        self.is_failing, self.read = is_failing, script
        super().__init__(self._reply)

    def _reply(self, prompt: str) -> Any:
        if self.is_failing and "harbor" in extract(prompt, "problem") and "harbor is 100" in extract(prompt, "section"):
            return PolicyError("gone")
        return self.read(prompt)

    async def complete(self, prompt: Any, sampling: Any) -> Any:
        problem = extract(prompt[0]["content"], "problem")
        number = next((index for index, name in enumerate(NAMES) if name in problem), 0)
        await asyncio.sleep(0.004 * (number % 2))
        return await super().complete(prompt, sampling)

    @property
    def sections(self) -> list[str]:
        return [extract(prompt, "section") for prompt in self.prompts if "<section>" in prompt]

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        return Counter((extract(prompt, "problem"), extract(prompt, "section")) for prompt in self.prompts)

    def has_shared_one_pass(self, questions: int = len(QUESTIONS)) -> bool:
        """Return whether each section was read for all questions before the next section was read."""
        unique_sections = list(dict.fromkeys(self.sections))
        assert len(unique_sections) > 5
        return self.sections == [section for section in unique_sections for _ in range(questions)]


class AskState(TypedDict, total=False):
    question: Any
    document: Any
    answer: Any
    notes: list[str]
    run: list[str]
    quotes: list[list[dict[str, Any]]]
    why: list[str]


async def invoke(graph: Any, state: Any, config: Any = CONFIG) -> Any:
    return await graph.ainvoke(state, config)


class TestTheTool:
    async def test_eight_questions_share_one_pass_and_equal_questions_one_run(self, make_reader) -> None:
        """Also if the caller limits the concurrency of its graph."""
        policy = UnevenPolicy()
        tool = ReadLongDocument(agent=make_reader(policy, run_log=False))
        questions = [*QUESTIONS[:7], f" {QUESTIONS[0]} "]
        agent = create_agent(make_caller({"questions": questions, "text": TEXT}), [tool], checkpointer=InMemorySaver())
        (message,) = find_tool_messages(await invoke(agent, ASK, {**CONFIG, "max_concurrency": 2}))
        readings = message.artifact["readings"]
        assert [reading["answer"] for reading in readings] == [*KEYS[:7], KEYS[0]]
        assert readings[0] == readings[7]
        for number, (question, key) in enumerate(zip(QUESTIONS[:7], KEYS, strict=False), 1):
            assert f"Question {number}: {question}\nAnswer: {key}\nEvidence" in message.text
        assert policy.has_shared_one_pass(7)

    @pytest.mark.parametrize("has_checkpoints", [False, True], ids=["no checkpoints", "checkpoints of its own"])
    async def test_after_a_raised_failure_only_the_failed_question_continues(
        self, make_reader, has_checkpoints
    ) -> None:
        policy = UnevenPolicy(is_failing=True)
        reader = make_reader(policy, run_log=False, **({"checkpoints": InMemorySaver()} if has_checkpoints else {}))
        tool = ReadLongDocument(agent=reader, on_failure="raise")
        agent = create_agent(make_caller({"questions": QUESTIONS, "text": TEXT}), [tool], checkpointer=InMemorySaver())
        with pytest.raises(PolicyError, match="gone") as error:
            await invoke(agent, ASK)
        policy.is_failing = False
        (message,) = find_tool_messages(await invoke(agent, None))
        assert [reading["answer"] for reading in message.artifact["readings"]] == KEYS
        assert all(reading["evidence"] for reading in message.artifact["readings"])
        assert message.artifact["readings"][0]["run_id"] == error.value.run_id
        repeated = {question for (question, _), count in policy.counts.items() if count > 1}
        assert max(policy.counts.values()) == 2
        assert repeated == {QUESTIONS[0]}, "the others had ended before the error was raised"
        assert sum(policy.counts.values()) == len(policy.counts) + 1

    async def test_a_model_gets_the_other_answers_and_asks_the_failed_question_again(self, make_reader) -> None:
        policy = UnevenPolicy(is_failing=True)
        tool, saver = ReadLongDocument(agent=make_reader(policy, run_log=False)), InMemorySaver()
        agent = create_agent(make_caller({"questions": QUESTIONS[:3], "text": TEXT}), [tool], checkpointer=saver)
        (failed,) = find_tool_messages(await invoke(agent, ASK))
        assert failed.status == "success"
        assert [reading["answer"] for reading in failed.artifact["readings"]] == [None, *KEYS[1:3]]
        assert "The read failed: gone" in failed.text
        policy.is_failing = False
        agent = create_agent(make_caller({"questions": QUESTIONS[:1], "text": TEXT}), [tool], checkpointer=saver)
        _, repeated = find_tool_messages(await invoke(agent, ASK))
        assert repeated.artifact["readings"][0]["answer"] == KEYS[0]
        assert repeated.artifact["readings"][0]["run_id"] == failed.artifact["readings"][0]["run_id"]
        assert sum(policy.counts.values()) == len(policy.counts) + 1, "only the chunk that failed was read again"


class TestTheNode:
    async def test_a_list_of_questions_gives_lists_in_their_order(self, make_reader) -> None:
        policy = UnevenPolicy()
        node = memagent_node(
            make_reader(policy), memory="notes", run_id="run", evidence="quotes", stop_reason="why",
            write=lambda state, results: {"document": [result.chunks_read for result in results]},
        )  # fmt: skip
        out = await invoke(build_parent(node, AskState).compile(), {"question": QUESTIONS, "document": TEXT})
        assert out["answer"] == KEYS
        assert [notes.split()[-1] for notes in out["notes"]] == KEYS
        assert [quotes[0]["quote"].split()[-1] for quotes in out["quotes"]] == KEYS
        assert len(set(out["run"])) == len(QUESTIONS)
        assert out["why"] == [StopReason.ANSWERED] * len(QUESTIONS)
        assert len(set(out["document"])) == 1
        assert policy.has_shared_one_pass()

    async def test_a_list_of_one_gives_lists_and_equal_questions_share_one_run(self, make_reader) -> None:
        policy = UnevenPolicy()
        graph = build_parent(memagent_node(make_reader(policy), run_id="run"), AskState).compile()
        out = await invoke(graph, {"question": QUESTIONS[:1], "document": TEXT})
        assert out["answer"] == KEYS[:1]
        policy.prompts.clear()
        out = await invoke(graph, {"question": (QUESTIONS[0], QUESTIONS[1], QUESTIONS[0]), "document": TEXT})
        assert out["answer"] == [KEYS[0], KEYS[1], KEYS[0]]
        assert out["run"][0] == out["run"][2] != out["run"][1]
        assert policy.has_shared_one_pass(2)

    async def test_invalid_questions_are_refused_before_a_read(self, make_reader) -> None:
        policy = UnevenPolicy()
        graph = build_parent(memagent_node(make_reader(policy)), AskState).compile()
        for question in ({"q": QUESTIONS[0]}, [QUESTIONS[0], " "]):
            with pytest.raises(MemAgentError, match=r"not a text or a list of texts|the question is empty"):
                await invoke(graph, {"question": question, "document": TEXT})
        assert not policy.prompts

    async def test_a_nested_node_raises_after_the_other_questions_and_only_the_failed_one_continues(
        self, make_reader, log
    ) -> None:
        policy = UnevenPolicy()
        node = memagent_node(make_reader(policy, run_log=log), evidence="quotes", run_id="run")
        outer = build_parent(build_parent(node, AskState).compile(), AskState).compile(checkpointer=InMemorySaver())
        policy.is_failing = True
        with pytest.raises(PolicyError, match="gone"):
            await invoke(outer, {"question": QUESTIONS, "document": TEXT})
        answered = [question for question, section in policy.counts if not section]
        assert sorted(answered) == sorted(QUESTIONS[1:])
        policy.is_failing = False
        out = await invoke(outer, None)
        assert out["answer"] == KEYS
        assert all(out["quotes"])
        repeated = [question for (question, _), count in policy.counts.items() if count > 1]
        assert repeated == QUESTIONS[:1]
        assert sum(policy.counts.values()) == len(policy.counts) + 1, "only the chunk that failed was read again"
        assert [log.get(run_id).question for run_id in out["run"]] == QUESTIONS


async def test_a_tool_result_is_asked_several_questions_in_one_pass(make_reader) -> None:
    policy = UnevenPolicy()
    middleware, saver = MemAgentMiddleware(make_reader(policy), result_tokens=500), InMemorySaver()

    def fetch() -> str:
        """Fetch a text."""
        return TEXT

    def make_agent(*replies: Any) -> Any:
        return create_agent(make_chat_model(*replies), [fetch], middleware=[middleware], checkpointer=saver)

    async def ask(arguments: dict[str, Any], prefix: str) -> Any:
        return await invoke(make_agent(make_tool_calls(("ask_tool_result", arguments), prefix=prefix), "done"), ASK)

    (result,) = find_tool_messages(await invoke(make_agent(make_tool_calls(("fetch", {})), "read"), ASK))
    policy.prompts.clear()
    policy.is_failing = True
    arguments = {"run_id": result.response_metadata["memagent"]["run_id"], "questions": QUESTIONS[:3]}
    *_, message = find_tool_messages(await ask(arguments, "b"))
    for number in (1, 2):
        assert f"Question {number + 1}: {QUESTIONS[number]}\nAnswer: {KEYS[number]}" in message.text
    assert f"Question 1: {QUESTIONS[0]}\nThe result could not be read: gone" in message.text
    failed, *others = message.artifact["readings"]
    assert "gone" in failed["error"]
    assert [reading["answer"] for reading in others] == KEYS[1:3]
    policy.prompts.clear()
    policy.is_failing = False
    *_, message = find_tool_messages(await ask(arguments, "c"))
    assert [reading["answer"] for reading in message.artifact["readings"]] == KEYS[:3]
    assert policy.has_shared_one_pass(3)
    policy.is_failing = True
    *_, message = find_tool_messages(await ask({**arguments, "questions": QUESTIONS[:1]}, "d"))
    assert (message.status, "The result could not be read: gone" in message.text) == ("error", True)
    *_, message = find_tool_messages(await ask({**arguments, "questions": QUESTIONS * 2}, "e"))
    assert "at most 8 items" in message.text

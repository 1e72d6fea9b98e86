"""The messages of a history are read into a memory and not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from langchain_memagent.rolling_history import RollingHistory
from memagent_graph import MemAgent, ScriptedPolicy

MakeReader = Callable[..., MemAgent]
MESSAGES = [HumanMessage("The key of harbor is 4711."), AIMessage("Noted.")]
QUESTION = "Which keys, of harbor and castle?"


def read_history(reader: MemAgent, memory: str, messages: list[BaseMessage]) -> str:
    def ignore(run_id: str, question: str, update: Any) -> None:
        pass

    history = RollingHistory(reader, tokens=1000, keep_messages=1)
    return asyncio.run(history.read_into_memory(memory, messages, QUESTION, {}, ignore))


def test_messages_are_not_stored(make_reader: MakeReader, tmp_path: Path, isolated_home: Path) -> None:
    reader = make_reader()
    read_history(reader, "", MESSAGES)
    assert reader.run_log is not None
    assert list(reader.run_log.runs()) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"4711" in path.read_bytes()]


def test_messages_without_text_need_no_call_and_keep_the_memory(make_reader: MakeReader) -> None:
    policy = ScriptedPolicy([])
    assert read_history(make_reader(policy), "old memory", [AIMessage("")]) == "old memory"
    assert policy.prompts == []

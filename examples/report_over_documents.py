"""Read many documents in parallel for one question: `python examples/report_over_documents.py QUESTION FILE...`.

Set OPENAI_BASE_URL to a server, or MEMAGENT_MODEL to a policy (`embedded` finds numbers).
"""

from __future__ import annotations

import operator
import os
import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from langchain_memagent import memagent_node
from memagent_graph import MemAgent, ReadResult
from memagent_graph.settings import ReadSettings


class State(TypedDict, total=False):
    """The graph's state."""

    question: str
    paths: list[str]
    findings: Annotated[list[str], operator.add]
    report: str


def send_reads(state: State) -> list[Send]:
    """Return one read for each document; each read has its own position and memory."""
    return [Send("read", {"question": state["question"], "path": path}) for path in state["paths"]]


def write_finding(task: dict[str, str], result: ReadResult) -> dict[str, list[str]]:
    """Return the answer and up to two quotes of one document, for the report."""
    lines = [f"- **{Path(task['path']).name}**: {result.answer} ({result.chunks_read} chunks)"]
    return {"findings": ["\n".join(lines + [f"  > {evidence.quote}" for evidence in result.evidence[:2]])]}


def main(question: str, paths: list[str]) -> None:
    """Read every document, then print a report in Markdown."""
    agent = MemAgent(settings=ReadSettings.from_environment(os.environ))
    builder: Any = StateGraph(State)
    builder.add_node(
        "read", memagent_node(agent, document=lambda task: Path(task["path"]), answer=None, write=write_finding)
    )
    builder.add_node("report", lambda state: {"report": "\n".join([f"# {state['question']}", *state["findings"]])})
    builder.add_conditional_edges(START, send_reads, ["read"])
    builder.add_edge("read", "report")
    builder.add_edge("report", END)
    print(builder.compile().invoke({"question": question, "paths": paths})["report"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""The server's prompts. Clients show them to their users, often as slash commands."""

from __future__ import annotations

from typing import Annotated, Any

from mcp.server.fastmcp import FastMCP
from pydantic import Field


def add_prompts(server: FastMCP[Any]) -> None:
    """Add the prompts to a server."""
    server.prompt(title="Ask a long document")(ask_document)
    server.prompt(title="Check an answer against its document")(check_answer)


def ask_document(
    path: Annotated[str, Field(description="The file.")],
    question: Annotated[str, Field(description="What to find out; several questions on separate lines.")],
) -> str:
    """Read a document of any length from beginning to end, and answer from it with quotes."""
    return (
        f"Read the document {path} with the tool read_document. If it may be long, read it in the background and call "
        f"wait until the answer is ready. Ask all of this in one call:\n\n{question}\n\nThen answer me. For each "
        "point, give the supporting quotes with their place in the document. Say so if the document has no answer."
    )


def check_answer(run_id: Annotated[str, Field(description="The run's id, as given in answers.")]) -> str:
    """Check whether a run's notes and answer are supported by its document."""
    return (
        f"Look at run {run_id} with the tool show_run. For every claim of its answer, name the quote that supports it, "
        "or say that there is none. If a note that the question needed was lost later, name it."
    )

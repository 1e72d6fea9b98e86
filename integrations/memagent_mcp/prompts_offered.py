"""The prompts that clients offer their users, as slash commands often."""

from __future__ import annotations

from typing import Annotated, Any

from mcp.server.fastmcp import FastMCP
from pydantic import Field


def add_prompts(server: FastMCP[Any]) -> None:
    """Offer them."""
    server.prompt(title="Ask a long document")(ask_document)
    server.prompt(title="Check an answer against its document")(check_answer)


def ask_document(
    path: Annotated[str, Field(description="The file.")],
    question: Annotated[str, Field(description="What to find out; several questions one a line.")],
) -> str:
    """Read a document of any length from beginning to end, and answer from it with quotes."""
    return (
        f"Read the document {path} with the tool read_document, in the background if it may be long, and call wait "
        f"until its answer is there. Ask all of this in one call:\n\n{question}\n\nThen answer me, with the quotes "
        "that support each point and their places. Say so where the document holds no answer."
    )


def check_answer(run_id: Annotated[str, Field(description="The run's id, as answers give it.")]) -> str:
    """See whether what a run noted and answered is in its document."""
    return (
        f"Look at run {run_id} with the tool show_run. For every claim of its answer, name the quote that supports it, "
        "or say that there is none. Say what was noted and lost again that the question needed."
    )

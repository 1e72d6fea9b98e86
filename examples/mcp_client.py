"""Read a document through the MCP server, as an agent does: `python examples/mcp_client.py FILE QUESTION [OPTION...]`.

The client starts `memagent mcp` with the options, as in `--base-url http://localhost:8000/v1` or `--model embedded`.
Without options, the server in OPENAI_BASE_URL reads, or the policy that was added to this machine.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client


async def show_progress(progress: float, total: float | None, message: str | None) -> None:
    """Print a progress notification; the server sends one after each chunk."""
    print(f"{progress / (total or 1):4.0%}  {message}")


async def main(path: Path, question: str, *options: str) -> None:
    """Ask a question, and print the progress, the answer with its quotes, and the run."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "memagent_graph", "mcp", "--root", str(path.parent), *options],
        env=dict(os.environ),
    )
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        arguments = {"path": str(path), "questions": question}
        result = await session.call_tool("read_document", arguments, progress_callback=show_progress)
        if result.isError or result.structuredContent is None:
            raise SystemExit(result.content[0].text)
        answer = result.structuredContent["answers"][0]
        print(f"answer: {answer['answer']}")
        for quote in answer["evidence"]:
            print(f"  characters {quote['start_char']}-{quote['end_char']}: {quote['context']}")
        run = await session.call_tool("show_run", {"run_id": answer["run_id"]})
        print(run.content[0].text)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))

"""Ask a question about a document, and watch the memory grow: `python examples/ask_a_document.py FILE QUESTION`.

Set OPENAI_BASE_URL to a server, or MEMAGENT_MODEL to a policy (`embedded` finds numbers).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from memagent_graph import MemAgent, ReadResult
from memagent_graph.settings import ReadSettings


def main(path: Path, question: str) -> None:
    """Print each change of memory as it happens, then the answer."""
    with MemAgent(settings=ReadSettings.from_environment(os.environ)) as agent:
        for event in agent.stream(path, question):
            if isinstance(event, ReadResult):
                print(f"answer: {event.answer} ({event.chunks_read} chunks, {event.usage.total_tokens:,} tokens)")
            elif event.changed:
                print(f"chunk {event.chunk_index}, characters {event.start_char}-{event.end_char}: {event.memory!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

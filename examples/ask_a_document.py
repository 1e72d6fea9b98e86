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
        for part in agent.stream(path, question):
            if isinstance(part, ReadResult):
                print(f"answer: {part.answer} ({part.chunks_read} chunks, {part.usage.total_tokens:,} tokens)")
            elif part.changed:
                print(f"chunk {part.chunk_index}, characters {part.start_char}-{part.end_char}: {part.memory!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

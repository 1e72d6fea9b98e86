"""Ask a question about a document, and watch the memory grow: `python examples/ask_a_document.py FILE QUESTION`.

It uses the policy that comes with the package; name a server with OPENAI_BASE_URL to use that instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from memagent_graph import LocalPolicy, MemAgent, OpenAICompatiblePolicy, ReadResult


def main(path: Path, question: str) -> None:
    """Print each change of memory as it happens, then the answer."""
    policy = OpenAICompatiblePolicy() if "OPENAI_BASE_URL" in os.environ else LocalPolicy.embedded()
    with MemAgent(policy) as agent:
        for part in agent.stream(path, question):
            if isinstance(part, ReadResult):
                print(f"answer: {part.answer} ({part.chunks_read} chunks, {part.usage.total_tokens:,} tokens)")
            elif part.changed:
                print(f"chunk {part.chunk_index}, characters {part.start_char}-{part.end_char}: {part.memory!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

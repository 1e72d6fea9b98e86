"""How soon the first request leaves for a document of 15 MB, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.text import prose_of
from benchmarks.throughput import slow_server

_READ = """
import sys, time, pathlib
from memagent_graph import MemAgent, OpenAICompatiblePolicy, Budget, Limits, load_prompts, policy
reader = MemAgent(OpenAICompatiblePolicy("slow", base_url=sys.argv[1]), tokenizer="embedded", budget=Budget(),
                  prompts=load_prompts(), store=pathlib.Path(sys.argv[3]), run_log=False)
sent = []
complete = reader.policy.complete
async def first(prompt, sampling):
    sent.append(time.perf_counter())
    return await complete(prompt, sampling)
reader.policy.complete = first
begin = time.perf_counter()
reader.read(pathlib.Path(sys.argv[2]), "What is said?", limits=Limits(max_chunks=1))
print(sent[0] - begin)
"""
_IMPORT = """
import sys, time
begin = time.perf_counter()
import memagent_graph
print(time.perf_counter() - begin)
assert "torch" not in sys.modules
"""


def _seconds(*arguments: str) -> float:
    runs = [
        float(subprocess.run([sys.executable, "-c", *arguments], check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    return sorted(runs)[1]


def measure() -> list[Figure]:
    """Seconds from `read` to the first request, and seconds of `import memagent_graph`; medians of three processes."""
    with slow_server(0) as url, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "15MB.txt"
        text = next(iter(prose_of(100_000)))
        path.write_text(text * (15_000_000 // len(text) + 1))
        first = _seconds(_READ, url, str(path), str(Path(folder) / "store"))
    imported = _seconds(_IMPORT)
    return [
        Figure("first request of a 15 MB file, after", first, "s", "<= 0.5", first <= 0.5),
        Figure("import memagent_graph", imported, "s", "<= 0.5", imported <= 0.5),
    ]

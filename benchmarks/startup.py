"""Measure the time to the first request for a new document of 15 MB, and the start of imports and the command line."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure
from benchmarks.slow_server import run_slow_server
from benchmarks.text import make_prose

_READ_PROGRAM = """
import sys, time, pathlib
from memagent_graph import MemAgent, OpenAICompatiblePolicy, Budget, Limits, load_prompts, policy
reader = MemAgent(OpenAICompatiblePolicy("slow", base_url=sys.argv[1]), tokenizer="embedded", budget=Budget(),
                  prompts=load_prompts(), store=pathlib.Path(sys.argv[3]), run_log=False)
send_times = []
complete = reader.policy.complete
async def complete_with_send_time(prompt, sampling):
    send_times.append(time.perf_counter())
    return await complete(prompt, sampling)
reader.policy.complete = complete_with_send_time
start_time = time.perf_counter()
reader.read(pathlib.Path(sys.argv[2]), "What is said?", limits=Limits(max_chunks=1))
print(send_times[0] - start_time)
"""
_IMPORT_PROGRAM = """
import sys, time
start_time = time.perf_counter()
import memagent_graph
print(time.perf_counter() - start_time)
assert "torch" not in sys.modules
"""


def _run_program(*arguments: str) -> float:
    """Run a Python program that prints seconds, and return them."""
    return float(subprocess.run([sys.executable, "-c", *arguments], check=True, capture_output=True, text=True).stdout)


_POLICY_PROGRAM = """
import sys
from memagent_graph.cli import main
from memagent_graph.cli.console import Console
def stop(self, words):
    raise SystemExit(0)
Console.print_note = stop
sys.argv = ["memagent", "read", sys.argv[1], "-q", "What is said?", "--model", "embedded"]
main()
"""


def _measure_processor_seconds(home: str, *arguments: str) -> float:
    """Return the user and system time of a Python process with its data in `home`: the minimum of three runs."""
    processor_seconds = []
    for _ in range(3):
        usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "MEMAGENT_HOME": home}
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
        usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor_seconds.append(
            usage_after.ru_utime - usage_before.ru_utime + usage_after.ru_stime - usage_before.ru_stime
        )
    return min(processor_seconds)


def _measure_command_line() -> list[Figure]:
    """Return the processor time of the help, of a read up to the line that names the policy, and of a complete read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "note.txt"
        path.write_text("The access code of the quiet falcon is 48213.")
        help_seconds = _measure_processor_seconds(folder, "-m", "memagent_graph", "--help")
        policy_seconds = _measure_processor_seconds(folder, "-c", _POLICY_PROGRAM, str(path))
        question = "What is the access code of the quiet falcon?"
        read_seconds = _measure_processor_seconds(
            folder, "-m", "memagent_graph", "read", str(path), "-q", question, "--model", "embedded"
        )
        import_seconds = _measure_processor_seconds(
            folder, "-c", "import torch, transformers.models.llama.modeling_llama"
        )
    return [
        Figure.at_most("memagent --help, processor time", help_seconds, "s", 0.5),
        Figure.at_most("memagent read until it names the policy, processor time", policy_seconds, "s", 2),
        Figure(
            "read of one chunk, embedded : import of torch and transformers' Llama", read_seconds / import_seconds, "x"
        ),
    ]


def measure() -> list[Figure]:
    """Return the medians for the first request and for `import memagent_graph`, and the figures of the command line."""
    with run_slow_server(0) as url, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "15MB.txt"
        text = make_prose(100_000)
        path.write_text(text * (15_000_000 // len(text) + 1))
        stores = [str(Path(folder) / f"store-{index}") for index in range(3)]  # a known document is not stored again
        first_request_seconds = median(_run_program(_READ_PROGRAM, url, str(path), store) for store in stores)
    import_seconds = median(_run_program(_IMPORT_PROGRAM) for _ in range(3))
    return [
        Figure.at_most("time to the first request for a 15 MB file", first_request_seconds, "s", 0.5),
        Figure.at_most("import memagent_graph", import_seconds, "s", 0.5),
        *_measure_command_line(),
    ]

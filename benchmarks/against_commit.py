"""Chunking and decoding against another commit: `python -m benchmarks.against_commit WORKTREE`.

`git worktree add WORKTREE COMMIT` makes the folder. Rounds of the two alternate, each in a process of its own; a figure
is the ratio of the shortest processor times: above 1, this commit is slower. A document is tokenised by the same
library in both, and that is measured once for both; beside a ratio stand the microseconds that each needs to cut a
chunk besides, and how many of the chunks end with a sentence: a code that knows no sentences is quick to find none.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from memagent_graph.documents import Document, DocumentStore
from memagent_graph.documents.chunking import Boundary, Chunker
from memagent_graph.policies.replies import decode_completion
from memagent_graph.policy import SamplingParams
from memagent_graph.tokenizers.loading import load_tokenizer

ROUNDS = 7
PASSES = 5
CHARACTERS = 40_000
CHUNK_TOKENS: dict[str, tuple[Boundary, int]] = {
    "token": ("token", 512),
    "sentence": ("sentence", 512),
    "sentence (long chunks)": ("sentence", 5000),
}
SENTENCES = Path(__file__).parent.parent / "tests/support/sentences.txt"
SCRIPTS = ("ASCII", "Latin", "Cyrillic", "Arabic", "Devanagari", "Thai", "Han")
REPLIES = {"plain reply": 0, "reply with 800 log-probs": 800}
DECODED = 5_000
MOST = 1.05
THAI = ("หอคอย", "นี้", "เก่า", "มาก", "อยู่", "ใกล้", "ทะเล", " ")
"""Thai marks no sentences."""


def shuffled_sentences(script: str) -> list[str]:
    """Return the marked sentences of a script in random order, again and again; ASCII is a part of Latin."""
    lines = SENTENCES.read_text("utf-8").partition("[" + script.replace("ASCII", "Latin") + "]")[2].partition("\n[")[0]
    vocabulary = (
        [sentence for line in lines.splitlines() for sentence in line.split("|")[:-1]] if script != "Thai" else [*THAI]
    )
    vocabulary = [sentence for sentence in vocabulary if sentence.isascii() or script != "ASCII"]
    rng = random.Random(0)
    sentences: list[str] = []
    while vocabulary and len("".join(sentences)) < CHARACTERS:
        sentences += rng.sample(vocabulary, len(vocabulary))
    return sentences


def vllm_reply(logprobs: int) -> bytes:
    """Return a reply as vLLM writes it."""
    entries = [{"token": "word", "logprob": -0.25, "bytes": [119, 111], "top_logprobs": []}] * logprobs
    ids = {"logprobs": {"content": entries}, "token_ids": [7] * logprobs} if logprobs else {"logprobs": None}
    message: dict[str, Any] = {"role": "assistant", "content": "word " * 200, "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None, **ids}
    usage = {"prompt_tokens": 5000, "total_tokens": 5800, "completion_tokens": 800, "prompt_tokens_details": None}
    return json.dumps({"id": "chat-1", "model": "m", "choices": [choice], "usage": usage}).encode()


def measure_here() -> dict[str, tuple[float, str]]:
    """Return by figure the processor seconds of the code that is imported, and how many chunks end with a sentence."""
    figures: dict[str, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = DocumentStore(folder)
        for script in SCRIPTS:
            sentences = shuffled_sentences(script)
            text = "".join(sentences)
            ref = store.add(Document.from_text(text))
            sentence_ends = set(accumulate(map(len, sentences)))
            sentence_ends |= {end - 1 for end in sentence_ends if text[end - 1] == " "}  # tokens have the space before
            tokenizer = load_tokenizer("embedded")
            for name, (boundary, chunk_tokens) in CHUNK_TOKENS.items():
                seconds = []
                for _ in range(PASSES):  # the first one tokenises
                    start_time = time.process_time()
                    chunker = Chunker(store, ref, tokenizer, chunk_tokens, boundary)
                    ends = [chunk.end_char for chunk in chunker.chunks()]
                    seconds.append(time.process_time() - start_time)
                if name == "token":
                    figures[f"tokenising {script}"] = seconds[0], ""
                count = f"{len(sentence_ends & {*ends})}/{len(ends)}"
                figures[f"{name}, {script}"] = min(seconds), count
    options: dict[str, Any] = {"model": "m"}
    if "sampling" in inspect.signature(decode_completion).parameters:
        options["sampling"] = SamplingParams(max_tokens=1000)
    for name, logprobs in REPLIES.items():
        body = vllm_reply(logprobs)
        start_time = time.process_time()
        for _ in range(DECODED // (1 + logprobs // 10)):
            decode_completion(body, **options)
        figures[name] = time.process_time() - start_time, ""
    return figures


def measure_in(tree: Path) -> dict[str, tuple[float, str]]:
    """Return the same of the code in a folder."""
    command = [sys.executable, "-P", __file__, "--here"]
    process = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
    )
    figures: dict[str, tuple[float, str]] = json.loads(process.stdout)
    return figures


def main(worktree: Path) -> None:
    """Print the table."""
    from benchmarks.figures import Figure, print_table

    trees = {"before": worktree, "now": Path(__file__).parent.parent}
    rounds = [{name: measure_in(tree) for name, tree in trees.items()} for _ in range(ROUNDS)]
    figures = []
    for metric, (_, count) in rounds[0]["now"].items():
        if metric.startswith("tokenising"):
            continue
        old_seconds, new_seconds = (min(results[name][metric][0] for results in rounds) for name in trees)
        common, details = 0.0, ""
        if count:
            script = metric.rpartition(" ")[2]
            common = min(results[name][f"tokenising {script}"][0] for results in rounds for name in trees)
            chunks = int(count.partition("/")[2]) / 1e6
            counts = f"{rounds[0]['old_seconds'][metric][1]} -> {count}"
            details = f", {old_seconds / chunks:.0f} -> {new_seconds / chunks:.0f} us, {counts}"
        ratio = (common + new_seconds) / (common + old_seconds)
        figures.append(Figure(metric + details, ratio, "", f"at most {MOST}", ratio <= MOST))
    print_table(figures)


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        print(json.dumps(measure_here()))
    else:
        main(Path(sys.argv[1]))

"""Compare the speed of chunking and decoding with another commit: `python -m benchmarks.against_commit WORKTREE`.

`git worktree add WORKTREE COMMIT` makes the folder. Rounds of the two commits alternate, each round in its own process.
A figure is the ratio of the shortest processor times; above 1, this commit is slower. Both commits tokenise with the
same library, so the time of tokenising is measured once and counted for both. The label of a figure also shows the
microseconds per chunk without tokenising, and how many chunks end at the end of a sentence, for each commit.
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
PASSES_PER_ROUND = 5
MIN_CHARACTERS = 40_000
CHUNKINGS: dict[str, tuple[Boundary, int]] = {
    "token": ("token", 512),
    "sentence": ("sentence", 512),
    "sentence (long chunks)": ("sentence", 5000),
}
SENTENCES = Path(__file__).parent.parent / "tests/support/sentences.txt"
SCRIPTS = ("ASCII", "Latin", "Cyrillic", "Arabic", "Devanagari", "Thai", "Han")
LOGPROB_COUNTS = {"plain reply": 0, "reply with 800 log-probs": 800}
DECODED_REPLIES = 5_000
MAX_RATIO = 1.05
THAI_WORDS = ("หอคอย", "นี้", "เก่า", "มาก", "อยู่", "ใกล้", "ทะเล", " ")
"""Words, because Thai does not mark the ends of sentences."""


def shuffle_sentences(script: str) -> list[str]:
    """Return sentences of a script in random order, repeated until they have `MIN_CHARACTERS` characters.

    The sentences of "ASCII" are those of Latin that have only ASCII characters.
    """
    lines = SENTENCES.read_text("utf-8").partition("[" + script.replace("ASCII", "Latin") + "]")[2].partition("\n[")[0]
    vocabulary = (
        [*THAI_WORDS]
        if script == "Thai"
        else [sentence for line in lines.splitlines() for sentence in line.split("|")[:-1]]
    )
    vocabulary = [sentence for sentence in vocabulary if sentence.isascii() or script != "ASCII"]
    rng = random.Random(0)
    sentences: list[str] = []
    while vocabulary and len("".join(sentences)) < MIN_CHARACTERS:
        sentences += rng.sample(vocabulary, len(vocabulary))
    return sentences


def make_vllm_reply(logprob_count: int) -> bytes:
    """Return the body of a chat completion in vLLM's format."""
    entries = [{"token": "word", "logprob": -0.25, "bytes": [119, 111], "top_logprobs": []}] * logprob_count
    token_fields = (
        {"logprobs": {"content": entries}, "token_ids": [7] * logprob_count} if logprob_count else {"logprobs": None}
    )
    message: dict[str, Any] = {"role": "assistant", "content": "word " * 200, "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None, **token_fields}
    usage = {"prompt_tokens": 5000, "total_tokens": 5800, "completion_tokens": 800, "prompt_tokens_details": None}
    return json.dumps({"id": "chat-1", "model": "m", "choices": [choice], "usage": usage}).encode()


def measure_this_code() -> dict[str, tuple[float, str]]:
    """Measure the imported code.

    Returns:
        for each figure, its processor seconds and the count of chunks that end with a sentence, such as "7/9".
    """
    measurements: dict[str, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = DocumentStore(folder)
        for script in SCRIPTS:
            sentences = shuffle_sentences(script)
            text = "".join(sentences)
            reference = store.add(Document.from_text(text))
            sentence_ends = set(accumulate(map(len, sentences)))
            # A token includes the space before its word.
            sentence_ends |= {end - 1 for end in sentence_ends if text[end - 1] == " "}
            tokenizer = load_tokenizer("embedded")
            for chunking, (boundary, chunk_tokens) in CHUNKINGS.items():
                seconds = []
                for _ in range(PASSES_PER_ROUND):  # only the first pass tokenises
                    start_time = time.process_time()
                    chunks = Chunker(store, reference, tokenizer, chunk_tokens, boundary).chunks()
                    ends = [chunk.end_char for chunk in chunks]
                    seconds.append(time.process_time() - start_time)
                if chunking == "token":
                    measurements[f"tokenising {script}"] = seconds[0], ""
                sentence_end_counts = f"{len(sentence_ends & {*ends})}/{len(ends)}"
                measurements[f"{chunking}, {script}"] = min(seconds), sentence_end_counts
    decoding_options: dict[str, Any] = {"model": "m"}
    if "sampling" in inspect.signature(decode_completion).parameters:
        decoding_options["sampling"] = SamplingParams(max_tokens=1000)
    for metric, logprob_count in LOGPROB_COUNTS.items():
        body = make_vllm_reply(logprob_count)
        start_time = time.process_time()
        for _ in range(DECODED_REPLIES // (1 + logprob_count // 10)):
            decode_completion(body, **decoding_options)
        measurements[metric] = time.process_time() - start_time, ""
    return measurements


def measure_worktree(tree: Path) -> dict[str, tuple[float, str]]:
    """Run `measure_this_code` in a new process with the code of a worktree, and return its result."""
    command = [sys.executable, "-P", __file__, "--here"]
    process = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
    )
    measurements: dict[str, tuple[float, str]] = json.loads(process.stdout)
    return measurements


def main(worktree: Path) -> None:
    """Print the ratios of this commit to the one in `worktree`."""
    from benchmarks.figures import Figure, print_table

    tree_by_name = {"before": worktree, "now": Path(__file__).parent.parent}
    rounds = [{name: measure_worktree(tree) for name, tree in tree_by_name.items()} for _ in range(ROUNDS)]
    figures = []
    for metric, (_, sentence_end_counts) in rounds[0]["now"].items():
        if metric.startswith("tokenising"):
            continue
        old_seconds, new_seconds = (min(results[name][metric][0] for results in rounds) for name in tree_by_name)
        tokenising_seconds, details = 0.0, ""
        if sentence_end_counts:
            script = metric.rpartition(" ")[2]
            tokenising_seconds = min(
                results[name][f"tokenising {script}"][0] for results in rounds for name in tree_by_name
            )
            chunk_count = int(sentence_end_counts.partition("/")[2])
            counts = f"{rounds[0]['before'][metric][1]} -> {sentence_end_counts}"
            details = f", {1e6 * old_seconds / chunk_count:.0f} -> {1e6 * new_seconds / chunk_count:.0f} us, {counts}"
        ratio = (tokenising_seconds + new_seconds) / (tokenising_seconds + old_seconds)
        figures.append(Figure.at_most(metric + details, ratio, "", MAX_RATIO))
    print_table(figures)


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        print(json.dumps(measure_this_code()))
    else:
        main(Path(sys.argv[1]))

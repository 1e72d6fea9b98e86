"""Chunking 15 MB of English: its time against the tokenizers library's own encoding of the same text, and its memory.

Two tokenizers: the embedded policy's
(small vocabulary, many tokens) and a byte-level BPE of about 50,000 tokens, trained here once and kept in the folder
for temporary files. Times are processor seconds of one process, alternating, the best of three each.
"""

from __future__ import annotations

import bisect
import functools
import json
import random
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from benchmarks.figures import Figure, print_table
from memagent_graph.documents import Document, DocumentRef, DocumentStore, chunking
from memagent_graph.documents.chunking import Boundary, Chunker
from memagent_graph.tokenizers.loading import HFTokenizer, load_tokenizer

TEXT_BYTES = 15_000_000
SMALL_BYTES = 150_000
CHUNK_TOKENS = 5000
FED_CHARACTERS = 100_000
LARGE_VOCABULARY = 50_000
ROUNDS = 3
BOUNDARY_CHARACTERS = 2_000_000
BOUNDARY_CHUNK_TOKENS = 512


@functools.cache
def english() -> str:
    """15 MB of prose: the standard library's documentation strings and comments, with sentences shuffled repeatedly."""
    sentences = [
        line.strip(" #\"'")
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.count(" ") > 7 and line.strip(" #\"'")[:1].isalpha() and not set(line) & set("={}[]()_\\")
    ]
    rng = random.Random(0)
    lines: list[str] = []
    size = 0
    while size < TEXT_BYTES:
        rng.shuffle(sentences)
        lines += sentences
        size += sum(len(sentence) + 1 for sentence in sentences)
    return "\n".join(lines).encode()[:TEXT_BYTES].decode("utf-8", "ignore")


def large_tokenizer() -> HFTokenizer:
    """A byte-level BPE of about 50,000 tokens, with the rules of cl100k_base."""
    path = Path(tempfile.gettempdir()) / f"memagent-benchmark-{LARGE_VOCABULARY}.json"
    if not path.exists():
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=LARGE_VOCABULARY,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:1500]
        backend.train_from_iterator((path.read_text("utf-8", "replace") for path in library), trainer)
        backend.save(str(path))
    return load_library_tokenizer(path)


def load_library_tokenizer(spec: str | Path) -> HFTokenizer:
    tokenizer = load_tokenizer(spec)
    if not isinstance(tokenizer, HFTokenizer):
        raise TypeError(f"{spec} is not a tokenizer.json")
    return tokenizer


def _at_most(metric: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(metric, value, unit, f"at most {bound:g}", value <= bound)


def _stated(metric: str, value: float, unit: str) -> Figure:
    return Figure(metric, value, unit, "", met=True)


def _seconds(work: Callable[[], object]) -> float:
    start_time = time.process_time()
    work()
    return time.process_time() - start_time


def _chunk_all(store: DocumentStore, ref: DocumentRef, tokenizer: HFTokenizer) -> int:
    # Drop the pieces of the previous round: this measures a document that was not read before.
    chunking._PIECES = chunking._PieceCache(chunking._CACHED_BYTES)
    return sum(chunk.tokens for chunk in Chunker(store, ref, tokenizer, CHUNK_TOKENS).chunks())


def _against_library(tokenizer: HFTokenizer, store: DocumentStore, text: str) -> Iterator[Figure]:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer._backend.encode(text, add_special_tokens=False).ids
        return ids

    parts = [text[start : start + FED_CHARACTERS] for start in range(0, len(text), FED_CHARACTERS)]
    ref = store.add(Document.from_text(text, name="english"))
    library_seconds, chunking_seconds = [], []
    tokens = 0
    for _ in range(ROUNDS):
        library_seconds.append(_seconds(lambda: [encode(part) for part in parts]))
        start_time = time.process_time()
        tokens = _chunk_all(store, ref, tokenizer)
        chunking_seconds.append(time.process_time() - start_time)
    name = f"{tokenizer._backend.get_vocab_size():,} tokens' vocabulary"
    yield _stated(f"the library alone, 15 MB, {name}", min(library_seconds), "s")
    yield _stated(f"chunked, {name}, {tokens:,} tokens", min(chunking_seconds), "s")
    yield _at_most(f"chunked / the library alone, {name}", min(chunking_seconds) / min(library_seconds), "", 1.3)


def _cached_chunk_milliseconds(store: DocumentStore, text: str) -> float:
    """The cost of a chunk when its piece is tokenised, as for the second question on a document."""
    reader = Chunker(store, store.add(Document.from_text(text[:60_000])), load_tokenizer("embedded"), CHUNK_TOKENS)
    for _ in reader.chunks():
        pass
    rounds = 50
    count = sum(1 for _ in reader.chunks())
    return _seconds(lambda: [list(reader.chunks()) for _ in range(rounds)]) / (rounds * count) * 1000


def _boundaries(store: DocumentStore, tokenizer: HFTokenizer) -> Iterator[Figure]:
    """Facts of one sentence that a chunk's end cuts in two, and the time of chunking, by where chunks may end."""
    rng = random.Random(1)
    sentences = [line for line in english()[:BOUNDARY_CHARACTERS].split("\n") if line]
    parts: list[str] = []
    for number, line in enumerate(sentences):
        parts.append(line if line.endswith(".") else line + ".")
        if number % 10 == 0:
            parts.append(f"The special magic number of station {number} is {rng.randrange(10**6, 10**7)}.")
    text = " ".join(parts)
    facts = [match.span() for match in re.finditer(r"The special magic number of station \d+ is \d+\.", text)]
    ref = store.add(Document.from_text(text, name="facts"))
    seconds: dict[str, float] = {}
    for boundary in get_args(Boundary):
        start_time = time.process_time()
        ends = [c.end_char for c in Chunker(store, ref, tokenizer, BOUNDARY_CHUNK_TOKENS, boundary).chunks()]
        seconds[boundary] = time.process_time() - start_time
        cut = 0
        for start, end in facts:
            cut += bisect.bisect_right(ends, start) != bisect.bisect_left(ends, end)
        yield _stated(f"facts cut in two of {len(facts):,} at {len(ends):,} chunks ({boundary})", cut, "facts")
        yield _stated(f"time of chunking against the first ({boundary})", seconds[boundary] / seconds["token"], "times")


def _read_in_process(path: str) -> None:
    """The body of the measured process: store a file, read all its chunks, print its peak memory in kB."""
    with tempfile.TemporaryDirectory() as folder:
        store = DocumentStore(folder)
        start_time = time.perf_counter()
        ref = store.add(Document.from_path(path))
        store_seconds = time.perf_counter() - start_time
        for _ in Chunker(store, ref, load_tokenizer("embedded"), CHUNK_TOKENS).chunks():
            pass
    print(json.dumps({"peak": _peak_kilobytes(), "stored": store_seconds}))


def _peak_kilobytes() -> int:
    """The peak memory of this process. Not `ru_maxrss`, which on Linux starts at the peak of the parent process."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return int(status.partition("VmHWM:")[2].split()[0])


def _measured_process(path: Path) -> dict[str, float]:
    code = f"from benchmarks.chunking import _read_in_process; _read_in_process({str(path)!r})"
    root = Path(__file__).parent.parent
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    measurement: dict[str, float] = json.loads(process.stdout)
    return measurement


def measure() -> list[Figure]:
    """Run all of this module's measurements."""
    text = english()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "large.txt", Path(folder) / "small.txt"
        large.write_text(text, encoding="utf-8")
        small.write_text(text[:SMALL_BYTES], encoding="utf-8")
        of_large, of_small = _measured_process(large), _measured_process(small)
        megabytes = (of_large["peak"] - of_small["peak"]) / 1024
        figures.append(_at_most("peak memory on 15 MB above that on 150 kB", megabytes, "MB", 30))
        figures.append(_at_most("adding a 15 MB file to the store", of_large["stored"], "s", 0.2))
        store = DocumentStore(Path(folder) / "store")
        embedded = load_library_tokenizer("embedded")
        for tokenizer in (embedded, large_tokenizer()):
            figures += _against_library(tokenizer, store, text)
        figures += _boundaries(store, embedded)
        milliseconds = _cached_chunk_milliseconds(store, text)
        figures.append(_at_most("a chunk of 5000 tokens besides its tokenisation", milliseconds, "ms", 0.2))
    return figures


if __name__ == "__main__":
    print_table(measure())

"""Measure the time and memory of chunking 15 MB of English, compared with the tokenizers library alone.

There are two tokenizers: that of the embedded policy, which has a small vocabulary, and a byte-level BPE of about
50,000 tokens, which is trained once and stored in the folder for temporary files. Times are processor seconds of one
process. Chunking and the library alternate, and the best of three rounds counts.
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
PART_CHARACTERS = 100_000
LARGE_VOCABULARY = 50_000
ROUNDS = 3
BOUNDARY_CHARACTERS = 2_000_000
BOUNDARY_CHUNK_TOKENS = 512


@functools.cache
def build_english_text() -> str:
    """Return 15 MB of English prose.

    It consists of sentences from the standard library's docstrings and comments, shuffled again at each repetition.
    """
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


def load_large_tokenizer() -> HFTokenizer:
    """Return a byte-level BPE tokenizer of about 50,000 tokens, with the pre-tokenisation of cl100k_base."""
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
        source_files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:1500]
        backend.train_from_iterator((path.read_text("utf-8", "replace") for path in source_files), trainer)
        backend.save(str(path))
    return load_hf_tokenizer(path)


def load_hf_tokenizer(spec: str | Path) -> HFTokenizer:
    """Load a tokenizer that has a tokenizer.json.

    Raises:
        TypeError: the tokenizer is of another kind.
    """
    tokenizer = load_tokenizer(spec)
    if not isinstance(tokenizer, HFTokenizer):
        raise TypeError(f"{spec} is not a tokenizer.json")
    return tokenizer


def _time_call(function: Callable[[], object]) -> float:
    start_time = time.process_time()
    function()
    return time.process_time() - start_time


def _count_chunked_tokens(store: DocumentStore, reference: DocumentRef, tokenizer: HFTokenizer) -> int:
    # Clear the cache of the previous round, to measure a document that was not read before.
    chunking._newest_pieces.clear()
    return sum(chunk.tokens for chunk in Chunker(store, reference, tokenizer, CHUNK_TOKENS).chunks())


def _compare_with_library(tokenizer: HFTokenizer, store: DocumentStore, text: str) -> Iterator[Figure]:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer._backend.encode(text, add_special_tokens=False).ids
        return ids

    text_parts = [text[start : start + PART_CHARACTERS] for start in range(0, len(text), PART_CHARACTERS)]
    reference = store.add(Document.from_text(text, name="english"))
    library_seconds, chunking_seconds = [], []
    tokens = 0
    for _ in range(ROUNDS):
        library_seconds.append(_time_call(lambda: [encode(part) for part in text_parts]))
        start_time = time.process_time()
        tokens = _count_chunked_tokens(store, reference, tokenizer)
        chunking_seconds.append(time.process_time() - start_time)
    vocabulary = f"{tokenizer._backend.get_vocab_size():,} tokens' vocabulary"
    yield Figure(f"the library alone, 15 MB, {vocabulary}", min(library_seconds), "s")
    yield Figure(f"chunked, {vocabulary}, {tokens:,} tokens", min(chunking_seconds), "s")
    yield Figure.at_most(
        f"chunked / the library alone, {vocabulary}", min(chunking_seconds) / min(library_seconds), "", 1.3
    )


def _measure_cached_chunk(store: DocumentStore, text: str) -> float:
    """Return the milliseconds for a chunk whose text is tokenised already, as for a second question on a document."""
    chunker = Chunker(store, store.add(Document.from_text(text[:60_000])), load_tokenizer("embedded"), CHUNK_TOKENS)
    for _ in chunker.chunks():
        pass
    rounds = 50
    chunk_count = sum(1 for _ in chunker.chunks())
    return _time_call(lambda: [list(chunker.chunks()) for _ in range(rounds)]) / (rounds * chunk_count) * 1000


def _measure_boundaries(store: DocumentStore, tokenizer: HFTokenizer) -> Iterator[Figure]:
    """Yield, for each kind of boundary, the number of one-sentence facts that chunks cut in two, and the time."""
    rng = random.Random(1)
    sentences = [sentence for sentence in build_english_text()[:BOUNDARY_CHARACTERS].split("\n") if sentence]
    text_sentences: list[str] = []
    for sentence_index, sentence in enumerate(sentences):
        text_sentences.append(sentence if sentence.endswith(".") else sentence + ".")
        if sentence_index % 10 == 0:
            text_sentences.append(
                f"The special magic number of station {sentence_index} is {rng.randrange(10**6, 10**7)}."
            )
    text = " ".join(text_sentences)
    facts = [match.span() for match in re.finditer(r"The special magic number of station \d+ is \d+\.", text)]
    reference = store.add(Document.from_text(text, name="facts"))
    seconds: dict[str, float] = {}
    for boundary in get_args(Boundary):
        start_time = time.process_time()
        ends = [
            chunk.end_char for chunk in Chunker(store, reference, tokenizer, BOUNDARY_CHUNK_TOKENS, boundary).chunks()
        ]
        seconds[boundary] = time.process_time() - start_time
        cut_facts = 0
        for start, end in facts:
            cut_facts += bisect.bisect_right(ends, start) != bisect.bisect_left(ends, end)
        yield Figure(f"facts cut in two of {len(facts):,} at {len(ends):,} chunks ({boundary})", cut_facts, "facts")
        yield Figure(f"time of chunking against the first ({boundary})", seconds[boundary] / seconds["token"], "times")


def _read_and_print_memory(path: str) -> None:
    """Store a file, read all its chunks, and print as JSON the peak memory in kB and the seconds of storing.

    It is the main function of the measured process.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = DocumentStore(folder)
        start_time = time.perf_counter()
        reference = store.add(Document.from_path(path))
        store_seconds = time.perf_counter() - start_time
        for _ in Chunker(store, reference, load_tokenizer("embedded"), CHUNK_TOKENS).chunks():
            pass
    print(json.dumps({"peak": _read_peak_kilobytes(), "stored": store_seconds}))


def _read_peak_kilobytes() -> int:
    """Return the peak memory of this process in kB.

    On Linux, `ru_maxrss` would start at the peak of the parent process.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return int(status.partition("VmHWM:")[2].split()[0])


def _measure_in_process(path: Path) -> dict[str, float]:
    code = f"from benchmarks.chunking import _read_and_print_memory; _read_and_print_memory({str(path)!r})"
    root = Path(__file__).parent.parent
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    measurement: dict[str, float] = json.loads(process.stdout)
    return measurement


def measure() -> list[Figure]:
    """Run all measurements of this module, and return their figures."""
    text = build_english_text()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "large.txt", Path(folder) / "small.txt"
        large.write_text(text, encoding="utf-8")
        small.write_text(text[:SMALL_BYTES], encoding="utf-8")
        large_result, small_result = _measure_in_process(large), _measure_in_process(small)
        megabytes = (large_result["peak"] - small_result["peak"]) / 1024
        figures.append(Figure.at_most("peak memory on 15 MB above that on 150 kB", megabytes, "MB", 30))
        figures.append(Figure.at_most("adding a 15 MB file to the store", large_result["stored"], "s", 0.2))
        store = DocumentStore(Path(folder) / "store")
        embedded = load_hf_tokenizer("embedded")
        for tokenizer in (embedded, load_large_tokenizer()):
            figures += _compare_with_library(tokenizer, store, text)
        figures += _measure_boundaries(store, embedded)
        milliseconds = _measure_cached_chunk(store, text)
        figures.append(Figure.at_most("a chunk of 5000 tokens besides its tokenisation", milliseconds, "ms", 0.2))
    return figures


if __name__ == "__main__":
    print_table(measure())

"""A corpus with known answers, the command that reads it, and a server that counts its answers."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from aiohttp import web

from support.document_files import make_docx
from support.fake_server import FakeServer
from support.programs import run_program
from support.scripts import SMALL_OPTIONS, extract, read_perfectly

NAMES = ("harbor", "castle", "bridge")
QUESTIONS = tuple(f"What is the key of {name}?" for name in NAMES)


def make_text(number: int, words: int) -> str:
    """Return the text of document `number`, with a key for each name; no two documents share a sentence."""
    filler = [f"d{number}w{index} and then" for index in range(words // 3)]
    for index, name in enumerate(NAMES, 1):
        sentence = f"The key of {name} is {make_key(number, name)}."
        position = len(filler) * index // 4  # twice, since a chunk may end inside one
        filler[position:position] = [sentence, *filler[:3], sentence]
    return " ".join(filler)


def make_key(number: int, name: str) -> str:
    """Return the key of a name in document `number`."""
    return str(1000 + 10 * number + NAMES.index(name))


def write_corpus(folder: Path, documents: int, *, max_words: int) -> dict[str, int | None]:
    """Write text and DOCX files, and broken PDFs; return by path the document's number, or None for a PDF."""
    rng, numbers = random.Random(3), dict[str, int | None]()
    for number in range(documents):
        text = make_text(number, int(40 * (max_words / 40) ** rng.random()))
        kind = {13: "pdf", 1: "docx"}.get(number % 20, "txt")
        contents = {"pdf": b"%PDF-1.7 broken", "docx": make_docx(text), "txt": text.encode()}
        path = folder / f"{number % 7}" / f"d{number}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[kind])
        numbers[str(path.relative_to(folder))] = None if kind == "pdf" else number
    return numbers


class CountingServer(FakeServer):
    """Answers correctly, apart from a fraction `faults` of its replies; counts its answers for each section."""

    def __init__(self, *, faults: float = 0.0, delay: float = 0.0) -> None:
        super().__init__(self._respond, delay=delay)
        self._rng, self._faults = random.Random(1), faults
        self.answer_counts: Counter[tuple[str, str]] = Counter()
        """The number of answers by section and question."""

    def _respond(self, body: dict[str, Any], number: int) -> Any:
        self.requests.clear()  # else they would fill the memory in a long run
        self.headers.clear()
        if self._rng.random() < self._faults:
            return self._rng.choice(
                (
                    web.json_response({"error": {"message": "busy"}}, status=503),
                    web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "0.05"}),
                    web.Response(body=b'{"choices": [{"mess', content_type="application/json"),
                )
            )
        prompt = body["messages"][-1]["content"]
        if section := extract(prompt, "section"):
            self.answer_counts[section, extract(prompt, "problem")] += 1
        return read_perfectly(prompt)


def make_corpus_command(source: Path | str, out: Path | str, server: FakeServer, *options: str) -> list[str]:
    """Return the command line that reads a corpus through a server."""
    questions = [argument for question in QUESTIONS for argument in ("-q", question)]
    return [
        sys.executable, "-m", "memagent_graph", "corpus", str(source), *questions, "--out", str(out), "--base-url",
        server.base_url, "--model", "fake", "--tokenizer", "embedded", *SMALL_OPTIONS, *options,
    ]  # fmt: skip


def run_corpus_command(source: Path | str, out: Path | str, server: FakeServer, *options: str) -> Any:
    """Run that command to its end."""
    process = run_program(make_corpus_command(source, out, server, *options), capture_output=True)
    assert "Traceback" not in process.stderr, process.stderr
    return process


def wait_for_chunks(process: Any, server: CountingServer, chunks: int = 1) -> None:
    """Wait until the process has read `chunks` more chunks through the server."""
    total, deadline = sum(server.answer_counts.values()) + chunks, time.monotonic() + 120
    while sum(server.answer_counts.values()) < total:
        assert process.poll() is None and time.monotonic() < deadline, "the process has ended, or does not read"
        time.sleep(0.005)


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Return all rows of all Parquet files, including files that the manifest does not list."""
    return [row for path in sorted(out.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]

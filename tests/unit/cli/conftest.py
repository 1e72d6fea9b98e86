"""A book, a server, and `memagent read` of the book through the server with small budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from support.command_line import memagent
from support.fake_server import FakeServer
from support.scripts import SMALL_OPTIONS, make_document

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.62: "The key of harbor is 4711."}, words=1000)
READ_OPTIONS = ("--tokenizer", "embedded", *SMALL_OPTIONS, "--context-window", "900")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def options(server: FakeServer) -> tuple[str, ...]:
    """Options with the server and small budgets."""
    return ("--base-url", server.base_url, *READ_OPTIONS)


@pytest.fixture
def read(book: Path, options: tuple[str, ...]) -> Callable[..., Result]:
    """Runs `memagent read` on the book with a question about its key, and with further options."""
    question = "What is the key of harbor?"
    return lambda *more, code=0: memagent("read", book, "-q", question, *options, *more, code=code)

"""A book, a policy server, and `memagent read` of the book with small budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from support.command_line import memagent
from support.fake_server import FakeServer
from support.scripts import SMALL_OPTIONS, make_document

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.62: "The key of harbor is 4711."}, words=1000)
SMALL_SETTINGS = ("--tokenizer", "embedded", *SMALL_OPTIONS, "--context-window", "900")


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
    """The options that name the server and the small budgets."""
    return ("--base-url", server.base_url, *SMALL_SETTINGS)


@pytest.fixture
def read_book(book: Path, options: tuple[str, ...]) -> Callable[..., Result]:
    """A function that runs `memagent read` with a question about the book and extra options."""
    question = "What is the key of harbor?"
    return lambda *extra_options, code=0: memagent("read", book, "-q", question, *options, *extra_options, code=code)

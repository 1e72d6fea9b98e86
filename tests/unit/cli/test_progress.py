"""Progress: lines where there is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from memagent_graph.cli import progress
from memagent_graph.cli.progress import ProgressDisplay


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    return io.StringIO()


def test_without_a_terminal_it_prints_lines(output: io.StringIO) -> None:
    with ProgressDisplay("reading", console=Console(file=output)) as display:
        display.update(1_000, "2 failed [sic]")
        display.update(1_001, total=3_000)
    assert output.getvalue() == "reading: 1,000, 2 failed [sic]\nreading: 1,001 of 3,000\n"


def test_quiet_prints_nothing(output: io.StringIO) -> None:
    with ProgressDisplay("reading", quiet=True, console=Console(file=output)) as display:
        display.update(1)
    assert output.getvalue() == ""

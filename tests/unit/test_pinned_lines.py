"""Pinned lines of memory, by the function that puts them back."""

from __future__ import annotations

import pytest

from memagent_graph.reading.pinned_lines import with_pins


@pytest.mark.parametrize(
    ("memory", "pins", "expected"),
    [
        ("one\ntwo", ["two"], "one\ntwo"),
        ("one", ["two"], "two\none"),
        ("", ["two"], "two"),
        # A memory is stripped, so its first line has lost its indentation.
        ("- two\none", ["  - two"], "- two\none"),
        ("one\n    two", ["two"], "one\n    two"),
    ],
)
def test_a_pinned_line_is_put_back_once(memory: str, pins: list[str], expected: str) -> None:
    for _ in range(3):
        memory = with_pins(memory, pins, lambda text: len(text) < 40, lambda text: text[:40]).strip()
    assert memory == expected


def test_where_there_is_no_room_pinned_lines_go_first_and_the_end_is_cut() -> None:
    memory = with_pins("- two\n" + "x" * 40, ["  - two", "one"], lambda text: len(text) < 40, lambda text: text[:40])
    assert memory == "  - two\none\n" + "x" * 28

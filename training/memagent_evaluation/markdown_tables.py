"""Groups rows of results, and formats them as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from memagent_evaluation.result_table import ResultRow
from memagent_evaluation.samples import LengthUnit
from memagent_evaluation.score_statistics import Estimate
from memagent_graph.grouping import group_values

SCORES: Final = {
    "strict": "strict",
    "lenient": "lenient",
    "string_match": "string match",
    "token_f1": "token F1",
}
"""Columns of scores, with their titles in tables."""
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


def list_score_titles(rows: Iterable[ResultRow]) -> dict[str, str]:
    """Return the scores that rows have, with their titles: `SCORES`, and a judge's grade if there is one."""
    return SCORES | ({"judged": "judge"} if any(row.judge for row in rows) else {})


def format_length(length: int, unit: str = LengthUnit.TOKENS) -> str:
    """Return a length as text: 8K, 1.5M (1K is 1024 tokens, 1M is 1024K); other lengths, and passages, in full."""
    for size, suffix in ((1 << 20, "M"), (1 << 10, "K")):
        if unit == LengthUnit.TOKENS and length >= size and length % (size // 2) == 0:
            return f"{length / size:g}{suffix}"
    return f"{length:,}"


def format_length_with_unit(row: ResultRow) -> str:
    """Return a row's length with its unit."""
    return f"{format_length(row.length, row.unit)} {row.unit}"


def group_items(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> list[tuple[_Key, list[_Item]]]:
    """Return the items of each key, with keys in the order of their first items."""
    return list(group_values((key(item), item) for item in items).items())


def format_interval(estimate: Estimate) -> str:
    """Return an estimate in percent, for tables."""
    return f"{100 * estimate.mean:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def render_table(table: Sequence[Sequence[str]]) -> str:
    """Return rows of cells, of which the first is the header, as a table; columns of numbers are right-aligned."""
    header, *body = table
    is_numeric = [all(row[column][:1] in "0123456789+-–<" for row in body) for column in range(len(header))]
    alignments = ["---:" if is_number else "---" for is_number in is_numeric]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, alignments, *body))

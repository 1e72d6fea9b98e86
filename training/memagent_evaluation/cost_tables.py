"""Tables of the cost of questions: tokens, calls, seconds with percentiles, estimated arithmetic, and the price if
given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, Final

from memagent_evaluation.markdown_tables import grouped, length_label, markdown
from memagent_evaluation.result_table import Row
from memagent_graph.prices import Prices

COST_LEGEND: Final = (
    "Means over the questions that did not fail, and percentiles of seconds (p95: 95 % of questions took no longer). "
    "Seconds are wall time with many questions at once, waiting for the server included. FLOPs are estimated from "
    "tokens and the model's size, if that is known, and compared with one call with the whole document."
)
_PRICE_LEGEND: Final = (
    "Price: per question, and of all together, at {prompt:g} for a million prompt tokens, cached ones included, and "
    "{completion:g} for a million completion tokens. Tokens of failed attempts are not known."
)
_MEANS: Final = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "calls": 1, "seconds": 2}
"""Columns of costs, with the digits that tables show of their means."""
PERCENTILES: Final = (50, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that the given percentage of the values does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def cost_parts(rows: Sequence[Row], prices: Prices | None = None) -> list[str]:
    """The legend and the table, by length and system, over a system's questions that did not fail."""
    asked = sorted((row for row in rows if row.has_costs), key=lambda row: (row.unit, row.length))
    heads = ["tokens in", "cached", "tokens out", "calls", "seconds", *(f"p{each}" for each in PERCENTILES), "FLOPs"]
    priced = [] if prices is None else ["price", "price of all"]
    table = [["length", "system", *heads, "one call with all, FLOPs", *priced]]
    for (unit, length, system), group in grouped(asked, lambda row: (row.unit, row.length, row.system)):
        counts = (f"{fmean(_values(group, name)):,.{digits}f}" for name, digits in _MEANS.items())
        seconds = [row.seconds for row in group]
        slow = (f"{percentile(seconds, each):,.2f}" for each in PERCENTILES)
        estimates = (_mean_flops(group, name) for name in ("flops", "full_context_flops"))
        price = [] if prices is None else [_money(fmean(spent := _prices(group, prices))), _money(sum(spent))]
        table.append([f"{length_label(length, unit)} {unit}", system, *counts, *slow, *estimates, *price])
    legend = COST_LEGEND
    if prices is not None:
        legend += " " + _PRICE_LEGEND.format(prompt=prices.prompt, completion=prices.completion)
    return [legend, markdown(table)]


def costs_as_json(rows: Iterable[Row], prices: Prices | None = None) -> dict[str, Any]:
    """Means, percentiles of seconds, and the mean price, of the rows that have costs; None if there are none."""
    asked = [row for row in rows if row.has_costs]
    told: dict[str, Any] = {
        "means": {name: fmean(_values(asked, name)) if asked else None for name in _MEANS},
        "seconds": {f"p{each}": percentile([row.seconds for row in asked], each) if asked else None
                    for each in PERCENTILES},
    }  # fmt: skip
    if prices is not None:
        told["price"] = fmean(_prices(asked, prices)) if asked else None
    return told


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [getattr(row, name) for row in rows]


def _prices(rows: Iterable[Row], prices: Prices) -> list[float]:
    return [prices.of(row.prompt_tokens, row.completion_tokens) for row in rows]


def _money(value: float) -> str:
    return f"{value:,.2f}" if value >= 100 else f"{value:.4g}"


def _mean_flops(rows: Iterable[Row], name: str) -> str:
    known = [value for row in rows if (value := getattr(row, name)) is not None]
    return f"{fmean(known):.2e}" if known else "–"

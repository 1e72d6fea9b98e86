"""Read filings into a typed table by a schema, and measure the accuracy of each field.

    python -m benchmarks.filings 1000 --base-url http://localhost:8000/v1 --model NAME

Filings are generated (`filing_texts.py`), read with `memagent corpus --schema`, and compared with the facts that they
were generated from. `memagent corpus` gets all options after the number; one of `--model` and `--base-url` is required.
With `--out FOLDER` the table is stored, and the same command continues it.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import rich.box
from rich.console import Console
from rich.table import Table

from benchmarks import filing_texts
from benchmarks.filing_texts import QUESTION, Filing, GeneratedFiling, write_filings
from memagent_corpus import TableFolder
from memagent_evaluation.score_statistics import compute_wilson_interval

FIELDS: Final = tuple(Filing.model_fields)
_TOLERANCE: Final = 0.0005
"""The relative tolerance of numbers; amounts are stated with at least four digits."""


@dataclass(frozen=True, slots=True)
class FieldAccuracy:
    """The accuracy of a column, as counts of rows."""

    field: str
    right: int
    wrong: int
    """Rows with another value than the true one."""
    missing: int
    """Rows with null where the filing has a value, and rows with an error."""
    invented: int
    """Rows with a value where the filing has none."""

    @property
    def rows(self) -> int:
        """The number of all rows."""
        return self.right + self.wrong + self.missing + self.invented


def judge_value(value: Any, truth: Any, *, has_answer: bool) -> str:
    """Compare a value with the truth, and return "right", "wrong", "missing" or "invented".

    Texts are compared without case and spaces around them, numbers with a small tolerance, and lists in any order.

    Args:
        value: the value in the table.
        truth: the value that the filing was generated from.
        has_answer: whether the row has no error; a null is right only then.
    """
    if truth is None:
        return "invented" if value is not None else "right" if has_answer else "missing"
    if value is None:
        return "missing"
    return "right" if _normalise(value) == _normalise(truth) or _are_close(value, truth) else "wrong"


def compute_accuracies(rows: Iterable[Mapping[str, Any]], truths: Mapping[str, GeneratedFiling]) -> list[FieldAccuracy]:
    """Return the accuracy of every column.

    Args:
        rows: the rows of the table, with `document`, `error` and the columns of `Filing`.
        truths: the filings by file name.

    Raises:
        ValueError: a filing has no row or several rows.
    """
    table_rows = list(rows)
    rows_by_document = {row["document"]: row for row in table_rows}
    if len(rows_by_document) != len(table_rows) or rows_by_document.keys() != truths.keys():
        raise ValueError(f"{len(table_rows)} rows of {len(rows_by_document)} documents for {len(truths)} filings")
    accuracies = []
    for field in FIELDS:
        counts = dict.fromkeys(("right", "wrong", "missing", "invented"), 0)
        for name, filing in truths.items():
            row = rows_by_document[name]
            counts[judge_value(row[field], getattr(filing.truth, field), has_answer=row["error"] is None)] += 1
        accuracies.append(FieldAccuracy(field, **counts))
    return accuracies


def format_table(accuracies: Iterable[FieldAccuracy], *, errors: int) -> Table:
    """Return the accuracies as a table to print."""
    table = Table("field", "accuracy", "95 % interval", "wrong", "missing", "invented", box=rich.box.SIMPLE)
    for column in accuracies:
        estimate = compute_wilson_interval(column.right, column.rows)
        table.add_row(
            column.field,
            f"{estimate.mean:.1%}",
            f"{estimate.low:.1%} to {estimate.high:.1%}",
            *(f"{count:,}" for count in (column.wrong, column.missing, column.invented)),
        )
    table.caption = f"{errors:,} rows with errors, whose fields are missing"
    return table


def _normalise(value: Any) -> Any:
    match value:
        case str():
            return " ".join(value.casefold().split())
        case list():
            return sorted(map(str, map(_normalise, value)))
        case _:
            return value


def _are_close(value: Any, truth: Any) -> bool:
    return isinstance(value, float) and isinstance(truth, float) and math.isclose(value, truth, rel_tol=_TOLERANCE)


def main(arguments: list[str]) -> int:
    """Read filings, print the accuracies, and return the exit status."""
    if len(arguments) < 2 or not arguments[0].isdigit() or not {"--model", "--base-url"} & set(arguments):
        sys.stderr.write("python -m benchmarks.filings NUMBER --model NAME [--base-url URL] [--out FOLDER] [...]\n")
        return 2
    count, options = int(arguments[0]), arguments[1:]
    with tempfile.TemporaryDirectory(prefix="filings-") as folder:
        truths = write_filings(Path(folder) / "in", count)
        out = options[options.index("--out") + 1] if "--out" in options else str(Path(folder) / "out")
        command = [
            *(sys.executable, "-m", "memagent_graph", "corpus", str(Path(folder) / "in"), "-q", QUESTION),
            *("--schema", f"{Path(filing_texts.__file__)}:Filing", *options),
            *(() if "--out" in options else ("--out", out)),
        ]
        if exit_status := subprocess.run(command, check=False).returncode:
            return exit_status
        rows = list(TableFolder(out).rows(["document", "error", *FIELDS]))
    Console().print(
        format_table(compute_accuracies(rows, truths), errors=sum(row["error"] is not None for row in rows))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

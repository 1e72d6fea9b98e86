"""Writes docs/reference/tables.md: the fields of templates and the columns of exports, from the code that uses them.

python scripts/write_tables.py
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from memagent_graph.reading.strategy import Strategy
from memagent_graph.run_log.exchange import parquet
from memagent_graph.run_log.records import Conversation, RunRecord
from memagent_graph.strategies import load_strategy, strategy_names

PAGE: Final = Path(__file__).resolve().parent.parent / "docs/reference/tables.md"
_DOCS: Final = {
    "conversation": "Its row in the log: what `memagent reward --conversation` takes.",
    "escaped": "The columns whose text is written as in a JSON string, because it has half surrogate pairs.",
    "run_events": "Events of no conversation: edited memories, withdrawn rewards; JSON.",
    "run_rewards": "The run's rewards, oldest first: name, value, source, time, note.",
    "rewards": "The conversation's own rewards, as `run_rewards`.",
}
"""Of columns that are no field of a record."""
_TYPES: Final = {
    "ids": "list<uint32>", "logprobs": "list<float>", "names": "list<string>", "spans": "list<struct>",
    "rewards": "list<struct>",
}  # fmt: skip
_BOUNDS: Final = {"memory_tokens": "the memory", "answer_tokens": "the answer", "question_tokens": "the question"}


def field_docs(kind: type) -> dict[str, str]:
    """Return the strings below a dataclass's fields, as one line each, with those of the classes it inherits from."""
    docs: dict[str, str] = {}
    for parent in reversed(kind.__mro__[:-1]):
        body = ast.parse(inspect.getsource(parent)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                docs[field.target.id] = " ".join(str(text.value.value).split()) if is_text else ""
    return docs


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    titles = list(titles)
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def template_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield the roles of the strategies that ship: file, strategies, fields and the bound of the reply."""
    users: dict[str, list[str]] = {}
    roles = {}
    for name in strategy_names():
        strategy: Strategy = load_strategy(name)
        for role in strategy.roles:
            users.setdefault(role.name, []).append(name)
            roles[role.name] = role
    for name, role in roles.items():
        names = ", ".join(f"`{{{field}}}`" for field in ("prompt", *sorted(role.fields)))
        bound = _BOUNDS.get(str(role.bound), f"{role.bound} tokens")
        yield f"`{name}.txt`", ", ".join(users[name]), names, bound


def column_rows() -> Iterator[tuple[str, str, str]]:
    """Yield the columns of an export: name, type and what it is."""
    of_run, of_conversation = field_docs(RunRecord), field_docs(Conversation)
    docs = {**{f"run_{name}": text for name, text in of_run.items()}, **of_run, **of_conversation, **_DOCS}
    for name, column in parquet.COLUMNS.items():
        yield f"`{name}`", f"`{_TYPES.get(column.arrow, column.arrow)}`", docs.get(name, "")


def page() -> str:
    """Return the page."""
    lines = ["# Tables", "", "Written by `python scripts/write_tables.py` from the code.", ""]
    lines += ["## Templates", ""]
    lines += [
        "A profile's folder `templates` has a file for each role. A template must have these fields, and no others.",
        "",
    ]
    lines += table(("file", "strategies", "fields", "bound of the reply"), template_rows())
    lines += [
        "",
        "## Exports",
        "",
        "`memagent export runs.parquet` writes a row for each conversation, with its run's columns repeated.",
        "",
    ]
    lines += table(("column", "type", "what it is"), column_rows())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")

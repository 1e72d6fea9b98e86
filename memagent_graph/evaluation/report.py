"""An evaluation as Markdown: accuracy with intervals, costs, what may be said of the systems, and what went wrong.

Nothing is left out of a denominator, and nothing is ranked that the questions do not tell apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeVar

from memagent_graph.errors import EvaluationError
from memagent_graph.evaluation.failures import Loss
from memagent_graph.evaluation.results import Results, Row, RowOutcome
from memagent_graph.evaluation.samples import LengthUnit
from memagent_graph.evaluation.statistics import Comparison, Estimate, compare, estimate, holm, ranked

SCORES: Final = {
    "strict": "strict",
    "lenient": "lenient",
    "string_match": "string match",
    "token_f1": "token F1",
}
"""Columns of scores, and what tables call them."""
_LEGEND: Final = (
    "Percentages with 95 % intervals. Strict: the answer is the gold one, normalised, and in the form asked for. "
    "Lenient: it holds the gold one as whole words. String match: as RULER counts. A question without an answer is "
    "wrong in all of them; why it has none is counted apart."
)
_COUNTED_APART: Final = {
    RowOutcome.NO_ANSWER: "no answer",
    RowOutcome.UNFINISHED: "unfinished",
    RowOutcome.FAILED: "failed",
    RowOutcome.DOES_NOT_FIT: "does not fit",
}
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
_SHOWN_FAILURES: Final = 12
_SHOWN_CHARACTERS: Final = 60


def render_report(results: Results, *, plots: Sequence[Path] = (), log: Path | None = None) -> str:
    """All tables of an evaluation.

    Args:
        results: what was measured.
        plots: image files to show, named as the report's reader finds them.
        log: the run log, for the command that opens a run.
    """
    rows = results.rows
    if not rows:
        return "# Evaluation\n\nNo question has been answered yet.\n"
    parts = ["# Evaluation", _introduction(results)]
    parts += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in plots]
    parts += ["## Accuracy", _LEGEND, _overview(rows)]
    for (task, unit), group in _grouped(rows, lambda row: (row.task, row.unit)):
        parts += [f"### {task}", _accuracy_table(group, unit)]
    parts += ["## Cost per question", _cost_table(rows)]
    if len(results.systems) > 1:
        parts += ["## Comparison", *_comparison(results)]
    parts += _failures(rows, log)
    return "\n\n".join(parts) + "\n"


def render_comparison(first: Results, second: Results, names: tuple[str, str]) -> str:
    """Two evaluations, compared on the questions that both have asked.

    Raises:
        EvaluationError: they have no questions in common, or ask something else under the same names.
    """
    pairs = _pairs(first, second, names)
    left = len(first.rows) + len(second.rows) - 2 * len(pairs)
    parts = [
        f"# {names[0]} and {names[1]}",
        f"{len(pairs):,} questions were asked in both" + (f"; {left:,} rows have no partner." if left else "."),
    ]
    for system, compared in _compared_pairs(pairs, names):
        table = _comparison_table([(label, names[1], each) for label, each in compared], names[0])
        parts += [f"## {system}", table, *_sentences([compared[-1][1]])]
    return "\n\n".join(parts) + "\n"


def comparison(first: Results, second: Results, names: tuple[str, str]) -> list[dict[str, Any]]:
    """What `render_comparison` says, JSON-ready.

    Raises:
        EvaluationError: as there.
    """
    return [
        {"system": system, "length": label, **{score: asdict(each) for score, each in scores.items()}}
        for system, compared in _compared_pairs(_pairs(first, second, names), names)
        for label, scores in compared
    ]


def summary(results: Results) -> list[dict[str, Any]]:
    """Accuracy and costs by system, task and length, JSON-ready."""
    return [
        {
            "system": system,
            "task": task,
            "length": length,
            "unit": unit,
            "n": len(rows),
            "scores": {name: asdict(estimate([getattr(row, name) for row in rows])) for name in SCORES},
            "outcomes": dict(Counter(row.outcome for row in rows)),
            "means": {
                name: fmean(getattr(row, name) for row in rows)
                for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "calls", "seconds")
            },
        }
        for (system, task, unit, length), rows in _grouped(
            results.rows, lambda row: (row.system, row.task, row.unit, row.length)
        )
    ]


def length_label(length: int, unit: str = LengthUnit.TOKENS) -> str:
    """A length as people say it: 8K tokens are 8 x 1024, 1M is 1024 K; others, and all passages, in full."""
    for size, suffix in ((1 << 20, "M"), (1 << 10, "K")):
        if unit == LengthUnit.TOKENS and length >= size and length % (size // 2) == 0:
            return f"{length / size:g}{suffix}"
    return f"{length:,}"


def _pairs(first: Results, second: Results, names: tuple[str, str]) -> list[tuple[Row, Row]]:
    by_id = {(row.system, row.sample_id): row for row in second.rows}
    pairs = [(row, by_id[row.system, row.sample_id]) for row in first.rows if (row.system, row.sample_id) in by_id]
    if not pairs:
        raise EvaluationError(
            f"{names[0]} and {names[1]} have no question of the same system in common",
            hint="Compare evaluations of the same systems, tasks, lengths and seed.",
        )
    for one, other in pairs:
        if (one.question, one.gold, one.document_bytes) != (other.question, other.gold, other.document_bytes):
            raise EvaluationError(
                f"{one.sample_id} is not the same question in {names[0]} and {names[1]}",
                hint="Compare evaluations with the same seed, tokenizer, haystack and data.",
            )
    return pairs


def _compared_pairs(
    pairs: Sequence[tuple[Row, Row]], names: tuple[str, str]
) -> Iterator[tuple[str, list[tuple[str, dict[str, Comparison]]]]]:
    """By system, then by length, "all" at the end."""
    for system, group in _grouped(pairs, lambda pair: pair[0].system):
        parts = _by_length(group, lambda pair: pair[0])
        corrected = _corrected(
            [(label, names[1], _paired([a for a, _ in part], [b for _, b in part], names)) for label, part in parts]
        )
        yield system, [(label, each) for label, _, each in corrected]


def _introduction(results: Results) -> str:
    rows = results.rows
    told = [f"{len(rows):,} answers of {', '.join(results.systems)}"]
    model = results.settings.get("policy", {}).get("model")
    if model:
        told.append(f"policy {model}")
    told.append(f"evaluation {results.evaluation}")
    text = "; ".join(told) + "."
    if results.missing:
        text += f"\n\n**Not finished: {results.missing:,} questions have not been asked yet.**"
    if results.commands:
        text += "\n\n```\n" + "\n".join(results.commands) + "\n```"
    return text


def _overview(rows: Sequence[Row]) -> str:
    """Strict and lenient accuracy of each system at each length, over all tasks."""
    parts = []
    for unit, group in _grouped(rows, lambda row: row.unit):
        lengths = sorted({row.length for row in group})
        cells = {key: each for key, each in _grouped(group, lambda row: (row.system, row.length))}  # noqa: C416
        table = [["strict / lenient", *(f"{length_label(each, unit)} {unit}" for each in lengths)]]
        for system in dict.fromkeys(row.system for row in group):
            table.append([system, *(_both(cells.get((system, each), [])) for each in lengths)])
        parts.append(_markdown(table))
    return "\n\n".join(parts)


def _both(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    if all(row.outcome == RowOutcome.DOES_NOT_FIT.value for row in rows):
        return "does not fit"
    return " / ".join(f"{100 * fmean(getattr(row, name) for row in rows):.1f}" for name in ("strict", "lenient"))


def _accuracy_table(rows: Sequence[Row], unit: str) -> str:
    apart = [each for each in _COUNTED_APART if any(row.outcome == each.value for row in rows)]
    table = [[unit, "system", "n", *SCORES.values(), *(_COUNTED_APART[each] for each in apart)]]
    for (length, system), group in _grouped(rows, lambda row: (row.length, row.system)):
        counts = Counter(row.outcome for row in group)
        if counts[RowOutcome.DOES_NOT_FIT.value] == len(group):
            scores = ["–"] * len(SCORES)
        else:
            scores = [_interval(estimate([getattr(row, name) for row in group])) for name in SCORES]
        table.append(
            [length_label(length, unit), system, f"{len(group)}", *scores, *(f"{counts[each.value]}" for each in apart)]
        )
    return _markdown(table)


def _interval(value: Estimate) -> str:
    return f"{100 * value.mean:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def _cost_table(rows: Sequence[Row]) -> str:
    """Means over the questions that a system was asked; those that fail or do not fit cost what they cost."""
    asked = [row for row in rows if row.outcome != RowOutcome.DOES_NOT_FIT.value]
    asked.sort(key=lambda row: (row.unit, row.length))
    table = [
        ["length", "system", "tokens in", "cached", "tokens out", "calls", "seconds", "FLOPs", "one call of all, FLOPs"]
    ]
    for (unit, length, system), group in _grouped(asked, lambda row: (row.unit, row.length, row.system)):
        counts = (
            f"{fmean(getattr(row, name) for row in group):,.{digits}f}"
            for name, digits in (
                ("prompt_tokens", 0), ("cached_tokens", 0), ("completion_tokens", 0), ("calls", 1), ("seconds", 2),
            )
        )  # fmt: skip
        estimates = (_mean_flops(group, name) for name in ("flops", "full_context_flops"))
        table.append([f"{length_label(length, unit)} {unit}", system, *counts, *estimates])
    return _markdown(table)


def _mean_flops(rows: Iterable[Row], name: str) -> str:
    known = [value for row in rows if (value := getattr(row, name)) is not None]
    return f"{fmean(known):.2e}" if known else "–"


def _comparison(results: Results) -> list[str]:
    """The first system with each of the others on the same questions, and a ranking as far as there is one."""
    first, *others = results.systems
    rows = [row for row in results.rows if row.outcome != RowOutcome.DOES_NOT_FIT.value]
    of = {system: {row.sample_id: row for row in group} for system, group in _grouped(rows, lambda row: row.system)}
    compared: list[tuple[str, str, dict[str, Comparison]]] = []
    for other in others:
        shared = [row for row in of.get(first, {}).values() if row.sample_id in of.get(other, {})]
        for label, part in _by_length(shared, lambda row: row):
            partners = [of[other][row.sample_id] for row in part]
            compared.append((label, other, _paired(part, partners, (first, other))))
    if not compared:
        return ["The systems have no answered question in common."]
    compared = _corrected(compared)
    parts = [
        f"Each with {first}, on the questions that both were asked and that fit both; differences in points, {first} "
        f"minus the other. P-values are corrected for the {len(compared)} comparisons of the table (Holm).",
        _comparison_table(compared, first),
        *_sentences([each for label, _, each in compared if label == "all"]),
    ]
    common = set.intersection(*(set(of.get(system, {})) for system in results.systems))
    if common and len(results.systems) > 2:
        scores = {system: {each: of[system][each].lenient for each in sorted(common)} for system in results.systems}
        lines = "\n".join(f"- {line}" for line in ranked(scores).lines)
        parts.append(f"By lenient accuracy, on the {len(common):,} questions that all were asked:\n\n{lines}")
    return parts


def _paired(first: Sequence[Row], second: Sequence[Row], names: tuple[str, str]) -> dict[str, Comparison]:
    """By score: the same questions, answered twice."""
    return {
        score: compare(
            {row.sample_id: getattr(row, score) for row in first},
            {row.sample_id: getattr(row, score) for row in second},
            names=names,
        )
        for score in ("strict", "lenient")
    }


def _corrected(compared: list[tuple[str, str, dict[str, Comparison]]]) -> list[tuple[str, str, dict[str, Comparison]]]:
    for score in ("strict", "lenient"):
        values = holm([each[score].p_value for _, _, each in compared])
        for (_, _, each), p_value in zip(compared, values, strict=True):
            each[score] = replace(each[score], p_value=p_value, corrected_for=len(compared))
    return compared


def _comparison_table(compared: Sequence[tuple[str, str, Mapping[str, Comparison]]], first: str) -> str:
    table = [["length", f"{first} and", "n", "strict", "p", "lenient", "p", "verdict"]]
    for label, other, each in compared:
        cells = []
        for score in ("strict", "lenient"):
            one = each[score]
            cells += [
                f"{100 * one.difference:+.1f} [{100 * one.low:+.1f}, {100 * one.high:+.1f}]",
                "< 0.001" if one.p_value < 0.001 else f"{one.p_value:.3f}",
            ]
        table.append([label, other, f"{each['lenient'].n:,}", *cells, _verdict(each, first, other)])
    return _markdown(table)


def _verdict(each: Mapping[str, Comparison], first: str, second: str) -> str:
    told = {score: one for score, one in each.items() if one.told_apart}
    if not told:
        return "cannot be told apart"
    better = {first if one.difference > 0 else second for one in told.values()}
    which = "" if len(told) == len(each) else f", {' and '.join(told)} only"
    return f"{' and '.join(sorted(better))} better{which}"


def _sentences(compared: Iterable[Mapping[str, Comparison]]) -> list[str]:
    lines = [f"- {SCORES[score]}: {one.sentence}" for each in compared for score, one in each.items()]
    return ["\n".join(lines)] if lines else []


def _failures(rows: Sequence[Row], log: Path | None) -> list[str]:
    """Where the reader's wrong answers lost their facts, and how to look at them."""
    wrong = [row for row in rows if row.where_lost]
    failed = [row for row in rows if row.outcome == RowOutcome.FAILED.value]
    parts: list[str] = []
    if wrong:
        kinds = [kind for kind in Loss if any(kind.value in row.where_lost for row in wrong)]
        table = [["task", "length", "wrong answers", *(kind.value.replace("_", " ") for kind in kinds)]]
        for (task, unit, length), group in _grouped(wrong, lambda row: (row.task, row.unit, row.length)):
            counts = Counter(each for row in group for each in row.where_lost)
            cells = [f"{counts[kind.value]}" for kind in kinds]
            table.append([task, f"{length_label(length, unit)} {unit}", f"{len(group)}", *cells])
        parts += ["## Where facts were lost", "By needle, in the reader's wrong answers.", _markdown(table)]
        table = [["question", "gold", "answer", "lost", "run"]]
        for row in wrong[:_SHOWN_FAILURES]:
            lost = ", ".join(
                loss.replace("_", " ") + ("" if chunk is None else f" at chunk {chunk}")
                for loss, chunk in zip(row.where_lost, row.lost_at, strict=True)
            )
            run = f"`{row.run_id}`"
            table.append([row.sample_id, _short(", ".join(row.gold)), _short(row.answer or "–"), lost, run])
        option = f" --log {log}" if log is not None else ""
        parts += [
            f"The first {len(table) - 1} of {len(wrong)}; `memagent show RUN{option}` opens one:",
            _markdown(table),
        ]
    if failed:
        reasons = Counter(_short(row.error or "", 200) for row in failed)
        lines = "\n".join(f"- {count}: {reason}" for reason, count in reasons.most_common(_SHOWN_FAILURES))
        parts += ["## Failures", f"{len(failed)} questions failed twice, and count as wrong:\n\n{lines}"]
    return parts


def _by_length(items: Sequence[_Item], row_of: Callable[[_Item], Row]) -> list[tuple[str, list[_Item]]]:
    """Items by their rows' length, with a label; at the end all of them, as "all"."""
    ordered = sorted(items, key=lambda item: (row_of(item).unit, row_of(item).length))
    groups = _grouped(ordered, lambda item: _labelled(row_of(item)))
    return [*(groups if len(groups) > 1 else ()), *([("all", ordered)] if ordered else ())]


def _labelled(row: Row) -> str:
    return f"{length_label(row.length, row.unit)} {row.unit}"


def _grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> list[tuple[_Key, list[_Item]]]:
    """Items by key, keys in the order in which they come first."""
    groups: dict[_Key, list[_Item]] = defaultdict(list)
    for each in items:
        groups[key(each)].append(each)
    return list(groups.items())


def _markdown(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first of them the head, as a table; figures stand at the right."""
    head, *body = table
    right = [all(_is_figure(row[at]) for row in body) for at in range(len(head))]
    rule = ["---:" if each else "---" for each in right]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def _is_figure(cell: str) -> bool:
    return not cell or cell[0] in "0123456789+-–<"


def _short(text: str, longest: int = _SHOWN_CHARACTERS) -> str:
    """A text as a cell of a table: one line, without what Markdown would take for its own."""
    shown = "".join(each if each.isprintable() else " " for each in text)
    shown = shown if len(shown) <= longest else shown[: longest - 1] + "…"
    return shown.replace("\\", "\\\\").replace("|", "\\|").replace("`", "'").replace("<", "&lt;")

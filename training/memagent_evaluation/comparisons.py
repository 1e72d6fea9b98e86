"""Compares two systems, or two evaluations, on the same questions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from statistics import fmean
from typing import Any, Final

from memagent_evaluation.markdown_tables import SCORES, by_length, grouped, markdown
from memagent_evaluation.paired_tests import Comparison, compare, corrected
from memagent_evaluation.rankings import ranking_of
from memagent_evaluation.result_table import Outcome, Results, Row
from memagent_evaluation.statistics import Estimate, estimate
from memagent_graph.errors import EvaluationError

_COUNTED_ONCE: Final = 'In "all", a question that was asked at several lengths counts once, with its mean score.'


def render_comparison(first: Results, second: Results, names: tuple[str, str]) -> str:
    """Two evaluations, compared on the questions that both asked and that fitted in a call of both.

    Raises:
        EvaluationError: they have no questions in common, or different questions under the same names.
    """
    shared = _pairs(first, second, names)
    pairs = _fitting(shared)
    left = len(first.rows) + len(second.rows) - 2 * len(shared)
    told = [f"{len(shared):,} questions were asked in both"]
    if unfit := len(shared) - len(pairs):
        told.append(f"{unfit:,} of them did not fit and are left out")
    if left:
        told.append(f"{left:,} rows have no partner")
    parts = [f"# {names[0]} and {names[1]}", "; ".join(told) + "."]
    if any(_at_several_lengths(row for row, _ in own) for _, own in grouped(pairs, lambda pair: pair[0].system)):
        parts.append(_COUNTED_ONCE)
    for system, compared in _compared_pairs(pairs, names):
        table = _comparison_table([(label, names[1], each) for label, each in compared], names[0])
        parts += [f"## {system}", table, *_sentences([compared[-1][1]])]
    return "\n\n".join(parts) + "\n"


def comparison(first: Results, second: Results, names: tuple[str, str]) -> list[dict[str, Any]]:
    """The content of `render_comparison`, JSON-ready.

    Raises:
        EvaluationError: as there.
    """
    return [
        {"system": system, "length": label, **{score: asdict(each) for score, each in scores.items()}}
        for system, compared in _compared_pairs(_fitting(_pairs(first, second, names)), names)
        for label, scores in compared
    ]


def comparison_parts(results: Results) -> list[str]:
    """The first system compared with each other one on the same questions, and a ranking as far as possible."""
    first, *others = results.systems
    of = rows_by_system(row for row in results.rows if not row.scripted)
    compared: list[tuple[str, str, dict[str, Comparison]]] = []
    for other in others:
        shared = zip(*shared_rows(of.get(first, {}), of.get(other, {})), strict=True)
        for label, part in by_length(list(shared), lambda pair: pair[0]):
            compared.append((label, other, _paired([a for a, _ in part], [b for _, b in part], (first, other))))
    if not compared:
        return ["The systems have no answered question in common."]
    compared = _corrected(compared)
    parts = [
        f"Each with {first}, on the questions that both were asked and that fit both; differences in points, {first} "
        f"minus the other. P-values are corrected for the {len(compared)} comparisons of the table (Holm)."
        + (f" {_COUNTED_ONCE}" if any(_at_several_lengths(group.values()) for group in of.values()) else ""),
        _comparison_table(compared, first),
        *_sentences([each for label, _, each in compared if label == "all"]),
    ]
    if len(of) > 2:
        pairs = [(names, shared_rows(of[names[0]], of[names[1]])) for names in combinations(of, 2)]
        told = [paired(*rows, names, "lenient") for names, rows in pairs if rows[0]]
        lines = "\n".join(f"- {line}" for line in ranking_of(of, told).lines)
        numbers = sorted({each.n for each in told})
        asked = f"{numbers[0]:,}" + (f" to {numbers[-1]:,}" if len(numbers) > 1 else "")
        parts.append(f"By lenient accuracy, each pair on the {asked} questions that both were asked:\n\n{lines}")
    return parts


def _pairs(first: Results, second: Results, names: tuple[str, str]) -> list[tuple[Row, Row]]:
    by_id = {(row.system, row.attempt): row for row in second.rows}
    pairs = [(row, by_id[row.system, row.attempt]) for row in first.rows if (row.system, row.attempt) in by_id]
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


def _fitting(pairs: Sequence[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    """The pairs where both were asked; there may be none if no document fitted."""
    return [pair for pair in pairs if all(row.outcome is not Outcome.DOES_NOT_FIT for row in pair)]


def _compared_pairs(
    pairs: Sequence[tuple[Row, Row]], names: tuple[str, str]
) -> Iterator[tuple[str, list[tuple[str, dict[str, Comparison]]]]]:
    """By system, then by length, "all" at the end."""
    for system, group in grouped(pairs, lambda pair: pair[0].system):
        parts = by_length(group, lambda pair: pair[0])
        corrected = _corrected(
            [(label, names[1], _paired([a for a, _ in part], [b for _, b in part], names)) for label, part in parts]
        )
        yield system, [(label, each) for label, _, each in corrected]


def rows_by_system(rows: Iterable[Row]) -> dict[str, dict[tuple[str, int], Row]]:
    """By system, then by sample and repeat: the rows of asked questions, without those that fitted in no call."""
    asked = (row for row in rows if row.outcome is not Outcome.DOES_NOT_FIT)
    return {system: {row.attempt: row for row in group} for system, group in grouped(asked, lambda row: row.system)}


def shared_rows(
    first: Mapping[tuple[str, int], Row], second: Mapping[tuple[str, int], Row]
) -> tuple[list[Row], list[Row]]:
    """The rows of the samples that two systems were both asked, in the same order."""
    shared = [each for each in first if each in second]
    return [first[each] for each in shared], [second[each] for each in shared]


def paired(first: Sequence[Row], second: Sequence[Row], names: tuple[str, str], score: str) -> Comparison:
    """Two systems' answers to the same questions, by a score; clustered by document."""
    clusters = {same[0].sample_id: same[0].cluster for _, same in grouped(first, _question)}
    return compare(by_question(first, score), by_question(second, score), names=names, clusters=clusters)


def _paired(first: Sequence[Row], second: Sequence[Row], names: tuple[str, str]) -> dict[str, Comparison]:
    return {score: paired(first, second, names, score) for score in ("strict", "lenient")}


def accuracy(rows: Sequence[Row], score: str) -> Estimate:
    """The mean of a score with its interval, clustered by document; a question asked repeatedly counts once."""
    scores = by_question(rows, score)
    cluster = {row.sample_id: row.cluster for row in rows}
    return estimate(list(scores.values()), clusters=[cluster[each] for each in scores])


def by_question(rows: Iterable[Row], score: str) -> dict[str, float]:
    """A score by question, under the id of its first sample.

    A question that was asked at several lengths (as those of data files are) or repeatedly counts once, with its mean:
    its answers are not independent trials.
    """
    return {same[0].sample_id: fmean(getattr(row, score) for row in same) for _, same in grouped(rows, _question)}


def _question(row: Row) -> Hashable:
    """The key that rows of the same question, on documents of different lengths, have in common."""
    return row.task, row.index, row.question, row.gold


def _at_several_lengths(rows: Iterable[Row]) -> bool:
    """Whether a question was asked at several lengths."""
    return any(len({row.length for row in same}) > 1 for _, same in grouped(rows, _question))


def _corrected(compared: list[tuple[str, str, dict[str, Comparison]]]) -> list[tuple[str, str, dict[str, Comparison]]]:
    for score in ("strict", "lenient"):
        found = corrected([each[score] for _, _, each in compared])
        for (_, _, each), one in zip(compared, found, strict=True):
            each[score] = one
    return compared


def _comparison_table(compared: Sequence[tuple[str, str, Mapping[str, Comparison]]], first: str) -> str:
    table = [["length", f"{first} and", "n", "strict", "p", "lenient", "p", "verdict"]]
    for label, other, each in compared:
        cells = []
        for score in ("strict", "lenient"):
            cells += [each[score].points, each[score].p]
        table.append([label, other, f"{each['lenient'].n:,}", *cells, _verdict(each, first, other)])
    return markdown(table)


def _verdict(each: Mapping[str, Comparison], first: str, second: str) -> str:
    told = {score: one for score, one in each.items() if one.is_significant}
    if not told:
        return "not significant"
    better = {first if one.difference > 0 else second for one in told.values()}
    which = "" if len(told) == len(each) else f", {' and '.join(told)} only"
    return f"{' and '.join(sorted(better))} better{which}"


def _sentences(compared: Iterable[Mapping[str, Comparison]]) -> list[str]:
    lines = []
    for each in compared:
        # Strict and lenient often agree on every question.
        by_sentence = grouped(each.items(), lambda item: item[1].sentence)
        lines += [f"- {' and '.join(SCORES[score] for score, _ in same)}: {told}" for told, same in by_sentence]
    return ["\n".join(lines)] if lines else []

"""The roles of the policy in a report: it writes questions, outline and sections, and judges contradictions.

A policy that was trained on its own prompts needs templates for these roles in its profile. Without them, documents are
read for the report's own question, and the sections are the cells' answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal

from memagent_graph.calls import Writes
from memagent_graph.events import EventKind
from memagent_graph.prompts import Prompts
from memagent_graph.roles import Parsed, Role, Trouble, shipped

_MOST_QUESTIONS: Final = 6
_MOST_HEADINGS: Final = 12
_LONGEST_HEADING: Final = 120
_LIST_MARK: Final = re.compile(r"^\s*(?:[-*•]|\(?\d+[.):]|[Qq]\d+[.:])\s+|^#+\s*")
_QUOTE_MARKS: Final = re.compile(r"\[\s*q\s*\d+(?:\s*[,;]\s*q?\s*\d+)*\s*\]", re.IGNORECASE)
_OWN_REFERENCES: Final = re.compile(r"\s*\[\s*\d+(?:\s*[,;-]\s*\d+)*\s*\]")
"""References that a model invents; those of the report are made by code."""
_HEADING: Final = re.compile(r"^(?P<heading>.+?)\s*\[(?P<questions>[\s\dqQ,;]+)\]\s*$")


def parse_questions(text: str, _: Prompts) -> Parsed | Trouble:
    """Parse questions, one on each line; at most `_MOST_QUESTIONS` are kept."""
    lines = [_LIST_MARK.sub("", line).strip() for line in text.splitlines()]
    questions = list(dict.fromkeys(line for line in lines if line.endswith("?")))
    if not questions:
        return Trouble(EventKind.MALFORMED, f"the reply is {text[:40]!r}, and none of its lines is a question")
    return Parsed(text, questions[:_MOST_QUESTIONS])


def parse_outline(text: str, _: Prompts) -> Parsed | Trouble:
    """Parse headings, one on each line, followed by question numbers; these count from 1 in the reply, from 0 here."""
    outline: list[tuple[str, list[int]]] = []
    for line in text.splitlines():
        match = _HEADING.match(_LIST_MARK.sub("", line).strip())
        if match is not None:
            numbers = [int(number) - 1 for number in re.findall(r"\d+", match["questions"])]
            outline.append((_one_line(match["heading"]), list(dict.fromkeys(n for n in numbers if n >= 0))))
    if not outline:
        return Trouble(EventKind.MALFORMED, f"the reply is {text[:40]!r}, without a heading and question numbers")
    return Parsed(text, outline[:_MOST_HEADINGS])


def parse_section(text: str, _: Prompts) -> Parsed | Trouble:
    """Parse sentences, one on each line, with the numbers of the quotes that each cites."""
    sentences: list[tuple[str, list[int]]] = []
    for line in text.splitlines():
        line = _LIST_MARK.sub("", line).strip()  # noqa: PLW2901
        numbers = [int(number) for marks in _QUOTE_MARKS.findall(line) for number in re.findall(r"\d+", marks)]
        sentence = _OWN_REFERENCES.sub("", _QUOTE_MARKS.sub("", line))
        sentence = re.sub(r"\s+([.!?,;:])", r"\1", " ".join(sentence.split())).strip()
        if re.search(r"\w", sentence):
            sentences.append((sentence, list(dict.fromkeys(numbers))))
    if not sentences:
        return Trouble(EventKind.MALFORMED, "the reply has no sentence")
    return Parsed(text, sentences)


def parse_judgement(text: str, _: Prompts) -> Parsed | Trouble:
    """Parse CONTRADICT as True, and COMPATIBLE as False."""
    word = next(iter(text.split()), "").strip(".,:*").upper()
    if word not in {"CONTRADICT", "COMPATIBLE"}:
        return Trouble(EventKind.MALFORMED, f"the reply is {text[:40]!r}, neither CONTRADICT nor COMPATIBLE")
    return Parsed(text, word == "CONTRADICT")


def _one_line(heading: str) -> str:
    return " ".join(_OWN_REFERENCES.sub("", heading).strip("*#: ").split())[:_LONGEST_HEADING]


def _role(
    name: str,
    parse: Callable[[str, Prompts], Parsed | Trouble],
    *,
    fields: frozenset[str] = frozenset({"chunk"}),
    bound: Literal["answer_tokens"] | int = "answer_tokens",
) -> Role:
    return Role(name, Writes.DECISION, fields, shipped(name), bound=bound, parse=parse, optional=True)


QUESTIONS: Final = _role("report_questions", parse_questions)
OUTLINE: Final = _role("report_outline", parse_outline)
SECTION: Final = _role("report_section", parse_section, fields=frozenset({"chunk", "heading"}))
JUDGE: Final = _role("report_judge", parse_judgement, bound=16)


def has_prompts_for(roles: Sequence[Role], prompts: Prompts, *, own_words_only: bool) -> bool:
    """Whether a policy has a prompt for each role.

    With `own_words_only`, the policy understands only its own prompts, so those of the package do not count.
    """
    return not own_words_only or all(prompts.has(role.name) for role in roles)


def custom_templates(prompts: Prompts, *, own_words_only: bool) -> dict[str, str]:
    """Return the policy's own templates for these roles; "" for a role that it cannot take."""
    roles = (QUESTIONS, OUTLINE, SECTION, JUDGE)
    own = {role.name: prompts.template(role.name).text for role in roles if prompts.has(role.name)}
    others = {role.name: "" for role in roles if own_words_only and role.name not in own}
    return own | others

"""The two strategies with which a policy plans and writes a report, and their roles.

`ReportPlan` reads the beginnings of the documents and writes the questions. `ReportWriting` reads the matrix and writes
the sections. Because they are strategies, their runs are logged, counted, resumed and shown like all others.

A policy that was trained on its own prompts needs templates for the roles in its profile. Without them, documents are
read for the report's own question, and the sections are the cells' answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired

import msgspec
from langgraph.graph import END
from langgraph.types import Send

from memagent_graph.errors import MemAgentError
from memagent_graph.events import EventKind, ReadEvent, StopReason
from memagent_graph.prompts import Prompts, read_template
from memagent_graph.reading.inputs import check_question
from memagent_graph.reading.state import ReaderContext, ReaderState, merge_entries
from memagent_graph.reading.steps import Change, StepContext, branch
from memagent_graph.reading.strategy import OPEN_DOCUMENT, Strategy, StrategyGraph
from memagent_graph.roles import ParsedReply, ParseFailure, Role
from memagent_graph.trace import Writes
from memagent_report.evidence_matrix import (
    CellState,
    DifferingAnswers,
    Draft,
    EvidenceMatrix,
    ReportMode,
    ReportSection,
    ReportSentence,
    find_differing_answers,
    make_extractive_draft,
    make_extractive_section,
)

_MAX_PAIRS: Final = 100
"""Maximum number of pairs of answers that are judged in one report. Each pair needs one call."""


# The roles

_MAX_QUESTIONS: Final = 6
_MAX_HEADINGS: Final = 12
_MAX_HEADING_LENGTH: Final = 120
_LIST_MARK: Final = re.compile(r"^\s*(?:[-*•]|\(?\d+[.):]|[Qq]\d+[.:])\s+|^#+\s*")
_QUOTE_MARKS: Final = re.compile(r"\[\s*+q\s*+\d+(?:\s*+[,;]\s*+q?\s*+\d+)*+\s*+\]", re.IGNORECASE)
_INVENTED_REFERENCES: Final = re.compile(r"(?<!\s)\s*+\[\s*+\d+(?:\s*+[,;-]\s*+\d+)*+\s*+\]")
"""References that a model invents. The code makes the references of the report."""
_NUMBER: Final = re.compile(r"(?<!\d)\d{1,9}(?!\d)")
_HEADING: Final = re.compile(r"^(?P<heading>.+?)(?<!\s)\s*+\[(?P<questions>[\s\dqQ,;]+)\]\s*$")


def parse_questions(text: str, _: Prompts) -> ParsedReply | ParseFailure:
    """Parse questions, one on each line; at most `_MAX_QUESTIONS` are kept."""
    lines = [_LIST_MARK.sub("", line).strip() for line in text.splitlines()]
    questions = list(dict.fromkeys(line for line in lines if line.endswith("?")))
    if not questions:
        return ParseFailure(EventKind.MALFORMED, f"the reply is {text[:40]!r}, and none of its lines is a question")
    return ParsedReply(text, questions[:_MAX_QUESTIONS])


def parse_outline(text: str, _: Prompts) -> ParsedReply | ParseFailure:
    """Parse headings, one on each line, followed by question numbers; they count from 1 in the reply, from 0 here."""
    outline: list[tuple[str, list[int]]] = []
    for line in text.splitlines():
        match = _HEADING.match(_LIST_MARK.sub("", line).strip())
        if match is not None:
            numbers = dict.fromkeys(int(number) - 1 for number in _NUMBER.findall(match["questions"]))
            heading = " ".join(_INVENTED_REFERENCES.sub("", match["heading"]).strip("*#: ").split())
            outline.append((heading[:_MAX_HEADING_LENGTH], list(numbers)))
    if not outline:
        return ParseFailure(EventKind.MALFORMED, f"the reply is {text[:40]!r}, without a heading and question numbers")
    return ParsedReply(text, outline[:_MAX_HEADINGS])


def parse_section(text: str, _: Prompts) -> ParsedReply | ParseFailure:
    """Parse sentences, one on each line, with the numbers of the quotes that each cites."""
    sentences: list[tuple[str, list[int]]] = []
    for line in text.splitlines():
        line = _LIST_MARK.sub("", line).strip()  # noqa: PLW2901
        numbers = [int(number) for mark in _QUOTE_MARKS.findall(line) for number in _NUMBER.findall(mark)]
        sentence = _INVENTED_REFERENCES.sub("", _QUOTE_MARKS.sub("", line))
        sentence = re.sub(r"\s+([.!?,;:])", r"\1", " ".join(sentence.split())).strip()
        if re.search(r"\w", sentence):
            sentences.append((sentence, list(dict.fromkeys(numbers))))
    if not sentences:
        return ParseFailure(EventKind.MALFORMED, "the reply has no sentence")
    return ParsedReply(text, sentences)


def parse_judgement(text: str, _: Prompts) -> ParsedReply | ParseFailure:
    """Parse CONTRADICT as True, and COMPATIBLE as False."""
    verdict = next(iter(text.split()), "").strip(".,:*").upper()
    if verdict not in {"CONTRADICT", "COMPATIBLE"}:
        return ParseFailure(EventKind.MALFORMED, f"the reply is {text[:40]!r}, neither CONTRADICT nor COMPATIBLE")
    return ParsedReply(text, verdict == "CONTRADICT")


def _make_role(
    name: str,
    parse: Callable[[str, Prompts], ParsedReply | ParseFailure],
    *,
    fields: frozenset[str] = frozenset({"chunk"}),
    max_tokens: Literal["answer_tokens"] | int = "answer_tokens",
) -> Role:
    return Role(name, Writes.DECISION, fields, read_template(name), max_tokens=max_tokens, parse=parse, optional=True)


QUESTIONS: Final = _make_role("report_questions", parse_questions)
OUTLINE: Final = _make_role("report_outline", parse_outline)
SECTION: Final = _make_role("report_section", parse_section, fields=frozenset({"chunk", "heading"}))
JUDGE: Final = _make_role("report_judge", parse_judgement, max_tokens=16)


def list_custom_templates(prompts: Prompts, *, trained_prompts_only: bool) -> dict[str, str]:
    """Return the policy's own templates for these roles; "" for a role that it has no prompt for."""
    names = [role.name for role in (QUESTIONS, OUTLINE, SECTION, JUDGE)]
    templates = dict.fromkeys(names, "") if trained_prompts_only else {}
    return templates | {name: prompts.templates[name].text for name in names if name in prompts.templates}


# The strategies


@dataclass(frozen=True)
class ReportPlan(Strategy):
    """open_document -> ask_for_questions: one call; its answer is the questions, one on each line."""

    name: ClassVar[str] = "report_plan"
    roles: ClassVar[tuple[Role, ...]] = (QUESTIONS,)
    state: ClassVar[type] = ReaderState

    def wire(self, graph: StrategyGraph) -> None:
        """Add the node and its edges."""
        graph.add_node("ask_for_questions", _ask_for_questions)
        graph.add_edge(OPEN_DOCUMENT, "ask_for_questions")
        graph.add_edge("ask_for_questions", END)


async def _ask_for_questions(state: ReaderState, step: StepContext) -> Change:
    context = step.context
    text = context.store.read(state["document"], 0, state["document"]["size"])
    reply = await step.ask(QUESTIONS, chunk=context.truncate(text, context.budget.chunk_tokens), parents=())
    questions = []
    for question in reply.value or ():
        with suppress(MemAgentError):  # it is too long
            check_question(question, context)
            questions.append(question)
    return _make_final_change("\n".join(questions), reply.completion_text)


def _make_final_change(answer: str, raw_answer: str) -> Change:
    reason = StopReason.ANSWERED if answer else StopReason.NO_ANSWER
    return {"answer": answer or None, "raw_answer": raw_answer, "stop_reason": reason.value}


class WritingState(ReaderState):
    """The headings, the sections written so far, and the pairs of answers judged so far."""

    outline: NotRequired[list[tuple[str, list[int]]]]
    sections: NotRequired[Annotated[dict[str, Any], merge_entries]]
    """The written sections by number."""
    pairs: NotRequired[int]
    """The number of pairs of answers to judge."""
    judgements: NotRequired[Annotated[dict[str, bool], merge_entries]]
    """By the number of the pair: whether the two answers contradict each other."""


class WritingBranch(WritingState):
    """The state of a branch, with the number of the section that it writes, or of the pair that it judges."""

    branch: str
    number: int


@dataclass(frozen=True)
class ReportWriting(Strategy):
    """open_document -> outline -> write_section and judge, in parallel -> put_together.

    If the policy does not write a section in the required form, even after a retry, the section is extractive.
    """

    judge: bool = False
    """Whether the policy judges which answers contradict each other, pair by pair."""
    write: bool = True
    """Whether the policy writes the sections; if not, they are the cells' answers."""
    name: ClassVar[str] = "report_writing"
    roles: ClassVar[tuple[Role, ...]] = (OUTLINE, SECTION, JUDGE)
    state: ClassVar[type] = WritingState

    def wire(self, graph: StrategyGraph) -> None:
        """Add the nodes and their edges."""
        graph.add_node("outline", self._outline)
        graph.add_node("write_section", _write_section)
        graph.add_node("judge", _judge)
        graph.add_node("put_together", self._put_together)
        graph.add_edge(OPEN_DOCUMENT, "outline")
        graph.add_conditional_edges("outline", self._list_branches, ["write_section", "judge", "put_together"])
        graph.add_edge("write_section", "put_together")
        graph.add_edge("judge", "put_together")
        graph.add_edge("put_together", END)

    def _list_branches(self, state: WritingState) -> str | Sequence[Send]:
        branches = [
            branch("write_section", state, f"section {number + 1}", number=number, outline=state["outline"])
            for number in range(len(state.get("outline") or ()))
        ]
        branches += [
            branch("judge", state, f"pair {number + 1}", number=number) for number in range(state.get("pairs") or 0)
        ]
        return branches or "put_together"

    async def _outline(self, state: WritingState, step: StepContext) -> Change:
        """Ask for the headings. A question that belongs to no heading gets its own section."""
        matrix, context = _load_matrix(state, step), step.context
        pairs = len(find_pairs_to_judge(matrix)[0]) if self.judge else 0
        if not self.write:
            return {"outline": [], "pairs": pairs}
        answers, omissions = _fit_lines(_format_answers(matrix), "answers", context)
        reply = await step.ask(OUTLINE, chunk=answers, parents=(), events=omissions)
        outline: list[tuple[str, list[int]]] = []
        for heading, numbers in reply.value or ():
            if known_numbers := [number for number in numbers if 0 <= number < len(matrix.questions)]:
                outline.append((heading, known_numbers))
        assigned_questions = {question_number for _, numbers in outline for question_number in numbers}
        outline += [
            (question, [question_number])
            for question_number, question in enumerate(matrix.questions)
            if question_number not in assigned_questions
        ]
        return {"outline": outline, "pairs": pairs}

    async def _put_together(self, state: WritingState, step: StepContext) -> Change:
        """Join the sections to a draft; its JSON is the run's answer."""
        matrix, sections = _load_matrix(state, step), state.get("sections") or {}
        if self.write:
            written_sections = tuple(msgspec.convert(sections[key], ReportSection) for key in sorted(sections, key=int))
            draft = Draft(ReportMode.WRITTEN, written_sections)
        else:
            draft = make_extractive_draft(matrix)
        pairs, judgements = find_pairs_to_judge(matrix)[0], state.get("judgements") or {}
        contradictions = tuple(pair for number, pair in enumerate(pairs) if judgements.get(str(number)))
        draft = replace(draft, contradictions=contradictions)
        return _make_final_change(json.dumps(msgspec.to_builtins(draft), ensure_ascii=False), "")


def find_pairs_to_judge(matrix: EvidenceMatrix) -> tuple[list[DifferingAnswers], int]:
    """Return the pairs of different answers that the policy judges, one call for each, and how many are left out."""
    pairs = list(find_differing_answers(matrix))
    return pairs[:_MAX_PAIRS], max(0, len(pairs) - _MAX_PAIRS)


def _load_matrix(state: ReaderState, step: StepContext) -> EvidenceMatrix:
    text = step.context.store.read(state["document"], 0, state["document"]["size"])
    return msgspec.json.decode(text, type=EvidenceMatrix)


def _format_answers(matrix: EvidenceMatrix) -> Iterator[str]:
    for question_number, question in enumerate(matrix.questions):
        yield f"Question {question_number + 1}: {question}"
        for cell in matrix.column(question_number):
            answer = cell.answer if cell.state is CellState.ANSWERED else f"({cell.state.value})"
            yield f"[{question_number + 1}] {matrix.documents[cell.document].name}: {' '.join((answer or '').split())}"


def _format_quotes(matrix: EvidenceMatrix, questions: Sequence[int]) -> Iterator[str]:
    """Yield the quotes for some questions; all quotes of the matrix are numbered from 1."""
    for quote_number, (position, quote) in enumerate(matrix.quotes(), 1):
        if position.question in questions:
            page = f", {quote.page}" if quote.page else ""
            text = " ".join(quote.text.split())
            yield f'[q{quote_number}] {matrix.documents[position.document].name}{page}: "{text}"'


def _fit_lines(lines: Iterator[str], noun: str, context: ReaderContext) -> tuple[str, list[ReadEvent]]:
    """Return the lines that fit in the chunk of a prompt, and an event if others, called `noun`, do not."""
    prompt_lines: list[str] = []
    tokens = omitted_count = 0
    for line in lines:
        line_tokens = context.count_shown_tokens(line) + 2
        if tokens + line_tokens > context.budget.chunk_tokens:
            omitted_count += 1
            continue
        prompt_lines.append(line)
        tokens += line_tokens
    detail = f"{omitted_count} {noun} did not fit into the prompt"
    events = [ReadEvent(EventKind.SHORTENED_CHUNK, None, detail)] if omitted_count else []
    return "\n".join(prompt_lines), events


async def _write_section(state: WritingBranch, step: StepContext) -> Change:
    matrix, section_number = _load_matrix(state, step), state["number"]
    heading, questions = state["outline"][section_number]
    section = make_extractive_section(matrix, heading, tuple(questions))
    quotes, omissions = _fit_lines(_format_quotes(matrix, questions), "quotes", step.context)
    if quotes:
        short_heading = step.context.truncate(heading, step.context.budget.memory_tokens)
        reply = await step.ask(
            SECTION, chunk=quotes, heading=short_heading, slot=section_number, parents=(), events=omissions
        )
        if reply.value is not None:
            positions = {number: position for number, (position, _) in enumerate(matrix.quotes(), 1)}
            sentences = [
                ReportSentence(text, tuple(positions[number] for number in numbers if number in positions))
                for text, numbers in reply.value
            ]
            section = replace(section, sentences=tuple(sentences))
    return {"sections": {str(section_number): msgspec.to_builtins(section)}}


async def _judge(state: WritingBranch, step: StepContext) -> Change:
    """Ask whether two answers contradict each other; each is shown with its best quote."""
    matrix, pair_number = _load_matrix(state, step), state["number"]
    pair = find_pairs_to_judge(matrix)[0][pair_number]
    max_tokens = step.context.budget.chunk_tokens // 2 - 1
    statements = [
        step.context.truncate(_format_statement(matrix, pair.question, group[0]), max_tokens) for group in pair.groups
    ]
    question = matrix.questions[pair.question]
    reply = await step.ask(JUDGE, chunk="\n".join(statements), question=question, slot=pair_number, parents=())
    return {"judgements": {str(pair_number): bool(reply.value)}}


def _format_statement(matrix: EvidenceMatrix, question_index: int, document_index: int) -> str:
    cell = matrix.cell(document_index, question_index)
    quote = f' (quote: "{" ".join(cell.quotes[0].text.split())}")' if cell.quotes else ""
    return f"{matrix.documents[document_index].name}: {' '.join((cell.answer or '').split())}{quote}"

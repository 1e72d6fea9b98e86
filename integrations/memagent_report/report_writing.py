"""The two strategies with which a policy plans and writes a report.

`ReportPlan` reads the beginnings of the documents and writes the questions. `ReportWriting` reads the matrix and writes
the sections. Because they are strategies, their runs are logged, counted, resumed and shown like all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NotRequired

from langgraph.graph import END
from langgraph.types import Send

from memagent_graph.errors import MemAgentError
from memagent_graph.events import EventKind, StopReason
from memagent_graph.reading.ask import beginning, shown_tokens
from memagent_graph.reading.graph import check_question
from memagent_graph.reading.nodes import Change, StepContext, branch
from memagent_graph.reading.state import ReaderContext, ReaderState, put
from memagent_graph.reading.strategy import OPEN, Strategy, StrategyGraph
from memagent_graph.roles import Role
from memagent_report.contradictions import compared_answers, contradictions
from memagent_report.drafts import (
    Draft,
    DraftSection,
    DraftSentence,
    ReportMode,
    extractive_draft,
    extractive_section,
)
from memagent_report.evidence_matrix import (
    CellState,
    EvidenceMatrix,
    QuotePlace,
    SourceQuote,
    from_json,
    to_json,
)
from memagent_report.report_roles import JUDGE, OUTLINE, QUESTIONS, SECTION


@dataclass(frozen=True)
class ReportPlan(Strategy):
    """open_document -> ask_for_questions: one call; its answer is the questions, one on each line."""

    name: ClassVar[str] = "report_plan"
    roles: ClassVar[tuple[Role, ...]] = (QUESTIONS,)
    state: ClassVar[type] = ReaderState
    chooses: ClassVar[str] = "ask_for_questions"
    concludes: ClassVar[str] = "ask_for_questions"

    def wire(self, graph: StrategyGraph) -> None:
        """Add the node and its edges."""
        graph.add_node("ask_for_questions", _ask_for_questions)
        graph.add_edge(OPEN, "ask_for_questions")
        graph.add_edge("ask_for_questions", END)


async def _ask_for_questions(state: ReaderState, step: StepContext) -> Change:
    context = step.context
    text = context.store.read_bytes(state["document"], 0, state["document"]["size"] or 0).decode()
    reply = await step.ask(QUESTIONS, chunk=beginning(context, text, context.budget.chunk_tokens), parents=())
    asked = [each for each in reply.value or () if _can_be_asked(each, context)]
    return _ended(step, "\n".join(asked), reply.raw)


def _can_be_asked(question: str, context: ReaderContext) -> bool:
    try:
        check_question(question, context)
    except MemAgentError:
        return False
    return True


def _ended(step: StepContext, answer: str, raw: str) -> Change:
    reason = StopReason.ANSWERED if answer else StopReason.NO_ANSWER
    step.finished(reason, answer or None)
    return {"answer": answer or None, "raw_answer": raw, "stop_reason": reason.value}


class WritingState(ReaderState):
    """The headings, the sections written so far, and the judgements so far."""

    outline: NotRequired[list[tuple[str, list[int]]]]
    sections: NotRequired[Annotated[dict[str, Any], put]]
    """By section number."""
    judged: NotRequired[Annotated[dict[str, Any], put]]
    """By question number."""


class WritingBranch(WritingState):
    """The state of a branch, with the number of the section that it writes or the question that it judges."""

    branch: str
    number: int


@dataclass(frozen=True)
class ReportWriting(Strategy):
    """open_document -> outline -> write_section and judge, in parallel -> put_together.

    If the policy does not write a section in the required form, even when it is asked again, the section is extractive.
    """

    judge: bool = False
    """Whether the policy judges the contradictions that the rules find."""
    write: bool = True
    """Whether the policy writes the sections; if not, they are the cells' answers."""
    name: ClassVar[str] = "report_writing"
    roles: ClassVar[tuple[Role, ...]] = (OUTLINE, SECTION, JUDGE)
    state: ClassVar[type] = WritingState
    chooses: ClassVar[str] = "outline"
    concludes: ClassVar[str] = "put_together"

    def wire(self, graph: StrategyGraph) -> None:
        """Add the nodes and their edges."""
        graph.add_node("outline", self._outline)
        graph.add_node("write_section", _write_section)
        graph.add_node("judge", _judge)
        graph.add_node("put_together", self._put_together)
        graph.add_edge(OPEN, "outline")
        graph.add_conditional_edges("outline", self._each_part, ["write_section", "judge", "put_together"])
        graph.add_edge("write_section", "put_together")
        graph.add_edge("judge", "put_together")
        graph.add_edge("put_together", END)

    def _each_part(self, state: WritingState) -> str | Sequence[Send]:
        parts = [
            branch("write_section", state, f"section {number + 1}", number=number, outline=state["outline"])
            for number in range(len(state.get("outline") or ()))
        ]
        for number in state.get("judged") or {} if self.judge else ():
            parts.append(branch("judge", state, f"question {int(number) + 1}", number=int(number)))
        return parts or "put_together"

    async def _outline(self, state: WritingState, step: StepContext) -> Change:
        """Ask for the headings. A question that belongs to no heading gets its own section."""
        matrix, context = _matrix(state, step), step.context
        differing: dict[str, dict[str, bool]] = {str(each.question): {} for each in contradictions(matrix)}
        if not self.write:
            return {"outline": [], "judged": differing}
        listed, left_out = _fitting(_answers(matrix), context, context.budget.chunk_tokens)
        reply = await step.ask(OUTLINE, chunk=listed, parents=(), note=_note(left_out, "answers"))
        count = len(matrix.questions)
        outline = [(heading, [each for each in numbers if each < count]) for heading, numbers in reply.value or ()]
        outline = [(heading, numbers) for heading, numbers in outline if numbers]
        named = {number for _, numbers in outline for number in numbers}
        outline += [(asked, [number]) for number, asked in enumerate(matrix.questions) if number not in named]
        return {"outline": outline, "judged": differing}

    async def _put_together(self, state: WritingState, step: StepContext) -> Change:
        """Join the sections to a draft; its JSON is the run's answer."""
        written = state.get("sections") or {}
        sections = [from_json(written[key], DraftSection) for key in sorted(written, key=int)]
        judged = {
            int(key): bool(value["contradict"])
            for key, value in (state.get("judged") or {}).items()
            if value.get("contradict") is not None
        }
        draft = Draft(ReportMode.WRITTEN, tuple(sections), judged)
        if not self.write:
            draft = replace(extractive_draft(_matrix(state, step)), judgements=judged)
        return _ended(step, json.dumps(to_json(draft), ensure_ascii=False), "")


def _matrix(state: ReaderState, step: StepContext) -> EvidenceMatrix:
    text = step.context.store.read_bytes(state["document"], 0, state["document"]["size"] or 0)
    return from_json(json.loads(text), EvidenceMatrix)


def _answers(matrix: EvidenceMatrix) -> Iterator[str]:
    for number, asked in enumerate(matrix.questions):
        yield f"Question {number + 1}: {asked}"
        for cell in matrix.column(number):
            said = cell.answer if cell.state is CellState.ANSWERED else f"({cell.state.value})"
            yield f"[{number + 1}] {matrix.documents[cell.document].name}: {' '.join((said or '').split())}"


def numbered_quotes(matrix: EvidenceMatrix) -> list[tuple[QuotePlace, SourceQuote]]:
    """Return the quotes in the order in which the prompt numbers them, from 1."""
    return list(matrix.quotes())


def _evidence(matrix: EvidenceMatrix, questions: Sequence[int]) -> Iterator[str]:
    for number, (place, quote) in enumerate(numbered_quotes(matrix), 1):
        if place.question in questions:
            page = f", {quote.page}" if quote.page else ""
            text = " ".join(quote.text.split())
            yield f'[q{number}] {matrix.documents[place.document].name}{page}: "{text}"'


def _fitting(lines: Iterator[str], context: ReaderContext, most: int) -> tuple[str, int]:
    """Return the lines that fit in `most` tokens of the prompt, and how many do not."""
    kept: list[str] = []
    tokens = left_out = 0
    for line in lines:
        cost = shown_tokens(context, line) + 2
        if tokens + cost > most:
            left_out += 1
            continue
        kept.append(line)
        tokens += cost
    return "\n".join(kept), left_out


def _note(left_out: int, what: str) -> tuple[EventKind, str] | None:
    if not left_out:
        return None
    return EventKind.SHORTENED_CHUNK, f"{left_out} {what} did not fit into the prompt"


async def _write_section(state: WritingBranch, step: StepContext) -> Change:
    matrix, number = _matrix(state, step), state["number"]
    heading, questions = state["outline"][number]
    evidence, left_out = _fitting(_evidence(matrix, questions), step.context, step.context.budget.chunk_tokens)
    if not evidence:
        return {"sections": {str(number): to_json(extractive_section(matrix, heading, tuple(questions)))}}
    shown = beginning(step.context, heading, step.context.budget.memory_tokens)
    reply = await step.ask(
        SECTION, chunk=evidence, heading=shown, slot=number, parents=(), note=_note(left_out, "quotes")
    )
    if reply.value is None:
        section = extractive_section(matrix, heading, tuple(questions))
    else:
        places = [place for place, _ in numbered_quotes(matrix)]
        sentences = [
            DraftSentence(text, tuple(places[each - 1] for each in named if 0 < each <= len(places)))
            for text, named in reply.value
        ]
        section = DraftSection(heading, tuple(questions), tuple(sentences))
    return {"sections": {str(number): to_json(section)}}


async def _judge(state: WritingBranch, step: StepContext) -> Change:
    matrix, question = _matrix(state, step), state["number"]
    found = next(each for each in contradictions(matrix) if each.question == question)
    lines = (f"{name}: {' '.join(answer.split())}" for name, answer in compared_answers(matrix, found))
    answers, left_out = _fitting(lines, step.context, step.context.budget.chunk_tokens)
    reply = await step.ask(
        JUDGE,
        chunk=answers,
        question=matrix.questions[question],
        slot=question,
        parents=(),
        note=_note(left_out, "answers"),
    )
    return {"judged": {str(question): {"contradict": reply.value}}}

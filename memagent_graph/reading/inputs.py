"""What a read is given: questions, which are checked, and a document, which is stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from memagent_graph.documents import Document, DocumentRef
from memagent_graph.documents.conversion import ConversionCancellation
from memagent_graph.errors import BudgetError, MemAgentError
from memagent_graph.reading.state import ReaderContext


def check_question(question: str, context: ReaderContext) -> None:
    """Raise `MemAgentError` for a question that is empty or not text, `BudgetError` for one that exceeds its budget."""
    if not isinstance(question, str):
        raise MemAgentError(f"a question is of type {type(question).__name__}", hint="Questions are text.")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise MemAgentError(f"the question is not valid Unicode: {error}", hint="Pass it in UTF-8.") from error
    if not question.strip():
        raise MemAgentError("the question is empty", hint="Ask something.")
    budget = context.budget.question_tokens
    shown = context.prompts.neutralise(context.question_shown(question))
    if len(shown.encode("utf-8", "replace")) > budget and (tokens := context.tokenizer.count(shown)) > budget:
        fields = " with the answer's fields" if context.question_shown(question) != question else ""
        raise BudgetError(
            f"the question{fields} has {tokens} tokens and its budget is {budget}",
            hint="Shorten it, or raise --question-tokens and lower --chunk-tokens by as much.",
        )


def checked_questions(questions: Iterable[str], context: ReaderContext) -> list[str]:
    """Return the questions as a list; a single text is one question.

    Raises:
        MemAgentError: there is none, or one is empty or not text.
        BudgetError: one exceeds its budget.
    """
    several = [questions] if isinstance(questions, str) else list(questions)
    if not several:
        raise MemAgentError("there is no question", hint="Give at least one.")
    for question in several:
        check_question(question, context)
    return several


def stored_document(
    document: Any, context: ReaderContext, cancellation: ConversionCancellation | None = None
) -> DocumentRef:
    """Return a document's reference; another source is stored first.

    Raises:
        DocumentError: it cannot be read.
    """
    if is_reference(document):
        return cast("DocumentRef", document)
    return context.store.add(
        Document.of(document), replace_undecodable=context.replace_undecodable, cancellation=cancellation
    )


def is_reference(document: Any) -> bool:
    """Return whether a document is a reference to one in the store."""
    return isinstance(document, dict) and "key" in document and "size" in document

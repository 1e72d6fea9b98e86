"""The input of a read: checks questions and options, and stores the document."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, cast

from langchain_core.runnables import RunnableConfig

from memagent_graph.concurrency.shared_pass import Barrier
from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.errors import BudgetError, DocumentError, MemAgentError
from memagent_graph.plain_text import did_you_mean
from memagent_graph.reading.state import Limits, ReaderContext
from memagent_graph.response_format import ResponseFormatSource


class ReadOptions(TypedDict, total=False):
    """The options of one read."""

    response_format: ResponseFormatSource | None
    """The structure of the answer: a Pydantic model, or a JSON schema as a dict. The result's `value` is then an
    instance of the model, or the dict; see `memagent_graph.reading.structured`."""
    pages: str | None
    """The pages to read of a PDF file: "5", "5-10", "12-" or "1-3,7". All if left out."""
    run_id: str | None
    """Your own id for the run; by default a new one. An existing run with this id is replaced. With `questions`, it is
    the prefix of the ids: a hyphen and the index of the question follow."""
    limits: Limits | None
    """Limits of each question's run in this read, instead of the reader's own."""
    config: RunnableConfig | None
    """A LangChain config. Its callbacks, tags, metadata and run name are used."""
    barrier: Barrier | None
    """Keeps the read at the same chunk as other reads of the document; see `concurrency.shared_pass`."""


def check_options(options: ReadOptions) -> None:
    """Raise `MemAgentError` for an unknown option, and for a run id or limits of another type."""
    names = ReadOptions.__annotations__
    if unknown := next((name for name in options if name not in names), None):
        hint = did_you_mean(unknown, names, f"A read takes {', '.join(names)}; MemAgent(...) takes all settings.")
        raise MemAgentError(f"a read has no option {unknown!r}", hint=hint)
    for name, kind in (("run_id", str), ("limits", Limits)):
        if not isinstance(value := options.get(name), kind | None):
            raise MemAgentError(f"{name} is of type {type(value).__name__}", hint=f"Pass a {kind.__name__}.")


def check_question(question: str, context: ReaderContext) -> None:
    """Raise `MemAgentError` for a question that is empty or not text, `BudgetError` for one that exceeds its budget."""
    if not isinstance(question, str):
        raise MemAgentError(f"a question is of type {type(question).__name__}", hint="Pass the question as text.")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise MemAgentError(f"the question is not valid Unicode: {error}", hint="Pass it in UTF-8.") from error
    if not question.strip():
        raise MemAgentError("the question is empty", hint="Ask something.")
    budget = context.budget.question_tokens
    text = context.prompts.neutralise(context.format_question(question))
    if (tokens := context.tokenizer.count(text)) > budget:
        fields = " with the answer's fields" if context.format_question(question) != question else ""
        raise BudgetError(
            f"the question{fields} has {tokens} tokens and its budget is {budget}",
            hint=f"Shorten it, or use --question-tokens {tokens} (and a lower --chunk-tokens, if needed).",
        )


def check_questions(questions: Iterable[str], context: ReaderContext) -> list[str]:
    """Return the questions as a list. A string is one question.

    Raises:
        MemAgentError: there is no question, or a question is empty or not text.
        BudgetError: a question exceeds its budget.
    """
    if isinstance(questions, Mapping) or not isinstance(questions, Iterable):
        problem = f"the question is of type {type(questions).__name__}, not a text or a list of texts"
        raise MemAgentError(problem, hint="Pass a text, or several in a list.")
    texts = [questions] if isinstance(questions, str) else list(questions)
    if not texts:
        raise MemAgentError("there is no question", hint="Pass at least one question.")
    for question in texts:
        check_question(question, context)
    return texts


async def store_document(document: Any, store: DocumentStore, *, pages: str | None = None) -> DocumentRef:
    """Return the reference of a document. A source is stored first, all of it or only `pages`.

    Raises:
        DocumentError: the document cannot be read, or `pages` is given for a reference.
    """
    if not (isinstance(document, dict) and "key" in document and "size" in document):
        source = await asyncio.to_thread(Document.of, document)
        return await store.add_async(source.only(pages))
    if pages is not None:
        raise DocumentError(
            f"{document['name']} is already stored; pages must be chosen before it is stored",
            hint="Pass the file, or store the pages: store.add(Document.from_path(...).only(pages)).",
        )
    return cast("DocumentRef", document)

"""`cited_answer`: a result as a LangChain message, with the document's quotes as citations of its text."""

from __future__ import annotations

from langchain_core.messages import AIMessage
from langchain_core.messages.content import Annotation, create_citation, create_text_block

from memagent_graph.provenance.evidence import Evidence
from memagent_graph.results import ReadResult


def cited_answer(result: ReadResult) -> AIMessage:
    """Return the answer as one standard text block (`message.content_blocks`), with a `Citation` for each quote.

    A citation refers to the whole answer. Its `cited_text` is the quote, its `title` the document's name, with the page
    if the document has pages. Its `url` names the stored text and the characters (`urn:sha256:...#char=START,END`);
    nothing can be fetched there. In `extras` are the chunk, the span in the document and the line of memory that it
    supports.

    The text is empty if the read ended without an answer; `response_metadata["memagent"]` says why (`stop_reason`), and
    has the run's id. The quotes are looked up in the document's text.

    >>> memagent_node(agent, write=lambda state, result: {"messages": [cited_answer(result)]})  # doctest: +SKIP
    """
    answer = result.answer or ""
    citations: list[Annotation] = []
    if answer:
        citations = [_citation(result, number, evidence) for number, evidence in enumerate(result.evidence)]
    return AIMessage(
        content_blocks=[create_text_block(answer, id=f"{result.run_id}-answer", annotations=citations)],
        id=result.run_id,
        response_metadata={
            "memagent": {
                "run_id": result.run_id,
                "stop_reason": result.stop_reason.value,
                "document": dict(result.document),
                "chunks_read": result.chunks_read,
            }
        },
    )


def _citation(result: ReadResult, number: int, evidence: Evidence) -> Annotation:
    section = f", {evidence.section}" if evidence.section else ""
    return create_citation(
        id=f"{result.run_id}-{number}",
        title=f"{result.document['name']}{section}",
        url=f"urn:{result.document['key']}#char={evidence.start_char},{evidence.end_char}",
        start_index=0,
        end_index=len(result.answer or ""),
        cited_text=evidence.quote,
        chunk=evidence.chunk_index,
        start_char=evidence.start_char,
        end_char=evidence.end_char,
        line=evidence.line,
    )

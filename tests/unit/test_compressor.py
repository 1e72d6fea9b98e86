"""`MemAgentDocumentCompressor`: many retrieved documents become one reading with citations."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig, RunnableLambda, RunnablePassthrough
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from support.scripts import document_with, part, perfect_reader
from typing_extensions import TypedDict

from langchain_memagent.compressor import MemAgentDocumentCompressor
from memagent_graph import ScriptedPolicy
from memagent_graph.errors import BudgetError, PolicyError

QUESTION = "What is the key of harbor?"
FACT = "The key of harbor is 4711."


@pytest.fixture
def found() -> list[Document]:
    """Seven documents; the third and the sixth hold a fact, the sixth the one that counts."""
    filler = document_with({}, words=600)
    texts = [filler] * 7
    texts[2] = f"Élan vital 🙂. The key of harbor is 12. {filler}"
    texts[5] = f"{filler} {FACT}"
    return [
        Document(text, id=str(index), metadata={"source": f"book{index}.txt", "page": index})
        for index, text in enumerate(texts)
    ]


@pytest.mark.parametrize("sync", [True, False])
async def test_one_document_comes_out_with_citations_in_those_that_went_in(make_reader, found, sync) -> None:
    agent = make_reader()
    compressor = MemAgentDocumentCompressor(agent=agent)
    if sync:
        [reading] = compressor.compress_documents(found, QUESTION)
    else:
        [reading] = await compressor.acompress_documents(found, QUESTION)
    assert reading.page_content == "4711\n\nnothing yet\nharbor 12\nharbor 4711"
    assert reading.metadata["answer"] == "4711"
    assert reading.metadata["stop_reason"] == "answered"
    assert agent.run_log.get(reading.metadata["run_id"]).question == QUESTION
    citations = reading.metadata["citations"]
    assert [(each["document"], each["line"]) for each in citations] == [(2, "harbor 12"), (5, "harbor 4711")]
    for each in citations:
        document = found[each["document"]]
        assert each["metadata"] == document.metadata
        assert document.page_content[each["start_char"] : each["end_char"]] == each["quote"]
        assert "harbor is" in each["quote"]


def test_a_quote_across_two_documents_is_cited_in_both(make_reader) -> None:
    documents = [Document("the old tower of amber stones"), Document("fell into the cold sea at dawn")]
    line = "tower of amber stones fell into the cold sea"
    policy = ScriptedPolicy(lambda prompt: line if "<section>" in prompt else "\\boxed{at dawn}")
    [reading] = MemAgentDocumentCompressor(agent=make_reader(policy)).compress_documents(documents, "What fell?")
    quotes = [(each["document"], each["quote"]) for each in reading.metadata["citations"]]
    assert quotes == [(0, "tower of amber stones"), (1, "fell into the cold sea")]


def test_the_cited_documents_can_be_passed_on_as_they_were(make_reader, found) -> None:
    compressor = MemAgentDocumentCompressor(agent=make_reader(), keep="cited")
    assert compressor.compress_documents(found, QUESTION) == [found[2], found[5]]
    assert compressor.compress_documents(found[:2], QUESTION) == []


@pytest.mark.parametrize("documents", [[], [Document(" \n"), Document("")]])
async def test_nothing_comes_of_nothing_and_nobody_is_asked(make_reader, documents) -> None:
    policy = ScriptedPolicy(perfect_reader)
    compressor = MemAgentDocumentCompressor(agent=make_reader(policy))
    assert compressor.compress_documents(documents, QUESTION) == []
    assert await compressor.acompress_documents(documents, QUESTION) == []
    assert policy.prompts == []


def test_a_document_without_text_among_others_does_not_shift_citations(make_reader, found) -> None:
    [reading] = MemAgentDocumentCompressor(agent=make_reader()).compress_documents(
        [Document(""), *found[5:], Document(" ")], QUESTION
    )
    assert [each["document"] for each in reading.metadata["citations"]] == [1]


def test_a_query_beyond_its_budget_is_refused(make_reader, found) -> None:
    with pytest.raises(BudgetError, match="question"):
        MemAgentDocumentCompressor(agent=make_reader()).compress_documents(found, "why " * 200)


class Shelf(BaseRetriever):
    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return self.documents


class Names(BaseCallbackHandler):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_chain_start(self, serialized: Any, inputs: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs.get("name") or "")


@pytest.mark.parametrize("sync", [True, False])
async def test_it_stands_in_a_chain_behind_a_retriever_and_its_steps_are_traced_there(make_reader, found, sync) -> None:
    compressor = MemAgentDocumentCompressor(agent=make_reader())

    def compress(given: dict[str, Any]) -> Any:
        return compressor.compress_documents(given["documents"], given["question"])

    async def acompress(given: dict[str, Any]) -> Any:
        return await compressor.acompress_documents(given["documents"], given["question"])

    chain = (
        {"documents": Shelf(documents=found), "question": RunnablePassthrough()}
        | RunnableLambda(compress, acompress)
        | RunnableLambda(lambda kept: kept[0].metadata["answer"])
    )
    names = Names()
    config: Any = {"callbacks": [names]}
    assert (chain.invoke(QUESTION, config) if sync else await chain.ainvoke(QUESTION, config)) == "4711"
    assert names.seen.count("update_memory") > 10
    assert names.seen.count("answer") == 1


def test_callbacks_that_are_passed_in_are_called(make_reader, found) -> None:
    names = Names()
    MemAgentDocumentCompressor(agent=make_reader()).compress_documents(found, QUESTION, callbacks=[names])
    assert names.seen.count("answer") == 1


async def test_callbacks_that_are_passed_in_besides_being_there_are_called_once(make_reader, found) -> None:
    """As LangChain's ContextualCompressionRetriever does."""
    compressor = MemAgentDocumentCompressor(agent=make_reader())

    async def acompress(given: Any, config: RunnableConfig) -> Any:
        return await compressor.acompress_documents(found, QUESTION, callbacks=config["callbacks"])

    names = Names()
    await RunnableLambda(acompress).ainvoke(QUESTION, {"callbacks": [names]})
    assert names.seen.count("answer") == 1


async def test_the_cited_documents_are_known_also_where_the_read_had_ended_and_its_node_had_not(
    make_reader, found
) -> None:
    class State(TypedDict, total=False):
        cited: list[str]

    broken = True
    compressor = MemAgentDocumentCompressor(agent=make_reader(), keep="cited")

    async def compress(state: State) -> State:
        cited = await compressor.acompress_documents(found, QUESTION)
        if broken:
            raise KeyError("a defect somewhere")
        return {"cited": [document.id or "" for document in cited]}

    builder = StateGraph(State)
    builder.add_node("compress", compress)
    builder.add_edge(START, "compress")
    builder.add_edge("compress", END)
    graph = builder.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    with pytest.raises(KeyError):
        await graph.ainvoke({"cited": []}, config)
    broken = False
    assert await graph.ainvoke(None, config) == {"cited": ["2", "5"]}


async def test_in_a_graphs_node_it_is_resumed_at_its_chunk(make_reader, found) -> None:
    class State(TypedDict, total=False):
        answer: str
        citations: int

    broken = True

    def script(prompt: str) -> Any:
        return PolicyError("gone") if broken and FACT in part(prompt, "section") else perfect_reader(prompt)

    policy = ScriptedPolicy(script)
    compressor = MemAgentDocumentCompressor(agent=make_reader(policy))

    async def compress(state: State) -> State:
        [reading] = await compressor.acompress_documents(found, QUESTION)
        return {"answer": reading.metadata["answer"], "citations": len(reading.metadata["citations"])}

    builder = StateGraph(State)
    builder.add_node("compress", compress)
    builder.add_edge(START, "compress")
    builder.add_edge("compress", END)
    graph = builder.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    with pytest.raises(PolicyError):
        await graph.ainvoke({"answer": ""}, config)
    broken, asked = False, len(policy.prompts)
    assert await graph.ainvoke(None, config) == {"answer": "4711", "citations": 2}
    assert len(policy.prompts) - asked < asked

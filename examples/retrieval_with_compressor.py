"""Retrieve many texts, read all of them, cite: `python examples/retrieval_with_compressor.py FOLDER QUESTION`.

Set OPENAI_BASE_URL to a server, or MEMAGENT_MODEL to a policy (`embedded` finds numbers).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from langchain_memagent import MemAgentDocumentCompressor
from memagent_graph import MemAgent
from memagent_graph.settings import ReadSettings


class WordRetriever(BaseRetriever):
    """The paragraphs that share most words with the query; in place of your vector store."""

    paragraphs: list[Document]
    top: int = 50

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        asked = set(re.findall(r"\w+", query.lower()))
        return sorted(
            self.paragraphs, key=lambda each: -len(asked & set(re.findall(r"\w+", each.page_content.lower())))
        )[: self.top]


def main(folder: Path, question: str) -> None:
    """Chain a retriever and a reader of everything that it finds, and print answer and citations."""
    paragraphs = [
        Document(text, metadata={"source": path.name, "paragraph": number})
        for path in sorted(folder.glob("*.txt"))
        for number, text in enumerate(path.read_text().split("\n\n"))
    ]
    agent = MemAgent(settings=ReadSettings.from_environment(os.environ))
    compressor = MemAgentDocumentCompressor(agent=agent)
    chain = {"documents": WordRetriever(paragraphs=paragraphs), "query": RunnablePassthrough()} | RunnableLambda(
        lambda found: compressor.compress_documents(found["documents"], found["query"])
    )
    for reading in chain.invoke(question):
        print(f"answer: {reading.metadata['answer']}")
        for citation in reading.metadata["citations"]:
            print(f"  {citation['metadata']}, {citation['start_char']}-{citation['end_char']}: {citation['quote']!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""Documents: where their text comes from, how it is stored, and how it is cut into chunks."""

from __future__ import annotations

from memagent_graph.documents.shared_store import SharedDocumentStore, open_store, store_of
from memagent_graph.documents.sources import Document, DocumentRef, SourceMark
from memagent_graph.documents.store import DocumentStore

__all__ = [
    "Document", "DocumentRef", "DocumentStore", "SharedDocumentStore", "SourceMark", "open_store",
    "store_of",
]  # fmt: skip

"""Documents: where their text comes from, how it is stored, and how it is cut into chunks."""

from __future__ import annotations

from memagent_graph.documents.sources import Document, DocumentRef, SourceMark
from memagent_graph.documents.store import DocumentStore, open_store, store_of

__all__ = ["Document", "DocumentRef", "DocumentStore", "SourceMark", "open_store", "store_of"]

"""Documents: sources of text, the store, and chunks."""

from __future__ import annotations

from memagent_graph.documents.sources import Document, DocumentRef, SourceMark
from memagent_graph.documents.store import DocumentStore, find_store, open_store

__all__ = ["Document", "DocumentRef", "DocumentStore", "SourceMark", "find_store", "open_store"]

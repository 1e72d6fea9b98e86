"""Finds the sources of a memory's words in the document, without a model."""

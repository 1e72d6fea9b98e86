"""`ReadLongDocument` and its parts."""

from langchain_memagent.tool.read_long_document import ReadLongDocument

__all__ = ["ReadLongDocument"]

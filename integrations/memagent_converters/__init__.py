"""Converters of files to text: PDF, HTML, Office and OpenDocument files, e-mail, books, rich text.

Each takes a `memagent_graph.converters.SourceFile`, and is found by entry point. They run in a separate process
with limits on time and memory, and import the libraries of the extra `files` there.
"""

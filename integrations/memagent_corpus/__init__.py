"""Reads many documents and writes one table, with each row exactly once, even if runs are killed.

    inputs -> documents -> CorpusReader -> rows -> ledger -> Parquet parts and a manifest

`corpus_run.run_corpus` reads a corpus on one machine. Other engines use the same parts: `corpus_inputs.open_inputs`
lists documents that can be pickled, `CorpusReader.read_one` reads one document and returns its rows, and `TableFolder`
writes the rows.
"""

from __future__ import annotations

from memagent_corpus.corpus_documents import CorpusDocument
from memagent_corpus.corpus_inputs import Inputs, open_inputs
from memagent_corpus.corpus_reader import CorpusReader
from memagent_corpus.corpus_rows import Quote, Row
from memagent_corpus.table_folder import TableFolder

__all__ = ["CorpusDocument", "CorpusReader", "Inputs", "Quote", "Row", "TableFolder", "open_inputs"]

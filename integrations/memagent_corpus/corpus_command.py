"""Read many documents into one table.

Only `run` imports the modules that do the work, because they are slow to import and not needed for help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memagent_corpus.corpus_options import CorpusOptions


@dataclass(frozen=True, kw_only=True)
class Corpus(CorpusOptions):
    """Read many documents and write one table, with exactly one row for each document and question.

    Run the same command again to continue an unfinished run, or to add new documents and questions.
    """

    examples: ClassVar = (
        'memagent corpus filings -q "Who signed it?" -q "When?" --out answers --base-url http://localhost:8000/v1',
        'memagent corpus "s3://bucket/2024/*.pdf" --questions @questions.txt --out s3://bucket/answers',
        "memagent corpus filings.parquet --text-column body --question-column question --out answers",
        'memagent corpus filings -q "What does it report?" --schema filing.py:Filing --out answers',
        'memagent corpus filings -q "Who signed it?" --out answers --estimate --price-in 0.2 --price-out 0.6',
        'memagent corpus /shared/filings -q "Who signed it?" --out /shared/answers --ray auto --ray-actors 16',
    )

    def run(self) -> None:
        """Run the command."""
        from memagent_corpus.corpus_session import CorpusSession  # noqa: PLC0415

        CorpusSession(self).run()

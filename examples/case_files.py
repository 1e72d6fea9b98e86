"""Find contradictions between the files of a folder: `python examples/case_files.py FOLDER QUESTION...`.

Every file is read for all questions. Answers that contradict each other, as judged by the policy, are listed with a
quote and its page or position. Set OPENAI_BASE_URL to use a model server; without it, the policy in MEMAGENT_MODEL
reads, or one that was added to this machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from memagent_graph import MemAgent
from memagent_graph.settings import ReadSettings
from memagent_report import report


def main(folder: Path, questions: list[str]) -> None:
    """Print the contradictions and the missing answers, and write the complete report to case.html in the folder."""
    files = sorted(path for path in folder.iterdir() if path.suffix in {".txt", ".md", ".pdf", ".docx"})
    agent = MemAgent(settings=ReadSettings.from_environment(os.environ), checkpoints=folder / "case.sqlite")
    with agent:
        # The report is extractive, so that no answer of a legal case is reworded.
        case = report(agent, f"The case in {folder.name}", files, questions=questions, extractive=True, judge=True)
    matrix = case.matrix
    for contradiction in case.contradictions:
        print(f"CONTRADICTION: {matrix.questions[contradiction.question]}")
        for group in contradiction.groups:
            for document in group:
                cell = matrix.cell(document, contradiction.question)
                print(f"  {matrix.documents[document].name}: {cell.answer}")
                for quote in cell.quotes[:1]:
                    position = quote.page or f"characters {quote.start_char}-{quote.end_char}"
                    print(f'    "{" ".join(quote.text.split())}" ({position})')
    for cell in (cell for cell in matrix.cells if cell.answer is None):
        print(f"{matrix.documents[cell.document].name} has no answer to: {matrix.questions[cell.question]}")
    (folder / "case.html").write_text(case.to_html(), encoding="utf-8", errors="replace")
    print(f"{case.totals['quotes_found']} of {case.totals['quotes_checked']} quotes are in the files; see case.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

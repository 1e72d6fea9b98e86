"""Compare the findings of several papers: `python examples/literature_analysis.py QUESTION OUT PAPER...`.

Papers are PDF, Markdown or text files. Set OPENAI_BASE_URL to use a model server; without it, the policy in
MEMAGENT_MODEL reads, or one that was added to this machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from memagent_graph import MemAgent
from memagent_graph.settings import ReadSettings
from memagent_report import report
from memagent_report.report_files import write_report

QUESTIONS = (
    "How many participants did the study have?",
    "What was the effect, in numbers?",
    "What limits the result, according to the authors?",
)


def main(question: str, out: Path, papers: list[Path]) -> None:
    """Write the review, and its evidence matrix to the folder `out`."""
    agent = MemAgent(settings=ReadSettings.from_environment(os.environ), checkpoints=out.with_suffix(".sqlite"))
    with agent:
        review = report(agent, question, papers, questions=QUESTIONS)
    for path in write_report(review, out, ("md", "html", "csv")):
        print("wrote", path.name)
    for sentence in review.sentences:
        if not sentence.is_quoted:
            print("not quoted:", sentence.text, "-", "; ".join(problem.detail for problem in sentence.problems))
    print(f"{review.totals['quoted']} of {review.totals['sentences']} sentences are quoted")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(paper) for paper in sys.argv[3:]])

"""Read with a log, score the answer, and export the run: `python examples/reward_a_run.py FILE QUESTION EXPECTED OUT`.

OUT is a Parquet file (extra "export"). Look at the run with `memagent show RUN --log runs.sqlite`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from memagent_graph import LocalPolicy, MemAgent, RunLog
from memagent_graph.run_log import RunFilter
from memagent_graph.run_log.exchange import export_runs


def main(path: Path, question: str, expected: str, destination: Path) -> None:
    """Read, reward the run with 1 or 0, print the evidence, and export the run."""
    log = RunLog("runs.sqlite")
    with MemAgent(LocalPolicy.embedded(), run_log=log) as agent:
        result = agent.read(path, question)
    log.reward(result.run_id, float(result.answer == expected), name="exact", source="example")
    for evidence in result.evidence:
        print(f"{evidence.line!r} comes from chunk {evidence.chunk_index}: {evidence.quote!r}")
    run_filter = RunFilter(run_ids=[result.run_id])
    report = export_runs(log, destination, selection=run_filter, for_training=True, overwrite=True)
    print(f"{log.latest_rewards(result.run_id)}; {report.conversations} conversations in {destination}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))

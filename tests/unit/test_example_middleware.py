"""The middleware's example runs as it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support.programs import run_program

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_agent_with_middleware() -> None:
    command = [sys.executable, str(EXAMPLES / "agent_with_middleware.py"), "6000"]
    done = run_program(command, capture_output=True, check=True)
    answer = re.search(r"^Answer: (\d+)$", done.stdout, re.MULTILINE)
    fact = re.search(r"^The fact was (\d+)", done.stdout, re.MULTILINE)
    assert answer
    assert fact
    assert answer[1] == fact[1]
    assert "ask_tool_result" in done.stdout

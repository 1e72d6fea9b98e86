"""The middleware's example runs as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_agent_with_middleware() -> None:
    command = [sys.executable, str(EXAMPLES / "agent_with_middleware.py"), "6000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = re.search(r"^Answer: (\d+)$", done.stdout, re.MULTILINE)
    fact = re.search(r"^The fact was (\d+)", done.stdout, re.MULTILINE)
    assert answer
    assert fact
    assert answer[1] == fact[1]
    assert "ask_tool_result" in done.stdout

"""The tests' own way of starting programs: it must not hide what a program does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import Program, run_program, run_ranks


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_a_program_has_its_own_streams_arguments_folder_and_environment(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(sys.stdin.read(), sys.argv[1], os.getcwd(), dict(os.environ))\n"
        "print('é', file=sys.stderr)"
    )
    done = run_program(python(code, "x"), text="in", env={"A": "1"}, cwd=tmp_path, capture_output=True)
    assert (done.stdout, done.stderr) == (f"in x {tmp_path} {{'A': '1'}}\n", "é\n")


@pytest.mark.parametrize(
    ("code", "status"), [("pass", 0), ("raise SystemExit(3)", 3), ("raise SystemExit('why')", 1), ("1 / 0", 1)]
)
def test_a_program_ends_as_python_ends(code: str, status: int) -> None:
    done = run_program(python(code), capture_output=True)
    assert done.returncode == status == subprocess.run(python(code), capture_output=True, check=False).returncode
    assert ("why" in done.stderr) == ("why" in code)
    assert ("Traceback" in done.stderr) == ("/" in code)


def test_what_a_program_registered_for_its_end_is_done_after_its_threads() -> None:
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'end')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
    )
    assert run_program(python(code), capture_output=True).stdout == "thread\nend\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_program_is_ended_by_signals(number: signal.Signals) -> None:
    with Program(python("import time; print(1, flush=True); time.sleep(60)"), stdout=subprocess.PIPE,
                 stderr=subprocess.DEVNULL) as program:  # fmt: skip
        assert program.stdout.readline() == "1\n"
        program.send_signal(number)
        assert program.wait(10) == -number


def test_programs_have_imported_what_takes_long() -> None:
    pytest.importorskip("trl")
    code = "import sys; print([name for name in ('torch', 'transformers', 'trl', 'langgraph') if name in sys.modules])"
    assert run_program(python(code), capture_output=True).stdout == "['torch', 'transformers', 'trl', 'langgraph']\n"


def test_if_a_rank_fails_the_others_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': raise SystemExit(4)\ntime.sleep(60)\n")
    assert [done.returncode for done in run_ranks([sys.executable, script], 2)] == [-signal.SIGKILL, 4]

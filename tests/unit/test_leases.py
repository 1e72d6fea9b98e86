"""Leases of runs: one reader at a time reads a run, and a killed reader leaves no lease."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from memagent_graph import Limits, ScriptedPolicy
from memagent_graph.errors import CheckpointError, RunError
from memagent_graph.storage.file_locks import lease

TEXT = "The tower was built in 1904, and the bridge beside it in 1911. " * 100


def test_a_second_concurrent_resume_is_refused(make_reader, tmp_path) -> None:
    reading_started, can_continue = threading.Event(), threading.Event()

    def script(prompt: str) -> str:
        return "memory" if "<section>" in prompt else r"\boxed{1904}"

    def wait_and_reply(prompt: str) -> str:
        reading_started.set()
        assert can_continue.wait(60)
        return script(prompt)

    checkpoints, results = tmp_path / "checkpoints.sqlite", []
    with make_reader(ScriptedPolicy(script), checkpoints=checkpoints) as first_reader:
        first_reader.read(TEXT, "When?", run_id="r", limits=Limits(max_chunks=2))
    with (
        make_reader(ScriptedPolicy(wait_and_reply), checkpoints=checkpoints) as first_reader,
        make_reader(ScriptedPolicy(script), checkpoints=checkpoints) as second_reader,
    ):

        async def resume_first() -> None:
            results.append(await first_reader.aresume("r"))

        thread = threading.Thread(target=lambda: asyncio.run(resume_first()))
        thread.start()
        assert reading_started.wait(60)
        with pytest.raises(RunError, match=r"being read by this process already.*Wait for it") as error:
            second_reader.resume("r")
        assert error.value.run_id == "r"
        assert second_reader.policy.prompts == []
        with pytest.raises(RunError, match="already"):
            second_reader.read(TEXT, "When?", run_id="r")
        assert second_reader.read(TEXT, "When?", run_id="another").answer == "1904"
        can_continue.set()
        thread.join()
        assert results[0].answer == "1904"
        assert second_reader.resume("r").answer == "1904"
    assert [*(tmp_path / "checkpoints.sqlite-reading").iterdir()] == []


@pytest.mark.skipif(os.name != "posix", reason="the process is killed by a signal")
def test_a_lease_names_its_process_and_ends_when_it_is_killed(tmp_path) -> None:
    program = (
        "import pathlib, sys, time; from memagent_graph.storage.file_locks import lease\n"
        "with lease(pathlib.Path(sys.argv[1]), 'r'): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"being read by process {process.pid} already"), lease(tmp_path, "r"):
            pass
        with lease(tmp_path, "other"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with lease(tmp_path, "r"):
            pass
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written.*checkpoints"), lease(tmp_path / "file", "r"):
        pass

"""One run is read by one reader at a time; a reader that was killed leaves nothing behind."""

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


def test_second_concurrent_resume_is_refused(make_reader, tmp_path) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def script(prompt: str) -> str:
        return "memory" if "<section>" in prompt else r"\boxed{1904}"

    def slow(prompt: str) -> str:
        reading.set()
        assert go_on.wait(60)
        return script(prompt)

    checkpoints, results = tmp_path / "checkpoints.sqlite", []
    with make_reader(ScriptedPolicy(script), checkpoints=checkpoints) as first:
        first.read(TEXT, "When?", run_id="r", limits=Limits(max_chunks=2))
    with (
        make_reader(ScriptedPolicy(slow), checkpoints=checkpoints) as first,
        make_reader(ScriptedPolicy(script), checkpoints=checkpoints) as second,
    ):

        async def resume_first() -> None:
            results.append(await first.aresume("r"))

        thread = threading.Thread(target=lambda: asyncio.run(resume_first()))
        thread.start()
        assert reading.wait(60)
        with pytest.raises(RunError, match=r"being read by this process already.*Wait for it") as error:
            second.resume("r")
        assert error.value.run_id == "r"
        assert second.policy.prompts == []
        with pytest.raises(RunError, match="already"):
            second.read(TEXT, "When?", run_id="r")
        assert second.read(TEXT, "When?", run_id="another").answer == "1904"
        go_on.set()
        thread.join()
        assert results[0].answer == "1904"
        assert second.resume("r").answer == "1904"
    assert [*(tmp_path / "checkpoints.sqlite-reading").iterdir()] == []


@pytest.mark.skipif(os.name != "posix", reason="it is killed by a signal")
def test_a_killed_holder_is_named_while_it_lives_and_leaves_no_lease(tmp_path) -> None:
    program = (
        "import pathlib, sys, time; from memagent_graph.storage.file_locks import lease\n"
        "with lease(pathlib.Path(sys.argv[1]), 'r'): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"being read by process {holder.pid} already"), lease(tmp_path, "r"):
            pass
        with lease(tmp_path, "other"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with lease(tmp_path, "r"):
            pass
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written.*checkpoints"), lease(tmp_path / "file", "r"):
        pass

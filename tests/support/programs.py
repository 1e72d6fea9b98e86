"""Python programs in separate processes, forked from a process that has imported what they need.

Imports take most of the time that a program needs to start: 1 second for the command line, 5 for a local policy, 6 for
a trainer. Tests that start or kill programs use `Program` and `run_program` in place of `subprocess.Popen` and
`subprocess.run`; all streams are text. The processes are real, with their own ids, signals and exit codes. Two things
differ: a module that reads the environment during its import reads the tests' environment, and each program computes
with one thread. Tests of imports, of environments and of memory use `subprocess`.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Sized
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

import pytest

_CONTEXT = get_context("forkserver")
_PRELOADED_MODULES = (
    "memagent_graph.cli.commands",
    "memagent_graph.cli.read",
    "memagent_graph.policies.openai_compatible",
    "langgraph.checkpoint.sqlite.aio",
    "memagent_mcp.server",
    "memagent_evaluation.harness",
    "memagent_graph.policies.local",
    "memagent_training.job.trainer",
    "transformers.models.llama.modeling_llama",
)
_CONTEXT.set_forkserver_preload(list(_PRELOADED_MODULES))


class Program:
    """A running program, with the part of the interface of `subprocess.Popen` that tests use.

    Args:
        command: `sys.executable`, then "-m" and a module, "-c" and code, or a file; then the arguments.
        stdin, stdout, stderr: `subprocess.PIPE`, `subprocess.DEVNULL`, a file, or None to inherit the tests' stream.
        env: the environment; None to inherit it.
        cwd: the working folder; None to inherit it.
    """

    def __init__(
        self,
        command: Sequence[Any],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.args = [str(word) for word in command]
        if self.args[0] != sys.executable:
            raise ValueError(f"a program starts with {sys.executable}, not with {self.args[0]}")
        files: list[IO[str] | None] = []
        connections: list[Connection | None] = []
        for descriptor, stream in enumerate((stdin, stdout, stderr)):
            file, connection = _open_stream(stream, is_input=descriptor == 0)
            files.append(file)
            connections.append(connection)
        self.stdin, self.stdout, self.stderr = files
        environment = dict(os.environ if env is None else env)
        self._process = _CONTEXT.Process(
            target=_execute, args=(self.args[1:], environment, str(cwd or Path.cwd()), connections), daemon=False
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")  # for the fork server, which the first program starts
            self._process.start()
        self.pid: int = self._process.pid
        for connection in connections:
            if connection is not None:
                connection.close()

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status; None while the program runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the program has ended, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, signal_number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal_number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write `text` to the input, read the outputs to their ends, and wait.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than `timeout` seconds.
        """
        texts = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            texts[name] = stream.read()

        streams = [(name, stream) for name in texts if (stream := getattr(self, name)) is not None]
        readers = [threading.Thread(target=read, args=name, daemon=True) for name in streams]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            self.stdin.write(text or "")
            self.stdin.close()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return texts["stdout"], texts["stderr"]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self._process.join()


class KillableProcess:
    """A program that runs within a `with` statement, where it may be killed and started again."""

    process: Program | None = None

    def start(self) -> None:
        """Start the program, and wait until it is ready."""
        raise NotImplementedError

    def kill(self) -> None:
        """Send SIGKILL, wait for its end, and close its streams."""
        with self.process:
            self.process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


def kill_after(process: Program, requests: Sized, count: int, signal_number: int = signal.SIGKILL) -> bool:
    """Send a signal to a program once a server has got `count` requests; return False if it ended before."""
    while len(requests) < count:
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    process.send_signal(signal_number)
    process.wait()
    return True


def run_program(
    command: Sequence[Any],
    *,
    text: str | None = None,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does; `text` is its standard input.

    Raises:
        subprocess.CalledProcessError: with `check`, it failed.
        subprocess.TimeoutExpired: it ran for longer than `timeout` seconds, and was killed.
    """
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    options.setdefault("stdin", subprocess.DEVNULL if text is None else subprocess.PIPE)
    with Program(command, **options) as program:
        try:
            output, errors = program.communicate(text, timeout)
        except BaseException:
            program.kill()
            raise
    process = subprocess.CompletedProcess(program.args, program.wait(), output, errors)
    if check:
        if process.returncode:
            print(output, errors, file=sys.stderr)
        process.check_returncode()
    return process


def run_ranks(
    command: Sequence[Any], ranks: int, *, timeout: float = 240, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program as each rank of a process group on CPUs, as torch's launcher does; if one fails, kill the others.

    Raises:
        subprocess.TimeoutExpired: they ran for longer than `timeout` seconds.
    """
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        cpu_settings = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        group = {**os.environ, **cpu_settings, **environment, **address, "WORLD_SIZE": str(ranks)}
        listener.close()
        errors = [stack.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in range(ranks)]
        programs = [
            Program(command, stderr=file, env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, file in enumerate(errors)
        ]
        deadline = time.monotonic() + timeout
        while any(program.poll() is None for program in programs):
            if any(program.poll() for program in programs) or time.monotonic() > deadline:
                for program in programs:
                    program.kill()
            time.sleep(0.02)
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired([*command], timeout)
        for file in errors:
            file.seek(0)
        return [
            subprocess.CompletedProcess(program.args, program.wait(), "", file.read())
            for program, file in zip(programs, errors, strict=True)
        ]


def _open_stream(target: Any, *, is_input: bool) -> tuple[IO[str] | None, Connection | None]:
    """Return the tests' end of a stream as a file, and the program's end as a connection, which can be pickled."""
    if target is None:
        return None, None
    if target == subprocess.PIPE:
        reading, writing = _CONTEXT.Pipe(duplex=False)
        test_end, program_end = (writing, reading) if is_input else (reading, writing)
        file = os.fdopen(os.dup(test_end.fileno()), "w" if is_input else "r", encoding="utf-8")
        test_end.close()
        return file, program_end
    if target == subprocess.DEVNULL:
        return None, Connection(os.open(os.devnull, os.O_RDWR))
    return None, Connection(os.dup(target.fileno()))


def _execute(arguments: list[str], environment: dict[str, str], folder: str, streams: list[Connection | None]) -> None:
    """Take over the streams in the new process, and execute the program."""
    gc.freeze()  # objects of the fork server are never garbage here
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, stream in enumerate(streams):
        if stream is not None:
            os.dup2(stream.fileno(), descriptor)
            stream.close()
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    program, *rest = arguments
    try:
        if program == "-m":
            sys.path.insert(0, folder)
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif program == "-c":
            sys.path.insert(0, folder)
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # the test's own code
        else:
            sys.path.insert(0, str(Path(program).resolve().parent))
            sys.argv = arguments
            runpy.run_path(program, run_name="__main__")
    except KeyboardInterrupt:
        _shut_down()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        _shut_down()


def _shut_down() -> None:
    """Do those steps of an interpreter's shutdown that multiprocessing leaves out."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def parse_records(output: str) -> list[dict[str, list[str]]]:
    """Return the printed output of `memagent read` as one dict per question: the texts by label."""
    parsed: list[dict[str, list[str]]] = []
    for block in output.removesuffix("\n").split("\n\n"):
        record: dict[str, list[str]] = {}
        label = ""
        for line in block.split("\n"):
            if line.startswith("  "):
                record[label][-1] += "\n" + line[2:]
            else:
                label, _, text = line.partition(": ")
                record.setdefault(label, []).append(text)
        parsed.append(record)
    return parsed


def parse_answers(output: str) -> list[str]:
    """Return the answers in the printed output of `memagent read`."""
    return [answer for record in parse_records(output) for answer in record.get("answer", ())]

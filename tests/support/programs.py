"""Python programs in processes of their own, forked from one that has imported what they need.

Of the seconds that a program needs to start, nearly all are for imports: 1 for the command line, 5 for a policy in
this process, 6 for a trainer. Tests that start programs, and kill them, start them here: `Program` and `run_program`
stand for `subprocess.Popen` and `subprocess.run`, with text for all streams. The processes are real ones, with ids,
signals and exit codes of their own. Two things differ: a module that reads the environment while it is imported reads
the one of the tests, and each program computes with one thread. Tests of imports, of environments and of memory use
`subprocess`.
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
_IMPORTED = (
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
_CONTEXT.set_forkserver_preload(list(_IMPORTED))


class Program:
    """A running program, with the part of `subprocess.Popen` that tests use.

    Args:
        command: `sys.executable`, then "-m" and a module, "-c" and code, or a file; then the arguments.
        stdin, stdout, stderr: `subprocess.PIPE`, `subprocess.DEVNULL`, a file, or None for the tests' own.
        env: the environment; None for the tests' own.
        cwd: the working folder; None for the tests' own.
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
            raise ValueError(f"a program is started with {sys.executable}, not with {self.args[0]}")
        ours: list[IO[str] | None] = []
        theirs: list[Connection | None] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            mine, its = _stream(stream, is_input=number == 0)
            ours.append(mine)
            theirs.append(its)
        self.stdin, self.stdout, self.stderr = ours
        environment = dict(os.environ if env is None else env)
        self._process = _CONTEXT.Process(
            target=_run, args=(self.args[1:], environment, str(cwd or Path.cwd()), theirs), daemon=False
        )
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # of the process that all are forked from, which the first one starts
            patch.setenv("OMP_NUM_THREADS", "1")
            self._process.start()
        self.pid: int = self._process.pid
        for connection in theirs:
            if connection is not None:
                connection.close()

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; returns the exit status.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write `text` to its input, read the output to its end, and wait.

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
    """A program that runs within a context, and may be killed and started again there."""

    process: Program | None = None

    def start(self) -> None:
        """Start it, and wait until it is at work."""
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


def kill_after(process: Program, requests: Sized, count: int, number: int = signal.SIGKILL) -> bool:
    """End a program by a signal once a server has got so many requests; returns False if it ended before."""
    while len(requests) < count:
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    process.send_signal(number)
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
    """Run a program as each rank of a process group on CPUs, as torch's launcher does: if one fails, the others are
    ended.

    Raises:
        subprocess.TimeoutExpired: they ran for longer than `timeout` seconds.
    """
    with socket.socket() as free, ExitStack() as stack:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        on_cpus = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        group = {**os.environ, **on_cpus, **environment, **address, "WORLD_SIZE": str(ranks)}
        free.close()
        errors = [stack.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in range(ranks)]
        programs = [
            Program(command, stderr=file, env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, file in enumerate(errors)
        ]
        end = time.monotonic() + timeout
        while any(program.poll() is None for program in programs):
            if any(program.poll() for program in programs) or time.monotonic() > end:
                for program in programs:
                    program.kill()
            time.sleep(0.02)
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired([*command], timeout)
        for file in errors:
            file.seek(0)
        return [
            subprocess.CompletedProcess(program.args, program.wait(), "", file.read())
            for program, file in zip(programs, errors, strict=True)
        ]


def _stream(target: Any, *, is_input: bool) -> tuple[IO[str] | None, Connection | None]:
    """Our end of a stream as a file, and the program's, in a form that can be handed over."""
    if target is None:
        return None, None
    if target == subprocess.PIPE:
        reading, writing = _CONTEXT.Pipe(duplex=False)
        mine, its = (writing, reading) if is_input else (reading, writing)
        file = os.fdopen(os.dup(mine.fileno()), "w" if is_input else "r", encoding="utf-8")
        mine.close()
        return file, its
    if target == subprocess.DEVNULL:
        return None, Connection(os.open(os.devnull, os.O_RDWR))
    return None, Connection(os.dup(target.fileno()))


def _run(words: list[str], environment: dict[str, str], folder: str, streams: list[Connection | None]) -> None:
    """In the new process: take over the streams, and be the program."""
    gc.freeze()  # what it was forked with stays
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, stream in enumerate(streams):
        if stream is not None:
            os.dup2(stream.fileno(), number)
            stream.close()
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.path[:0] = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    first, *rest = words
    try:
        if first == "-m":
            sys.path.insert(0, folder)
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.path.insert(0, folder)
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # the test's own code
        else:
            sys.path.insert(0, str(Path(first).resolve().parent))
            sys.argv = words
            runpy.run_path(first, run_name="__main__")
    except KeyboardInterrupt:
        _end()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        _end()


def _end() -> None:
    """Do what an interpreter does at its end and multiprocessing leaves out."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def parse_records(output: str) -> list[dict[str, list[str]]]:
    """The questions of `memagent read` in its printed form: for each, the texts by their labels."""
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
    """The answers in what `memagent read` printed."""
    return [answer for record in parse_records(output) for answer in record.get("answer", ())]

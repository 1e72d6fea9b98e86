"""Reads continue after the loop's own server dies. Failed reads count as wrong answers in a measurement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from support.rl_loops import make_job

from memagent_graph import MemAgent, PolicyError, ScriptedPolicy
from memagent_graph.errors import PolicyAuthenticationError, PolicyUnreachableError
from memagent_training.rl.curriculum import HELD_OUT_START
from memagent_training.rl.loop import measure
from memagent_training.rl.policy_serving import ServerBackend
from memagent_training.rl.rl_job import PreparedLoop, prepare
from memagent_training.serving.policy_sync.sync import ServedPolicy, SyncMethod
from memagent_training.serving.vllm_server import VLLMServerError


class Server:
    """A fake of the loop's own server, with its health check."""

    def __init__(self) -> None:
        self.is_running = False
        self.answers = False
        self.starts = 0

    def is_healthy(self) -> bool:
        return self.answers

    def restart(self) -> None:
        self.is_running = self.answers = True
        self.starts += 1

    def kill(self) -> None:
        self.is_running = self.answers = False


class Sync:
    """A fake that records the versions it serves and counts the readers."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.readers = 0

    async def sync(self, policy: Path, version: str, logprobs: Any = None) -> ServedPolicy:
        assert self.readers == 0
        self.versions.append(version)
        return ServedPolicy("policy", version, SyncMethod.RELOAD, 0.1, 1e-5)

    @asynccontextmanager
    async def hold_weights(self, served: ServedPolicy) -> AsyncIterator[None]:
        assert served.version == self.versions[-1]
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServerBackend]:
    backend = ServerBackend(prepare(make_job(tmp_path)))
    backend._own_server, backend._sync = Server(), Sync()  # type: ignore[assignment]
    for number in range(6):
        (backend.get_policy_folder(number)).mkdir(parents=True)
    yield backend
    backend.run_log.close()


def get_fakes(backend: ServerBackend) -> tuple[Server, Sync]:
    server, sync = backend._own_server, backend._sync
    assert isinstance(server, Server)
    assert isinstance(sync, Sync)
    return server, sync


@pytest.mark.parametrize("is_running", [False, True], ids=["dead", "runs without an answer"])
async def test_reads_are_repeated_after_a_restart_of_the_server(serving: ServerBackend, is_running: bool) -> None:
    """A server's process may still run for a moment after it died, and an engine may die without its server."""
    server, sync = get_fakes(serving)
    await serving.serve(1)
    attempts: list[str] = []

    async def work() -> str:
        attempts.append(sync.versions[-1])
        if len(attempts) == 1:
            server.is_running, server.answers = is_running, False
            raise PolicyUnreachableError("no answer")
        return "read"

    assert await serving.run_with_weights(1, work) == "read"
    assert attempts == ["iteration-1", "iteration-1"]
    assert (server.starts, sync.versions, sync.readers) == (2, ["iteration-1", "iteration-1"], 0)


async def test_reads_fail_after_the_last_restart_of_the_server(serving: ServerBackend) -> None:
    server, _ = get_fakes(serving)
    await serving.serve(0)

    async def work() -> None:
        server.kill()
        raise PolicyUnreachableError("no answer")

    with pytest.raises(PolicyUnreachableError):
        await serving.run_with_weights(0, work)
    assert server.starts == 4


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_server_that_answers_or_is_not_ours_is_not_restarted(serving, is_ours: bool) -> None:
    server, _ = get_fakes(serving)
    await serving.serve(0)
    if not is_ours:
        serving._own_server = None

    async def work() -> None:
        raise PolicyUnreachableError("a read took too long")

    with pytest.raises(PolicyUnreachableError, match="too long"):
        await serving.run_with_weights(0, work)
    assert server.starts == 1


@pytest.mark.parametrize(("deaths", "starts"), [(1, 2), (2, 2)])
async def test_a_server_that_fails_to_start_is_started_once_more(
    serving: ServerBackend, monkeypatch: pytest.MonkeyPatch, deaths: int, starts: int
) -> None:
    server, sync = get_fakes(serving)
    start = server.restart

    def restart() -> None:
        start()
        if server.starts <= deaths:
            server.kill()
            raise VLLMServerError("the vLLM server ended while starting")

    monkeypatch.setattr(server, "restart", restart)
    if deaths < starts:
        await serving.serve(1)
        assert sync.versions == ["iteration-1"]
    else:
        with pytest.raises(VLLMServerError):
            await serving.serve(1)
    assert server.starts == starts


async def test_the_previous_and_all_newer_policies_stay_on_disk(serving: ServerBackend) -> None:
    """A server that is restarted for readers of an older policy must not delete the trainer's newest ones."""
    await serving.serve(3)
    assert sorted(folder.name for folder in serving.get_policy_folder(0).parent.iterdir()) == ["2", "3", "4", "5"]


# Measuring


@pytest.fixture
def reader(make_reader):
    """A reader whose memory is always "noted", and whose answers come from a function."""

    def make(answer: Any) -> MemAgent:
        return make_reader(ScriptedPolicy(lambda prompt: "noted" if "<section>" in prompt else answer(prompt)))

    return make


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedLoop:
    return prepare(make_job(tmp_path / "rl", measure_every=10, measure_lengths=(300, 400), measure_count=3))


async def test_each_held_out_question_is_read_once_and_a_read_that_fails_is_wrong(prepared, reader) -> None:
    task = prepared.curriculum.tasks[0]
    gold = {task.sample(length, HELD_OUT_START + number).gold[0] for length in (300, 400) for number in range(3)}
    assert len(gold) == 6
    samples_by_question = {
        task.sample(length, HELD_OUT_START + n).question: (length, n) for length in (300, 400) for n in range(3)
    }

    def answer(prompt: str) -> Any:
        length, number = next(key for question, key in samples_by_question.items() if question in prompt)
        if number == 2:
            return PolicyError("broken")
        sample = task.sample(length, HELD_OUT_START + number)
        return rf"\boxed{{{sample.gold[0]}}}" if number == 0 or length == 300 else r"\boxed{wrong}"

    result = await measure(prepared, reader(answer), 4, 0.5)
    assert (result.iteration, result.temperature, result.failed) == (4, 0.5, 2)
    assert {length: estimate.n for length, estimate in result.accuracy.items()} == {300: 3, 400: 3}
    assert [result.accuracy[length].mean for length in (300, 400)] == pytest.approx([2 / 3, 1 / 3])
    assert result.mean == pytest.approx(0.5)


@pytest.mark.parametrize("kind", [PolicyUnreachableError, PolicyAuthenticationError])
async def test_a_measurement_fails_when_the_server_is_unreachable(kind: type[PolicyError], prepared, reader) -> None:
    """Otherwise all answers would count as wrong, and the caller could not restart the server."""
    with pytest.raises(kind, match="gone"):
        await measure(prepared, reader(lambda prompt: kind("gone")), 0, 0.0)

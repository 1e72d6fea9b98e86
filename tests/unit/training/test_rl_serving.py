"""Reads continue after a crash of the loop's own server, and failed reads count as wrong in a measurement."""

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


class FakeServer:
    """A fake of the loop's own server, with its health check."""

    def __init__(self) -> None:
        self.is_running = False
        self.is_answering = False
        self.starts = 0

    def is_healthy(self) -> bool:
        return self.is_answering

    def restart(self) -> None:
        self.is_running = self.is_answering = True
        self.starts += 1

    def kill(self) -> None:
        self.is_running = self.is_answering = False


class FakeSync:
    """A fake that records the versions it serves and counts the readers."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.readers = 0

    async def sync(self, policy: Path, version: str, score_rows: Any = None) -> ServedPolicy:
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
    backend._own_server, backend._sync = FakeServer(), FakeSync()  # type: ignore[assignment]
    for number in range(6):
        (backend.get_policy_folder(number)).mkdir(parents=True)
    yield backend
    backend.run_log.close()


def get_fakes(backend: ServerBackend) -> tuple[FakeServer, FakeSync]:
    server, sync = backend._own_server, backend._sync
    assert isinstance(server, FakeServer)
    assert isinstance(sync, FakeSync)
    return server, sync


@pytest.mark.parametrize("is_running", [False, True], ids=["dead", "runs without an answer"])
async def test_reads_are_repeated_after_a_restart_of_the_server(serving: ServerBackend, is_running: bool) -> None:
    """A server process may outlive its engine, or still run for a moment after a crash."""
    server, sync = get_fakes(serving)
    await serving.serve(1)
    attempts: list[str] = []

    async def read() -> str:
        attempts.append(sync.versions[-1])
        if len(attempts) == 1:
            server.is_running, server.is_answering = is_running, False
            raise PolicyUnreachableError("no answer")
        return "read"

    assert await serving.run_with_weights(1, read) == "read"
    assert attempts == ["iteration-1", "iteration-1"]
    assert (server.starts, sync.versions, sync.readers) == (2, ["iteration-1", "iteration-1"], 0)


async def test_reads_fail_after_the_last_restart_of_the_server(serving: ServerBackend) -> None:
    server, _ = get_fakes(serving)
    await serving.serve(0)

    async def read() -> None:
        server.kill()
        raise PolicyUnreachableError("no answer")

    with pytest.raises(PolicyUnreachableError):
        await serving.run_with_weights(0, read)
    assert server.starts == 4


@pytest.mark.parametrize("is_own", [True, False])
async def test_healthy_or_remote_server_is_not_restarted(serving, is_own: bool) -> None:
    server, _ = get_fakes(serving)
    await serving.serve(0)
    if not is_own:
        serving._own_server = None

    async def read() -> None:
        raise PolicyUnreachableError("a read took too long")

    with pytest.raises(PolicyUnreachableError, match="too long"):
        await serving.run_with_weights(0, read)
    assert server.starts == 1


@pytest.mark.parametrize(("failure_count", "start_count"), [(1, 2), (2, 2)])
async def test_server_that_fails_to_start_is_started_once_more(
    serving: ServerBackend, monkeypatch: pytest.MonkeyPatch, failure_count: int, start_count: int
) -> None:
    server, sync = get_fakes(serving)
    start = server.restart

    def restart_or_fail() -> None:
        start()
        if server.starts <= failure_count:
            server.kill()
            raise VLLMServerError("the vLLM server ended while starting")

    monkeypatch.setattr(server, "restart", restart_or_fail)
    if failure_count < start_count:
        await serving.serve(1)
        assert sync.versions == ["iteration-1"]
    else:
        with pytest.raises(VLLMServerError):
            await serving.serve(1)
    assert server.starts == start_count


async def test_previous_and_all_newer_policies_stay_on_disk(serving: ServerBackend) -> None:
    """A restart for readers of an older policy must not delete newer policies of the trainer."""
    await serving.serve(3)
    assert sorted(folder.name for folder in serving.get_policy_folder(0).parent.iterdir()) == ["2", "3", "4", "5"]


# Measuring


@pytest.fixture
def make_fake_reader(make_reader):
    """Makes readers whose memory is always "noted", and whose answers come from a function."""

    def make(answer: Any) -> MemAgent:
        return make_reader(ScriptedPolicy(lambda prompt: "noted" if "<section>" in prompt else answer(prompt)))

    return make


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedLoop:
    return prepare(make_job(tmp_path / "rl", measure_every=10, measure_lengths=(300, 400), measure_count=3))


async def test_each_held_out_question_is_read_once_and_failed_reads_are_wrong(prepared, make_fake_reader) -> None:
    task = prepared.curriculum.tasks[0]
    keys = [(length, number) for length in (300, 400) for number in range(3)]
    samples = [task.sample(length, HELD_OUT_START + number) for length, number in keys]
    assert len({sample.gold[0] for sample in samples}) == 6
    keys_by_question = {sample.question: key for sample, key in zip(samples, keys, strict=True)}

    def answer(prompt: str) -> Any:
        length, number = next(key for question, key in keys_by_question.items() if question in prompt)
        if number == 2:
            return PolicyError("broken")
        sample = task.sample(length, HELD_OUT_START + number)
        return rf"\boxed{{{sample.gold[0]}}}" if number == 0 or length == 300 else r"\boxed{wrong}"

    result = await measure(prepared, make_fake_reader(answer), 4, 0.5)
    assert (result.iteration, result.temperature, result.failed) == (4, 0.5, 2)
    assert {length: estimate.n for length, estimate in result.accuracy.items()} == {300: 3, 400: 3}
    assert [result.accuracy[length].mean for length in (300, 400)] == pytest.approx([2 / 3, 1 / 3])
    assert result.mean == pytest.approx(0.5)


@pytest.mark.parametrize("error_class", [PolicyUnreachableError, PolicyAuthenticationError])
async def test_measurement_fails_when_the_server_is_unreachable(error_class: Any, prepared, make_fake_reader) -> None:
    """Otherwise all answers would count as wrong, and the caller could not restart the server."""
    with pytest.raises(error_class, match="gone"):
        await measure(prepared, make_fake_reader(lambda prompt: error_class("gone")), 0, 0.0)

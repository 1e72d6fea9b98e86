"""Weights come into a server by one way or another, are verified there, and what fails says why."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.fake_server import FakeServer

from memagent_training.forward.layouts import IdRow, TokenRow
from memagent_training.serving.policy_sync import server_api
from memagent_training.serving.policy_sync.folders import PolicyFolder
from memagent_training.serving.policy_sync.probe import (
    PreviousLogProbs,
    Probe,
    ProbeLogProbs,
    find_largest_gap,
    find_mismatch,
    score_with_folder,
)
from memagent_training.serving.policy_sync.sync import PolicySync, RemoteServer, SyncMethod
from memagent_training.serving.vllm_server import VLLMServer, VLLMServerError
from memagent_training.training_errors import TrainingError

RANK = 8


def logprob(weights: float, token: int) -> float:
    """The log-prob of a token by a "model" whose weights are one number, at any position."""
    return -2.0 - ((token * 7919) % 97) / 50 - weights


def weights_of(policy: Path) -> float:
    """The number in a policy's folder; adapters add theirs to their base model's."""
    folder = PolicyFolder.inspect(policy)
    if folder.has_weights:
        return float(load_file(folder.path / "model.safetensors")["model.norm.weight"][0])
    return amount_of(folder.adapter) + weights_of(Path(folder.adapter_base))  # type: ignore[arg-type]


def amount_of(adapter: Path) -> float:
    return float(load_file(adapter / "adapter_model.safetensors")["base_model.model.model.layer.lora_A.weight"][0, 0])


def trainer(policy: Path, rows: Sequence[TokenRow]) -> list[list[float]]:
    return [[logprob(weights_of(policy), token) for token in row.completion_ids_T] for row in rows]


def write_policy(folder: Path, weights: float, **config: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"model_type": "llama", "vocab_size": 256, "hidden_size": 4, "num_attention_heads": 2}
    settings |= {"tie_word_embeddings": False, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {"model.norm.weight": numpy.full(4, weights), "model.layer.weight": numpy.zeros((6, 4))}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_adapter(folder: Path, base: Path, amount: float, *, rank: int = RANK, **config: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": str(base), **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    half = "base_model.model.model.layer.lora_"
    tensors = {f"{half}A.weight": numpy.full((rank, 4), amount), f"{half}B.weight": numpy.zeros((6, rank))}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class FakeVLLM(FakeServer):
    """Answers as vLLM 0.31 does, its prefix cache and its traps included.

    `broken` names what does not work: "reload" changes nothing, "reset" keeps the cache, "adapter" adds nothing,
    "half" changes only half of what it should, "path" cannot be read by the server.
    """

    adapters: dict[str, float]  # type: ignore[assignment]  # the names, and what they add

    def __init__(self, model: Path, *, dev: bool = True, lora: bool = True, key: str | None = None) -> None:
        super().__init__(model="policy", window=120, key=key)
        self.start_with(model)
        self.dev, self.lora = dev, lora
        self.broken: set[str] = set()
        self.calls: list[str] = []
        self.busy = 0
        self.is_paused = False

    def start_with(self, model: Path) -> None:
        self.weights, self.adapters = weights_of(model), {}
        self.cache: dict[tuple[str, tuple[int, ...]], float] = {}

    def add_routes(self, app: web.Application) -> None:
        app.middlewares.append(self._record_call)
        app.router.add_post("/v1/completions", self._complete_text)
        if self.lora:
            app.router.add_post("/v1/load_lora_adapter", self._load)
            app.router.add_post("/v1/unload_lora_adapter", self._unload)
        if self.dev:
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._resume)
            app.router.add_post("/collective_rpc", self._reload)
            app.router.add_post("/reset_prefix_cache", self._reset)

    @web.middleware
    async def _record_call(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        if request.path.startswith("/v1") and (refusal := self._refuse_wrong_key(request)):
            return refusal
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)

    @staticmethod
    def _error(status: int, words: str) -> web.Response:
        return web.json_response({"error": {"message": words, "code": status}}, status=status)

    async def _complete_text(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, prompt = body["model"], body["prompt"]
        assert not self.is_paused
        if name != "policy" and name not in self.adapters:
            return self._error(404, f"The model `{name}` does not exist.")
        weights = self.weights + self.adapters.get(name, 0.0)
        choice: dict[str, Any] = {}
        if "prompt_logprobs" in body:
            values = [{str(token): {"logprob": logprob(weights, token)}} for token in prompt]
            choice["prompt_logprobs"] = [None, *values[1:]]
        else:
            remembered = self.cache.get((name, tuple(prompt)), weights)
            ids = [(index * 3 + 1) % 256 for index in range(body["max_tokens"])]
            values = [logprob((weights + remembered) / 2, id_) for id_ in ids]
            choice |= {"token_ids": ids, "logprobs": {"token_logprobs": values}}
        self.cache.setdefault((name, tuple(prompt)), weights)
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens_details": None}})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return self._error(400, f"The lora adapter '{name}' has already been loaded.")
        if "path" in self.broken or not path.is_dir():  # noqa: ASYNC240
            return self._error(404, f"Loading lora {name} failed: No adapter found for {path}")
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > RANK:
            return self._error(500, f"LoRA rank {rank} is greater than max_lora_rank {RANK}.")
        self.adapters[name] = 0.0 if "adapter" in self.broken else amount_of(path)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.Response(text="Success")

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "wait"
        if "pause" in self.broken:
            await asyncio.sleep(5)
        self.is_paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.is_paused = False
        return web.json_response({"status": "resumed"})

    async def _reload(self, request: web.Request) -> web.Response:
        assert self.is_paused
        body = await request.json()
        assert body["method"] == "reload_weights"
        new = weights_of(Path(body["kwargs"]["weights_path"]))
        if "half" in self.broken:
            self.weights = (self.weights + new) / 2
        elif "reload" not in self.broken:
            self.weights = new
        return web.json_response({"results": [None]})

    async def _reset(self, request: web.Request) -> web.Response:
        if self.busy:
            self.busy -= 1
            return web.json_response({"success": False})
        if "reset" not in self.broken:
            self.cache.clear()
        return web.json_response({"success": True})


class OwnServer(VLLMServer):
    """A server of one's own whose process is the fake."""

    def __init__(self, fake: FakeVLLM, model: Path, **options: Any) -> None:
        super().__init__(model, log_file=model / "log", **options)
        self.fake, self.port, self.restarts = fake, fake._port, 0

    def restart(self, model: Path | None = None) -> None:
        self.restarts += 1
        self.model = model or self.model
        self.fake.start_with(self.model)


SCORES = "memagent_training.serving.policy_sync.sync.score_with_folder"


@pytest.fixture(autouse=True)
def scores_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCORES, trainer)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "policy-0", 0.0)


@pytest.fixture
def fake(base: Path) -> Iterator[FakeVLLM]:
    with FakeVLLM(base) as running:
        yield running


def own(fake: FakeVLLM, base: Path, *methods: SyncMethod, **settings: Any) -> PolicySync:
    server = OwnServer(fake, base, max_lora_rank=settings.pop("max_lora_rank", None))
    return PolicySync(server, methods=methods or tuple(SyncMethod), **settings)


@pytest.fixture
def sync(fake: FakeVLLM, base: Path) -> PolicySync:
    """Of a server of our own, in every way."""
    return own(fake, base)


def remote(fake: FakeVLLM, **options: Any) -> PolicySync:
    server = RemoteServer(fake.base_url, "policy", **options)
    return PolicySync(server)


# Three ways


async def test_log_probs_that_the_trainer_has_in_memory_are_taken_in_place_of_the_folders(
    fake, base, tmp_path, monkeypatch
) -> None:
    sync = own(fake, base, SyncMethod.RELOAD)
    await sync.sync(write_policy(tmp_path / "policy-1", 0.3), "1")
    monkeypatch.setattr(SCORES, lambda policy, rows: pytest.fail(f"{policy} was loaded"))
    new = write_policy(tmp_path / "policy-2", 0.5)
    assert (await sync.sync(new, "2", partial(trainer, new))).gap < 1e-6
    other = write_policy(tmp_path / "policy-3", 0.7)
    with pytest.raises(TrainingError, match=r"are not the trainer's"):
        await sync.sync(other, "3", partial(trainer, new))


async def test_adapters_are_served_under_a_name_of_their_own_per_version_and_content(fake, base, tmp_path) -> None:
    """The prefix cache knows names, and would confuse other adapters of the same version."""
    sync = own(fake, base, SyncMethod.ADAPTER)
    first = await sync.sync(write_adapter(tmp_path / "1", base, 0.3), "1")
    second = await sync.sync(write_adapter(tmp_path / "2", base, 0.6), "2")
    assert (first.method, first.version, first.reasons) == (SyncMethod.ADAPTER, "1", ())
    assert fake.adapters == pytest.approx({first.model: 0.3, second.model: 0.6})
    assert second.gap < 1e-6
    assert fake.weights == 0.0
    other = await sync.sync(write_adapter(tmp_path / "other", base, 0.9), "2")
    assert len({first.model, second.model, other.model}) == 3
    again = await own(fake, base, SyncMethod.ADAPTER).sync(tmp_path / "2", "2")
    assert again.model == second.model, "the same adapters again are no error"


async def test_whole_weights_are_reloaded_in_a_pause_and_the_cache_is_dropped(sync, fake, tmp_path) -> None:
    fake.busy = 2
    new = write_policy(tmp_path / "policy-1", 0.5)
    served = await sync.sync(new, "1")
    assert (served.method, served.model, served.reasons) == (SyncMethod.RELOAD, "policy", ())
    assert fake.weights == 0.5
    assert not fake.is_paused
    assert sync.server.model == new
    swap = [call for call in fake.calls if not call.startswith("/v1")]
    assert swap == ["/pause", "/collective_rpc", *["/reset_prefix_cache"] * 3, "/resume"]


async def test_adapters_are_tried_before_whole_weights(fake, base, tmp_path) -> None:
    policy = write_policy(tmp_path / "1", 0.5)
    write_adapter(policy / "adapter", base, 0.5)
    assert (await own(fake, base).sync(policy, "1")).method is SyncMethod.ADAPTER
    fake.broken.add("adapter")
    fake.adapters.clear()
    served = await own(fake, base).sync(policy, "1")
    assert served.method is SyncMethod.RELOAD
    assert len(served.reasons) == 1
    assert served.reasons[0].startswith("adapter: the server does not answer with the new weights")
    assert not fake.adapters


async def test_a_restart_is_the_last_resort_and_says_what_came_before(sync, fake, tmp_path, caplog) -> None:
    fake.broken.add("reload")
    served = await sync.sync(write_policy(tmp_path / "policy-1", 0.5), "1")
    assert served.method is SyncMethod.RESTART
    assert re.search(r"reload: .*: -\d\.\d+ against -\d\.\d+, with a tolerance of 0.001", served.reasons[0])
    assert "version 1 did not come into the server by reload" in caplog.text
    assert sync.server.restarts == 1


async def test_a_server_that_is_gone_is_restarted_with_the_new_weights(sync, fake, base, tmp_path) -> None:
    assert isinstance(sync.server, OwnServer)
    port, sync._api.root_url = sync.server.port, "http://127.0.0.1:9"

    def restart(model: Path | None = None) -> None:
        fake.start_with(model or base)
        sync._api.root_url = f"http://127.0.0.1:{port}"

    sync.server.restart = restart  # type: ignore[method-assign]
    served = await sync.sync(write_policy(tmp_path / "policy-1", 0.5), "1")
    assert served.method is SyncMethod.RESTART
    assert "no connection" in served.reasons[0]


# Verification


async def test_a_stale_prefix_cache_is_detected(fake, base, tmp_path) -> None:
    fake.broken.add("reset")
    served = await own(fake, base).sync(write_policy(tmp_path / "policy-1", 0.5), "1")
    assert served.method is SyncMethod.RESTART
    assert "through its prefix cache, but not without it" in served.reasons[0]


@pytest.mark.parametrize("fault", ["reload", "half"])
async def test_a_swap_that_changed_nothing_or_half_is_noticed_within_the_tolerance(sync, fake, tmp_path, fault) -> None:
    """One step of training moves log-probs by less than the tolerance."""
    assert (await sync.sync(write_policy(tmp_path / "1", 2e-4), "1")).method is SyncMethod.RELOAD
    fake.broken.add(fault)
    served = await sync.sync(write_policy(tmp_path / "2", 6e-4), "2")
    assert served.method is SyncMethod.RESTART
    assert "did not move with the trainer's" in served.reasons[0]


async def test_the_same_weights_may_be_synced_again(fake, base, tmp_path) -> None:
    sync = own(fake, base, SyncMethod.RELOAD)
    policy = write_policy(tmp_path / "1", 0.5)
    await sync.sync(policy, "1")
    assert (await sync.sync(policy, "1 again")).gap < 1e-6


async def test_a_failed_sync_reports_both_log_probs_and_a_hint(fake, base, tmp_path) -> None:
    fake.broken.add("reload")
    with pytest.raises(TrainingError, match=r"not served.*unverified: reload: .* against .*tolerance of") as caught:
        await remote(fake).sync(write_policy(tmp_path / "1", 0.5), "1")
    assert "restart: the server is not ours" in str(caught.value)
    assert "restart it with these weights where it runs" in str(caught.value)


# Readers


async def test_old_adapters_are_unloaded_after_their_last_reader(sync, fake, base, tmp_path) -> None:
    first = await sync.sync(write_adapter(tmp_path / "1", base, 0.1), "1")
    async with sync.hold_weights(first):
        later = [await sync.sync(write_adapter(tmp_path / str(k), base, 0.1 * k), str(k)) for k in (2, 3)]
        assert set(fake.adapters) == {first.model, *(token.model for token in later)}
    assert set(fake.adapters) == {token.model for token in later}


async def test_leftover_adapters_are_unloaded_only_from_a_server_of_our_own(fake, base, tmp_path) -> None:
    fake.adapters |= {"left": 0.1, "older": 0.2}
    await remote(fake, model=base).sync(write_policy(tmp_path / "1", 0.1), "1")
    assert set(fake.adapters) == {"left", "older"}
    await own(fake, tmp_path / "1").sync(base, "2")
    assert not fake.adapters


async def test_whole_weights_do_not_change_under_readers(sync, fake, tmp_path) -> None:
    served = await sync.sync(write_policy(tmp_path / "1", 0.1), "1")
    async with sync.hold_weights(served):
        with pytest.raises(TrainingError, match="1 readers are at work"):
            await sync.sync(write_policy(tmp_path / "2", 0.2), "2")
    assert fake.weights == 0.1
    assert (await sync.sync(tmp_path / "2", "2")).method is SyncMethod.RELOAD


async def test_a_sync_waits_for_requests_and_does_not_cut_them_off(sync, fake, tmp_path, monkeypatch) -> None:
    fake.broken.add("pause")
    monkeypatch.setattr(server_api, "REQUEST_SECONDS", 0.5)
    with pytest.raises(TrainingError, match="requests are still running"):
        await sync.sync(write_policy(tmp_path / "1", 0.1), "1")
    assert sync.server.restarts == 0
    assert "/resume" in fake.calls


async def test_adapters_are_loaded_again_into_a_server_that_was_restarted(sync, fake, base, tmp_path) -> None:
    await sync.sync(write_adapter(tmp_path / "1", base, 0.1), "1")
    fake.start_with(base)
    assert (await sync.sync(write_adapter(tmp_path / "2", base, 0.2), "2")).method is SyncMethod.ADAPTER


# What is refused before a server hears of it


def is_untouched(fake: FakeVLLM) -> bool:
    return not {"/collective_rpc", "/v1/load_lora_adapter", "/pause"} & set(fake.calls)


async def test_a_folder_without_a_policy_is_refused(sync, fake, tmp_path) -> None:
    with pytest.raises(TrainingError, match="has no policy"):
        await sync.sync(tmp_path / "nowhere", "1")
    assert is_untouched(fake)


async def test_adapters_of_other_weights_are_noticed(fake, base, tmp_path) -> None:
    """vLLM accepts them; the server's log-probs are then not the trainer's."""
    other = write_policy(tmp_path / "other", 1.0)
    sync = own(fake, base, SyncMethod.ADAPTER)
    with pytest.raises(TrainingError, match="does not answer with the new weights"):
        await sync.sync(write_adapter(tmp_path / "a", other, 0.1), "1")
    assert (await sync.sync(write_adapter(tmp_path / "b", base, 0.1), "2")).method is SyncMethod.ADAPTER


async def test_tied_embeddings_are_restarted_not_reloaded(tmp_path) -> None:
    base = write_policy(tmp_path / "0", 0.0, tie_word_embeddings=True)
    new = write_policy(tmp_path / "1", 0.5, tie_word_embeddings=True)
    with FakeVLLM(base) as fake:
        served = await own(fake, base).sync(new, "1")
        assert served.method is SyncMethod.RESTART
        assert "embeddings are tied" in served.reasons[0]
        assert is_untouched(fake)
        assert (await own(fake, new, reload_tied=True).sync(base, "2")).method is SyncMethod.RELOAD


async def test_a_restart_without_a_tokenizer_is_refused(fake, base, tmp_path) -> None:
    bare = write_policy(tmp_path / "1", 0.5)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(TrainingError, match="has no tokenizer"):
        await own(fake, base, SyncMethod.RESTART).sync(bare, "1")


# Servers that are not ours, or not started for this


async def test_a_remote_server_is_swapped_over_http_with_its_key(base, tmp_path) -> None:
    with FakeVLLM(base, key="right") as fake:
        sync = remote(fake, api_key="right", model=base)
        assert (await sync.sync(write_policy(tmp_path / "1", 0.5), "1")).method is SyncMethod.RELOAD
        with pytest.raises(TrainingError, match="refused the key"):
            await remote(fake, api_key="wrong").sync(tmp_path / "1", "1")


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [("adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.*--enable-lora"), ("weights", "VLLM_SERVER_DEV_MODE=1")],
)
async def test_an_endpoint_that_is_not_there_names_how_to_start_the_server(base, tmp_path, kind, remedy) -> None:
    policy = write_policy(tmp_path / "1", 0.5) if kind == "weights" else write_adapter(tmp_path / "1", base, 0.5)
    with FakeVLLM(base, dev=False, lora=False) as fake, pytest.raises(TrainingError, match=f"has no /.*{remedy}"):
        await remote(fake, model=base).sync(policy, "1")


async def test_a_rank_that_is_too_large_names_the_option(fake, base, tmp_path) -> None:
    policy = write_adapter(tmp_path / "1", base, 0.5, rank=16)
    for sync in (remote(fake, model=base), own(fake, base, max_lora_rank=8)):
        with pytest.raises(TrainingError, match=r"rank 16 is greater than max_lora_rank 8.*larger `--max-lora-rank"):
            await sync.sync(policy, "1")


async def test_adapters_that_the_server_cannot_see_name_the_paths(fake, base, tmp_path) -> None:
    fake.broken.add("path")
    with pytest.raises(TrainingError, match=r"No adapter found for .*under the same path as this machine"):
        await remote(fake, model=base).sync(write_adapter(tmp_path / "1", base, 0.5), "1")


async def test_an_unreachable_server_and_an_unknown_model_are_errors(fake, base, tmp_path) -> None:
    policy = write_policy(tmp_path / "1", 0.5)
    nobody = PolicySync(RemoteServer("http://127.0.0.1:9/v1", "policy"))
    with pytest.raises(TrainingError, match=r"no connection to http://127\.0\.0\.1:9"):
        await nobody.sync(policy, "1")
    other = PolicySync(RemoteServer(fake.base_url, "other"))
    with pytest.raises(TrainingError, match="does not serve 'other'; it serves policy"):
        await other.sync(policy, "1")


# The comparison by itself

values = st.lists(st.floats(-20, 0), min_size=4, max_size=30)
noise = st.floats(-9e-4, 9e-4)


@given(values, st.data())
def test_differences_within_the_tolerance_are_no_fault_and_one_beyond_it_is(numbers, data) -> None:
    half = len(numbers) // 2
    expected = ProbeLogProbs(tuple(numbers[:half]), tuple(numbers[half:]))
    answers = [number + data.draw(noise) for number in numbers]
    near = ProbeLogProbs(tuple(answers[:half]), tuple(answers[half:]))
    assert find_mismatch(near, expected, tolerance=1e-3) is None
    assert find_largest_gap(near, expected) <= 1e-3
    answers[data.draw(st.integers(0, len(answers) - 1))] += data.draw(st.sampled_from([0.01, -3.0, float("nan")]))
    far = ProbeLogProbs(tuple(answers[:half]), tuple(answers[half:]))
    assert find_mismatch(far, expected, tolerance=1e-3) is not None
    assert not find_largest_gap(far, expected) <= 1e-3


@given(values, st.floats(1e-4, 8e-4), st.floats(0, 1))
def test_small_moves_are_a_fault_exactly_where_the_server_missed_too_much_of_them(numbers, step, share) -> None:
    old = tuple(numbers)
    new = ProbeLogProbs(tuple(number + step for number in numbers), (0.0,))
    answers = ProbeLogProbs(tuple(number + share * step for number in numbers), (0.0,))
    fault = find_mismatch(answers, new, tolerance=1e-3, before=PreviousLogProbs(old, old))
    if abs(share - 0.6) > 0.01:
        assert (fault is not None) == (share < 0.6)


def test_a_server_in_another_precision_is_not_blamed_for_moves_that_it_cannot_show() -> None:
    old, new = (-1.0, -2.0), ProbeLogProbs((-1.001, -2.001), (0.0,))
    rounded = PreviousLogProbs((-1.02, -1.97), old)
    assert find_mismatch(ProbeLogProbs((-1.02, -1.97), (0.0,)), new, tolerance=0.1, before=rounded) is None


@given(st.integers(64, 200_000), st.none() | st.integers(16, 2048))
def test_a_probe_fits_vocabulary_and_window(vocabulary, window) -> None:
    probe = Probe.make(vocabulary, window)
    assert max(map(len, probe.prompts)) + 8 <= (window or 1024)
    assert all(0 < token < vocabulary for prompt in probe.prompts for token in prompt)
    assert probe == Probe.make(vocabulary, window)


# The trainer's side


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from support.small_models import make_model

    folder = tmp_path_factory.mktemp("llama")
    make_model(dtype=torch.float32).save_pretrained(folder)
    return folder


ROWS = [IdRow((3,), (5, 7, 9)), IdRow((1, 2), (4, 6))]


def test_adapters_by_themselves_give_those_of_the_merged_weights(llama, tmp_path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(1)
    adapter_model = get_peft_model(AutoModelForCausalLM.from_pretrained(llama), settings)
    adapter_model.save_pretrained(str(tmp_path / "adapter"))
    adapter_model.merge_and_unload().save_pretrained(tmp_path / "merged")
    there, here = score_with_folder(tmp_path / "adapter", ROWS), score_with_folder(tmp_path / "merged", ROWS)
    assert [*there[0], *there[1]] == pytest.approx([*here[0], *here[1]], abs=1e-5)
    assert there[0] != pytest.approx(score_with_folder(llama, ROWS)[0], abs=1e-3)


def test_a_folder_that_transformers_cannot_load_is_an_error(base) -> None:
    (base / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(TrainingError, match="cannot be loaded to verify"):
        score_with_folder(base, ROWS)


# The server's own side


def test_a_server_of_our_own_in_another_number_format_may_differ_by_more(base, tmp_path) -> None:
    exact, narrow = (
        VLLMServer(base, log_file=tmp_path / "log", options=("--dtype", dtype)) for dtype in ("float32", "bfloat16")
    )
    assert PolicySync(exact)._tolerance == PolicySync(RemoteServer("http://x/v1", "policy"))._tolerance == 1e-3
    assert PolicySync(narrow)._tolerance == 1
    assert PolicySync(narrow, tolerance=0.1)._tolerance == 0.1


def test_the_maximum_lora_rank_is_rounded_up_and_checked(base, tmp_path) -> None:
    plain = VLLMServer(base, log_file=tmp_path / "log")
    assert "--enable-lora" not in plain._build_arguments()
    arguments = VLLMServer(base, log_file=tmp_path / "log", max_lora_rank=9)._build_arguments()
    assert arguments[arguments.index("--max-lora-rank") + 1] == "16"
    for rank in (0, 1000):
        with pytest.raises(VLLMServerError, match=f"must be 1 to 512, got {rank}"):
            VLLMServer(base, log_file=tmp_path / "log", max_lora_rank=rank)._build_arguments()


def test_a_restart_that_fails_keeps_the_old_folder(base, tmp_path, monkeypatch) -> None:
    server = VLLMServer(base, log_file=tmp_path / "log")

    def start() -> None:
        raise VLLMServerError("no")

    monkeypatch.setattr(server, "start", start)
    with pytest.raises(VLLMServerError):
        server.restart(tmp_path)
    assert server.model == base

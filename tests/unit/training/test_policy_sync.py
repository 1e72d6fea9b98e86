"""New weights reach a server by adapters, reload or restart, and are verified; failures state their reason."""

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
    ProbeLogProbs,
    find_largest_gap,
    find_mismatch,
    make_prompts,
    score_with_folder,
)
from memagent_training.serving.policy_sync.sync import PolicySync, RemoteServer, SyncMethod
from memagent_training.serving.vllm_server import VLLMServer, VLLMServerError
from memagent_training.training_errors import TrainingError

MAX_LORA_RANK = 8


def compute_logprob(weights: float, token: int) -> float:
    """Return the log-prob of a token under a fake model whose weights are one number, at any position."""
    return -2.0 - ((token * 7919) % 97) / 50 - weights


def read_weights(policy: Path) -> float:
    """Return the number in a policy's folder; adapters add their number to that of the base model."""
    folder = PolicyFolder.inspect(policy)
    if folder.has_weights:
        return float(load_file(folder.path / "model.safetensors")["model.norm.weight"][0])
    return read_amount(folder.adapter) + read_weights(Path(folder.adapter_base))  # type: ignore[arg-type]


def read_amount(adapter: Path) -> float:
    return float(load_file(adapter / "adapter_model.safetensors")["base_model.model.model.layer.lora_A.weight"][0, 0])


def score_rows(policy: Path, rows: Sequence[TokenRow]) -> list[list[float]]:
    return [[compute_logprob(read_weights(policy), token) for token in row.completion_ids_T] for row in rows]


def write_policy(folder: Path, weights: float, **config: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"model_type": "llama", "vocab_size": 256, "hidden_size": 4, "num_attention_heads": 2}
    settings |= {"tie_word_embeddings": False, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {"model.norm.weight": numpy.full(4, weights), "model.layer.weight": numpy.zeros((6, 4))}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_adapter(folder: Path, base: Path, amount: float, *, rank: int = MAX_LORA_RANK, **config: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": str(base), **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layer.lora_{}.weight"
    tensors = {name.format("A"): numpy.full((rank, 4), amount), name.format("B"): numpy.zeros((6, rank))}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class FakeVLLM(FakeServer):
    """Replies like vLLM 0.31, including its prefix cache and known faults.

    `broken` names what does not work: "reload" changes nothing, "reset" keeps the cache, "adapter" adds nothing,
    "half" changes weights by half, "path" makes adapters unreadable, and "pause" takes too long.
    """

    adapters: dict[str, float]  # type: ignore[assignment]  # the number that each name adds

    def __init__(self, model: Path, *, dev: bool = True, lora: bool = True, key: str | None = None) -> None:
        super().__init__(model="policy", window=120, key=key)
        self.start_with(model)
        self.dev, self.lora = dev, lora
        self.broken: set[str] = set()
        self.calls: list[str] = []
        self.busy = 0
        self.is_paused = False

    def start_with(self, model: Path) -> None:
        self.weights, self.adapters = read_weights(model), {}
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
    def _error(status: int, message: str) -> web.Response:
        return web.json_response({"error": {"message": message, "code": status}}, status=status)

    async def _complete_text(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, prompt = body["model"], body["prompt"]
        assert not self.is_paused
        if name != "policy" and name not in self.adapters:
            return self._error(404, f"The model `{name}` does not exist.")
        weights = self.weights + self.adapters.get(name, 0.0)
        choice: dict[str, Any] = {}
        if "prompt_logprobs" in body:
            values = [{str(token): {"logprob": compute_logprob(weights, token)}} for token in prompt]
            choice["prompt_logprobs"] = [None, *values[1:]]
        else:
            cached_weights = self.cache.get((name, tuple(prompt)), weights)
            ids = [(index * 3 + 1) % 256 for index in range(body["max_tokens"])]
            values = [compute_logprob((weights + cached_weights) / 2, id_) for id_ in ids]
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
        if rank > MAX_LORA_RANK:
            return self._error(500, f"LoRA rank {rank} is greater than max_lora_rank {MAX_LORA_RANK}.")
        self.adapters[name] = 0.0 if "adapter" in self.broken else read_amount(path)
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
        new_weights = read_weights(Path(body["kwargs"]["weights_path"]))
        if "half" in self.broken:
            self.weights = (self.weights + new_weights) / 2
        elif "reload" not in self.broken:
            self.weights = new_weights
        return web.json_response({"results": [None]})

    async def _reset(self, request: web.Request) -> web.Response:
        if self.busy:
            self.busy -= 1
            return web.json_response({"success": False})
        if "reset" not in self.broken:
            self.cache.clear()
        return web.json_response({"success": True})


class OwnServer(VLLMServer):
    """A server of our own whose process is the fake server."""

    def __init__(self, fake: FakeVLLM, model: Path, **options: Any) -> None:
        super().__init__(model, log_file=model / "log", **options)
        self.fake, self.port, self.restarts = fake, fake._port, 0

    def restart(self, model: Path | None = None) -> None:
        self.restarts += 1
        self.model = model or self.model
        self.fake.start_with(self.model)


SCORE_FUNCTION = "memagent_training.serving.policy_sync.sync.score_with_folder"


@pytest.fixture(autouse=True)
def fake_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCORE_FUNCTION, score_rows)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "policy-0", 0.0)


@pytest.fixture
def fake(base: Path) -> Iterator[FakeVLLM]:
    with FakeVLLM(base) as fake_server:
        yield fake_server


def sync_own_server(fake: FakeVLLM, base: Path, *methods: SyncMethod, **settings: Any) -> PolicySync:
    server = OwnServer(fake, base, max_lora_rank=settings.pop("max_lora_rank", None))
    return PolicySync(server, methods=methods or tuple(SyncMethod), **settings)


@pytest.fixture
def sync(fake: FakeVLLM, base: Path) -> PolicySync:
    """A sync to a server of our own that may use all methods."""
    return sync_own_server(fake, base)


def sync_remote_server(fake: FakeVLLM, **options: Any) -> PolicySync:
    server = RemoteServer(fake.base_url, "policy", **options)
    return PolicySync(server)


# Methods


async def test_log_probs_of_the_trainer_replace_those_of_the_folder(fake, base, tmp_path, monkeypatch) -> None:
    sync = sync_own_server(fake, base, SyncMethod.RELOAD)
    await sync.sync(write_policy(tmp_path / "policy-1", 0.3), "1")
    monkeypatch.setattr(SCORE_FUNCTION, lambda policy, rows: pytest.fail(f"{policy} was loaded"))
    second_policy = write_policy(tmp_path / "policy-2", 0.5)
    assert (await sync.sync(second_policy, "2", partial(score_rows, second_policy))).gap < 1e-6
    third_policy = write_policy(tmp_path / "policy-3", 0.7)
    with pytest.raises(TrainingError, match=r"are not the trainer's"):
        await sync.sync(third_policy, "3", partial(score_rows, second_policy))


async def test_adapters_have_a_name_for_each_version_and_content(fake, base, tmp_path) -> None:
    """The prefix cache is keyed by name, and would confuse different adapters of the same version."""
    sync = sync_own_server(fake, base, SyncMethod.ADAPTER)
    first_policy = await sync.sync(write_adapter(tmp_path / "1", base, 0.3), "1")
    second_policy = await sync.sync(write_adapter(tmp_path / "2", base, 0.6), "2")
    assert (first_policy.method, first_policy.version, first_policy.reasons) == (SyncMethod.ADAPTER, "1", ())
    assert fake.adapters == pytest.approx({first_policy.model: 0.3, second_policy.model: 0.6})
    assert second_policy.gap < 1e-6
    assert fake.weights == 0.0
    other_policy = await sync.sync(write_adapter(tmp_path / "other", base, 0.9), "2")
    assert len({first_policy.model, second_policy.model, other_policy.model}) == 3
    reloaded_policy = await sync_own_server(fake, base, SyncMethod.ADAPTER).sync(tmp_path / "2", "2")
    assert reloaded_policy.model == second_policy.model, "loading equal adapters again is no error"


async def test_full_weights_are_reloaded_in_a_pause_and_the_cache_is_reset(sync, fake, tmp_path) -> None:
    fake.busy = 2
    policy = write_policy(tmp_path / "policy-1", 0.5)
    served = await sync.sync(policy, "1")
    assert (served.method, served.model, served.reasons) == (SyncMethod.RELOAD, "policy", ())
    assert fake.weights == 0.5
    assert not fake.is_paused
    assert sync.server.model == policy
    update_calls = [call for call in fake.calls if not call.startswith("/v1")]
    assert update_calls == ["/pause", "/collective_rpc", *["/reset_prefix_cache"] * 3, "/resume"]


async def test_adapters_are_tried_before_full_weights(fake, base, tmp_path) -> None:
    policy = write_policy(tmp_path / "1", 0.5)
    write_adapter(policy / "adapter", base, 0.5)
    assert (await sync_own_server(fake, base).sync(policy, "1")).method is SyncMethod.ADAPTER
    fake.broken.add("adapter")
    fake.adapters.clear()
    served = await sync_own_server(fake, base).sync(policy, "1")
    assert served.method is SyncMethod.RELOAD
    assert len(served.reasons) == 1
    assert served.reasons[0].startswith("adapter: the server does not answer with the new weights")
    assert not fake.adapters


async def test_restart_is_the_last_method_and_reports_earlier_failures(sync, fake, tmp_path, caplog) -> None:
    fake.broken.add("reload")
    served = await sync.sync(write_policy(tmp_path / "policy-1", 0.5), "1")
    assert served.method is SyncMethod.RESTART
    assert re.search(r"reload: .*: -\d\.\d+ against -\d\.\d+, with a tolerance of 0.001", served.reasons[0])
    assert "version 1 could not be loaded into the server by reload" in caplog.text
    assert sync.server.restarts == 1


async def test_unreachable_own_server_is_restarted_with_the_new_weights(sync, fake, base, tmp_path) -> None:
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


async def test_stale_prefix_cache_is_detected(fake, base, tmp_path) -> None:
    fake.broken.add("reset")
    served = await sync_own_server(fake, base).sync(write_policy(tmp_path / "policy-1", 0.5), "1")
    assert served.method is SyncMethod.RESTART
    assert "of completions after cached prompts" in served.reasons[0]


@pytest.mark.parametrize("fault", ["reload", "half"])
async def test_partial_weight_update_within_the_tolerance_is_detected(sync, fake, tmp_path, fault) -> None:
    """One step of training moves log-probs by less than the tolerance."""
    assert (await sync.sync(write_policy(tmp_path / "1", 2e-4), "1")).method is SyncMethod.RELOAD
    fake.broken.add(fault)
    served = await sync.sync(write_policy(tmp_path / "2", 6e-4), "2")
    assert served.method is SyncMethod.RESTART
    assert "did not move with the trainer's" in served.reasons[0]


async def test_equal_weights_can_be_synced_again(fake, base, tmp_path) -> None:
    sync = sync_own_server(fake, base, SyncMethod.RELOAD)
    policy = write_policy(tmp_path / "1", 0.5)
    await sync.sync(policy, "1")
    assert (await sync.sync(policy, "1 again")).gap < 1e-6


async def test_failed_sync_reports_both_log_probs_and_a_hint(fake, base, tmp_path) -> None:
    fake.broken.add("reload")
    with pytest.raises(TrainingError, match=r"not served.*unverified: reload: .* against .*tolerance of") as error:
        await sync_remote_server(fake).sync(write_policy(tmp_path / "1", 0.5), "1")
    assert "restart: the server is not ours" in str(error.value)
    assert "restart it with these weights where it runs" in str(error.value)


# Readers


async def test_old_adapters_are_unloaded_after_their_last_reader(sync, fake, base, tmp_path) -> None:
    first = await sync.sync(write_adapter(tmp_path / "1", base, 0.1), "1")
    async with sync.hold_weights(first):
        adapters = {version: write_adapter(tmp_path / version, base, 0.1 * int(version)) for version in "23"}
        later_policies = [await sync.sync(adapter, version) for version, adapter in adapters.items()]
        assert set(fake.adapters) == {first.model, *(policy.model for policy in later_policies)}
    assert set(fake.adapters) == {policy.model for policy in later_policies}


async def test_leftover_adapters_are_unloaded_only_from_a_server_of_our_own(fake, base, tmp_path) -> None:
    fake.adapters |= {"left": 0.1, "older": 0.2}
    await sync_remote_server(fake, model=base).sync(write_policy(tmp_path / "1", 0.1), "1")
    assert set(fake.adapters) == {"left", "older"}
    await sync_own_server(fake, tmp_path / "1").sync(base, "2")
    assert not fake.adapters


async def test_full_weights_do_not_change_during_reads(sync, fake, tmp_path) -> None:
    served = await sync.sync(write_policy(tmp_path / "1", 0.1), "1")
    async with sync.hold_weights(served):
        with pytest.raises(TrainingError, match="1 readers are at work"):
            await sync.sync(write_policy(tmp_path / "2", 0.2), "2")
    assert fake.weights == 0.1
    assert (await sync.sync(tmp_path / "2", "2")).method is SyncMethod.RELOAD


async def test_sync_waits_for_running_requests(sync, fake, tmp_path, monkeypatch) -> None:
    fake.broken.add("pause")
    monkeypatch.setattr(server_api, "REQUEST_SECONDS", 0.5)
    with pytest.raises(TrainingError, match="requests are still running"):
        await sync.sync(write_policy(tmp_path / "1", 0.1), "1")
    assert sync.server.restarts == 0
    assert "/resume" in fake.calls


async def test_adapters_are_loaded_after_a_server_restart(sync, fake, base, tmp_path) -> None:
    await sync.sync(write_adapter(tmp_path / "1", base, 0.1), "1")
    fake.start_with(base)
    assert (await sync.sync(write_adapter(tmp_path / "2", base, 0.2), "2")).method is SyncMethod.ADAPTER


# Refusals before a request to the server


def is_untouched(fake: FakeVLLM) -> bool:
    return not {"/collective_rpc", "/v1/load_lora_adapter", "/pause"} & set(fake.calls)


async def test_folder_without_a_policy_is_refused(sync, fake, tmp_path) -> None:
    with pytest.raises(TrainingError, match="has no policy"):
        await sync.sync(tmp_path / "nowhere", "1")
    assert is_untouched(fake)


async def test_adapters_of_another_base_model_are_detected(fake, base, tmp_path) -> None:
    """vLLM accepts them, but its log-probs then differ from the trainer's."""
    other_base = write_policy(tmp_path / "other", 1.0)
    sync = sync_own_server(fake, base, SyncMethod.ADAPTER)
    with pytest.raises(TrainingError, match="does not answer with the new weights"):
        await sync.sync(write_adapter(tmp_path / "a", other_base, 0.1), "1")
    assert (await sync.sync(write_adapter(tmp_path / "b", base, 0.1), "2")).method is SyncMethod.ADAPTER


async def test_tied_embeddings_need_a_restart_instead_of_a_reload(tmp_path) -> None:
    base = write_policy(tmp_path / "0", 0.0, tie_word_embeddings=True)
    policy = write_policy(tmp_path / "1", 0.5, tie_word_embeddings=True)
    with FakeVLLM(base) as fake:
        served = await sync_own_server(fake, base).sync(policy, "1")
        assert served.method is SyncMethod.RESTART
        assert "embeddings are tied" in served.reasons[0]
        assert is_untouched(fake)
        assert (await sync_own_server(fake, policy, reload_tied=True).sync(base, "2")).method is SyncMethod.RELOAD


async def test_restart_without_a_tokenizer_is_refused(fake, base, tmp_path) -> None:
    policy = write_policy(tmp_path / "1", 0.5)
    (policy / "tokenizer.json").unlink()
    with pytest.raises(TrainingError, match="has no tokenizer"):
        await sync_own_server(fake, base, SyncMethod.RESTART).sync(policy, "1")


# Remote servers and missing endpoints


async def test_remote_server_is_updated_over_http_with_its_key(base, tmp_path) -> None:
    with FakeVLLM(base, key="right") as fake:
        sync = sync_remote_server(fake, api_key="right", model=base)
        assert (await sync.sync(write_policy(tmp_path / "1", 0.5), "1")).method is SyncMethod.RELOAD
        with pytest.raises(TrainingError, match="refused the key"):
            await sync_remote_server(fake, api_key="wrong").sync(tmp_path / "1", "1")


@pytest.mark.parametrize(
    ("policy_kind", "remedy"),
    [("adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.*--enable-lora"), ("weights", "VLLM_SERVER_DEV_MODE=1")],
)
async def test_missing_endpoint_error_names_the_start_options(base, tmp_path, policy_kind, remedy) -> None:
    policy = write_policy(tmp_path / "1", 0.5) if policy_kind == "weights" else write_adapter(tmp_path / "1", base, 0.5)
    with FakeVLLM(base, dev=False, lora=False) as fake, pytest.raises(TrainingError, match=f"has no /.*{remedy}"):
        await sync_remote_server(fake, model=base).sync(policy, "1")


async def test_error_for_a_too_large_rank_names_the_option(fake, base, tmp_path) -> None:
    policy = write_adapter(tmp_path / "1", base, 0.5, rank=16)
    for sync in (sync_remote_server(fake, model=base), sync_own_server(fake, base, max_lora_rank=8)):
        with pytest.raises(TrainingError, match=r"rank 16 is greater than max_lora_rank 8.*larger `--max-lora-rank"):
            await sync.sync(policy, "1")


async def test_error_for_adapters_that_the_server_cannot_read_names_the_path(fake, base, tmp_path) -> None:
    fake.broken.add("path")
    with pytest.raises(TrainingError, match=r"No adapter found for .*under the same path as this machine"):
        await sync_remote_server(fake, model=base).sync(write_adapter(tmp_path / "1", base, 0.5), "1")


async def test_unreachable_server_and_unknown_model_are_errors(fake, base, tmp_path) -> None:
    policy = write_policy(tmp_path / "1", 0.5)
    unreachable = PolicySync(RemoteServer("http://127.0.0.1:9/v1", "policy"))
    with pytest.raises(TrainingError, match=r"no connection to http://127\.0\.0\.1:9"):
        await unreachable.sync(policy, "1")
    unknown_model = PolicySync(RemoteServer(fake.base_url, "other"))
    with pytest.raises(TrainingError, match="does not serve 'other'; it serves policy"):
        await unknown_model.sync(policy, "1")


# The comparison of log-probs

values = st.lists(st.floats(-20, 0), min_size=4, max_size=30)
noise = st.floats(-9e-4, 9e-4)


@given(values, st.data())
def test_only_differences_above_the_tolerance_are_faults(logprobs, data) -> None:
    middle = len(logprobs) // 2
    expected = ProbeLogProbs(tuple(logprobs[:middle]), tuple(logprobs[middle:]))
    answers = [logprob + data.draw(noise) for logprob in logprobs]
    close_answers = ProbeLogProbs(tuple(answers[:middle]), tuple(answers[middle:]))
    assert find_mismatch(close_answers, expected, tolerance=1e-3) is None
    assert find_largest_gap(close_answers, expected) <= 1e-3
    answers[data.draw(st.integers(0, len(answers) - 1))] += data.draw(st.sampled_from([0.01, -3.0, float("nan")]))
    distant_answers = ProbeLogProbs(tuple(answers[:middle]), tuple(answers[middle:]))
    assert find_mismatch(distant_answers, expected, tolerance=1e-3) is not None
    assert not find_largest_gap(distant_answers, expected) <= 1e-3


@given(values, st.floats(1e-4, 8e-4), st.floats(0, 1))
def test_small_updates_are_a_fault_if_the_server_missed_too_much(logprobs, step, applied_share) -> None:
    old_logprobs = tuple(logprobs)
    new_logprobs = ProbeLogProbs(tuple(logprob + step for logprob in logprobs), (0.0,))
    answers = ProbeLogProbs(tuple(logprob + applied_share * step for logprob in logprobs), (0.0,))
    fault = find_mismatch(answers, new_logprobs, tolerance=1e-3, before=PreviousLogProbs(old_logprobs, old_logprobs))
    if abs(applied_share - 0.6) > 0.01:
        assert (fault is not None) == (applied_share < 0.6)


def test_updates_are_not_a_fault_only_if_they_are_below_the_server_precision() -> None:
    old_logprobs, new_logprobs = (-1.0, -2.0), ProbeLogProbs((-1.001, -2.001), (0.0,))
    answers = ProbeLogProbs((-1.02, -1.97), (0.0,))
    before = PreviousLogProbs(server=answers.prompt, trainer=old_logprobs)
    assert find_mismatch(answers, new_logprobs, tolerance=0.1, before=before) is None
    old_logprobs, answers, new_logprobs = (-2.0,), ProbeLogProbs((-1.999,), (0.0,)), ProbeLogProbs((-1.9935,), (0.0,))
    assert find_mismatch(answers, new_logprobs, tolerance=0.1, before=PreviousLogProbs(answers.prompt, old_logprobs))


@given(st.integers(64, 200_000), st.none() | st.integers(16, 2048))
def test_probe_fits_vocabulary_and_window(vocabulary, window) -> None:
    prompts = make_prompts(vocabulary, window)
    assert max(map(len, prompts)) + 8 <= (window or 1024)
    assert all(0 < token < vocabulary for prompt in prompts for token in prompt)
    assert prompts == make_prompts(vocabulary, window)


# Log-probs of a folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from support.small_models import make_model

    folder = tmp_path_factory.mktemp("llama")
    make_model(dtype=torch.float32).save_pretrained(folder)
    return folder


ROWS = [IdRow((3,), (5, 7, 9)), IdRow((1, 2), (4, 6))]


def test_log_probs_of_adapters_equal_those_of_merged_weights(llama, tmp_path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(1)
    adapter_model = get_peft_model(AutoModelForCausalLM.from_pretrained(llama), settings)
    adapter_model.save_pretrained(str(tmp_path / "adapter"))
    adapter_model.merge_and_unload().save_pretrained(tmp_path / "merged")
    adapter_logprobs, merged_logprobs = (score_with_folder(tmp_path / name, ROWS) for name in ("adapter", "merged"))
    assert adapter_logprobs == [pytest.approx(row, abs=1e-5) for row in merged_logprobs]
    assert adapter_logprobs[0] != pytest.approx(score_with_folder(llama, ROWS)[0], abs=1e-3)


def test_folder_that_transformers_cannot_load_is_an_error(base) -> None:
    (base / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(TrainingError, match="cannot be loaded to verify"):
        score_with_folder(base, ROWS)


# Settings of our own server


def test_own_server_in_bfloat16_has_a_larger_tolerance(base, tmp_path) -> None:
    float32_server, bfloat16_server = (
        VLLMServer(base, log_file=tmp_path / "log", options=("--dtype", dtype)) for dtype in ("float32", "bfloat16")
    )
    assert PolicySync(float32_server)._tolerance == PolicySync(RemoteServer("http://x/v1", "policy"))._tolerance == 1e-3
    assert PolicySync(bfloat16_server)._tolerance == 1
    assert PolicySync(bfloat16_server, tolerance=0.1)._tolerance == 0.1


def test_maximum_lora_rank_is_rounded_up_and_checked(base, tmp_path) -> None:
    assert "--enable-lora" not in VLLMServer(base, log_file=tmp_path / "log")._build_arguments()
    arguments = VLLMServer(base, log_file=tmp_path / "log", max_lora_rank=9)._build_arguments()
    assert arguments[arguments.index("--max-lora-rank") + 1] == "16"
    for rank in (0, 1000):
        with pytest.raises(VLLMServerError, match=f"must be 1 to 512, got {rank}"):
            VLLMServer(base, log_file=tmp_path / "log", max_lora_rank=rank)._build_arguments()


def test_failed_restart_keeps_the_old_folder(base, tmp_path, monkeypatch) -> None:
    server = VLLMServer(base, log_file=tmp_path / "log")

    def start() -> None:
        raise VLLMServerError("no")

    monkeypatch.setattr(server, "start", start)
    with pytest.raises(VLLMServerError):
        server.restart(tmp_path)
    assert server.model == base

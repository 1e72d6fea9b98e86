"""Each method loads new weights into a real vLLM server, and failures of a reload are detected.

Needs three server starts. The tests on the shared server each begin with the weights of the embedded policy.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from random_policy import write_random_policy

from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_training.job.training_output import copy_policy_files
from memagent_training.serving.policy_sync.probe import find_mismatch, make_prompts, probe_server, score_with_folder
from memagent_training.serving.policy_sync.server_api import ServerAPI
from memagent_training.serving.policy_sync.sync import PolicySync, RemoteServer, SyncMethod
from memagent_training.serving.vllm_server import VLLMServer
from memagent_training.training_errors import TrainingError

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    log_file = tmp_path_factory.mktemp("vllm") / "server.log"
    with VLLMServer(EMBEDDED_FOLDER, log_file=log_file, dev_mode=True, max_lora_rank=8) as server:
        yield server


@pytest.fixture(scope="module")
def api(server: VLLMServer) -> ServerAPI:
    return ServerAPI(server.root_url, None, trust_env=False)


def write_perturbed_policy(folder: Path, scale: float, seed: int) -> Path:
    """Save the embedded policy with noise on all weights, `scale` times the standard deviation of each tensor."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * scale * weight.std())
    model.save_pretrained(folder)
    copy_policy_files(folder, EMBEDDED_FOLDER)
    return folder


def write_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """Save a random adapter of the embedded policy and the merged weights, as after a training run."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.02)
    model.save_pretrained(str(folder / "adapter"))
    model.merge_and_unload().save_pretrained(folder)
    copy_policy_files(folder, EMBEDDED_FOLDER)
    return folder


def make_sync(server: VLLMServer | RemoteServer, *methods: SyncMethod, **settings) -> PolicySync:
    return PolicySync(server, methods=methods or tuple(SyncMethod), **{"tolerance": TOLERANCE, **settings})


async def load_embedded_policy(server: VLLMServer) -> None:
    await make_sync(server, SyncMethod.RELOAD).sync(EMBEDDED_FOLDER, "0")


async def test_a_small_training_step_is_distinguished_from_no_step(server, api, tmp_path, monkeypatch) -> None:
    """The log-probs of the two versions differ by less than the tolerance, which is wider here."""
    tolerance = 1e-2
    await load_embedded_policy(server)
    folder = write_perturbed_policy(tmp_path / "1", 1e-5, seed=1)
    assert (await make_sync(server, SyncMethod.RELOAD, tolerance=tolerance).sync(folder, "1")).gap < TOLERANCE
    await load_embedded_policy(server)
    old_scores = await probe_server(api, server.model_name, make_prompts(5120, 1024))
    expected = old_scores.split(score_with_folder(folder, old_scores.rows))
    assert find_mismatch(old_scores.logprobs, expected, tolerance=tolerance) is None

    async def skip_reload(self: ServerAPI, path: str) -> None:
        """Reload nothing."""

    monkeypatch.setattr(ServerAPI, "reload_weights", skip_reload)
    policy_sync = make_sync(
        RemoteServer(server.base_url, server.model_name, model=EMBEDDED_FOLDER), SyncMethod.RELOAD, tolerance=tolerance
    )
    with pytest.raises(TrainingError, match="did not move with the trainer's"):
        await policy_sync.sync(folder, "1")


async def test_without_a_reset_of_the_prefix_cache_old_keys_and_values_are_used(server, api, tmp_path) -> None:
    await load_embedded_policy(server)
    prompts = make_prompts(5120, 1024)
    folder = write_perturbed_policy(tmp_path / "1", 0.05, seed=1)
    await probe_server(api, server.model_name, prompts)
    await api.reload_weights(str(folder))
    stale_scores = await probe_server(api, server.model_name, prompts)
    assert stale_scores.cached_tokens > 0
    fault = find_mismatch(
        stale_scores.logprobs, stale_scores.split(score_with_folder(folder, stale_scores.rows)), tolerance=TOLERANCE
    )
    assert fault is not None
    assert "of completions after cached prompts" in fault
    await api.reset_prefix_cache()
    fresh_scores = await probe_server(api, server.model_name, prompts)
    assert fresh_scores.cached_tokens == 0
    expected = fresh_scores.split(score_with_folder(folder, fresh_scores.rows))
    assert find_mismatch(fresh_scores.logprobs, expected, tolerance=TOLERANCE) is None


async def test_an_adapter_of_other_weights_is_refused_though_the_server_accepts_it(server, tmp_path) -> None:
    await load_embedded_policy(server)
    other_policy = write_random_policy(tmp_path / "other")
    adapter = write_adapter(tmp_path / "wrong-base", seed=1) / "adapter"
    config = (adapter / "adapter_config.json").read_text()
    config = re.sub(r'"base_model_name_or_path": "[^"]*"', f'"base_model_name_or_path": "{other_policy}"', config)
    (adapter / "adapter_config.json").write_text(config)
    with pytest.raises(TrainingError, match="cannot be loaded to verify it"):
        await make_sync(server).sync(adapter, "1")
    assert server.is_healthy()


async def test_a_rank_that_is_too_large_is_refused_with_the_servers_option(server, tmp_path) -> None:
    await load_embedded_policy(server)
    adapter = write_adapter(tmp_path / "64", seed=1, rank=64) / "adapter"
    policy_sync = PolicySync(RemoteServer(server.base_url, server.model_name, model=EMBEDDED_FOLDER))
    with pytest.raises(TrainingError, match=r"rank 64 is greater than max_lora_rank.*`--max-lora-rank`"):
        await policy_sync.sync(adapter, "1")


async def test_a_broken_server_is_restarted_with_the_new_weights(server, tmp_path) -> None:
    """A path that `policy_sync` would refuse breaks the engine."""
    await load_embedded_policy(server)
    async with httpx2.AsyncClient(timeout=60) as client:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "missing")}}
        assert (await client.post(f"{server.root_url}/collective_rpc", json=body)).status_code == 500
    folder = write_perturbed_policy(tmp_path / "1", 0.05, seed=2)
    policy = await make_sync(server).sync(folder, "1")
    assert (policy.method, server.model) == (SyncMethod.RESTART, folder)
    assert policy.gap < TOLERANCE
    assert len(policy.reasons) == 1
    assert policy.reasons[0].startswith("reload: ")


async def test_a_reload_with_tied_embeddings_keeps_the_old_output_head_and_is_refused(vllm_python, tmp_path) -> None:
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    untied = write_random_policy(tmp_path / "untied")
    config = AutoConfig.from_pretrained(untied, tie_word_embeddings=True)
    for number in (0, 1):
        shutil.copytree(untied, tmp_path / f"tied-{number}")
        torch.manual_seed(number)
        LlamaForCausalLM(config).save_pretrained(tmp_path / f"tied-{number}")
    with VLLMServer(tmp_path / "tied-0", log_file=tmp_path / "server.log", dev_mode=True) as server:
        remote = RemoteServer(server.base_url, server.model_name, model=tmp_path / "tied-0")
        with pytest.raises(TrainingError, match=r"reload: its embeddings are tied.*Untie them"):
            await PolicySync(remote).sync(tmp_path / "tied-1", "1")
        with pytest.raises(TrainingError, match=r"reload: the server does not answer with the new weights"):
            await PolicySync(remote, reload_tied=True).sync(tmp_path / "tied-1", "1")

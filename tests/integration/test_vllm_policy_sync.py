"""New weights come into a real vLLM server by each way, and the traps of a reload are real and noticed.

Three server starts in all. The tests of the first server each begin with the embedded policy's own weights.
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
from memagent_training.serving.policy_sync.probe import Probe, find_mismatch, score_with_folder
from memagent_training.serving.policy_sync.server_api import ServerAPI
from memagent_training.serving.policy_sync.sync import PolicySync, RemoteServer, SyncMethod
from memagent_training.serving.vllm_server import VLLMServer
from memagent_training.training_errors import TrainingError

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    log_file = tmp_path_factory.mktemp("vllm") / "server.log"
    with VLLMServer(EMBEDDED_FOLDER, log_file=log_file, dev_mode=True, max_lora_rank=8) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: VLLMServer) -> ServerAPI:
    return ServerAPI(server.root_url, None, trust_env=False)


def perturb_policy(folder: Path, share: float, seed: int) -> Path:
    """Save the embedded policy with noise on all weights, `share` of each tensor's spread."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * share * weight.std())
    model.save_pretrained(folder)
    copy_policy_files(folder, EMBEDDED_FOLDER)
    return folder


def make_adapters(folder: Path, seed: int, rank: int = 8) -> Path:
    """Save random adapters of the embedded policy, and the merged weights, as a training leaves them."""
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


def syncing(server: VLLMServer | RemoteServer, *methods: SyncMethod, **settings) -> PolicySync:
    return PolicySync(server, methods=methods or tuple(SyncMethod), **{"tolerance": TOLERANCE, **settings})


async def at_first(server: VLLMServer) -> None:
    await syncing(server, SyncMethod.RELOAD).sync(EMBEDDED_FOLDER, "0")


async def test_a_step_of_training_is_told_from_none(server, api, tmp_path, monkeypatch) -> None:
    """It is small: the log-probs of two versions lie within the tolerance, here a wider one, of each other."""
    tolerance = 1e-2
    await at_first(server)
    folder = perturb_policy(tmp_path / "1", 1e-5, seed=1)
    assert (await syncing(server, SyncMethod.RELOAD, tolerance=tolerance).sync(folder, "1")).gap < TOLERANCE
    await at_first(server)
    old = await Probe.make(5120, 1024).read(api, server.model_name)
    expected = old.split(score_with_folder(folder, old.rows))
    assert find_mismatch(old.logprobs, expected, tolerance=tolerance) is None

    async def nothing(self: ServerAPI, path: str) -> None:
        """A reload that reloads nothing."""

    monkeypatch.setattr(ServerAPI, "reload_weights", nothing)
    remote = syncing(
        RemoteServer(server.base_url, server.model_name, model=EMBEDDED_FOLDER), SyncMethod.RELOAD, tolerance=tolerance
    )
    with pytest.raises(TrainingError, match="did not move with the trainer's"):
        await remote.sync(folder, "1")


async def test_without_the_reset_old_keys_and_values_are_served(server, api, tmp_path) -> None:
    await at_first(server)
    probe = Probe.make(5120, 1024)
    folder = perturb_policy(tmp_path / "1", 0.05, seed=1)
    await probe.read(api, server.model_name)
    await api.reload_weights(str(folder))
    stale = await probe.read(api, server.model_name)
    assert stale.cached_tokens > 0
    fault = find_mismatch(stale.logprobs, stale.split(score_with_folder(folder, stale.rows)), tolerance=TOLERANCE)
    assert fault is not None
    assert "through its prefix cache, but not without it" in fault
    await api.reset_prefix_cache()
    fresh = await probe.read(api, server.model_name)
    assert fresh.cached_tokens == 0
    expected = fresh.split(score_with_folder(folder, fresh.rows))
    assert find_mismatch(fresh.logprobs, expected, tolerance=TOLERANCE) is None


async def test_adapters_of_other_weights_that_the_server_accepts_are_noticed(server, tmp_path) -> None:
    await at_first(server)
    other = write_random_policy(tmp_path / "other")
    mistaken = make_adapters(tmp_path / "mistaken", seed=1) / "adapter"
    text = (mistaken / "adapter_config.json").read_text()
    text = re.sub(r'"base_model_name_or_path": "[^"]*"', f'"base_model_name_or_path": "{other}"', text)
    (mistaken / "adapter_config.json").write_text(text)
    with pytest.raises(TrainingError, match="cannot be loaded to verify it"):
        await syncing(server).sync(mistaken, "1")
    assert server.is_healthy()


async def test_a_rank_that_is_too_large_is_refused_by_the_server_in_words_that_help(server, tmp_path) -> None:
    await at_first(server)
    adapter = make_adapters(tmp_path / "64", seed=1, rank=64) / "adapter"
    remote = PolicySync(RemoteServer(server.base_url, server.model_name, model=EMBEDDED_FOLDER))
    with pytest.raises(TrainingError, match=r"rank 64 is greater than max_lora_rank.*`--max-lora-rank`"):
        await remote.sync(adapter, "1")


async def test_a_server_that_broke_is_restarted_with_the_new_weights(server, tmp_path) -> None:
    """The engine is broken on purpose, by the path that `policy_sync` would have refused."""
    await at_first(server)
    async with httpx2.AsyncClient(timeout=60) as client:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "nowhere")}}
        assert (await client.post(f"{server.root_url}/collective_rpc", json=body)).status_code == 500
    folder = perturb_policy(tmp_path / "1", 0.05, seed=2)
    served = await syncing(server).sync(folder, "1")
    assert (served.method, server.model) == (SyncMethod.RESTART, folder)
    assert served.gap < TOLERANCE
    assert len(served.reasons) == 1
    assert served.reasons[0].startswith("reload: ")


async def test_a_reload_leaves_the_old_output_head_where_embeddings_are_tied(vllm_python, tmp_path) -> None:
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    untied = write_random_policy(tmp_path / "untied")
    config = AutoConfig.from_pretrained(untied, tie_word_embeddings=True)
    for number in (0, 1):
        shutil.copytree(untied, tmp_path / f"tied-{number}")
        torch.manual_seed(number)
        LlamaForCausalLM(config).save_pretrained(tmp_path / f"tied-{number}")
    with VLLMServer(tmp_path / "tied-0", log_file=tmp_path / "server.log", dev_mode=True) as tied:
        remote = RemoteServer(tied.base_url, tied.model_name, model=tmp_path / "tied-0")
        with pytest.raises(TrainingError, match=r"reload: its embeddings are tied.*Untie them"):
            await PolicySync(remote).sync(tmp_path / "tied-1", "1")
        with pytest.raises(TrainingError, match=r"reload: the server does not answer with the new weights"):
            await PolicySync(remote, reload_tied=True).sync(tmp_path / "tied-1", "1")

"""A tiny policy and its logged rollouts, and a program that trains on them and records each step, once per rank.

    python -m torch.distributed.run --nproc-per-node 2 training_world.py FOLDER OUT CASE...

FOLDER is the output of `make_world`. OUT/RANK.pt then has, for each case and step, the weights before the step, the
gradients and the loss.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from memagent_training.data.rollouts import Rollout, RolloutGroup, TrainingConversation
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.job.job_settings import load_preset
from memagent_training.job.trainer import MultiConvDAPOTrainer
from support import small_models

VOCABULARY = 64
SMALL_SETTINGS = {
    "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    "token_budget": 200, "learning_rate": 0.005, "warmup_steps": 0, "max_logprob_gap": 9,
}  # fmt: skip
"""Settings of a small training run. The logged log-probs are made up, 0.23 nats off."""


def make_model(folder: Path, *, seed: int = 0) -> LlamaForCausalLM:
    """Write a model folder, and return the model."""
    from tokenizers import Tokenizer, models

    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "initializer_range": 0.15}
    model: LlamaForCausalLM = small_models.make_model(seed=seed, dtype=torch.float32, **sizes).eval()
    model.save_pretrained(folder / "model")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w1", eos_token="w2"
    )
    tokenizer.save_pretrained(folder / "model")
    return model


def make_world(folder: Path, *, groups: int = 6) -> list[RolloutGroup]:
    """Write a model folder and groups whose logged log-probs are close to the model's.

    K varies from 1 to 4, prompts share prefixes, all rewards of one group are 0, one completion is truncated, one is
    partly masked, one is empty.
    """
    model = make_model(folder)
    rng = random.Random(0)
    rollout_groups = [_make_group(rng, model, index) for index in range(groups)]
    (folder / "groups.pkl").write_bytes(pickle.dumps(rollout_groups))
    return rollout_groups


def _make_group(rng: random.Random, model: LlamaForCausalLM, group_index: int) -> RolloutGroup:
    question = [rng.randrange(3, VOCABULARY) for _ in range(6)]
    rollouts = []
    for rollout_index in range(4):
        turns = rng.randint(1, 4)
        calls = [*(("update", "", turn) for turn in range(turns - 1)), ("answer", "", 0)]
        conversations = [_make_conversation(rng, model, question, turn, call) for turn, call in enumerate(calls)]
        if group_index == 0 and rollout_index == 0:
            conversations[-1] = replace(conversations[-1], truncated=True)
        if group_index == 1 and rollout_index == 0:
            mask = [position % 2 == 0 for position in range(len(conversations[0].completion_ids_T))]
            conversations[0] = replace(conversations[0], loss_mask_T=mask)
        if group_index == 1 and rollout_index == 1:
            empty = TrainingConversation(array("I", question), array("I"), array("f"), "update", "", 0, False, "v1")
            conversations.insert(0, empty)
        reward = 0.0 if group_index == 2 else float(rng.random() < 0.5) + rng.random() * 0.1
        rollouts.append(Rollout(f"run-{group_index}-{rollout_index}", tuple(conversations), reward))
    return RolloutGroup(f"group-{group_index}", tuple(rollouts))


def _make_conversation(
    rng: random.Random, model: LlamaForCausalLM, question: list[int], turn: int, call: tuple[str, str, int]
) -> TrainingConversation:
    prompt = [*question, *([turn + 3] * 5), *(rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 6)))]
    completion = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    model_logprobs = logits.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
    logprobs = array("f", (min(logprob + rng.gauss(0, 0.3), 0.0) for logprob in model_logprobs))
    return TrainingConversation(array("I", prompt), array("I", completion), logprobs, *call, False, "v1")


def make_config(case: dict[str, Any], output: Path) -> MultiConvDAPOConfig:
    """Return the settings of a case: a preset with changes."""
    schedule = {"learning_rate": 0.01, "groups_per_step": 3, "save_strategy": "no", "token_budget": 400}
    settings = SMALL_SETTINGS | schedule | {"max_grad_norm": 0.0, "max_steps": 2, "seed": 5}
    return load_preset(case["preset"], output_dir=str(output), **(settings | case.get("changes", {})))


class StepRecorder(TrainerCallback):
    """Records the weights before each step and its gradients, unsharded on every rank."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        is_sharded = any(hasattr(tensor, "full_tensor") for _, tensor in _list_parameters(model))
        weights = {name: _gather(tensor) for name, tensor in _list_parameters(model)}
        self.steps.append({"weights": weights, "is_sharded": is_sharded})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps[-1]["gradients"] = {
            name: _gather(tensor.grad) for name, tensor in _list_parameters(model) if tensor.grad is not None
        }


def _list_parameters(model: Any) -> list[tuple[str, Any]]:
    return [
        (name.removeprefix("module."), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _gather(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def run_case(folder: Path, case: dict[str, Any], output: Path) -> list[dict[str, Any]]:
    """Train, and return for each step the weights before it, gradients, loss and logged metrics."""
    groups = pickle.loads((folder / "groups.pkl").read_bytes())
    recorder = StepRecorder()
    trainer = MultiConvDAPOTrainer(
        str(folder / "model"), groups, make_config(case, output), callbacks=[recorder], policy_versions=["v0", "v1"]
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for step, entry in zip(recorder.steps, logs, strict=True):
        step["log"] = entry
        step["loss"] = entry["loss"]
    return recorder.steps


def shard_on_cpus() -> None:
    """Make accelerate prepare models with FSDP2 on CPUs, where torch supports it but accelerate does not use it."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    original_init = AcceleratorState.__init__

    def initialize_with_plugin(state: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original_init(state, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = initialize_with_plugin  # type: ignore[method-assign]


def main() -> None:
    """Run the cases on the command line, which are JSON."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        shard_on_cpus()
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    end_rank({text: run_case(folder, json.loads(text), output / "trainer") for text in sys.argv[3:]}, output)


def end_rank(outcomes: dict[str, Any], output: Path) -> None:
    """Write the outcomes of this rank, and end together with the other ranks."""
    torch.save(outcomes, output / f"{os.environ.get('RANK', '0')}.pt")
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()  # else the group's threads may abort the process at its end


if __name__ == "__main__":
    main()

"""Build the rows of an optimizer step, and run it with the trainers that `training_step.py` compares."""

from __future__ import annotations

import gc
import math
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    TrainerCallback,
)
from transformers.trainer_callback import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_training.algorithm.advantages import AdvantageSettings, TrainingRow, prepare_batch
from memagent_training.algorithm.planner import Layout, split_into_steps
from memagent_training.data.rollouts import Rollout, RolloutGroup, TrainingConversation
from memagent_training.forward.layouts import pad_rows
from memagent_training.job.config import MultiConvDAPOConfig, OldLogProbs
from memagent_training.job.trainer import MultiConvDAPOTrainer

ROLLOUTS = 16
TOKEN_BUDGET = 16_384
SIZES = ("embedded", "0.5B", "tiny")
DTYPES = ("fp32", "bf16")
TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2}
"""Relative tolerances of loss and gradient norm; bfloat16 has 8 bits of mantissa, and layouts round differently."""
_TRAINER_OPTIONS = {
    "learning_rate": 1e-6, "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.01,
    "max_grad_norm": 1.0, "epsilon": 0.2, "epsilon_high": 0.2, "delta": 3.0, "beta": 0.0, "temperature": 1.0,
    "disable_dropout": True, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
"""The options of the trainer that are the same for all contenders."""


class PromptOrder(StrEnum):
    """The position of the memory in a prompt."""

    SECTION_FIRST = "section first"
    """The memory is after the section; the rollouts of a group share all that is before it."""

    PAPER = "paper's order"
    """The memory is before the section, as in MemAgent's prompt; the rollouts share the header."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a conversation's parts in tokens; the memory is as long as a completion."""

    header: int
    section: int
    completion: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The model, the rows and the number of steps with which all contenders are measured."""

    device: str = "cpu"
    model_size: str = "embedded"
    dtype: str = "fp32"
    """The dtype of the arithmetic; bf16 is by autocast. Weights and AdamW's state are float32, as in TRL."""
    lengths: Lengths = Lengths(40, 500, 60)
    repeats: int = 1
    """The number of timed steps in each run of a contender."""
    rollouts: int = ROLLOUTS
    conversations: int = 8
    """The number of conversations of each rollout."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to run the step: with one of our layouts, or with TRL's own trainer if `layout` is None."""

    order: PromptOrder
    layout: Layout | None
    batch_size: int = 1
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """The name in the table."""
        if self.layout is None:
            return f"GRPOTrainer, {self.batch_size} row{'s' * (self.batch_size > 1)} at once"
        return f"{self.layout}{', gradient checkpointing' * self.checkpointing}"


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one optimizer step."""

    wall_seconds: float
    processor_seconds: float
    forwarded_tokens: int
    peak_bytes: int | None
    """The maximum GPU memory of tensors; None on a CPU."""


@dataclass(frozen=True, slots=True)
class Step:
    """The cost and the result of one optimizer step."""

    cost: StepCost
    loss: float
    gradient_norm: float


def make_group(name: str, order: PromptOrder, workload: Workload, vocabulary: int) -> RolloutGroup:
    """Return the rollouts of one question; groups of the same name have the same tokens in both orders."""
    rng, lengths = random.Random(name), workload.lengths

    def draw_ids(length: int) -> array[int]:
        return array("I", (rng.randrange(vocabulary) for _ in range(length)))

    header = draw_ids(lengths.header)
    sections = [draw_ids(lengths.section) for _ in range(workload.conversations)]
    rollouts = []
    for rollout_index in range(workload.rollouts):
        memory, conversations = array("I"), []
        for index, section in enumerate(sections):
            prompt_end = section + memory if order is PromptOrder.SECTION_FIRST else memory + section
            completion = draw_ids(lengths.completion)
            # A model with random weights gives each token about 1 / vocabulary.
            logprobs = array("f", (min(rng.gauss(-math.log(vocabulary), 0.2), 0.0) for _ in completion))
            location = ("answer", "", 0) if index == workload.conversations - 1 else ("update", "", index)
            conversations.append(
                TrainingConversation(header + prompt_end, completion, logprobs, *location, False, "v0")
            )
            memory = completion
        rollouts.append(Rollout(f"{name}-{rollout_index}", tuple(conversations), float(rollout_index % 2)))
    return RolloutGroup(name, tuple(rollouts))


def make_groups(order: PromptOrder, workload: Workload, vocabulary: int) -> list[RolloutGroup]:
    """Return the short group of the untimed step, and one group for each timed step."""
    timed_groups = [make_group(f"timed-{number}", order, workload, vocabulary) for number in range(workload.repeats)]
    return [make_group("warm-up", order, replace(workload, lengths=Lengths(4, 8, 4)), vocabulary), *timed_groups]


def compare(contenders: Sequence[Contender], workload: Workload) -> dict[Contender, list[Step]]:
    """Measure contenders in their order, and return their steps; one that is named twice is measured twice.

    Raises:
        ValueError: two contenders of the same prompt order differ in loss or gradient norm.
    """
    steps_by_contender: dict[Contender, list[Step]] = {}
    for contender in contenders:
        print(f"  {contender.order}, {contender.name} ...", file=sys.stderr, flush=True)
        steps = run_contender(contender, workload)
        for cost in (step.cost for step in steps):
            cost_text = f"{cost.wall_seconds:.3g} s, {cost.processor_seconds:.3g} of processor time"
            print(f"    {cost.forwarded_tokens:,} tokens, {cost_text}", file=sys.stderr, flush=True)
        reference_steps = next(
            (steps_by_contender[other] for other in steps_by_contender if other.order is contender.order), steps
        )
        _check_same_work(contender, steps, reference_steps[: workload.repeats], TOLERANCES[workload.dtype])
        steps_by_contender[contender] = steps_by_contender.get(contender, []) + steps
    return steps_by_contender


def run_contender(contender: Contender, workload: Workload) -> list[Step]:
    """Run a contender's training, and return its timed steps."""
    config = make_model_config(workload.model_size)
    groups = make_groups(contender.order, workload, config.vocab_size)
    seed = next(
        seed for seed in count() if split_into_steps(groups, groups_per_step=1, seed=seed)[0][0].group_id == "warm-up"
    )
    trainer_options: dict[str, Any] = {
        **_TRAINER_OPTIONS,
        "seed": seed,
        "max_steps": len(groups),
        "use_cpu": workload.device == "cpu",
        "bf16": workload.dtype == "bf16",
        "gradient_checkpointing": contender.checkpointing,
    }
    torch.manual_seed(0)
    with torch.device(workload.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    recorder = _StepRecorder(model, workload.device)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        trainer: GRPOTrainer
        if contender.layout is not None:
            arguments = MultiConvDAPOConfig(
                output_dir=folder, layout=contender.layout, token_budget=TOKEN_BUDGET, groups_per_step=1,
                old_logprobs=OldLogProbs.LOGGED, importance_cap=None, max_logprob_gap=9, **trainer_options,
            )  # fmt: skip
            trainer = MultiConvDAPOTrainer(
                model, groups, arguments, processing_class=_make_tokenizer(), callbacks=[recorder]
            )
        else:
            step_groups = split_into_steps(groups, groups_per_step=1, seed=seed)
            batches = [batch for step in step_groups for batch in _make_stock_batches(step, contender.batch_size)]
            trainer = _make_stock_trainer(
                model, batches, contender.batch_size, folder, workload.rollouts, trainer_options, recorder
            )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps = [
        Step(cost, loss=log["loss"], gradient_norm=log["grad_norm"])
        for cost, log in zip(recorder.costs, logs, strict=True)
    ]
    del trainer, model
    gc.collect()
    if workload.device == "cuda":
        torch.cuda.empty_cache()
    return steps[1:]


def make_model_config(size: str) -> PreTrainedConfig:
    """Return the configuration of the embedded policy, of Qwen2.5-0.5B, or of a tiny Qwen2 for tests."""
    if size == "embedded":
        config: PreTrainedConfig = AutoConfig.from_pretrained(EMBEDDED_FOLDER)
        return config
    if size == "0.5B":
        return Qwen2Config(
            vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
        )  # fmt: skip
    return Qwen2Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip


def _make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer without a vocabulary, from which trainers get the padding id."""
    words = Tokenizer(models.WordLevel({"pad": 0, "end": 1}, unk_token="pad"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", eos_token="end")


class _StockTrainer(GRPOTrainer):
    """TRL's own trainer, with prepared batches instead of generated rows."""

    batches: Sequence[dict[str, Tensor]] = ()

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Tensor]:
        return {name: tensor.to(self.accelerator.device) for name, tensor in self.batches[self._step].items()}


def _make_stock_trainer(
    model: Any,
    batches: Sequence[dict[str, Tensor]],
    batch_size: int,
    folder: str,
    rollouts: int,
    trainer_options: dict[str, Any],
    recorder: TrainerCallback,
) -> GRPOTrainer:
    batches_per_step = len(batches) // trainer_options["max_steps"]
    arguments = GRPOConfig(
        output_dir=folder, loss_type="dapo", per_device_train_batch_size=batch_size, num_generations=rollouts,
        gradient_accumulation_steps=batches_per_step, steps_per_generation=batches_per_step,
        remove_unused_columns=False, **trainer_options,
    )  # fmt: skip
    trainer = _StockTrainer(
        model,
        reward_funcs=lambda *_, **__: [],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [""] * len(batches) * batch_size}),
        processing_class=_make_tokenizer(),
        callbacks=[recorder],
    )
    trainer.batches = batches
    return trainer


def _make_stock_batches(groups: Sequence[RolloutGroup], batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the input of TRL's loss for one optimizer step; rows of similar length are together."""
    rows: list[TrainingRow] = sorted(
        prepare_batch(groups, AdvantageSettings()).rows, key=lambda row: row.conversation_index
    )
    learned_tokens = torch.tensor(sum(row.conversation.learned_tokens for row in rows))
    for start in range(0, len(rows), batch_size):
        batch_rows = rows[start : start + batch_size]
        prompt_ids, prompt_mask, completion_ids, completion_mask = pad_rows([row.conversation for row in batch_rows])
        old_logprobs = torch.zeros(completion_ids.shape)
        for index, row in enumerate(batch_rows):
            old_logprobs[index, : len(row.conversation.logprobs_T)] = torch.tensor(row.conversation.logprobs_T)
        yield {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor([row.advantage for row in batch_rows]),
            "old_per_token_logps": old_logprobs,
            "num_items_in_batch": learned_tokens,
        }


class _StepRecorder(TrainerCallback):
    """Measures the time of each optimizer step, from the first micro-batch to the end of AdamW, and its tokens."""

    def __init__(self, model: Any, device: str) -> None:
        self.device = device
        self.costs: list[StepCost] = []
        self._tokens = 0
        self._start_times = (0.0, 0.0)
        model.get_input_embeddings().register_forward_hook(self._count_tokens)

    def _count_tokens(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._tokens += inputs[0].numel()

    def _read_clocks(self) -> tuple[float, float]:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._tokens = 0
        self._start_times = self._read_clocks()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wall, processor = (end - start for end, start in zip(self._read_clocks(), self._start_times, strict=True))
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        self.costs.append(StepCost(wall, processor, self._tokens, peak))


def _check_same_work(
    contender: Contender, steps: Sequence[Step], expected_steps: Sequence[Step], tolerance: float
) -> None:
    for step_index, (step, expected_step) in enumerate(zip(steps, expected_steps, strict=True)):
        for metric, value, expected_value in (
            ("loss", step.loss, expected_step.loss),
            ("gradient norm", step.gradient_norm, expected_step.gradient_norm),
        ):
            if not math.isclose(value, expected_value, rel_tol=tolerance):
                raise ValueError(
                    f"{contender.name}, {contender.order}: step {step_index}: {metric} is {value}, but "
                    f"{expected_value} for the first contender with this order. They do different work, so do not "
                    "compare their times."
                )

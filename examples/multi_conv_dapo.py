"""Multi-Conv DAPO in one file of plain PyTorch: `python examples/multi_conv_dapo.py RUNS MODEL OUT --preset dapo`.

A rollout reads a document in K separate conversations of prompt and completion, such as memory updates and the answer.
Only the answer has a reward R. Its difference from the mean of the question's rollouts, their group, is the advantage A
of every learned token t of all K conversations:

    A    = R - mean(R) over the group's rollouts (never over conversations)         [DAPO: / (std(R) + epsilon)]
           and of several rewards their weighted sum, where each `Term` compares runs, or conversations of one slot
    r_t  = p(t) / p_old(t), where p_old is the policy before the first step on these rollouts
    loss = 1/T sum_t( -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A) + kl_coef KL_t - entropy_coef H_t )

T counts the learned tokens of all groups of the step. Conversations are computed one by one, without padding: slow but
simple; `memagent train` does the same in batches. Left out: mini-batches, warm-up, LoRA.
"""
# ruff: noqa: N803, N806 - suffixes give shapes: G rollouts of a group, K conversations, T completion tokens, V words

from __future__ import annotations

import argparse
import copy
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers import PreTrainedModel as Model

from memagent_training.data.replay import load_groups
from memagent_training.data.rollouts import RolloutGroup as Group
from memagent_training.data.rollouts import TrainingConversation as Conversation
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.outcome_rewards import BoxedExactMatch
from memagent_training.rewards.reward_names import find_built_in_reward


@dataclass(frozen=True, slots=True)
class Term:
    """A term of A: a reward by name, times a weight."""

    reward: str  # outcome, step, or another that the rollouts have
    weight: float = 1.0
    scope: Literal["run", "role", "conversation"] = "run"  # what is compared: runs, or conversations in the same slot
    of: str = "*"  # the roles whose mean reward is a run's reward
    roles: tuple[str, ...] = ("*",)  # of the tokens that the advantage is for
    divide_by_std: bool | None = None  # None: as the settings say


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the algorithm."""

    divide_by_std: bool = False
    epsilon: float = 1e-6
    leave_one_out: bool = False  # compare with the mean of the group's other rollouts
    terms: tuple[Term, ...] = (Term("outcome"),)  # whose sum A is
    overlong: tuple[int, int] | None = None  # maximum length, and the tokens before it in which the penalty rises to 1
    drop_zero_variance: bool = False  # leave out groups whose rewards are all equal
    mask_truncated: bool = False  # learn nothing from completions that the output bound cut off
    loss_weights: Literal["token_mean", "rollout_mean", "conversation_mean"] = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # where A < 0, a token's loss is at most this times -A
    importance_level: Literal["token", "sequence"] = "token"  # sequence: one ratio for a whole completion (GSPO)
    importance_cap: float | None = None  # weigh by p_old / p_logged, up to this; logs hold p at a temperature of 1
    kl_coef: float = 0.0
    kl_clamp: float = math.inf  # the most that a token's KL counts
    entropy_coef: float = 0.0
    temperature: float = 1.0


MEMAGENT_PAPER = Settings(dual_clip=3.0, kl_coef=1e-3, kl_clamp=10.0)
DAPO = Settings(divide_by_std=True, drop_zero_variance=True, clip_high=0.28)
GRU_MEM = (  # arXiv 2602.10560 publishes no constants: these are ours
    Term("outcome", 0.8), Term("format", 0.08), Term("exit_in_time", 0.16, roles=("gated_*",)),
    Term("gate_right", 0.2, "conversation", roles=("gated_*",)),
)  # fmt: skip
REMEMR1 = (Term("outcome", 0.8), Term("format", 0.2, "conversation"), Term("recall_gain", 0.2, "conversation"))
PRESETS = {
    "memagent-paper": MEMAGENT_PAPER,
    "dapo": DAPO,
    "gru-mem": replace(MEMAGENT_PAPER, drop_zero_variance=True, terms=GRU_MEM),
    "rememr1": replace(MEMAGENT_PAPER, terms=REMEMR1),  # arXiv 2509.23040
    "longrlvr": replace(MEMAGENT_PAPER, divide_by_std=True, drop_zero_variance=True, terms=(Term("longrlvr"),)),
}


def compare_rewards(R: Sequence[float], settings: Settings) -> list[float]:
    """Return the difference of each reward from the group's mean; a single reward has 0."""
    means = [fmean(R[:i] + R[i + 1 :] if settings.leave_one_out and len(R) > 1 else R) for i in range(len(R))]
    scale = stdev(R) + settings.epsilon if settings.divide_by_std and len(R) > 1 else 1.0
    return [(reward - mean) / scale for reward, mean in zip(R, means, strict=True)]


def group_rewards(group: Group, term: Term) -> list[dict[tuple[int, tuple[int, ...]], float]]:
    """Return groups of rewards that a term compares, each reward by rollout g and the conversations k it credits."""
    rewards_by_scope: dict[object, dict[tuple[int, tuple[int, ...]], float]] = defaultdict(dict)
    for g, rollout in enumerate(group.rollouts_G):
        roles_K = [conversation.role for conversation in rollout.conversations_K]
        credited = tuple(k for k, role in enumerate(roles_K) if any(fnmatchcase(role, name) for name in term.roles))
        R = {"outcome": rollout.reward, **rollout.term_rewards}[term.reward]
        R_K = [R] * len(roles_K) if isinstance(R, float) else [*R]
        counted_rewards = [reward for role, reward in zip(roles_K, R_K, strict=True) if fnmatchcase(role, term.of)]
        if term.scope != "conversation" and counted_rewards:
            rewards_by_scope["runs"][g, credited] = fmean(counted_rewards)
        for k in credited if term.scope == "conversation" else ():
            rewards_by_scope[rollout.conversations_K[k].slot_key][g, (k,)] = R_K[k]
    return list(rewards_by_scope.values())


def compute_advantages(group: Group, settings: Settings) -> list[list[float]]:
    """Return A for the K conversations of each of the G rollouts; G is at least 2."""
    max_length, ramp = settings.overlong or (math.inf, 1)
    lengths_GK = [[len(row.completion_ids_T) for row in rollout.conversations_K] for rollout in group.rollouts_G]
    penalties_G = [min(max((max(lengths_K) - max_length + ramp) / ramp, 0.0), 1.0) for lengths_K in lengths_GK]
    A_GK = [[0.0 for _ in lengths_K] for lengths_K in lengths_GK]
    for term in settings.terms:
        term_settings = settings if term.divide_by_std is None else replace(settings, divide_by_std=term.divide_by_std)
        for rewards in group_rewards(group, term):
            R = [reward - penalties_G[g] * (term.reward == "outcome") for (g, _), reward in rewards.items()]
            for (g, credited), A in zip(rewards, compare_rewards(R, term_settings), strict=True):
                for k in credited:
                    A_GK[g][k] += term.weight * A
    return A_GK


def is_trained_on(group: Group, settings: Settings) -> bool:
    """Return whether a group is part of the step; other groups are left out of all means."""
    rewards = [[*rewards_gk.values()] for term in settings.terms for rewards_gk in group_rewards(group, term)]
    has_variance = any(not math.isclose(min(R), max(R), abs_tol=1e-12) for R in rewards)
    return len(group.rollouts_G) > 1 and (has_variance or not settings.drop_zero_variance)


def mask_learned(conversation: Conversation, settings: Settings) -> list[bool]:
    """Return which of the T completion tokens are learned from."""
    mask_T = conversation.loss_mask_T or [True] * len(conversation.completion_ids_T)
    return [is_learned and not (settings.mask_truncated and conversation.truncated) for is_learned in mask_T]


def forward(model: Model, conversation: Conversation, temperature: float) -> tuple[Tensor, Tensor]:
    """Return each completion token's log-prob, and the entropy of its distribution: (logprobs_T, entropies_T)."""
    ids = torch.tensor([*conversation.prompt_ids_P, *conversation.completion_ids_T], device=model.device)
    start = len(conversation.prompt_ids_P)
    logits_TV = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]  # each predicts the next
    logprobs_TV = (logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)) / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, ids[start:, None])[:, 0], -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def compute_losses(
    model: Model, conversation: Conversation, A: float, settings: Settings,
    old_T: Tensor | None, reference: Model | None,
) -> Tensor:  # fmt: skip
    """Return the loss of each learned token of a conversation."""
    learned_T = torch.tensor(mask_learned(conversation, settings), device=model.device)
    logprobs_T, entropies_T = forward(model, conversation, settings.temperature)
    old_T = logprobs_T.detach() if old_T is None else old_T.to(logprobs_T)
    log_ratio_T = (logprobs_T - old_T).clamp(-20, 20)  # or exp would be infinite
    if settings.importance_level == "sequence":
        log_ratio_T = log_ratio_T[learned_T].mean().expand_as(log_ratio_T)
    ratio_T = log_ratio_T.exp()
    loss_T = -torch.min(ratio_T * A, ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high) * A)
    if settings.dual_clip is not None and A < 0:
        loss_T = loss_T.clamp(max=-settings.dual_clip * A)
    if settings.importance_cap is not None:
        loss_T = loss_T * (old_T - old_T.new_tensor(conversation.logprobs_T)).exp().clamp(max=settings.importance_cap)
    if settings.kl_coef:
        if reference is None:
            raise ValueError("kl_coef needs a reference: pass the model as it was before training")
        reference_T = forward(reference, conversation, settings.temperature)[0].detach()
        gap_T = (reference_T - logprobs_T).clamp(-20, 20)
        loss_T = loss_T + settings.kl_coef * (gap_T.exp() - gap_T - 1).clamp(max=settings.kl_clamp)  # Schulman's k3
    return (loss_T - settings.entropy_coef * entropies_T)[learned_T]


def compute_step_loss(
    model: Model, groups: Sequence[Group], settings: Settings, *, old: Mapping[tuple[str, int], Tensor] | None = None,
    reference: Model | None = None, backward: bool = False,
) -> Tensor:  # fmt: skip
    """Return an optimizer step's loss, a scalar. `old`: p_old's logprobs_T by run id and k; None: the model's own."""
    rows = [
        (rollout.run_id, k, conversation, A)
        for group in groups
        if is_trained_on(group, settings)
        for rollout, A_K in zip(group.rollouts_G, compute_advantages(group, settings), strict=True)
        for k, (conversation, A) in enumerate(zip(rollout.conversations_K, A_K, strict=True))
        if any(mask_learned(conversation, settings))
    ]
    if not rows:
        raise ValueError("nothing can be learned from these groups: roll out more, or drop and mask less")
    learned_tokens = Counter(run_id for run_id, _, row, _ in rows for learned in mask_learned(row, settings) if learned)
    loss = torch.zeros(())
    for run_id, k, conversation, A in rows:
        losses = compute_losses(model, conversation, A, settings, None if old is None else old[run_id, k], reference)
        divisor = {
            "token_mean": learned_tokens.total(),
            "rollout_mean": len(learned_tokens) * learned_tokens[run_id],
            "conversation_mean": len(rows) * len(losses),
        }[settings.loss_weights]
        conversation_loss = losses.sum() / divisor
        if backward:  # now, so that only one conversation's graph is in memory
            conversation_loss.backward()  # type: ignore[no-untyped-call]
        loss = loss + (conversation_loss.detach() if backward else conversation_loss)
    return loss


def train(model: Model, groups: Sequence[Group], settings: Settings, *, steps: int, learning_rate: float) -> None:
    """Take optimizer steps, each on all groups, and print the loss and the gradient norm of each."""
    model.eval()  # with dropout, the ratios of unchanged weights would not be 1
    reference = copy.deepcopy(model) if settings.kl_coef else None
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    rows = {(rollout.run_id, k): row for rollout in rollouts for k, row in enumerate(rollout.conversations_K)}
    old = {key: forward(model, row, settings.temperature)[0].detach() for key, row in rows.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    for step in range(1, steps + 1):
        loss = compute_step_loss(model, groups, settings, old=old, reference=reference, backward=True)
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss:+.6f}, gradient norm {gradient_norm:.3f}")


def main() -> None:
    """Train the model that the command line names, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="a run log, or an export of one")
    parser.add_argument("model", type=Path, help="the folder of the model that made the runs")
    parser.add_argument("out", type=Path, help="a new folder for the trained model")
    parser.add_argument("--preset", choices=PRESETS, default="memagent-paper")
    parser.add_argument("--reward", default="reward", help="the name of a reward in the log")
    parser.add_argument("--gold", type=Path, help="right answers in JSON lines, for rewards by boxed exact match")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists: name a new folder")
    gold, settings = GoldAnswers.load(arguments.gold) if arguments.gold else None, PRESETS[arguments.preset]
    device = torch.accelerator.current_accelerator(check_available=True)  # None without one
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, device_map=device)
    terms = {term.reward: find_built_in_reward(term.reward) for term in settings.terms if term.reward != "outcome"}
    reward, find_gold = (BoxedExactMatch(), gold.find) if gold else (arguments.reward, None)
    replay = load_groups(arguments.runs, reward=reward, term_rewards=terms, find_gold=find_gold)
    train(model, replay.require_groups(), settings, steps=arguments.steps, learning_rate=arguments.learning_rate)
    shutil.copytree(arguments.model, arguments.out, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()

"""However a step is ordered, split, laid out and shared out over ranks, its gradient is that of one row at a time."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from memagent_training.algorithm.advantages import AdvantageSettings, LossWeights, TrainingRow, prepare_batch  # noqa: E402
from memagent_training.algorithm.planner import Layout, plan_step  # noqa: E402
from memagent_training.data.rollouts import Rollout, RolloutGroup, TrainingConversation  # noqa: E402
from memagent_training.forward.layouts import lay_out  # noqa: E402
from memagent_training.forward.scoring import score_completions  # noqa: E402

VOCABULARY = 24
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).double()
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":  # transformers' own computes in float32
            norm = torch.nn.RMSNorm(module.weight.shape, eps=1e-6, dtype=torch.float64)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, norm)
    return model


def gradient(model: Any, rows: Sequence[TrainingRow], *, ranks: int, budget: int, layout: Layout) -> Any:
    """Of sum(weight * advantage * log-prob), the policy gradient at a ratio of 1, as the ranks' sum."""
    model.zero_grad()
    plan = plan_step(rows, ranks=ranks, token_budget=budget, layout=layout)
    for rank in plan.micro_batches:
        for planned in rank:
            real = [rows[number] for number in planned.rows]
            padding_rows = [
                TrainingConversation(array("I", [0]), array("I", [0]), array("f", [0.0]), "update", "", 0, False, "")
            ]
            conversations = [*(row.conversation for row in real), *padding_rows * planned.padding_rows]
            scored = score_completions(model, lay_out(conversations, layout, pad_id=0))
            factors = torch.tensor(
                [*(row.weight * row.advantage for row in real), *[0.0] * planned.padding_rows], dtype=torch.float64
            )
            (scored.logprobs_BT * scored.mask_BT * factors[:, None]).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def one_by_one(model: Any, rows: Sequence[TrainingRow]) -> Any:
    model.zero_grad()
    for row in rows:
        prompt, completion = list(row.conversation.prompt_ids_P), list(row.conversation.completion_ids_T)
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum()
        (row.weight * row.advantage * chosen).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def make_groups(seed: int) -> list[RolloutGroup]:
    """Small groups whose prompts share prefixes, with duplicates among them."""
    source = random.Random(seed)

    def conversation(shared: list[int]) -> TrainingConversation:
        prompt = shared + [source.randrange(VOCABULARY) for _ in range(source.randint(0, 4))]
        completion = [source.randrange(VOCABULARY) for _ in range(source.randint(1, 5))]
        logprobs = array("f", [-1.0] * len(completion))
        return TrainingConversation(array("I", prompt), array("I", completion), logprobs, "update", "", 0, False, "v1")

    groups = []
    for number in range(source.randint(1, 3)):
        shared = [source.randrange(VOCABULARY) for _ in range(source.randint(1, 6))]
        rollouts = []
        for place in range(source.randint(2, 4)):
            conversations = [conversation(shared) for _ in range(source.randint(1, 3))]
            if source.random() < 0.3:
                conversations.append(conversations[0])
            rollouts.append(Rollout(f"r{number}-{place}", tuple(conversations), source.choice([0.0, 0.5, 1.0])))
        groups.append(RolloutGroup(f"g{number}", tuple(rollouts)))
    return groups


def _shuffled(shuffle: random.Random, items: Sequence[Any]) -> list[Any]:
    return shuffle.sample(list(items), len(items))


@given(
    seed=st.integers(0, 10_000),
    ranks=st.integers(1, 4),
    budget=st.integers(24, 200),
    layout=st.sampled_from(Layout),
    weights=st.sampled_from(LossWeights),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_splitting_padding_and_ranks_change_nothing(
    model: Any, seed: int, ranks: int, budget: int, layout: Layout, weights: LossWeights
) -> None:
    rows = prepare_batch(make_groups(seed), AdvantageSettings(loss_weights=weights)).rows
    found = gradient(model, rows, ranks=ranks, budget=budget, layout=layout)
    assert (found - one_by_one(model, rows)).abs().max() < TOLERANCE


@given(seed=st.integers(0, 10_000), shuffle=st.randoms(use_true_random=False), layout=st.sampled_from(Layout))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_order_of_groups_and_rollouts_changes_nothing(
    model: Any, seed: int, shuffle: random.Random, layout: Layout
) -> None:
    groups = make_groups(seed)
    shuffled = [replace(group, rollouts_G=tuple(_shuffled(shuffle, group.rollouts_G))) for group in groups]
    gradients = [
        gradient(model, prepare_batch(each, AdvantageSettings()).rows, ranks=2, budget=60, layout=layout).clone()
        for each in (groups, _shuffled(shuffle, shuffled))
    ]
    assert (gradients[0] - gradients[1]).abs().max() < TOLERANCE


@given(seed=st.integers(0, 10_000), longer=st.integers(1, 8))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_duplicated_prefix_costs_nothing_and_changes_nothing(model: Any, seed: int, longer: int) -> None:
    """Two equal groups are twice one of them: the mean is the same, and the tree no larger."""
    groups = make_groups(seed)
    again = [
        RolloutGroup(group.group_id + "'", tuple(replace(r, run_id=r.run_id + "'") for r in group.rollouts_G))
        for group in groups
    ]
    once, twice = (prepare_batch(each, AdvantageSettings()).rows for each in (groups, [*groups, *again]))
    budget = 40 * longer + 2000
    plans = [plan_step(each, ranks=1, token_budget=budget, layout=Layout.PREFIX_TREE) for each in (once, twice)]
    assert plans[0].forwarded_tokens == plans[1].forwarded_tokens
    gradients = [
        gradient(model, each, ranks=1, budget=budget, layout=Layout.PREFIX_TREE).clone() for each in (once, twice)
    ]
    assert (gradients[0] - gradients[1]).abs().max() < TOLERANCE

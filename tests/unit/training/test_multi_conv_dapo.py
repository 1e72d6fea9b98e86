"""The teaching example says what Multi-Conv DAPO is: by hand, by numeric differentiation, and from a log to a model."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.programs import run_program

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import made_rollouts  # noqa: E402
import multi_conv_dapo as dapo  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support.training_log import comparable, write_log  # noqa: E402

from memagent_training.algorithm.advantages import (  # noqa: E402
    AdvantageSettings,
    Baseline,
    DropReason,
    LossWeights,
    OverlongPenalty,
    find_drop_reason,
    prepare_batch,
)
from memagent_training.algorithm.credit import parse_terms  # noqa: E402
from memagent_training.data.rollouts import Rollout, RolloutGroup, TrainingConversation  # noqa: E402

EXAMPLE = Path(dapo.__file__)
PLAIN = dapo.Settings()


class Bigram(torch.nn.Module):  # type: ignore[name-defined, misc]
    """A language model whose next token depends on the last alone, with probabilities that are given."""

    def __init__(self, *probabilities: Sequence[float]) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).log())
        self.device = torch.device("cpu")

    def forward(self, input_ids: Any, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def bigram() -> Bigram:
    """After 0 come 0, 1 and 2 with a half, a quarter and a quarter."""
    return Bigram([0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1])


def conversation(*completion: int, prompt: Sequence[int] = (0,), **more: Any) -> TrainingConversation:
    return made_rollouts.conversation(prompt, completion, **more)


_names = itertools.count()


def group(*rollouts: tuple[float, Sequence[TrainingConversation]], name: str = "question") -> RolloutGroup:
    """Rollouts of (reward, conversations)."""
    return RolloutGroup(name, tuple(Rollout(f"run{next(_names)}", tuple(rows), reward) for reward, rows in rollouts))


def run_ids(*groups: RolloutGroup) -> list[str]:
    return [rollout.run_id for group in groups for rollout in group.rollouts_G]


def outcomes(group: RolloutGroup, choice: Any) -> list[float]:
    """A of rollouts without step rewards: of all conversations of one the same."""
    advantages = [set(A_K) for A_K in dapo.compute_advantages(group, choice)]
    assert all(len(A_K) == 1 for A_K in advantages)
    return [A for A_K in advantages for A in A_K]


def log(*probabilities: float) -> Any:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def loss(groups: Sequence[RolloutGroup], choice: Any = PLAIN, **policies: Any) -> float:
    return float(dapo.compute_step_loss(bigram(), groups, choice, **policies).detach())


# The policy's log-probs


def test_log_probs_and_entropies_are_of_the_completion_s_tokens() -> None:
    logprobs_T, entropies_T = dapo.forward(bigram(), conversation(1, 2, 0, prompt=[2, 0]), 1.0)
    assert logprobs_T.exp().tolist() == pytest.approx([0.25, 0.7, 0.6])
    first = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert entropies_T.tolist()[0] == pytest.approx(first)
    assert len(entropies_T) == 3


def test_weights_of_half_precision_are_scored_in_single() -> None:
    logprobs_T, entropies_T = dapo.forward(bigram().bfloat16(), conversation(0), 1.0)
    assert (logprobs_T.dtype, entropies_T.dtype) == (torch.float32, torch.float32)


# Who gets which advantage, and over what the loss is a mean: below, as in the package, whose tests do it by hand


SHORT_AND_LONG = group((1.0, [conversation(1)]), (0.0, [conversation(1), conversation(2, 1)]))
"""A half for one token, minus a half for one and two more."""


# What a token's loss is: by hand. The advantage is a half, the other rollout's ratio 1.


def one_token(sign: int, ratio: float, choice: Any) -> tuple[float, float]:
    """The loss of a token with advantage half of `sign` and this ratio, and its derivative by the token's log-prob."""
    pair = group((float(sign), [conversation(1)]), (0.0, [conversation(1, prompt=[2])]))
    ids = run_ids(pair)
    old = {(ids[0], 0): log(0.25 / ratio), (ids[1], 0): log(0.3)}
    model = bigram()
    total = dapo.compute_step_loss(model, [pair], choice, old=old)
    total.backward()
    slope = float(model.table.grad[0, 1]) / (1 - 0.25)  # d log p / d logit = 1 - p
    return float(total.detach()) * 2 - sign * 0.5, slope * 2


@pytest.mark.parametrize(
    ("sign", "ratio", "expected", "slope"),
    [
        (+1, 1.1, -0.55, -0.55),
        (+1, 1.25, -0.625, -0.625),  # between the clip's two sides
        (+1, 1.5, -0.64, 0.0),
        (+1, 0.5, -0.25, -0.25),
        (-1, 0.9, 0.45, 0.45),
        (-1, 0.5, 0.40, 0.0),
        (-1, 1.5, 0.75, 0.75),
        (-1, 10.0, 1.50, 0.0),  # three times the advantage, and no more
    ],
)
def test_the_ratio_is_clipped_where_it_went_far_enough(sign: int, ratio: float, expected: float, slope: float) -> None:
    choice = dapo.Settings(clip_high=0.28, dual_clip=3.0)
    assert one_token(sign, ratio, choice) == pytest.approx((expected, slope), abs=1e-9)


@pytest.mark.parametrize(("cap", "weight"), [(None, 1.0), (1.0, 0.25 / 0.5), (0.1, 0.1)])
def test_without_old_log_probs_they_are_the_model_s_and_move_nothing(cap: float | None, weight: float) -> None:
    pair = group((0.0, [conversation(1, logprobs=[math.log(0.5)])]), (1.0, [conversation(1, prompt=[2])]))
    model = bigram()
    dapo.compute_step_loss(model, [pair], dapo.Settings(importance_cap=cap)).backward()
    assert float(model.table.grad[0, 1]) == pytest.approx(0.5 * weight * (1 - 0.25) / 2)


def test_the_entropy_bonus_is_a_mean_over_learned_tokens() -> None:
    equal = group((1.0, [conversation(1, 2, mask=[True, False])]), (1.0, [conversation(1)]))
    assert loss([equal], dapo.Settings(entropy_coef=0.2)) == pytest.approx(-0.2 * 1.5 * math.log(2))


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_coef needs a reference"):
        loss([SHORT_AND_LONG], dapo.MEMAGENT_PAPER)
    equal = group((1.0, [conversation(1)]), (1.0, [conversation(1)]))
    with pytest.raises(ValueError, match="nothing can be learned"):
        loss([equal], dapo.DAPO)
    with pytest.raises(KeyError):
        loss([SHORT_AND_LONG], old={})


# Against the package's own advantages and weights


@st.composite
def many_groups(draw: st.DrawFn) -> list[RolloutGroup]:
    def draw_turn() -> TrainingConversation:
        length = draw(st.integers(0, 4))
        mask = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
        turn = conversation(*[1] * length, mask=mask, truncated=draw(st.booleans()))
        roles, branches = st.sampled_from(["update", "merge", "answer"]), st.sampled_from(["", "s0"])
        return replace(turn, role=draw(roles), branch=draw(branches), slot=draw(st.integers(0, 1)))

    def with_steps(rollout: Rollout) -> Rollout:
        steps, gate = (tuple(draw(rewards) for _ in rollout.conversations_K) for _ in range(2))
        return replace(rollout, term_rewards={"step": steps, "gate": gate, "exit": float(draw(rewards))})

    rewards = st.sampled_from([0.0, 1.0, 0.3, 0.1 + 0.2, -2.5]) | st.floats(-3, 3).map(lambda value: round(value, 3))
    groups = [
        group(
            *(
                (draw(rewards), [draw_turn() for _ in range(draw(st.integers(1, 3)))])
                for _ in range(draw(st.integers(1, 4)))
            ),
            name=f"group{index}",
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    return [replace(group, rollouts_G=tuple(map(with_steps, group.rollouts_G))) for group in groups]


TERMS: list[tuple[dict[str, Any], ...]] = [
    (),
    ({"reward": "exit"},),
    ({"reward": "outcome", "weight": 0.6}, {"reward": "step", "weight": 0.4, "scope": "conversation"}),
    ({"reward": "step", "scope": "conversation"},),
    ({"reward": "outcome", "weight": 0.5}, {"reward": "exit", "weight": -0.3, "roles": ("answer",)}),
    ({"reward": "gate", "scope": "role", "of": "update", "roles": ("update", "merge")}, {"reward": "outcome"}),
    ({"reward": "gate", "scope": "conversation", "roles": ("up*",), "divide_by_std": True}, {"reward": "gate"}),
]


def as_in_the_example(of: AdvantageSettings) -> tuple[Any, ...]:
    """The terms of the package's settings, as the example has them."""
    return tuple(
        dapo.Term(term.reward, term.weight, term.scope.value, term.of or "*", term.roles or ("*",), term.divide_by_std)
        for term in of.terms
    )


@settings(max_examples=40)
@given(
    groups=many_groups(),
    terms=st.sampled_from(TERMS),
    std=st.booleans(),
    leave_one_out=st.booleans(),
    drop=st.booleans(),
    mask=st.booleans(),
    overlong=st.none() | st.just((3, 2)),
    mean=st.sampled_from(LossWeights),
)
def test_advantages_and_weights_are_the_package_s(
    groups: list[RolloutGroup],
    terms: tuple[dict[str, Any], ...],
    std: bool,
    leave_one_out: bool,
    drop: bool,
    mask: bool,
    overlong: tuple[int, int] | None,
    mean: LossWeights,
) -> None:
    if terms and all(term["reward"] != "outcome" for term in terms):
        overlong = None  # it is the outcome's
    theirs = AdvantageSettings(
        credit=parse_terms(terms),
        baseline=Baseline.LEAVE_ONE_OUT if leave_one_out else Baseline.GROUP_MEAN,
        divide_by_std=std,
        overlong_penalty=OverlongPenalty(*overlong) if overlong else None,
        mask_truncated=mask,
        drop_zero_variance=drop,
        loss_weights=mean,
    )
    ours = dapo.Settings(
        terms=as_in_the_example(theirs),
        leave_one_out=leave_one_out,
        divide_by_std=std,
        overlong=overlong,
        mask_truncated=mask,
        drop_zero_variance=drop,
        loss_weights=mean.value,
    )
    batch = prepare_batch(groups, theirs)
    for row in batch.rows:
        A_K = dapo.compute_advantages(groups[row.group_index], ours)[row.rollout_index]
        assert A_K[row.conversation_index] == pytest.approx(row.advantage, rel=1e-9, abs=1e-9)
    for group in groups:
        if find_drop_reason(group, theirs) is not DropReason.NOTHING_LEARNED:
            assert dapo.is_trained_on(group, ours) == (find_drop_reason(group, theirs) is None)
    if batch.rows:
        expected = -sum(row.weight * row.advantage * row.conversation.learned_tokens for row in batch.rows)
        assert loss(groups, ours) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        turned = [replace(group, rollouts_G=group.rollouts_G[::-1]) for group in reversed(groups)]
        assert loss(turned, ours) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    else:
        with pytest.raises(ValueError, match="nothing can be learned"):
            loss(groups, ours)


# Gradients, on a transformer


def llama(seed: int = 0, dtype: Any = torch.float64, **changes: Any) -> Any:
    """Tiny, with weights large enough that predictions differ."""
    sizes = {
        "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "initializer_range": 0.3,
    }  # fmt: skip
    return made_rollouts.make_model(seed=seed, dtype=dtype, **sizes, **changes).eval()


def a_step() -> tuple[list[RolloutGroup], dict[tuple[str, int], Any]]:
    """Variable K, a mask, a truncated conversation, equal rewards; and old log-probs that clip some tokens each way."""
    source = torch.Generator().manual_seed(3)

    def make_turn(length: int, **changes: Any) -> TrainingConversation:
        prompt, completion = (torch.randint(0, 24, (n,), generator=source).tolist() for n in (5, length))
        logprobs = (-2 - torch.rand(length, generator=source)).tolist()
        return conversation(*completion, prompt=prompt, logprobs=logprobs, **changes)

    groups = [
        group(
            (1.0, [make_turn(3), make_turn(4, mask=[True, False, True, True])]),
            (0.0, [make_turn(5)]),
            (0.25, [make_turn(2)] * 3),
        ),
        group((1.0, [make_turn(3)]), (1.0, [make_turn(2)]), name="equal"),
        group((0.0, [make_turn(6, truncated=True), make_turn(2)]), (2.0, [make_turn(4)]), name="cut"),
    ]
    model = llama()
    old = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts_G):
        for k, row in enumerate(rollout.conversations_K):
            logprobs_T = dapo.forward(model, row, 0.9)[0].detach()
            old[rollout.run_id, k] = logprobs_T + 0.8 * torch.randn(len(logprobs_T), generator=source).double()
    return groups, old


EVERYTHING = dapo.Settings(
    leave_one_out=True,
    mask_truncated=True,
    loss_weights="rollout_mean",
    dual_clip=1.5,
    importance_level="sequence",
    importance_cap=1.5,
    kl_coef=0.05,
    entropy_coef=0.02,
)
VARIANTS = {
    "paper": replace(dapo.MEMAGENT_PAPER, kl_coef=0.1),
    "dapo": replace(dapo.DAPO, overlong=(6, 4), importance_cap=2.0),
    "everything": EVERYTHING,
    "conversation_mean": replace(EVERYTHING, importance_level="token", loss_weights="conversation_mean"),
}


def test_these_steps_clip_on_both_sides_and_twice() -> None:
    groups, old = a_step()
    model = llama()
    pairs = []
    for group in groups:
        for rollout, advantage in zip(group.rollouts_G, outcomes(group, PLAIN), strict=True):
            for k, row in enumerate(rollout.conversations_K):
                logprobs_T, _ = dapo.forward(model, row, 0.9)
                pairs += [(advantage, float(ratio)) for ratio in (logprobs_T.detach() - old[rollout.run_id, k]).exp()]
    assert any(advantage > 0 and ratio > 1.28 for advantage, ratio in pairs)
    assert any(advantage < 0 and ratio < 0.8 for advantage, ratio in pairs)
    assert any(advantage < 0 and ratio > 3 for advantage, ratio in pairs)
    assert any(advantage and 0.8 < ratio < 1.2 for advantage, ratio in pairs)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_numeric_differentiation(name: str) -> None:
    choice = replace(VARIANTS[name], temperature=0.9)
    groups, old = a_step()
    model, reference = llama(), llama(seed=1)

    def at_present() -> Any:
        return dapo.compute_step_loss(model, groups, choice, old=old, reference=reference)

    at_present().backward()
    source = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        direction = torch.randn(parameter.shape, generator=source).double()
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-6)
            above = at_present()
            parameter.sub_(direction, alpha=2e-6)
            below = at_present()
            parameter.add_(direction, alpha=1e-6)
        expected = float(above - below) / 2e-6
        assert float((parameter.grad * direction).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-8)


# Training


def read_steps(out: str) -> list[tuple[int, float, float]]:
    lines = re.findall(r"^step (\d+): reward (\S+), loss (\S+)$", out, re.MULTILINE)
    return [(int(step), float(reward), float(value)) for step, reward, value in lines]


def test_training_takes_adamw_steps_from_the_policy_and_towards_the_reference_of_the_start(capsys) -> None:
    """Without dropout, and going backward from one conversation at a time."""
    pair = group((40.0, [conversation(1, 2), conversation(3)]), (0.0, [conversation(4, 5), conversation(6)]))
    choice = replace(dapo.MEMAGENT_PAPER, kl_coef=5.0)
    policy, model, start = llama(attention_dropout=0.5).train(), llama(), llama()
    dapo.train(policy, [pair], choice, steps=4, learning_rate=1e-2)
    old = {
        (rollout.run_id, k): dapo.forward(start, row, 1.0)[0].detach()
        for rollout in pair.rollouts_G
        for k, row in enumerate(rollout.conversations_K)
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        present = dapo.compute_step_loss(model, [pair], choice, old=old, reference=start)
        present.backward()
        losses.append(float(present.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert [value for _, _, value in read_steps(capsys.readouterr().out)] == pytest.approx(losses, abs=1e-6)
    for left, right in zip(policy.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-9)


@pytest.fixture
def workplace(world, tmp_path: Path) -> tuple[Path, RolloutGroup]:
    """A log of four rollouts of a question, of which one ends in the right answer, a model and gold answers."""
    four = next(group for group in comparable(world.groups) if len(group.rollouts_G) == 4)
    right = {four.rollouts_G[0].run_id: {"text": r"\boxed{4711}"}}
    write_log(tmp_path / "runs.sqlite", [four], world.model, of_run=right)
    shutil.copytree(world.model, tmp_path / "model")
    gold = {"question": f"What is in {four.group_id}?", "answers": ["4711"]}
    (tmp_path / "gold.jsonl").write_text(json.dumps(gold))
    return tmp_path, four


def test_from_a_log_to_a_trained_model(workplace) -> None:
    folder, _ = workplace
    command = [sys.executable, str(EXAMPLE), "runs.sqlite", "model", "trained"]
    options = ["--preset", "dapo", "--gold", "gold.jsonl", "--steps", "2", "--learning-rate", "1e-2"]
    result = run_program([*command, *options], capture_output=True, check=True, cwd=folder)
    steps = read_steps(result.stdout)
    assert [(step, reward) for step, reward, _ in steps] == [(1, 0.25), (2, 0.25)]
    assert steps[1][2] < steps[0][2]
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(folder / name) for name in ("model", "trained"))
    changes = [
        float((right - left).detach().abs().max())
        for left, right in zip(before.parameters(), after.parameters(), strict=True)
    ]
    assert max(changes) == pytest.approx(2e-2, rel=0.2)  # two of AdamW's first steps
    assert (folder / "trained" / "tokenizer.json").exists()


@pytest.fixture
def run_main(workplace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(*options: str) -> None:
        monkeypatch.chdir(workplace[0])
        monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "runs.sqlite", "model", "trained", *options])
        dapo.main()

    return run


def test_by_default_it_is_the_paper_s_recipe_on_logged_rewards(run_main, workplace, capsys) -> None:
    run_main("--steps", "2")
    reward = sum(rollout.reward for rollout in workplace[1].rollouts_G) / 4
    assert [(step, mean) for step, mean, _ in read_steps(capsys.readouterr().out)] == [
        (step, pytest.approx(reward, abs=1e-3)) for step in (1, 2)
    ]


def test_bad_input_is_told_before_anything_is_written(run_main, workplace, capsys) -> None:
    folder, _ = workplace
    with pytest.raises(Exception, match=r"none of the 4 runs .* no_reward"):
        run_main("--reward", "liked")
    assert not (folder / "trained").exists()
    (folder / "trained").mkdir()
    with pytest.raises(SystemExit):
        run_main()
    assert "trained exists: name a new folder" in capsys.readouterr().err


# What it must stay


def test_it_has_at_most_255_lines_and_leans_on_nothing_of_the_trainer() -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 255
    nodes = list(ast.walk(ast.parse(source)))
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.startswith("memagent")} == {
        "memagent_training.data.replay",
        "memagent_training.data.rollouts",
        "memagent_training.rewards.gold_answers",
        "memagent_training.rewards.outcome_rewards",
        "memagent_training.rewards.reward_names",
    }
    assert "trl" not in {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names} | modules

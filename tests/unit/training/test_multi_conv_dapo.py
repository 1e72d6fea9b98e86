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
from made_rollouts import example_settings  # noqa: E402
from support.small_models import make_model  # noqa: E402
from support.training_log import select_comparable, write_log  # noqa: E402

from memagent_training.algorithm.advantages import (  # noqa: E402
    AdvantageBatch,
    AdvantageSettings,
    Baseline,
    DropReason,
    LossWeights,
    OverlongPenalty,
    find_drop_reason,
    prepare_batch,
)
from memagent_training.algorithm.credit import parse_credit_terms  # noqa: E402
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
    return made_rollouts.make_conversation(prompt, completion, **more)


_names = itertools.count()


def group(*rollouts: tuple[float, Sequence[TrainingConversation]], name: str = "question") -> RolloutGroup:
    """Rollouts of (reward, conversations)."""
    return RolloutGroup(name, tuple(Rollout(f"run{next(_names)}", tuple(rows), reward) for reward, rows in rollouts))


def loss(groups: Sequence[RolloutGroup], choice: Any = PLAIN, **policies: Any) -> float:
    return float(dapo.compute_step_loss(bigram(), groups, choice, **policies).detach())


# The policy's log-probs


def test_weights_of_half_precision_are_scored_in_single() -> None:
    logprobs_T, entropies_T = dapo.forward(bigram().bfloat16(), conversation(0), 1.0)
    assert (logprobs_T.dtype, entropies_T.dtype) == (torch.float32, torch.float32)


# Who gets which advantage, and over what the loss is a mean: below, as in the package, whose tests do it by hand


SHORT_AND_LONG = group((1.0, [conversation(1)]), (0.0, [conversation(1), conversation(2, 1)]))
"""A half for one token, minus a half for one and two more."""


@pytest.mark.parametrize(("cap", "weight"), [(None, 1.0), (1.0, 0.25 / 0.5), (0.1, 0.1)])
def test_without_old_log_probs_they_are_the_model_s_and_move_nothing(cap: float | None, weight: float) -> None:
    pair = group((0.0, [conversation(1, logprobs=[math.log(0.5)])]), (1.0, [conversation(1, prompt=[2])]))
    model = bigram()
    dapo.compute_step_loss(model, [pair], dapo.Settings(importance_cap=cap)).backward()
    assert float(model.table.grad[0, 1]) == pytest.approx(0.5 * weight * (1 - 0.25) / 2)


def test_missing_reference_variance_or_log_probs_are_refused() -> None:
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


def make_settings(
    terms: tuple[dict[str, Any], ...], overlong: OverlongPenalty | None, **others: Any
) -> AdvantageSettings:
    """A penalty is a part of the outcome."""
    if terms and all(term["reward"] != "outcome" for term in terms):
        overlong = None
    return AdvantageSettings(credit=parse_credit_terms(terms), overlong_penalty=overlong, **others)


SETTINGS = st.builds(
    make_settings,
    st.sampled_from(TERMS),
    st.sampled_from([None, OverlongPenalty(3, 2)]),
    baseline=st.sampled_from(Baseline),
    divide_by_std=st.booleans(),
    mask_truncated=st.booleans(),
    drop_zero_variance=st.booleans(),
    loss_weights=st.sampled_from(LossWeights),
)


@settings(max_examples=40)
@given(many_groups(), SETTINGS)
def test_advantages_and_weights_are_the_package_s(groups: list[RolloutGroup], theirs: AdvantageSettings) -> None:
    """And the package's rows are the same to the last bit in any order of groups and rollouts."""
    ours = example_settings(theirs)
    batch = prepare_batch(groups, theirs)
    for row in batch.rows:
        A_K = dapo.compute_advantages(groups[row.group_index], ours)[row.rollout_index]
        assert A_K[row.conversation_index] == pytest.approx(row.advantage, rel=1e-9, abs=1e-9)
    for group in groups:
        if find_drop_reason(group, theirs) is not DropReason.NOTHING_LEARNED:
            assert dapo.is_trained_on(group, ours) == (find_drop_reason(group, theirs) is None)
    turned = [replace(group, rollouts_G=group.rollouts_G[::-1]) for group in reversed(groups)]
    assert contents(prepare_batch(turned, theirs)) == contents(batch)
    if batch.rows:
        expected = -sum(row.weight * row.advantage * row.conversation.learned_tokens for row in batch.rows)
        assert loss(groups, ours) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert loss(turned, ours) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert math.fsum(row.weight * row.conversation.learned_tokens for row in batch.rows) == pytest.approx(1, 1e-12)
    else:
        with pytest.raises(ValueError, match="nothing can be learned"):
            loss(groups, ours)


def contents(batch: AdvantageBatch) -> tuple[Any, ...]:
    """Of a batch, without the order of its rows."""
    rows = {(row.run_id, row.conversation_index): (row.advantage, row.weight) for row in batch.rows}
    return rows, replace(batch, rows=())


def read_losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+), gradient norm [\d.]+$", out, re.MULTILINE)]


def test_training_takes_adamw_steps_from_the_policy_and_towards_the_reference_of_the_start(capsys) -> None:
    """Without dropout, and going backward from one conversation at a time."""
    pair = group((40.0, [conversation(1, 2), conversation(3)]), (0.0, [conversation(4, 5), conversation(6)]))
    choice = replace(dapo.MEMAGENT_PAPER, kl_coef=5.0)
    policy = make_model(attention_dropout=0.5).train()
    model, start = make_model().eval(), make_model().eval()
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
    assert read_losses(capsys.readouterr().out) == pytest.approx(losses, abs=1e-6)
    for left, right in zip(policy.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-9)


@pytest.fixture
def workplace(world, tmp_path: Path) -> tuple[Path, RolloutGroup]:
    """A log of four rollouts of a question, of which one ends in the right answer, a model and gold answers."""
    four = next(group for group in select_comparable(world.groups) if len(group.rollouts_G) == 4)
    right = {four.rollouts_G[0].run_id: {"text": r"\boxed{4711}"}}
    write_log(tmp_path / "runs.sqlite", [four], world.model, changes_by_run=right)
    shutil.copytree(world.model, tmp_path / "model")
    gold = {"question": f"What is in {four.group_id}?", "answers": ["4711"]}
    (tmp_path / "gold.jsonl").write_text(json.dumps(gold))
    return tmp_path, four


def test_from_a_log_to_a_trained_model(workplace) -> None:
    folder, _ = workplace
    command = [sys.executable, str(EXAMPLE), "runs.sqlite", "model", "trained"]
    options = ["--preset", "dapo", "--gold", "gold.jsonl", "--steps", "2", "--learning-rate", "1e-2"]
    result = run_program([*command, *options], capture_output=True, check=True, cwd=folder)
    first_loss, last_loss = read_losses(result.stdout)
    assert last_loss < first_loss
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


def test_by_default_it_is_the_paper_s_recipe_on_logged_rewards(run_main, workplace, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(dapo, "train", lambda model, groups, settings, **_: calls.append((groups, settings)))
    run_main()
    (((logged,), settings),) = calls
    expected_rewards = sorted(rollout.reward for rollout in workplace[1].rollouts_G)
    assert sorted(rollout.reward for rollout in logged.rollouts_G) == pytest.approx(expected_rewards)
    assert settings == dapo.MEMAGENT_PAPER


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

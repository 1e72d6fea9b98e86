"""The teaching example equals the package's advantages and AdamW steps, and trains from a log to a model."""

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
from made_rollouts import make_example_settings  # noqa: E402
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
DEFAULT_SETTINGS = dapo.Settings()


class Bigram(torch.nn.Module):  # type: ignore[name-defined, misc]
    """A language model whose next token depends only on the last one, with given probabilities."""

    def __init__(self, *probabilities: Sequence[float]) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).log())
        self.device = torch.device("cpu")

    def forward(self, input_ids: Any, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def make_bigram() -> Bigram:
    """Make a model in which 0 is followed by 0, 1 and 2 with probabilities 1/2, 1/4 and 1/4."""
    return Bigram([0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1])


def make_conversation(*completion: int, prompt: Sequence[int] = (0,), **options: Any) -> TrainingConversation:
    return made_rollouts.make_conversation(prompt, completion, **options)


_numbers = itertools.count()


def make_group(*rollouts: tuple[float, Sequence[TrainingConversation]], name: str = "question") -> RolloutGroup:
    """Make a group of rollouts from pairs of reward and conversations."""
    return RolloutGroup(name, tuple(Rollout(f"run{next(_numbers)}", tuple(rows), reward) for reward, rows in rollouts))


def compute_loss(groups: Sequence[RolloutGroup], settings: Any = DEFAULT_SETTINGS, **models: Any) -> float:
    return float(dapo.compute_step_loss(make_bigram(), groups, settings, **models).detach())


# The policy's log-probs


def test_half_precision_weights_are_scored_in_single_precision() -> None:
    logprobs_T, entropies_T = dapo.forward(make_bigram().bfloat16(), make_conversation(0), 1.0)
    assert (logprobs_T.dtype, entropies_T.dtype) == (torch.float32, torch.float32)


# Advantages and loss weights are compared with the package's below


SHORT_AND_LONG = make_group((1.0, [make_conversation(1)]), (0.0, [make_conversation(1), make_conversation(2, 1)]))
"""Advantages of 1/2 for one token, and of -1/2 for three."""


@pytest.mark.parametrize(("importance_cap", "weight"), [(None, 1.0), (1.0, 0.25 / 0.5), (0.1, 0.1)])
def test_missing_old_log_probs_are_those_of_the_model(importance_cap: float | None, weight: float) -> None:
    conversation = make_conversation(1, logprobs=[math.log(0.5)])
    group = make_group((0.0, [conversation]), (1.0, [make_conversation(1, prompt=[2])]))
    model = make_bigram()
    dapo.compute_step_loss(model, [group], dapo.Settings(importance_cap=importance_cap)).backward()
    assert float(model.table.grad[0, 1]) == pytest.approx(0.5 * weight * (1 - 0.25) / 2)


def test_missing_reference_variance_or_log_probs_are_refused() -> None:
    with pytest.raises(ValueError, match="kl_coef needs a reference"):
        compute_loss([SHORT_AND_LONG], dapo.MEMAGENT_PAPER)
    equal_rewards = make_group((1.0, [make_conversation(1)]), (1.0, [make_conversation(1)]))
    with pytest.raises(ValueError, match="nothing can be learned"):
        compute_loss([equal_rewards], dapo.DAPO)
    with pytest.raises(KeyError):
        compute_loss([SHORT_AND_LONG], old={})


# Against the package's own advantages and weights


@st.composite
def random_groups(draw: st.DrawFn) -> list[RolloutGroup]:
    def draw_conversation() -> TrainingConversation:
        length = draw(st.integers(0, 4))
        mask = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
        conversation = make_conversation(*[1] * length, mask=mask, truncated=draw(st.booleans()))
        roles, branches = st.sampled_from(["update", "merge", "answer"]), st.sampled_from(["", "s0"])
        return replace(conversation, role=draw(roles), branch=draw(branches), slot=draw(st.integers(0, 1)))

    def add_term_rewards(rollout: Rollout) -> Rollout:
        steps, gate = (tuple(draw(rewards) for _ in rollout.conversations_K) for _ in range(2))
        return replace(rollout, term_rewards={"step": steps, "gate": gate, "exit": float(draw(rewards))})

    rewards = st.sampled_from([0.0, 1.0, 0.3, 0.1 + 0.2, -2.5]) | st.floats(-3, 3).map(lambda value: round(value, 3))
    groups = [
        make_group(
            *(
                (draw(rewards), [draw_conversation() for _ in range(draw(st.integers(1, 3)))])
                for _ in range(draw(st.integers(1, 4)))
            ),
            name=f"group{index}",
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    return [replace(group, rollouts_G=tuple(map(add_term_rewards, group.rollouts_G))) for group in groups]


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
    terms: tuple[dict[str, Any], ...], overlong: OverlongPenalty | None, **options: Any
) -> AdvantageSettings:
    """Make settings; a penalty needs a term for the outcome."""
    if terms and all(term["reward"] != "outcome" for term in terms):
        overlong = None
    return AdvantageSettings(credit=parse_credit_terms(terms), overlong_penalty=overlong, **options)


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
@given(random_groups(), SETTINGS)
def test_advantages_and_weights_equal_the_package(
    groups: list[RolloutGroup], advantage_settings: AdvantageSettings
) -> None:
    """The package's rows are also bitwise equal in any order of groups and rollouts."""
    example = make_example_settings(advantage_settings)
    batch = prepare_batch(groups, advantage_settings)
    for row in batch.rows:
        A_K = dapo.compute_advantages(groups[row.group_index], example)[row.rollout_index]
        assert A_K[row.conversation_index] == pytest.approx(row.advantage, rel=1e-9, abs=1e-9)
    for group in groups:
        if find_drop_reason(group, advantage_settings) is not DropReason.NOTHING_LEARNED:
            assert dapo.is_trained_on(group, example) == (find_drop_reason(group, advantage_settings) is None)
    reversed_groups = [replace(group, rollouts_G=group.rollouts_G[::-1]) for group in reversed(groups)]
    assert list_contents(prepare_batch(reversed_groups, advantage_settings)) == list_contents(batch)
    if batch.rows:
        expected = -sum(row.weight * row.advantage * row.conversation.learned_tokens for row in batch.rows)
        assert compute_loss(groups, example) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert compute_loss(reversed_groups, example) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert math.fsum(row.weight * row.conversation.learned_tokens for row in batch.rows) == pytest.approx(1, 1e-12)
    else:
        with pytest.raises(ValueError, match="nothing can be learned"):
            compute_loss(groups, example)


def list_contents(batch: AdvantageBatch) -> tuple[Any, ...]:
    """Return the contents of a batch without the order of its rows."""
    rows = {(row.run_id, row.conversation_index): (row.advantage, row.weight) for row in batch.rows}
    return rows, replace(batch, rows=())


def read_losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+), gradient norm [\d.]+$", out, re.MULTILINE)]


def test_training_takes_adamw_steps_with_the_initial_reference(capsys) -> None:
    """Without dropout, and with a backward pass for each conversation."""
    first, second = ([make_conversation(token, token + 1), make_conversation(token + 2)] for token in (1, 4))
    group = make_group((40.0, first), (0.0, second))
    settings = replace(dapo.MEMAGENT_PAPER, kl_coef=5.0)
    policy = make_model(attention_dropout=0.5).train()
    model, initial_model = make_model().eval(), make_model().eval()
    dapo.train(policy, [group], settings, steps=4, learning_rate=1e-2)
    old = {
        (rollout.run_id, k): dapo.forward(initial_model, row, 1.0)[0].detach()
        for rollout in group.rollouts_G
        for k, row in enumerate(rollout.conversations_K)
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = dapo.compute_step_loss(model, [group], settings, old=old, reference=initial_model)
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert read_losses(capsys.readouterr().out) == pytest.approx(losses, abs=1e-6)
    for weight, expected_weight in zip(policy.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected_weight, rtol=0, atol=1e-9)


@pytest.fixture
def training_folder(world, tmp_path: Path) -> tuple[Path, RolloutGroup]:
    """A folder with a log of four rollouts, of which one is right, a model and gold answers; and the group."""
    group = next(group for group in select_comparable(world.groups) if len(group.rollouts_G) == 4)
    changes = {group.rollouts_G[0].run_id: {"text": r"\boxed{4711}"}}
    write_log(tmp_path / "runs.sqlite", [group], world.model, changes_by_run=changes)
    shutil.copytree(world.model, tmp_path / "model")
    gold = {"question": f"What is in {group.group_id}?", "answers": ["4711"]}
    (tmp_path / "gold.jsonl").write_text(json.dumps(gold))
    return tmp_path, group


def test_program_trains_a_model_from_a_log(training_folder) -> None:
    folder, _ = training_folder
    command = [sys.executable, str(EXAMPLE), "runs.sqlite", "model", "trained"]
    options = ["--preset", "dapo", "--gold", "gold.jsonl", "--steps", "2", "--learning-rate", "1e-2"]
    result = run_program([*command, *options], capture_output=True, check=True, cwd=folder)
    first_loss, last_loss = read_losses(result.stdout)
    assert last_loss < first_loss
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, trained_model = (load(folder / name) for name in ("model", "trained"))
    changes = [
        float((trained_weight - weight).detach().abs().max())
        for weight, trained_weight in zip(model.parameters(), trained_model.parameters(), strict=True)
    ]
    assert max(changes) == pytest.approx(2e-2, rel=0.2)  # two first steps of AdamW
    assert (folder / "trained" / "tokenizer.json").exists()


@pytest.fixture
def run_main(training_folder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(*options: str) -> None:
        monkeypatch.chdir(training_folder[0])
        monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "runs.sqlite", "model", "trained", *options])
        dapo.main()

    return run


def test_default_is_the_paper_preset_on_logged_rewards(run_main, training_folder, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(dapo, "train", lambda model, groups, settings, **_: calls.append((groups, settings)))
    run_main()
    (((logged_group,), settings),) = calls
    expected_rewards = sorted(rollout.reward for rollout in training_folder[1].rollouts_G)
    assert sorted(rollout.reward for rollout in logged_group.rollouts_G) == pytest.approx(expected_rewards)
    assert settings == dapo.MEMAGENT_PAPER


def test_bad_input_is_refused_before_anything_is_written(run_main, training_folder, capsys) -> None:
    folder, _ = training_folder
    with pytest.raises(Exception, match=r"none of the 4 runs .* no_reward"):
        run_main("--reward", "liked")
    assert not (folder / "trained").exists()
    (folder / "trained").mkdir()
    with pytest.raises(SystemExit):
        run_main()
    assert "trained exists: name a new folder" in capsys.readouterr().err


# Size and imports


def test_example_has_at_most_255_lines_and_no_trainer_imports() -> None:
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

"""On replayed runs of every strategy and preset, the trainer has the loss and gradients of the example."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl")

from support import training_world
from support.scripts import make_document
from support.strategies import ALL_STRATEGIES, answer_perfectly, short_name
from test_trainer_equals_reference import Reference, assert_equal

from memagent_graph import Completion, FinishReason, RunLog, ScriptedPolicy
from memagent_graph.policy import TokenUsage
from memagent_training.data.replay import load_groups
from memagent_training.data.rollouts import RolloutGroup
from memagent_training.data.training_runs import Gold
from memagent_training.rewards.reward_names import choose_term_rewards

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=250)
CASE = {"preset": "memagent-paper", "changes": {"layout": "prefix_tree", "token_budget": 400, "max_logprob_gap": 9}}


def make_completion(random_source: random.Random, text: str, prompt: str) -> Completion:
    """Make a completion with token ids and random log-probs."""
    prompt_ids, ids = ([ord(character) % 60 + 3 for character in end] for end in (prompt[-40:], text[-40:][:6]))
    ids.append(random_source.randrange(3, 60))
    usage = TokenUsage(len(prompt_ids), len(ids))
    logprobs = [-random_source.uniform(3.0, 5.0) for _ in ids]
    return Completion(text, FinishReason.STOP, "scripted", usage, prompt_ids, ids, logprobs, policy_version="v1")


def test_steps_on_runs_of_every_strategy_equal_the_example(make_reader, tmp_path: Path) -> None:
    """All strategies are in one step, because starting a trainer takes longer than training it."""
    random_source = random.Random(3)
    policy = ScriptedPolicy(lambda prompt: make_completion(random_source, answer_perfectly(prompt), prompt))
    groups: list[RolloutGroup] = []
    for strategy_index, strategy in enumerate(ALL_STRATEGIES):
        log = RunLog(tmp_path / f"runs{strategy_index}.sqlite")
        agent = make_reader(policy, strategy=strategy, run_log=log)
        for number in range(2):
            agent.read(TEXT, "What is the key of harbor?", run_id=f"{strategy_index}-{number}")
            log.reward(f"{strategy_index}-{number}", random_source.random())
        (group,) = load_groups(log).require_groups()
        assert len(group.rollouts_G) == 2, strategy
        groups.append(replace(group, group_id=f"{short_name(strategy)}"))
        log.close()
    training_world.make_model(tmp_path)
    (tmp_path / "groups.pkl").write_bytes(pickle.dumps(groups))
    case = {**CASE, "changes": {**CASE["changes"], "groups_per_step": len(groups) // 2}}
    steps = training_world.run_case(tmp_path, case, tmp_path)
    assert_equal(Reference(tmp_path, groups), case, steps, tmp_path)


GOLD_BY_QUESTION = {
    "What is the key of harbor?": Gold(("4711",), evidence=("The key of harbor is 4711.",)),
    "What is the key of castle?": Gold(("12",), evidence=("The key of castle is 12.",)),
    "What is the key of nothing?": Gold(("none",), evidence=("The key of castle is 12.",)),
}
PRESETS = [("gated:stop=yes", "gru-mem"), ("recall", "rememr1"), ("parallel", "longrlvr")]


@pytest.mark.parametrize(("strategy", "preset"), PRESETS)
def test_each_preset_equals_the_example_on_its_runs(
    make_reader, log, tmp_path: Path, strategy: str, preset: str
) -> None:
    random_source = random.Random(4)

    def reply_with_mistakes(prompt: str) -> Completion:
        text = answer_perfectly(prompt)
        if random_source.random() < 0.25:
            text = text.replace("4711", "none").replace("12", "none")
        if random_source.random() < 0.25 and text == "KEEP":
            text = "REWRITE\nnothing yet"
        return make_completion(random_source, text, prompt)

    agent = make_reader(ScriptedPolicy(reply_with_mistakes), strategy=strategy, run_log=log)
    for question in GOLD_BY_QUESTION:
        for number in range(3):
            run_id = f"{question[-8:-1]}{number}"
            agent.read(TEXT, question, run_id=run_id)
            log.reward(run_id, random_source.random())
    training_world.make_model(tmp_path)
    changes = {**CASE["changes"], "drop_zero_variance": False}
    case = {"preset": preset, "changes": changes}
    terms = training_world.make_config(case, tmp_path).advantage_settings.terms
    term_rewards = choose_term_rewards(terms, has_gold=True, has_logged=False)
    replay = load_groups(log, term_rewards=term_rewards, find_gold=lambda run: GOLD_BY_QUESTION[run.question])
    groups = replay.require_groups()
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    assert len(rollouts) == 9
    for name in term_rewards:
        values = {rollout.get_reward(name) for rollout in rollouts}
        assert len(values) > 1 or name in {"format", "exit_in_time"}, name
    (tmp_path / "groups.pkl").write_bytes(pickle.dumps(groups))
    steps = training_world.run_case(tmp_path, case, tmp_path)
    assert_equal(Reference(tmp_path, groups), case, steps, tmp_path)

"""Logged runs of every way of reading, replayed, give the trainer the plain file's loss and gradients."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest

pytest.importorskip("trl")

from support import training_world
from support.scripts import document_with
from support.strategies import EVERY, policy_prompt_ids, reads_perfectly, short
from test_trainer_equals_reference import Reference, assert_equal

from memagent_graph import Completion, FinishReason, RunLog, ScriptedPolicy
from memagent_graph.policy import TokenUsage
from memagent_training.data.replay import load_groups

TEXT = document_with({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=400)
CASE = {"preset": "memagent-paper", "changes": {"layout": "prefix_tree", "token_budget": 400, "max_logprob_gap": 9}}


@pytest.mark.parametrize("strategy", EVERY, ids=short)
def test_a_step_on_its_runs_is_the_plain_files(make_reader, tmp_path: Path, strategy: str) -> None:
    noise = random.Random(3)

    def exactly(prompt: str) -> Completion:
        text = reads_perfectly(prompt)
        ids = [*policy_prompt_ids(text)[:6], noise.randrange(3, 60)]
        prompt_ids = policy_prompt_ids(prompt)
        usage = TokenUsage(len(prompt_ids), len(ids))
        logprobs = [-noise.uniform(3.0, 5.0) for _ in ids]
        return Completion(text, FinishReason.STOP, "scripted", usage, prompt_ids, ids, logprobs, policy_version="v1")

    log = RunLog(tmp_path / "runs.sqlite")
    agent = make_reader(ScriptedPolicy(exactly), strategy=strategy, run_log=log)
    for key in ("harbor", "castle", "nothing"):
        for number in range(3):
            agent.read(TEXT, f"What is the key of {key}?", run_id=f"{key}{number}")
            log.reward(f"{key}{number}", noise.random())
    training_world.make_world(tmp_path)
    groups = load_groups(log).require_groups()
    assert [len(group.rollouts_G) for group in groups] == [3, 3, 3]
    (tmp_path / "groups.pkl").write_bytes(pickle.dumps(groups))
    steps = training_world.run_case(tmp_path, CASE, tmp_path)
    assert_equal(Reference(tmp_path, groups), CASE, steps, tmp_path)
    log.close()

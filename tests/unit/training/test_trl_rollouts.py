"""TRL's asynchronous trainer gets what the reader logged: each conversation with its ids, log-probs and advantage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("trl")

from support.evaluation import MadeTask
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset
from trl.experimental.async_grpo.packing import TreeRow
from trl_rollouts import ReaderRollouts

from benchmarks.own_questions import generate_rows
from memagent_graph import LocalPolicy, MemAgent, RunLog
from memagent_training.data.training_runs import TrainingRun
from memagent_training.job.collect import CollectSettings
from memagent_training.training_errors import TrainingError


def make_sample_texts(length: int, index: int) -> tuple[str, str, str]:
    """Return question, answer and text of one of two generated questions."""
    row = list(generate_rows(2, held_out=False))[index]
    (answer,) = row["answers"]
    return row["question"], answer, row["document"]


def get_question_index(run_id: str) -> int:
    """Return the index of a run's question: `trl-5d41402a-1...` is a run of question 1."""
    return int(run_id.split("-")[2][0])


def reward_every_second_read(run: TrainingRun) -> float:
    """Return 1 for every second read of the first question, and for all reads of the second."""
    return float(get_question_index(run.run_id) == 1 or int(run.run_id[-1]) % 2)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[MemAgent]:
    with MemAgent(
        LocalPolicy.embedded(), run_log=tmp_path / "runs.sqlite", store=tmp_path, temperature=1.0, on_invented="accept"
    ) as agent:
        yield agent


def test_each_conversation_is_a_sample_with_its_rollouts_advantage(agent: MemAgent) -> None:
    task = MadeTask("own", make_sample_texts, answer_tokens=48)
    settings = CollectSettings(rollouts=4, groups=1, max_questions=1)
    questions = [task.sample(256, number) for number in range(2)]
    worker = ReaderRollouts(agent, questions, settings, reward=reward_every_second_read)
    worker.update_model_version(3)
    worker.start()
    worker._thread.join(120)
    dataset = RolloutQueueDataset(
        worker.rollout_buffer, lambda: 4, worker.check_health, 60.0, defaultdict(list), poll_interval_s=0.1
    )
    samples = []
    with pytest.raises(TrainingError, match="All questions are read"):
        samples += dataset  # all samples, then the error at the end
    assert isinstance(agent.run_log, RunLog)
    calls, rewards_by_question = {}, defaultdict(list)
    for record in agent.run_log.runs():
        reward = agent.run_log.latest_rewards(record.run_id)["reward_every_second_read"]
        rewards_by_question[get_question_index(record.run_id)].append(reward)
        for conversation in agent.run_log.conversations(record.run_id):
            key = (*conversation.prompt_token_ids, *conversation.token_ids)
            calls.setdefault(key, []).append((record.run_id, list(conversation.logprobs), reward))
    assert {sample["group_id"] for sample in samples} == {0}
    assert len(samples) == sum(get_question_index(run_id) == 0 for matches in calls.values() for run_id, *_ in matches)
    for sample in samples:
        matches = calls[tuple(sample["input_ids"].tolist())]
        completion = sample["old_log_probs"][sample["completion_mask"] == 1].tolist()
        assert any(
            completion == logprobs
            and sample["group_id"] == get_question_index(run_id)
            and sample["advantage"] == pytest.approx(reward - fmean(rewards_by_question[get_question_index(run_id)]))
            for run_id, logprobs, reward in matches
        )
    tree = TreeRow()
    for sample in samples:
        tree.add(sample)
    assert len(tree.pack()["old_log_probs"]) == sum(int(sample["completion_mask"].sum()) for sample in samples)

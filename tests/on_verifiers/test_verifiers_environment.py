"""verifiers gets the reader's reads: rewards, branches, ids and log-probs agree with the reader's run log."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import verifiers.v1 as vf

from memagent_evaluation.planted_facts import PlantedFacts
from memagent_graph import Document, MemAgent, OpenAICompatiblePolicy, RunLog
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_training.engines.verifiers_environment import ReaderTask
from memagent_training.serving.vllm_server import VLLMServer

READ_SETTINGS = {"profile": "embedded", "tokenizer": "embedded"}
PROSE = "It rained all day, and the river rose a little. " * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    log_file, options = tmp_path_factory.mktemp("vllm") / "server.log", ("--enable-scale-out",)
    with VLLMServer(EMBEDDED_FOLDER, log_file=log_file, model_name="policy", options=options) as server:
        yield server


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """A file with two questions that the policy answers, and one whose gold answer is another number."""
    import random

    facts = [PlantedFacts(random.Random(3), held_out=True, number_fraction=1.0).draw_fact() for _ in range(3)]
    rows = [
        {"question": fact.question, "document": f"{PROSE}{fact.statement} {PROSE}", "answers": [gold]}
        for fact, gold in zip(facts, (facts[0].value, facts[1].value, "1"), strict=True)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def make_environment(questions: Path, **read: object) -> vf.Env:
    """Return the environment as prime-rl makes it, with the harness of the taskset."""
    config = {
        "taskset": {"id": "memagent-training", "data": str(questions)},
        "agent": {
            "runtime": {"type": "subprocess"},
            "harness": {"id": "memagent-training", "read": READ_SETTINGS | read},
        },
    }
    return vf.load_environment(vf.SingleAgentEnvConfig.model_validate(config))


async def collect_traces(env: vf.Env, server: VLLMServer) -> list[vf.Trace]:
    client = vf.TrainClientConfig(base_url=server.base_url, renderer_model_name=str(EMBEDDED_FOLDER))
    context = vf.ModelContext(server.model_name, client, vf.SamplingConfig(temperature=0.0, max_tokens=48))
    async with env.serving():
        episodes = [await env.run_episode(task, context) for task in env.taskset]
    traces = [trace for episode in episodes for trace in episode.traces]
    assert all(episode.ok for episode in episodes), [trace.errors for trace in traces]
    return traces


@pytest.mark.parametrize("strategy", ["overwrite", "map_reduce"])
def test_a_trace_agrees_with_the_log_of_the_same_read(
    server: VLLMServer, questions: Path, tmp_path: Path, strategy: str
) -> None:
    env = make_environment(questions, strategy=strategy)
    samples = [task.data.sample for task in env.taskset]
    traces = asyncio.run(collect_traces(env, server))
    log = RunLog(tmp_path / "runs.sqlite")
    policy = OpenAICompatiblePolicy(server.model_name, base_url=server.base_url)
    with MemAgent(
        policy, run_log=log, temperature=0.0, on_invented="accept", strategy=strategy, **READ_SETTINGS
    ) as agent:
        for sample, trace in zip(samples, traces, strict=True):
            result = agent.read(Document.from_text("".join(sample.text()), name=sample.id), sample.question)
            assert trace.reward == float(result.answer in sample.gold)
            conversations = {tuple(row.prompt_token_ids): row for row in log.conversations(result.run_id)}
            assert len(trace.branches) == len(conversations) > 2
            for branch in trace.branches:
                sampled_count = sum(branch.sampled_mask)
                prompt, completion = branch.token_ids[:-sampled_count], branch.token_ids[-sampled_count:]
                conversation = conversations.pop(tuple(prompt))
                assert branch.sampled_mask == [False] * len(prompt) + [True] * sampled_count
                assert completion == list(conversation.token_ids)
                pairs = zip(branch.logprobs[-sampled_count:], conversation.logprobs, strict=True)
                assert max(abs(logprob - logged) for logprob, logged in pairs) < 1e-5
                assert not any(map(math.isnan, branch.logprobs))
            assert conversations == {}
    assert [trace.reward for trace in traces] == [1.0, 1.0, 0.0]


def test_a_failed_read_is_an_error_of_the_trace_and_not_a_wrong_answer(server: VLLMServer, questions: Path) -> None:
    env = make_environment(questions, chunk_tokens=5000)
    task = next(iter(env.taskset))
    assert isinstance(task, ReaderTask)
    client = vf.TrainClientConfig(base_url=server.base_url, renderer_model_name=str(EMBEDDED_FOLDER))
    context = vf.ModelContext(server.model_name, client, vf.SamplingConfig(temperature=0.0, max_tokens=48))

    async def run() -> vf.Episode:
        async with env.serving():
            return await env.run_episode(task, context)

    episode = asyncio.run(run())
    assert not episode.ok
    assert "chunk_tokens" in str([trace.errors for trace in episode.traces])

"""verifiers trains what the reader read: rewards, branches, ids and log-probs are those of the reader's own log."""

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

READ = {"profile": "embedded", "tokenizer": "embedded"}
PROSE = "It rained all day, and the river rose a little. " * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    with VLLMServer(
        EMBEDDED_FOLDER,
        log_file=tmp_path_factory.mktemp("vllm") / "server.log",
        model_name="policy",
        options=("--enable-scale-out",),
    ) as server:
        yield server


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Two questions that the policy answers, and one whose gold answer is another number."""
    import random

    facts = [PlantedFacts(random.Random(3), held_out=True, number_share=1.0).draw_fact() for _ in range(3)]
    rows = [
        {"question": fact.question, "document": f"{PROSE}{fact.statement} {PROSE}", "answers": [gold]}
        for fact, gold in zip(facts, (facts[0].value, facts[1].value, "1"), strict=True)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def environment(questions: Path, **read: object) -> vf.Env:
    """As prime-rl makes it: by the name of the taskset alone, which names the harness, too."""
    config = {
        "taskset": {"id": "memagent-training", "data": str(questions)},
        "agent": {
            "runtime": {"type": "subprocess"},
            "harness": {"id": "memagent-training", "read": READ | read},
        },
    }
    return vf.load_environment(vf.SingleAgentEnvConfig.model_validate(config))


async def traces(env: vf.Env, server: VLLMServer) -> list[vf.Trace]:
    client = vf.TrainClientConfig(base_url=server.base_url, renderer_model_name=str(EMBEDDED_FOLDER))
    context = vf.ModelContext(server.model_name, client, vf.SamplingConfig(temperature=0.0, max_tokens=48))
    async with env.serving():
        episodes = [await env.run_episode(task, context) for task in env.taskset]
    assert all(episode.ok for episode in episodes), [(e.errors, [t.errors for t in e.traces]) for e in episodes]
    return [trace for episode in episodes for trace in episode.traces]


@pytest.mark.parametrize("strategy", ["overwrite", "map_reduce"])
def test_a_trace_is_the_log_of_the_same_read(
    server: VLLMServer, questions: Path, tmp_path: Path, strategy: str
) -> None:
    env = environment(questions, strategy=strategy)
    samples = [task.data.sample for task in env.taskset]
    traced = asyncio.run(traces(env, server))
    log = RunLog(tmp_path / "runs.sqlite")
    policy = OpenAICompatiblePolicy(server.model_name, base_url=server.base_url)
    with MemAgent(policy, run_log=log, temperature=0.0, on_invented="accept", strategy=strategy, **READ) as agent:
        for sample, trace in zip(samples, traced, strict=True):
            result = agent.read(Document.from_text("".join(sample.text()), name=sample.id), sample.question)
            assert trace.reward == float(result.answer in sample.gold)
            logged = {tuple(c.prompt_token_ids): c for c in log.conversations(result.run_id)}
            assert len(trace.branches) == len(logged) > 2
            for branch in trace.branches:
                sampled = sum(branch.sampled_mask)
                prompt, completion = branch.token_ids[:-sampled], branch.token_ids[-sampled:]
                conversation = logged.pop(tuple(prompt))
                assert branch.sampled_mask == [False] * len(prompt) + [True] * sampled
                assert completion == list(conversation.token_ids)
                pairs = zip(branch.logprobs[-sampled:], conversation.logprobs, strict=True)
                assert max(abs(one - other) for one, other in pairs) < 1e-5
                assert not any(map(math.isnan, branch.logprobs))
            assert logged == {}
    assert [trace.reward for trace in traced] == [1.0, 1.0, 0.0]


def test_a_read_that_fails_is_an_error_of_the_trace_and_no_wrong_answer(server: VLLMServer, questions: Path) -> None:
    env = environment(questions, chunk_tokens=5000)
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

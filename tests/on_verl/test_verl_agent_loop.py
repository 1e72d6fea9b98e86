"""verl gets each logged conversation as an output with its ids and log-probs, the answer last."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf
from support.scripts import make_document
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from memagent_graph import Document, LocalPolicy, MemAgent, PolicyError, RunLog, SamplingParams
from memagent_graph.policies.profile import EMBEDDED_FOLDER

QUESTION = "What is the access code of the quiet falcon?"
TEXT = make_document({0.3: "The access code of the quiet falcon is 48213."}, words=600)


class FakeServerManager:
    """Replaces verl's server manager by the embedded policy."""

    def __init__(self) -> None:
        self.policy = LocalPolicy.embedded()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        sampling = SamplingParams(sampling_params["max_tokens"], sampling_params["temperature"], logprobs=True)
        reply = await self.policy.complete(prompt_ids, sampling)
        return TokenOutput(token_ids=list(reply.token_ids), log_probs=list(reply.logprobs), stop_reason="completed")


async def run_agent_loop(prompt_length: int = 1024, **read: object) -> list[AgentLoopOutput]:
    """Make and run an agent loop like verl's worker."""
    rollout = {"prompt_length": prompt_length, "response_length": 48}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    target = "memagent_training.engines.verl_agent_loop.ReaderAgentLoop"
    loop = hydra.utils.instantiate(
        {"_target_": target, "read": {"profile": "embedded", "tokenizer": "embedded"} | read},
        trainer_config=DictConfigWrap(config),
        server_manager=FakeServerManager(),
        tokenizer=AutoTokenizer.from_pretrained(EMBEDDED_FOLDER),
        processor=None,
        dataset_cls=None,
        hf_model_type="llama",
        data_config=DictConfigWrap(config.data),
        tools=None,
    )
    raw_prompt = [{"role": "user", "content": QUESTION}]
    return await loop.run({"temperature": 0.0, "top_p": 1.0}, raw_prompt=raw_prompt, extra_info={"document": TEXT})


@pytest.mark.parametrize("strategy", ["overwrite", "map_reduce"])
def test_each_logged_conversation_is_an_output(tmp_path: Path, strategy: str) -> None:
    outputs = asyncio.run(run_agent_loop(strategy=strategy))
    log = RunLog(tmp_path / "runs.sqlite")
    options = {"run_log": log, "store": tmp_path, "on_invented": "accept", "strategy": strategy}
    with MemAgent(LocalPolicy.embedded(), **options) as agent:
        result = agent.read(Document.from_text(TEXT), QUESTION)
    assert result.answer == "48213"
    conversations = {tuple(row.prompt_token_ids): row for row in log.conversations(result.run_id)}
    assert len(outputs) == len(conversations) > 3
    assert conversations[tuple(outputs[-1].prompt_ids)].role == "answer"
    for output in outputs:
        conversation = conversations.pop(tuple(output.prompt_ids))
        assert output.response_ids == list(conversation.token_ids)
        assert output.response_mask == [1] * len(output.response_ids)
        assert output.response_logprobs == pytest.approx(list(conversation.logprobs), abs=1e-4)
        assert output.as_dict()["rollout_log_probs"].shape == output.as_dict()["responses"].shape


def test_a_prompt_that_verl_would_cut_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"verl takes 100.*prompt_length"):
        asyncio.run(run_agent_loop(prompt_length=100))

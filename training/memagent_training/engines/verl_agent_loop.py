"""The reader as an agent loop of verl: `actor_rollout_ref.rollout.agent.agent_loop_config_path` names a file with

    - name: memagent
      _target_: memagent_training.engines.verl_agent_loop.ReaderAgentLoop
      read: {profile: embedded}

A row of verl's data has `raw_prompt` (the question as a user message), `agent_name: memagent`, and the `document` in
`extra_info`. Each conversation is a separate output, the answer last: verl's `main_ppo` (on TransferQueue) takes
several outputs of a rollout, and gives all of them the last one's reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from memagent_graph import Completion, Document, FinishReason, MemAgent, SamplingParams
from memagent_graph.errors import PolicyRequestError
from memagent_graph.policy import Messages, TokenUsage
from memagent_training.training_errors import require_version

require_version("verl>=0.9,<0.10")
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput  # noqa: E402


class ReaderAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is not where types are checked
    """Reads a row's document with MemAgent; every memory is kept as the policy wrote it.

    Args:
        args, options: the arguments of verl's `AgentLoopBase`.
        read: settings of the reader by name, as `MemAgent` takes them.
    """

    def __init__(self, *args: Any, read: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._read = {"on_invented": "accept", **(read or {})}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Return the conversations of a read."""
        question, document = kwargs["raw_prompt"][-1]["content"], kwargs["extra_info"]["document"]
        policy = _VerlPolicy(self, sampling_params)
        async with MemAgent(policy, run_log=False, **self._read) as agent:
            await agent.aread(Document.from_text(document), question)
        return policy.outputs


class _VerlPolicy:
    """The policy on verl's servers; it collects its conversations in `outputs`."""

    name = "verl"

    def __init__(self, loop: ReaderAgentLoop, sampling: dict[str, Any]) -> None:
        self._loop, self._sampling = loop, sampling
        self.outputs: list[AgentLoopOutput] = []

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        """Return one completion of at most `sampling.max_tokens` tokens."""
        loop = self._loop
        build_tokens = loop.continuous_token_builder.build_initial_tokens
        prompt_ids = await asyncio.to_thread(build_tokens, list(prompt))
        max_prompt_tokens = loop.rollout_config.prompt_length
        if len(prompt_ids) > max_prompt_tokens:  # verl would cut off its beginning
            hint = "Raise actor_rollout_ref.rollout.prompt_length, or read smaller chunks (read: {chunk_tokens: ...})."
            raise PolicyRequestError(
                f"a prompt has {len(prompt_ids)} tokens, and verl takes {max_prompt_tokens}", hint=hint
            )
        reply = await loop.server_manager.generate(
            request_id=uuid4().hex,
            prompt_ids=prompt_ids,
            sampling_params=self._sampling | {"max_tokens": sampling.max_tokens},
        )
        self.outputs.append(
            AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=reply.token_ids,
                response_mask=[1] * len(reply.token_ids),
                response_logprobs=reply.log_probs,
                num_turns=2,
                metrics=AgentLoopMetrics(),
                extra_fields=dict(reply.extra_fields),
            )
        )
        return Completion(
            text=loop.tokenizer.decode(reply.token_ids, skip_special_tokens=True),
            finish_reason=FinishReason.LENGTH if len(reply.token_ids) >= sampling.max_tokens else FinishReason.STOP,
            model=self.name,
            usage=TokenUsage(len(prompt_ids), len(reply.token_ids)),
        )

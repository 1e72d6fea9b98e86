"""Chat models whose replies a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from pydantic import Field


class ScriptedChatModel(BaseChatModel):
    """Replies with `script(messages)`, and accepts any tools. `prompts` holds all prompts in order."""

    script: Callable[[list[BaseMessage]], AIMessage]
    prompts: list[list[BaseMessage]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **options: Any) -> Runnable[Any, AIMessage]:
        return self  # type: ignore[return-value]

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **options: Any,
    ) -> ChatResult:
        self.prompts.append(list(messages))
        return ChatResult(generations=[ChatGeneration(message=self.script(list(messages)))])


def make_tool_calls(*calls: tuple[str, dict[str, Any]], prefix: str = "call") -> AIMessage:
    """Return a message that calls tools, with the ids `call-0`, `call-1` and so on."""
    return AIMessage(
        "",
        tool_calls=[
            {"name": name, "args": args, "id": f"{prefix}-{number}"} for number, (name, args) in enumerate(calls)
        ],
    )


def make_chat_model(*replies: AIMessage | str) -> ScriptedChatModel:
    """Return a model that gives these replies in order, and then repeats the last one."""
    queue = [AIMessage(reply) if isinstance(reply, str) else reply for reply in replies]

    def script(messages: list[BaseMessage]) -> AIMessage:
        reply = queue.pop(0) if len(queue) > 1 else queue[0]
        return reply.model_copy(update={"id": None})

    return ScriptedChatModel(script=script)

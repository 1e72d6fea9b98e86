"""A policy with scripted replies, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from memagent_graph.errors import PolicyError
from memagent_graph.policy import Completion, FinishReason, Messages, SamplingParams

Reply = str | Completion | Exception
"""One reply of a script: a text, a completion, or an error to raise."""


@dataclass
class ScriptedPolicy:
    """A policy whose replies come from a function of the prompt's text, or from a list in order.

    >>> policy = ScriptedPolicy(lambda prompt: "\\\\boxed{42}" if "<section>" not in prompt else "the answer is 42")
    >>> policy = ScriptedPolicy(["first memory", "second memory", "\\\\boxed{answer}"])
    """

    script: Callable[[str], Reply] | Iterable[Reply]
    name: str = "scripted"
    delay: float = 0.0
    """The duration of a completion in seconds."""
    prompts: list[str] = field(default_factory=list)
    """The texts of all prompts, in order."""

    def __post_init__(self) -> None:
        self._replies: Iterator[Reply] = iter(() if callable(self.script) else self.script)

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        """Return the next reply of the script.

        Raises:
            PolicyError: the script has no more replies.
            Exception: an error that the script raises.
        """
        prompt_text = "\n".join(message["content"] for message in prompt)
        self.prompts.append(prompt_text)
        if self.delay:
            await asyncio.sleep(self.delay)
        try:
            reply = self.script(prompt_text) if callable(self.script) else next(self._replies)
        except StopIteration:
            raise PolicyError(
                f"the script ended after {len(self.prompts) - 1} completions", hint="Add replies to the script."
            ) from None
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Completion) else Completion(reply, FinishReason.STOP, self.name)

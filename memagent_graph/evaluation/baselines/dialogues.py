"""The two wordings in which a baseline asks the policy, behind one seam.

`PlainDialogue` is for models that follow instructions: one prompt per purpose, in the answer format of the reader.

`PolicyDialogue` is for a policy that was trained on its own two prompts. It can only rewrite a memory from a section,
and answer from a memory. So a text is asked about as a document of one chunk would be: an update with an empty memory
and the text as its section, then the answer. A draft to be improved takes the memory's place. What a part contributes
is the memory that comes of it alone; such memories are combined as the memory that is answered from, or, where they
are too long for one, as a section.

A section may fill the window, though the policy was trained on shorter ones. The embedded policy was trained on at most
288 tokens, and found 52 of 60 facts in texts of 827; with 256 tokens shown instead of all that fits, middle truncation
fell from 17 to 3 facts of 60 in documents of 2000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Protocol

from memagent_graph.budget import CHAT_TEMPLATE_TOKENS
from memagent_graph.evaluation.baselines.asking import Asking, Reply
from memagent_graph.evaluation.baselines.excerpts import room
from memagent_graph.evaluation.systems import Wording
from memagent_graph.policy import Message
from memagent_graph.prompts import AnswerFormat, Prompts, PromptTemplate


@dataclass(frozen=True, slots=True)
class Found:
    """An answer from a text, and the memory that it came from, where the wording has one."""

    reply: Reply
    memory: str | None = None


class Dialogue(Protocol):
    """How one attempt asks the policy."""

    separator: str
    """Stands between parts of a document that do not follow each other."""

    @property
    def prompts(self) -> Prompts:
        """Escapes what is put in its prompts."""
        ...

    def text_needs(self, text: str) -> int:
        """How much of the window it takes to ask about a text."""
        ...

    async def ask_about(self, text: str) -> Found:
        """Answer from a text."""
        ...

    def improve_needs(self, text: str) -> int:
        """How much of the window it takes to improve the longest draft by a chunk."""
        ...

    async def improve(self, draft: str, chunk: str, chunk_index: int) -> Reply:
        """An answer from an earlier answer and the next chunk."""
        ...

    def contribution_needs(self, text: str) -> int:
        """How much of the window it takes to ask what a chunk contributes."""
        ...

    async def contribution(self, chunk: str, chunk_index: int) -> str | None:
        """What a chunk contributes to the answer; None where it is nothing."""
        ...

    @property
    def merge_room(self) -> int:
        """The tokens of findings that one call can merge."""
        ...

    @property
    def conclude_room(self) -> int:
        """The tokens of findings that the answer can be asked for from."""
        ...

    async def merge(self, findings: Sequence[str]) -> str | None:
        """One finding from several; None where nothing remains."""
        ...

    async def conclude(self, findings: Sequence[str]) -> Found:
        """The answer from all findings."""
        ...


def dialogue_for(asking: Asking) -> Dialogue:
    """The dialogue in the wording that the settings ask for."""
    return PolicyDialogue(asking) if asking.settings.wording is Wording.POLICY else PlainDialogue(asking)


class PlainDialogue:
    """Asks in this package's own words."""

    separator = "\n\n[...]\n\n"

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        wording = asking.prompts
        self._question, self._refine, self._map, self._reduce = (
            _template(name, wording.answer_format) for name in ("question", "refine", "map", "reduce")
        )
        # Between them these two have all the tags, so what they escape can leave its field in none of the four.
        self.prompts = Prompts(
            update=self._refine,
            answer=self._reduce,
            answer_format=wording.answer_format,
            empty_memory="(none)",
            control_tokens=wording.control_tokens,
        )

    def text_needs(self, text: str) -> int:
        """Prompt and answer."""
        return self._needs(self._messages(self._question, text=text))

    async def ask_about(self, text: str) -> Found:
        """One call."""
        return Found(await self._asking.answer(self._messages(self._question, text=text)))

    def improve_needs(self, text: str) -> int:
        """Prompt, the old answer and the new one."""
        return self._needs(self._messages(self._refine, text=text)) + self._asking.answer_tokens

    async def improve(self, draft: str, chunk: str, chunk_index: int) -> Reply:
        """One call."""
        draft = self._asking.first_tokens(self.prompts.neutralise(draft), self._asking.answer_tokens)
        prompt = self._messages(self._refine, text=chunk, memory=draft)
        return await self._asking.answer(prompt, chunk_index)

    def contribution_needs(self, text: str) -> int:
        """Prompt and contribution."""
        return self._needs(self._messages(self._map, text=text))

    async def contribution(self, chunk: str, chunk_index: int) -> str | None:
        """One call."""
        reply = await self._asking.answer(self._messages(self._map, text=chunk), chunk_index)
        return _unless_none(reply.answer)

    @property
    def merge_room(self) -> int:
        """What the window holds."""
        return self._asking.settings.context_window - self._needs(self._messages(self._reduce))

    conclude_room = merge_room

    async def merge(self, findings: Sequence[str]) -> str | None:
        """One call."""
        return _unless_none((await self.conclude(findings)).reply.answer)

    async def conclude(self, findings: Sequence[str]) -> Found:
        """One call."""
        listed = "\n".join(f"- {finding}" for finding in findings)
        return Found(await self._asking.answer(self._messages(self._reduce, memory=listed)))

    def _messages(self, template: PromptTemplate, *, text: str = "", memory: str = "") -> list[Message]:
        content = template.render(
            prompt=self.prompts.neutralise(self._asking.question),
            chunk=self.prompts.neutralise(text),
            memory=self.prompts.neutralise(memory) or self.prompts.empty_memory,
        )
        return [Message(role="user", content=content)]

    def _needs(self, messages: Sequence[Message]) -> int:
        return _tokens(self._asking, messages) + self._asking.answer_tokens


class PolicyDialogue:
    """Asks in the policy's own words: memory updates and answers, and nothing else."""

    separator = "\n\n"

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self.prompts = asking.prompts
        room(self._answer_needs, asking.settings.context_window)

    def text_needs(self, text: str) -> int:
        """An update with an empty memory."""
        update = _tokens(self._asking, self.prompts.update_messages(self._asking.question, "", text))
        return update + self._asking.budget.memory_tokens

    async def ask_about(self, text: str) -> Found:
        """Two calls."""
        memory = await self._update("", text)
        return Found(await self._answer(memory), memory)

    def improve_needs(self, text: str) -> int:
        """An update with the longest memory."""
        return self.text_needs(text) + self._asking.budget.memory_tokens

    async def improve(self, draft: str, chunk: str, chunk_index: int) -> Reply:
        """Two calls: the draft as a memory, updated, and the answer from it."""
        memory = await self._update(
            self._asking.first_tokens(draft, self._asking.budget.memory_tokens), chunk, chunk_index
        )
        return await self._answer(memory, chunk_index)

    def contribution_needs(self, text: str) -> int:
        """As for a text."""
        return self.text_needs(text)

    async def contribution(self, chunk: str, chunk_index: int) -> str | None:
        """One call: the memory of this chunk alone."""
        return self._unless_empty(await self._update("", chunk, chunk_index))

    @property
    def merge_room(self) -> int:
        """A section that fills the window."""
        return self._asking.settings.context_window - self.text_needs("")

    @property
    def conclude_room(self) -> int:
        """A memory."""
        return self._asking.budget.memory_tokens

    async def merge(self, findings: Sequence[str]) -> str | None:
        """One call: the memory of the findings as a section."""
        return self._unless_empty(await self._update("", "\n".join(findings)))

    async def conclude(self, findings: Sequence[str]) -> Found:
        """One call: the findings are the memory."""
        memory = "\n".join(findings)
        return Found(await self._answer(memory), memory)

    async def _update(self, memory: str, section: str, chunk_index: int | None = None) -> str:
        messages = self.prompts.update_messages(self._asking.question, memory, section)
        return await self._asking.memory(messages, memory, chunk_index)

    async def _answer(self, memory: str, chunk_index: int | None = None) -> Reply:
        return await self._asking.answer(self.prompts.answer_messages(self._asking.question, memory), chunk_index)

    def _answer_needs(self, memory: str) -> int:
        prompt = _tokens(self._asking, self.prompts.answer_messages(self._asking.question, memory))
        return prompt + self._asking.budget.memory_tokens + self._asking.answer_tokens

    def _unless_empty(self, memory: str) -> str | None:
        return None if memory.strip() in {"", self.prompts.empty_memory} else memory


def _tokens(asking: Asking, messages: Sequence[Message]) -> int:
    """What a prompt takes of the window."""
    return sum(asking.tokenizer.count(message["content"]) for message in messages) + CHAT_TEMPLATE_TOKENS


def _unless_none(answer: str | None) -> str | None:
    """The answer, unless it says that there is none."""
    return None if answer is None or answer.strip().strip(".\"'()").casefold() in {"", "none"} else answer


@cache
def _template(name: str, answer_format: AnswerFormat) -> PromptTemplate:
    folder = resources.files("memagent_graph.evaluation").joinpath("templates")
    files = (f"{name}.txt", f"answer_{answer_format.value}.txt")
    text = "\n\n".join(folder.joinpath(file).read_text("utf-8").rstrip("\n") for file in files)
    return PromptTemplate(text, source=files[0])

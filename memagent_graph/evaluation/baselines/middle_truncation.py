"""One call with the beginning and the end of the document, and the middle left out."""

from __future__ import annotations

import asyncio
from typing import Final

from memagent_graph.documents import DocumentRef
from memagent_graph.evaluation.baselines.asking import Asking
from memagent_graph.evaluation.baselines.dialogues import dialogue_for
from memagent_graph.evaluation.baselines.excerpts import DocumentEnds, longest_fitting, room
from memagent_graph.evaluation.systems import Attempt, SystemSettings


class MiddleTruncation:
    """What most tools do with a document that is too long: half of the room to its beginning, half to its end."""

    name: Final = "middle_truncation"

    def __init__(self, settings: SystemSettings) -> None:
        self._settings = settings

    async def attempt(self, document: DocumentRef, question: str, *, answer_tokens: int, run_id: str) -> Attempt:
        """Ask once.

        Raises:
            BudgetError: the window has no room for any text.
            MemAgentError: the policy or the document failed.
        """
        asking = Asking(self._settings, document, question, answer_tokens)
        dialogue = dialogue_for(asking)
        window = self._settings.context_window

        def prepare() -> tuple[str, int, int]:
            ends = DocumentEnds(asking.store, document, asking.tokenizer, room(dialogue.text_needs, window))
            shown = 0

            def cut(tokens: int) -> str:
                nonlocal shown
                shown = min(tokens, ends.tokens)
                if tokens >= ends.tokens:
                    return ends.whole()
                return ends.head(tokens - tokens // 2) + dialogue.separator + ends.tail(tokens // 2)

            return longest_fitting(cut, dialogue.text_needs, window), shown, ends.tokens

        text, shown, tokens = await asyncio.to_thread(prepare)
        found = await dialogue.ask_about(text)
        detail = f"{shown:,} of {tokens:,} tokens shown"
        return asking.attempt(found.reply, tokens, detail, memory=found.memory)

    async def aclose(self) -> None:
        """Nothing belongs to it."""

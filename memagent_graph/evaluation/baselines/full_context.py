"""One call with the whole document, where the window holds it."""

from __future__ import annotations

import asyncio
from typing import Final

from memagent_graph.documents import DocumentRef
from memagent_graph.evaluation.baselines.asking import Asking
from memagent_graph.evaluation.baselines.dialogues import dialogue_for
from memagent_graph.evaluation.baselines.excerpts import DocumentEnds, room
from memagent_graph.evaluation.systems import Attempt, SystemSettings

_SLACK_TOKENS: Final = 16
"""A text in its prompt may have a few tokens fewer than alone, where it meets the words around it."""


class FullContext:
    """What a model with a long window would do. Its arithmetic grows with the square of the length."""

    name: Final = "full_context"

    def __init__(self, settings: SystemSettings) -> None:
        self._settings = settings

    async def attempt(self, document: DocumentRef, question: str, *, answer_tokens: int, run_id: str) -> Attempt:
        """Ask once. A document that does not fit is an outcome, `AttemptOutcome.DOES_NOT_FIT`, and asks nothing.

        Raises:
            BudgetError: not even an empty document would fit.
            MemAgentError: the policy or the document failed.
        """
        asking = Asking(self._settings, document, question, answer_tokens)
        dialogue = dialogue_for(asking)
        window = self._settings.context_window

        def prepare() -> tuple[str | None, int, int]:
            space = room(dialogue.text_needs, window)
            ends = DocumentEnds(asking.store, document, asking.tokenizer, 0)
            if ends.tokens > space + _SLACK_TOKENS:
                return None, ends.tokens, window - space + ends.tokens
            text = ends.whole()
            needed = dialogue.text_needs(text)
            return (text if needed <= window else None), ends.tokens, needed

        text, tokens, needed = await asyncio.to_thread(prepare)
        if text is None:
            return asking.does_not_fit(tokens, needed)
        found = await dialogue.ask_about(text)
        return asking.attempt(found.reply, tokens, f"all {tokens:,} tokens shown", memory=found.memory)

    async def aclose(self) -> None:
        """Nothing belongs to it."""

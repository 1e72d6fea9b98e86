"""One call with the whole document, where the window holds it."""

from __future__ import annotations

import asyncio
from typing import Final

from memagent_graph.evaluation.baselines.asking import Asking
from memagent_graph.evaluation.baselines.baseline import Baseline
from memagent_graph.evaluation.baselines.dialogues import Dialogue
from memagent_graph.evaluation.baselines.excerpts import DocumentEnds, room
from memagent_graph.evaluation.systems import Attempt

_SLACK_TOKENS: Final = 16
"""A text in its prompt may have a few tokens fewer than alone, where it meets the words around it."""


class FullContext(Baseline):
    """What a model with a long window would do. Its arithmetic grows with the square of the length."""

    name: Final = "full_context"

    async def answer(self, asking: Asking, dialogue: Dialogue) -> Attempt:
        """Ask once. A document that does not fit is an outcome, `Outcome.DOES_NOT_FIT`, and asks nothing."""
        window = self._settings.context_window

        def prepare() -> tuple[str | None, int, int]:
            space = room(dialogue.text_needs, window)
            ends = DocumentEnds(asking.store, asking.document, asking.tokenizer, 0)
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

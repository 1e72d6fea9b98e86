"""One call with the beginning and the end of the document, and the middle left out."""

from __future__ import annotations

import asyncio
from typing import Final

from memagent_graph.evaluation.baselines.asking import Asking
from memagent_graph.evaluation.baselines.baseline import Baseline
from memagent_graph.evaluation.baselines.dialogues import Dialogue
from memagent_graph.evaluation.baselines.excerpts import DocumentEnds, longest_fitting, room
from memagent_graph.evaluation.systems import Attempt


class MiddleTruncation(Baseline):
    """What most tools do with a document that is too long: half of the room to its beginning, half to its end."""

    name: Final = "middle_truncation"

    async def answer(self, asking: Asking, dialogue: Dialogue) -> Attempt:
        """Ask once."""
        window = self._settings.context_window

        def prepare() -> tuple[str, int, int]:
            ends = DocumentEnds(asking.store, asking.document, asking.tokenizer, room(dialogue.text_needs, window))
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

"""The refine chain: an answer from the first chunk, improved by each of the others in turn."""

from __future__ import annotations

from typing import Final

from memagent_graph.evaluation.baselines.asking import Asking, Reply
from memagent_graph.evaluation.baselines.baseline import Baseline
from memagent_graph.evaluation.baselines.dialogues import Dialogue
from memagent_graph.evaluation.baselines.excerpts import fitting_chunks, room
from memagent_graph.evaluation.systems import Attempt


class Refine(Baseline):
    """Like the reader it sees every chunk once, in order; unlike it, it carries an answer and no notes.

    Chunks are as long as the reader's where the window has room for that. A completion that is empty or refused
    leaves the draft as it was.
    """

    name: Final = "refine"

    async def answer(self, asking: Asking, dialogue: Dialogue) -> Attempt:
        """Ask once per chunk."""
        space = room(dialogue.improve_needs, self._settings.context_window)
        draft = Reply("", None)
        tokens = number = 0
        async for chunk in fitting_chunks(asking, dialogue.prompts, min(space, asking.budget.chunk_tokens)):
            tokens, number = tokens + chunk.tokens, number + 1
            reply = await dialogue.improve(draft.answer or "", chunk.text, chunk.index)
            draft = reply if reply.text else draft
        return asking.attempt(draft, tokens, f"{number:,} chunks", chunks=number)

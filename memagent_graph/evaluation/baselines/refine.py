"""The refine chain: an answer from the first chunk, improved by each of the others in turn."""

from __future__ import annotations

from typing import Final

from memagent_graph.documents import DocumentRef
from memagent_graph.evaluation.baselines.asking import Asking, Reply
from memagent_graph.evaluation.baselines.dialogues import dialogue_for
from memagent_graph.evaluation.baselines.excerpts import fitting_chunks, room
from memagent_graph.evaluation.systems import Attempt, SystemSettings


class Refine:
    """Like the reader it sees every chunk once, in order; unlike it, it carries an answer and no notes.

    Chunks are as long as the reader's where the window has room for that. A completion that is empty or refused
    leaves the draft as it was.
    """

    name: Final = "refine"

    def __init__(self, settings: SystemSettings) -> None:
        self._settings = settings

    async def attempt(self, document: DocumentRef, question: str, *, answer_tokens: int, run_id: str) -> Attempt:
        """Ask once per chunk.

        Raises:
            BudgetError: the window has no room for any text.
            MemAgentError: the policy failed, at the chunk that the error names, or the document did.
        """
        asking = Asking(self._settings, document, question, answer_tokens)
        dialogue = dialogue_for(asking)
        space = room(dialogue.improve_needs, self._settings.context_window)
        draft = Reply("", None)
        tokens = number = 0
        async for chunk in fitting_chunks(asking, dialogue.prompts, min(space, asking.budget.chunk_tokens)):
            tokens, number = tokens + chunk.tokens, number + 1
            reply = await dialogue.improve(draft.answer or "", chunk.text, chunk.index)
            draft = reply if reply.text else draft
        return asking.attempt(draft, tokens, f"{number:,} chunks")

    async def aclose(self) -> None:
        """Nothing belongs to it."""

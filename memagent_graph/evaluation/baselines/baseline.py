"""What all baselines share: an attempt asks the policy in one dialogue, and nothing is left to be closed."""

from __future__ import annotations

from abc import ABC, abstractmethod

from memagent_graph.documents import DocumentRef
from memagent_graph.evaluation.baselines.asking import Asking
from memagent_graph.evaluation.baselines.dialogues import Dialogue, dialogue_for
from memagent_graph.evaluation.systems import Attempt, SystemSettings


class Baseline(ABC):
    """A `System` that keeps nothing from one attempt to the next."""

    name: str

    def __init__(self, settings: SystemSettings) -> None:
        self._settings = settings

    async def attempt(self, document: DocumentRef, question: str, *, answer_tokens: int, run_id: str) -> Attempt:
        """See `System`. Nothing is saved or logged under `run_id`."""
        asking = Asking(self._settings, document, question, answer_tokens)
        return await self.answer(asking, dialogue_for(asking))

    @abstractmethod
    async def answer(self, asking: Asking, dialogue: Dialogue) -> Attempt:
        """Answer the question that `asking` has.

        Raises:
            BudgetError: the window has no room for what must be asked.
            MemAgentError: the policy failed, at the chunk that the error names where there are chunks, or the document.
        """

    async def aclose(self) -> None:  # noqa: B027  nothing to do is what they share
        """Nothing belongs to it; the policy is the caller's."""

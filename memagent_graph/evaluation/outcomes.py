"""How an attempt at a question ended: one list for systems, scores, rows and tables."""

from __future__ import annotations

from enum import StrEnum

from memagent_graph.results import StopReason


class Outcome(StrEnum):
    """How an attempt ended. All but ANSWERED are wrong in every score, and counted apart, in the denominator."""

    ANSWERED = "answered"
    """There is an answer to score."""
    NO_ANSWER = "no_answer"
    """All was read, and the policy wrote nothing, or refused, when asked for the answer."""
    UNFINISHED = "unfinished"
    """A limit of the reader's ended the read before the document did."""
    FAILED = "failed"
    """An error ended it: no server, a refused request, a document that cannot be read. Systems raise it."""
    DOES_NOT_FIT = "does_not_fit"
    """The document is longer than the window that the system would need; the policy was not asked. Nothing broke, and
    nothing was answered: tables print no accuracy where it is all that happened."""

    @classmethod
    def of(cls, stop_reason: StopReason) -> Outcome:
        """What a read's stop reason means here."""
        if stop_reason.resumable:
            return cls.UNFINISHED
        return cls.ANSWERED if stop_reason is StopReason.ANSWERED else cls.NO_ANSWER

"""Questions on the command line, and in files that are named with @ in front."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from memagent_graph.errors import MemAgentError
from memagent_graph.storage.bounded_files import MOST_BYTES_OF_WORDING, text_file

_MOST_QUESTIONS = 10_000


def questions_of(given: Iterable[str]) -> list[str]:
    """Return the questions, with each @FILE replaced by the questions in that file.

    Raises:
        MemAgentError: a question is empty; a file cannot be read, or contains no questions.
    """
    asked: list[str] = []
    for each in given:
        if not each.strip():
            raise MemAgentError("the question is empty", hint="Ask something.")
        if not each.startswith("@"):
            asked.append(each)
            continue
        try:
            text = text_file(Path(each[1:]).expanduser(), MOST_BYTES_OF_WORDING, pipes=True)
            found = [line.strip() for line in text.removeprefix("\ufeff").splitlines() if line.strip()]
            if len(found) > _MOST_QUESTIONS:
                raise ValueError(f"there are more than {_MOST_QUESTIONS:,}")
        except (OSError, ValueError) as error:
            raise MemAgentError(
                f"the questions in {each[1:]} cannot be read: {error}",
                hint="After @, name a text file in UTF-8 with one question on each line.",
            ) from error
        if not found:
            raise MemAgentError(f"{each[1:]} contains no questions", hint="Write one on each line.")
        asked += found
    return asked

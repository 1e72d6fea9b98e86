"""Recognizes answers that say that there is none, such as "not stated". English only."""

from __future__ import annotations

import re
from typing import Final

_SAYS_NONE: Final = re.compile(
    r"""(?:unknown|unclear|n/?a|nothing\ (?:found|relevant|yet)|no\ answer|unanswerable
    |(?:no|insufficient)\ (?:relevant\ )?information(?:\ found|\ given|\ available)?
    |(?:it\ is\ )?not\ (?:stated|mentioned|given|specified|available|found|known|applicable|provided|answered
     |in\ (?:the\ )?memory)
    |i\ (?:do\ not|don't)\ know|(?:it\ )?cannot\ be\ (?:determined|answered)
    |(?:the\ |this\ )?(?:document|text|memory|section)s?\ (?:does|do|did)\ not
     \ (?:say|state|mention|give|contain|hold|specify|answer|provide|know)
     (?:(?!\b(?:but|however|though|although|only|except)\b)[^.,;:])*
    )[.!]*""",
    re.IGNORECASE | re.VERBOSE,
)
_NONE: Final = re.compile(r"(?:none|nothing)[.!]*", re.IGNORECASE)


def gives_no_answer(answer: str | None, *, quoted: bool = False) -> bool:
    """Whether an answer is empty, or says that there is none.

    Args:
        answer: the answer.
        quoted: whether the document has a quote for it. Then "none" and "nothing" are answers.
    """
    words = " ".join((answer or "").split())
    return not words or bool(_SAYS_NONE.fullmatch(words)) or (not quoted and bool(_NONE.fullmatch(words)))

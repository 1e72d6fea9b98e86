"""English word lists for `sentence_checks`: opposites, negations, and words that are not names."""

from __future__ import annotations

import re
from typing import Final


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPENERS: Final = _words(
    """
    according although however overall moreover furthermore therefore thus hence likewise similarly
    accordingly instead nevertheless still yet finally meanwhile additionally consequently both either neither
    each every all most some many several few another such same first second third last next then here there
    while since unless until though whereas under upon within without along among between beyond despite
    except regarding concerning per via given if when yes no not none nothing nobody everything everyone
    everybody anything anyone something someone it its he she they we you half quarter much his her their our
    your my these those this that the a an one two also again only even later earlier
    """
)
"""Words that often begin a sentence; with a capital, they are not names."""
TITLES: Final = _words("mr mrs ms dr prof sir lady lord st")
NEGATIONS: Final = _words("not no never none neither nor without cannot nobody nothing nowhere")
"""Words that end in n't are negations too."""
SOFT_NEGATIONS: Final = _words(
    """
    unable free lack lacks lacked lacking absence absent fail fails failed failing failure refuse refuses refused
    exclude excludes excluded excluding prohibit prohibits prohibited forbid forbids forbidden
    """
)
"""Words that can have the meaning of a negation, so that one may replace the other."""
QUALIFIERS: Final = NEGATIONS | _words("unless except only until rarely seldom hardly barely almost nearly")
"""Words that restrict or negate a sentence; without them it claims more, or the opposite."""
BETWEEN_WORDS: Final = _words(
    """
    the and for with from this that these those its their his her were was are been being has have had did does
    doing any can could may might must shall should will would than then there which who whom whose what when where
    how into onto upon about such also only just very own per you your our
    """
)
"""Words that are ignored when the words around a negation, or between two names, are compared."""
OPPOSITES: Final = tuple(
    (_words(left), _words(right))
    for left, right in (
        ("may might optional optionally", "must shall required mandatory"),
        (
            "increase increased increases rise rose risen rises grew grow grown gain gained higher",
            "decrease decreased decreases fall fell fallen falls drop dropped decline declined shrank lower",
        ),
        ("more", "less fewer"),
        ("above over exceeding", "below under"),
        ("before prior earlier", "after later following"),
        ("minimum", "maximum"),
        ("all every each", "some few"),
        ("always", "sometimes rarely occasionally"),
        ("often usually frequently", "rarely seldom"),
        ("first earliest", "last latest"),
        ("largest biggest greatest highest", "smallest lowest"),
        ("accept accepted accepts", "reject rejected rejects"),
        ("granted grants grant", "denied denies deny"),
        (
            "allow allowed allows permitted permit permits",
            "forbid forbidden prohibited prohibit prohibits disallowed",
        ),
        ("plaintiff claimant", "defendant respondent"),
        ("won wins", "lost loses"),
        ("bought buyer purchaser", "sold seller"),
        ("true", "false"),
        ("yes", "no"),
        ("open opened", "closed shut"),
        ("north northern", "south southern"),
        ("east eastern", "west western"),
        ("left", "right"),
        ("internal", "external"),
        ("include includes including included", "exclude excludes excluding excluded"),
        ("success succeeded successful", "failure failed unsuccessful"),
        ("guilty", "innocent"),
        ("signed", "unsigned"),
        ("public", "private"),
        ("positive", "negative"),
        ("upper", "lower"),
        ("begin begins began start started starts", "end ended ends"),
        ("ascending", "descending"),
        ("strict strictly", "lenient loosely"),
        ("mutable", "immutable"),
        ("valid", "invalid"),
        ("present", "absent"),
        ("landlord lessor", "tenant lessee"),
        ("creditor lender", "debtor borrower"),
        ("employer", "employee"),
    )
)  # fmt: skip
"""Pairs of word groups. A sentence with a word of one group contradicts quotes that only have words of the other."""
OPPOSITE_PHRASES: Final = (
    (re.compile(r"\bat least\b|\bno (?:less|fewer) than\b|\bminimum\b", re.I),
     re.compile(r"\bat most\b|\bno more than\b|\bup to\b|\bmaximum\b", re.I)),
    (re.compile(r"\bmore than\b|\bover\b(?= \d)|\babove\b|\bgreater than\b|\bexceed", re.I),
     re.compile(r"\b(?:less|fewer) than\b|\bunder\b(?= \d)|\bbelow\b", re.I)),
)  # fmt: skip
"""Pairs of phrases, used like `OPPOSITES`."""

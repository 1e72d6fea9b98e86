"""Questions about sentences of real prose, found by the form of the sentences.

"If the file is empty, nothing is printed." asks "What happens if the file is empty?". So a policy learns to read facts
that were not planted: conditions, reasons, purposes, definitions and duties of manuals, licences and references.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from memagent_evaluation.english_facts import sentence
from memagent_evaluation.tasks.haystacks import split_sentences

_PLAIN: Final = re.compile(r"[A-Za-z0-9 ,.;:'\"`()/_-]+")
_COMMON: Final = frozenset(
    re.findall(
        r"\w+",
        """
        about after also before being between both cannot default does each every following function given
        have help here into method more must name only option other program same should some such than that
        their them then there these they this those used using value what when where whether which will with
        without would your
        """,
    )
)
"""Words that do not say what a question is about."""


@dataclass(frozen=True, slots=True)
class RealQuestion:
    """A sentence of the text, with its white space as single spaces, and a question that it answers."""

    statement: str
    question: str

    @property
    def keywords(self) -> frozenset[str]:
        """The question's words that say what it is about, lower case."""
        words = re.findall(r"[a-z][a-z0-9_-]{3,}", self.question.lower())
        return frozenset(words) - _COMMON

    def could_be_answered_by(self, text: str) -> bool:
        """Whether a text has most of the question's own words, so that it may answer it."""
        lower = text.lower()
        return 2 * sum(word in lower for word in self.keywords) > len(self.keywords)


_VERBS: Final = (
    "contains|returns|specifies|describes|provides|defines|controls|indicates|means|requires|supports|represents|allows"
    "|creates|prints|displays|causes|sets|holds|reads|writes|accepts|takes|shows|removes|stores|enables|implements"
)
_SUBJECT: Final = r"(?P<s>(?:The|A|An|Each|Every) (?:(?!(?:is|are|that|which) )[\w'/-]+ ){1,5}?|[A-Z][a-z][\w-]* )"
_FORMS: Final[tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]] = tuple(
    (re.compile(pattern), questions)
    for pattern, questions in (
        (
            r"If (?P<c>[^,;:]{12,90}), (?:then )?(?P<r>[^;:]{12,120})\.",
            ("What happens if {c}?", "If {c}, what happens?", "What follows if {c}?"),
        ),
        (
            r"When (?P<c>[^,;:]{12,90}), (?P<r>[^;:]{12,120})\.",
            ("What happens when {c}?", "When {c}, what is done?"),
        ),
        (
            r"(?P<r>(?:The|This|A|You|It) [^,;:]{15,110}) (?:if|unless|only when) (?P<c>[^;:]{12,90})\.",
            ("Under what condition is it that {r}?", "In which case {r}?"),
        ),
        (
            _SUBJECT + r"(?:is|are) used (?P<r>(?:to|for|by|in|as) [^;:]{8,100})\.",
            ("What is {s} used for?", "For what purpose is {s} used?", "How is {s} used?"),
        ),
        (
            rf"{_SUBJECT}(?P<v>{_VERBS}) (?P<r>[^;:]{{10,110}})\.",
            ("What does {s} {base}?", "What {v} {r}?", "Tell me what {s} {v}."),
        ),
        (
            _SUBJECT + r"(?P<m>must|should|may not|cannot|shall) (?P<r>[^;:]{10,110})\.",
            ("What {m} {s} do?", "What is said that {s} {m} do?"),
        ),
        (
            _SUBJECT + r"(?:is|are) (?P<r>(?:a|an|the) [^;:]{10,110})\.",
            ("What is {s}?", "How is {s} described?", "What kind of thing is {s}?"),
        ),
        (
            r"(?P<r>[A-Z][^,;:]{12,110}),? because (?P<c>[^;:]{10,110})\.",
            ("Why is it that {r}?", "What is the reason that {r}?"),
        ),
        (
            r"To (?P<c>[^,;:]{8,70}), (?P<r>(?:use|set|run|call|specify|add|see|type|press|choose) [^;:]{6,90})\.",
            ("How do you {c}?", "What should one do to {c}?", "How can I {c}?"),
        ),
        (
            r"(?P<s>[A-Z][^,;:]{4,60}?) (?:defaults to|is set by default to|is by default) (?P<r>[^;:]{2,60})\.",
            ("What is the default of {s}?", "Which value does {s} have by default?"),
        ),
        (
            r"By default,? (?P<c>[^;:]{15,110})\.",
            ("What is the default behaviour?", "What happens by default?"),
        ),
        (
            r"(?:[^;:]{0,60}?)[Rr]aises? (?:an? )?:?\w*:?`?(?P<r>[A-Z]\w+(?:Error|Exception|Warning))`?(?: exception)?"
            r",? (?:if|when) (?P<c>[^;:]{8,90})\.",
            (
                "Which exception is raised if {c}?",
                "What is raised when {c}?",
                "What error do I get if {c}?",
            ),
        ),
        (
            r"You can (?P<c>[^,;:]{6,60}?) (?P<r>(?:with|using|by|through|in) [^;:]{6,80})\.",
            ("How can I {c}?", "How do I {c}?", "With what can I {c}?"),
        ),
        (
            r"(?P<r>[A-Z][^,;:]{3,60}) (?:allows|enables|lets) (?:you|users|the user|one)(?: to)? (?P<c>[^;:]{8,90})\.",
            ("What lets me {c}?", "How can I {c}?", "What can be used to {c}?"),
        ),
        (
            r"Use (?P<r>[^,;:]{3,60}?) to (?P<c>[^;:]{8,90})\.",
            (
                "What can be used to {c}?",
                "How can I {c}?",
                "What should I use if I want to {c}?",
            ),
        ),
        (
            r"(?P<s>[A-Z][^,;:]{6,70}?) (?:is|are) (?P<r>not (?:allowed|permitted|supported|possible|guaranteed)"
            r"[^;:]{0,60})\.",
            ("Which restriction is there on {s}?", "What is said about {s}?"),
        ),
        (
            r"(?P<s>[A-Z][^,;:]{6,70}?) after (?P<r>(?:\d+|one|two|three|four|five|six|ten|a few|several) [a-z]+)\.",
            ("After how much time is it that {s}?", "How long does it take until {s}?"),
        ),
        (
            r"(?P<s>[a-z][a-z0-9_-]{1,18}) - (?P<r>[a-z][^;:]{12,70})",
            (
                "What does {s} do?",
                "What is {s} for?",
                "Which command or library is described as: {r}?",
            ),
        ),
    )
)


def sentences(text: str) -> Iterator[str]:
    """Yield the text's sentences, unchanged, including white space between words."""
    for paragraph in re.split(r"\n\s*\n", text):
        for part in split_sentences(paragraph):
            yield part.strip()


def real_questions(text: str) -> list[RealQuestion]:
    """Questions about the sentences of a text that have a known form; several per sentence."""
    questions: list[RealQuestion] = []
    for statement in sentences(text):
        plain = " ".join(statement.split())
        if not 40 <= len(plain) <= 230 or not _PLAIN.fullmatch(plain):
            continue
        made = [*_by_form(plain), *_by_verb(plain), *_with_a_gap(plain), *_by_words(plain)]
        is_name = plain[:1].islower()
        questions += [question for question in made if len(question.keywords) >= (1 if is_name else 2)]
    return questions


def _by_form(plain: str) -> Iterator[RealQuestion]:
    """Questions of the first form that a whole sentence has."""
    for pattern, questions in _FORMS:
        if match := pattern.fullmatch(plain):
            parts = {name: _inside(part) for name, part in match.groupdict().items()}
            parts["base"] = _base(parts.get("v", ""))
            for question in questions:
                yield RealQuestion(plain, question.format(**parts))
            return


def _by_verb(plain: str) -> Iterator[RealQuestion]:
    """Questions for the subject and for the object of a sentence with an auxiliary verb."""
    if match := _AUXILIARY.fullmatch(plain):
        subject, auxiliary, verb, rest = _inside(match["s"]), match["a"], match["v"], match["r"]
        yield RealQuestion(plain, f"What {auxiliary} {verb} {rest}?")
        yield RealQuestion(plain, f"What {auxiliary} {subject} {verb}?")
        yield RealQuestion(plain, f"{auxiliary.capitalize()} {subject} {verb} {rest}?")
    if match := _PASSIVE.fullmatch(plain):
        subject, verb, rest = _inside(match["s"]), match["v"], match["r"]
        for word in _WH[match["p"]]:
            yield RealQuestion(plain, f"{word} {match['a']} {subject} {verb}?")
        yield RealQuestion(plain, f"What {match['a']} {verb} {match['p']} {rest}?")
    if match := _NUMBER.search(plain):
        words = _content_words(plain.replace(match[0], " "))
        yield RealQuestion(plain, f"How many {match['u']} {' '.join(words[:5])}?")


def _with_a_gap(plain: str) -> Iterator[RealQuestion]:
    """Yield a question with the sentence's own words and a gap at its end, as people type into a search box."""
    match = _TAIL.fullmatch(plain)
    if match and len(match["c"].split()) >= 5:
        rest = _inside(match["c"])
        yield RealQuestion(plain, f"{sentence(rest)} what?")
        yield RealQuestion(plain, f"What about {' '.join(_content_words(rest))}?")


def _by_words(plain: str) -> Iterator[RealQuestion]:
    """Questions with some of the sentence's own words, in an order of their own: half a question is enough."""
    words = _content_words(plain)
    if len(words) < 4 or not (plain[0].isupper() and plain.endswith(".")):
        return
    rng = random.Random(plain)  # the same questions each time
    for _ in range(2):
        chosen = rng.sample(words, min(len(words), rng.randint(3, 5)))
        if rng.random() < 0.6:
            chosen.sort(key=words.index)
        yield RealQuestion(plain, f"{rng.choice(_QUESTION_WORDS)} {' '.join(chosen)}?")


def _content_words(text: str) -> list[str]:
    """Return the words that say what a text is about, in order, without their punctuation."""
    bare = (word.strip("'\"(),.;:") for word in text.split())
    return list(dict.fromkeys(word for word in bare if len(word) > 3 and word.lower() not in _COMMON))


_AUXILIARY: Final = re.compile(
    r"(?P<s>[A-Z][^,;:.]{3,70}?) (?P<a>(?:must|should|may|do|does|can|will|shall)(?: not)?|cannot)"
    r" (?P<v>[a-z]{2,14}) (?P<r>[^;:]{5,100})\."
)
_PASSIVE: Final = re.compile(
    r"(?P<s>[A-Z][^,;:.]{3,70}?) (?P<a>is|are|was|were) (?P<v>(?:not )?[a-z]{2,12}(?:ed|en|ten|wn|id|lt|nt|pt|ut|ad))"
    r" (?P<p>by|with|in|at|on|when|after|before|from|to|as|for|if|until) (?P<r>[^;:]{4,100})\."
)
_WH: Final = {
    "by": ("By what", "How", "By whom"),
    "with": ("With what", "How"),
    "in": ("Where", "In what"),
    "at": ("Where", "When"),
    "on": ("On what", "Where"),
    "when": ("When", "In which case"),
    "after": ("When", "After what"),
    "before": ("When", "Before what"),
    "from": ("From where", "From what"),
    "to": ("To what", "Where"),
    "as": ("As what", "How"),
    "for": ("For what", "Why"),
    "if": ("When", "Under what condition"),
    "until": ("Until when", "How long"),
}
"""The question words that ask for what follows a preposition."""
_NUMBER: Final = re.compile(r"\b(?:\d{1,5}|two|three|four|five|six|seven|eight|nine|ten|twelve) (?P<u>[a-z]{3,12}s)\b")
_QUESTION_WORDS: Final = (
    "What", "What", "What", "Which", "Which", "How", "How", "Why", "When", "Where", "Who", "May I", "Can I", "How many",
    "How long", "What happens with", "What is said about", "What about", "Does", "Is", "Must I", "In which case",
)  # fmt: skip
_TAIL: Final = re.compile(
    r"(?P<c>[A-Z][^;:]{20,150} (?:to|of|as|in|by|with|for|from|on|after|is|are|be|than|at|into|under|a|an|the))"
    r" (?P<r>[^;:,]{3,45})\."
)
"""Greedy, so that the gap is after the last such word."""


_SYNONYMS: Final = {
    "use": "employ", "used": "employed", "show": "display", "shows": "displays", "displays": "shows",
    "remove": "delete", "removed": "deleted", "delete": "remove", "create": "make", "creates": "makes",
    "start": "begin", "starts": "begins", "specified": "given", "given": "specified", "contains": "has",
    "returns": "gives back", "required": "needed", "requires": "needs", "needed": "required", "must": "has to",
    "option": "switch", "print": "output", "prints": "outputs", "large": "big", "small": "little", "error": "failure",
    "fails": "does not succeed", "empty": "without content", "missing": "not there", "change": "alter",
    "changed": "altered", "allows": "lets", "also": "", "directory": "folder", "program": "application",
    "invoked": "called", "called": "invoked", "enabled": "switched on", "disabled": "switched off", "only": "",
    "current": "present", "previous": "earlier", "whole": "entire", "modify": "change", "modified": "changed",
    "obtain": "get", "permission": "leave", "distribute": "pass on", "copy": "duplicate", "stop": "end",
    "allowed": "permitted", "permitted": "allowed", "raised": "thrown", "executed": "run", "unable": "not able",
    "default": "standard", "automatically": "by itself", "several": "more than one", "length": "size",
    "provide": "give", "provided": "given", "value": "setting", "available": "there", "terminate": "end",
    "increase": "raise", "choose": "select", "select": "choose", "find": "look for", "begin": "start",
    "additional": "further", "multiple": "several", "maximum": "largest", "minimum": "smallest", "quickly": "fast",
    "cannot": "can not", "unless": "if not", "must not": "may not", "you": "I", "your": "my", "connect": "reach",
    "function": "routine", "functions": "routines", "contain": "have", "receive": "get", "includes": "has",
    "include": "have", "written": "put", "user": "person", "users": "people", "file": "document",
}  # fmt: skip
"""Common synonyms; an empty one means that the word is left out."""


def paraphrased(rng: random.Random, question: str) -> str:
    """Return the question in words that differ somewhat from those of the sentence that answers it."""
    words: list[str] = []
    for word in question.split(" "):
        bare = word.rstrip("?,.")
        if bare in _SYNONYMS and rng.random() < 0.6:
            word = _SYNONYMS[bare] + word[len(bare) :]  # noqa: PLW2901
        elif words and rng.random() < (0.2 if bare in {"the", "a", "an"} else 0.06):
            continue
        if word:
            words.append(word)
    return " ".join(words)


def _inside(part: str) -> str:
    """Return a part of a sentence, adapted for use inside another one."""
    part = part.strip()
    first, _, rest = part.partition(" ")
    return (
        f"{first.lower()} {rest}".strip() if first in {"The", "This", "A", "An", "Each", "Every", "It", "You"} else part
    )


def _base(verb: str) -> str:
    if verb.endswith("ies"):
        return verb[:-3] + "y"
    return verb[:-1]

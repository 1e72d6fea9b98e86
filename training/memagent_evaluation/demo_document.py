"""The documents of `memagent demo`: the minutes of a small harbour's committee, and one for the embedded policy.

Names, sums, dates, the items of each meeting and their wordings vary by seed; the texts are in `demo_document.toml`.
Four questions ask for four kinds of facts: who, how much, why, and where or when. The same seed asks about the same
subjects at every length; dates depend on the length. The embedded policy finds numbers alone: its document is Python's
language reference with facts between the paragraphs.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from importlib.resources import files
from typing import Any, Final

from memagent_evaluation.planted_facts import Fact, PlantedFacts
from memagent_evaluation.tasks.haystacks import iter_python_prose
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.tokenizers import Tokenizer

_CHOICE: Final = re.compile(r"\[([^\[\]]*)\]")
_SLOT: Final = re.compile(r"\{(\w+?)\d?\}")
_SENTENCE_START: Final = re.compile(r"(?:^|(?<=[.!?] ))[a-z]")
_WORD: Final = re.compile(r"\w+")
_NUMBER_WORDS: Final = ["two", "three", "four", "five", "six", "seven", "eight", "nine"]
_QUESTION_KINDS: Final = (("who",), ("sum", "count", "changed"), ("why",), ("where", "date", "until"))
"""The kinds of facts that each of the four questions may ask for."""


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """A question, its answer, and the one sentence of the document that gives it."""

    question: str
    answer: str
    sentence: str
    subject: str
    """Words that only the sentence has, and for a value that changed the sentence with its first value."""
    required_phrases: tuple[str, ...]
    """Strings that a right answer contains; alternatives are separated by "|"."""
    depth: float
    """Where the sentence begins, as a fraction of the document's length, 0 to 1."""

    def is_right(self, answer: str | None) -> bool:
        """Return whether an answer contains all phrases, and at most a third of its words are from elsewhere.

        Letter case, articles, punctuation, and the format of sums and dates do not matter.
        """
        words = _normalise(answer or "")
        if gives_no_answer(answer) or not all(
            any(f" {_normalise(wording)} " in f" {words} " for wording in phrase.split("|"))
            for phrase in self.required_phrases
        ):
            return False
        allowed_words = {"pounds", *_normalise(f"{self.question} {self.sentence} {self.answer}").split()}
        content_words = [word for word in words.split() if len(word) > 3 or word.isdigit()]
        foreign_words = [word for word in content_words if word not in allowed_words]
        return len(foreign_words) * 3 <= len(content_words) and not any(word.isdigit() for word in foreign_words)


@dataclass(frozen=True, slots=True)
class DemoDocument:
    """A document and its questions, in the order of their sentences."""

    text: str
    questions: tuple[DemoQuestion, ...]


def make_demo_document(
    tokens: int = 40_000, seed: int = 0, count_tokens: Callable[[str], int] = lambda text: len(text) // 4
) -> DemoDocument:
    """Return minutes of at least `tokens` tokens, with four questions.

    Args:
        tokens: the minimum length; the last meeting may exceed it.
        seed: the seed of the minutes and the facts.
        count_tokens: counts the tokens of a text; by default, four characters are one.
    """
    minutes = _MinutesWriter(random.Random(f"minutes {seed}"))
    meetings: list[_Meeting] = []
    length = 0
    while length < tokens or len(meetings) < len(_QUESTION_KINDS):
        meetings.append(minutes.write_meeting())
        length += count_tokens(meetings[-1].format_minutes())
    generator = random.Random(f"facts {seed}")
    facts = [
        generator.choice([fact for fact in _load_texts()["facts"] if fact["kind"] in kinds])
        for kinds in _QUESTION_KINDS
    ]
    generator.shuffle(facts)
    questions = []
    for index, fact in enumerate(facts):
        meeting_index = int((index + generator.uniform(0.3, 0.8)) / len(facts) * len(meetings))
        meeting_index = max(meeting_index, fact["kind"] == "changed")  # an earlier meeting has the first value
        questions.append(minutes.add_fact(fact, meetings, meeting_index, random.Random(f"{seed} {fact['subject']}")))
    text = "\n\n\n".join(meeting.format_minutes() for meeting in meetings) + "\n"
    return _make_document(text, questions)


def _make_document(text: str, questions: Iterable[tuple[str, str, str, str, tuple[str, ...]]]) -> DemoDocument:
    """Return a document with its questions, of which `questions` has all fields but the depth."""
    return DemoDocument(text, tuple(DemoQuestion(*fields, text.index(fields[2]) / len(text)) for fields in questions))


def iter_demo_texts(seeds: Iterable[int], tokens: int = 40_000) -> Iterator[str]:
    """Yield each seed's document and questions as one text, so that training can exclude them."""
    for seed in seeds:
        document = make_demo_document(tokens, seed)
        yield "\n".join([document.text, *(question.question for question in document.questions)])


def make_number_document(
    tokenizer: Tokenizer, *, tokens: int = 100_000, questions: int = 4, seed: int = 7
) -> DemoDocument:
    """Return prose of at least `tokens` tokens, with `questions` numbers in it and four foreign numbers for each.

    One of the four foreign facts resembles the fact that is asked for. All facts come from the held-out split, and
    stand between paragraphs.
    """
    generator = random.Random(seed)
    facts = PlantedFacts(generator, held_out=True, number_fraction=1.0)
    asked_facts: list[Fact] = []
    for _ in range(questions):
        asked_facts.append(facts.draw_fact(exclude=frozenset(fact.entity.lower() for fact in asked_facts)))
    entities = frozenset(fact.entity.lower() for fact in asked_facts)
    foreign_facts = [facts.draw_near_miss(fact) for fact in asked_facts]
    foreign_facts += [facts.draw_fact(exclude=entities) for _ in range(3 * questions)]
    paragraphs: list[str] = []
    length = 0
    for paragraph in iter_python_prose():
        if length >= tokens:
            break
        paragraphs.append(paragraph)
        length += tokenizer.count(paragraph + "\n\n")
    depths = [(index + generator.uniform(0.2, 0.8)) / questions for index in range(questions)]
    insertions = [(depth, fact.statement) for depth, fact in zip(depths, asked_facts, strict=True)]
    insertions += [(generator.random(), fact.statement) for fact in foreign_facts]
    for depth, statement in sorted(insertions, key=lambda item: -item[0]):
        paragraphs.insert(int(depth * len(paragraphs)), statement)
    text = "\n\n".join(paragraphs)
    return _make_document(
        text, ((fact.question, fact.value, fact.statement, fact.entity, (fact.value,)) for fact in asked_facts)
    )


@cache
def _load_texts() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("demo_document.toml").read_text("utf-8"))


def _normalise(text: str) -> str:
    text = re.sub(r"(?<=\d),(?=\d)", "", text.lower())
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|['’]s\b|£", "", text)
    return " ".join(word for word in _WORD.findall(text) if word not in {"a", "an", "the", "of"})


class _Deck:
    """Draws options in random order; each option once before any is repeated."""

    def __init__(self, options: Iterable[Any], generator: random.Random) -> None:
        self._options, self._generator = list(options), generator
        self._remaining: list[Any] = []

    def draw(self) -> Any:
        """Return the next option."""
        if not self._remaining:
            self._remaining = self._generator.sample(self._options, len(self._options))
        return self._remaining.pop()


@dataclass(slots=True)
class _Meeting:
    """A meeting's day and text: heading, items as title and paragraph, and end."""

    day: date
    heading: str
    items: list[tuple[str, str]]
    end: str

    def format_minutes(self) -> str:
        """Return the minutes of the meeting."""
        items = [f"{item_number}. {title}\n{text}" for item_number, (title, text) in enumerate(self.items, start=1)]
        return "\n\n".join([self.heading, *items, self.end])


class _MinutesWriter:
    """Writes the minutes of one committee, meeting after meeting: its people, its money and its business."""

    def __init__(self, generator: random.Random) -> None:
        words = _load_texts()["words"]
        self._generator = generator
        surnames = generator.sample(words["surnames"], len(words["surnames"]))
        self._reserved, surnames = surnames[:4], surnames[4:]
        self._committee = [
            f"{'Mrs' if index % 2 else 'Mr'} {surname}"
            for index, surname in enumerate(surnames[:9], generator.choice((0, 1)))
        ]
        self._home, *towns = generator.sample(words["towns"], len(words["towns"]))
        self._first_name_deck = _Deck(words["women"] + words["men"], generator)
        self._surname_deck = _Deck(surnames[9:], generator)
        self._word_decks = {"town": _Deck(towns, generator), "firm": _Deck(words["firms"], generator)}
        self._word_decks |= {"boat": _Deck(words["boats"], generator), "place": _Deck(words["places"], generator)}
        self._item_deck = _Deck(_load_texts()["items"], generator)
        self._paragraph_decks = {item["title"]: _Deck(item["texts"], generator) for item in _load_texts()["items"]}
        self._officers = dict(zip(("chair", "secretary", "treasurer", "master"), self._committee, strict=False))
        self._weekday = generator.randrange(4)
        self._next_day = self._compute_meeting_day(date(generator.randrange(2014, 2021), 1, 1))
        self._previous_day: date | None = None
        self._subscription = generator.randrange(18, 35)
        self._balance = generator.randrange(6_000, 15_000)

    def write_meeting(self) -> _Meeting:
        """Return the minutes of the next meeting."""
        day, rng = self._next_day, self._generator
        next_month = (day.replace(day=1) + timedelta(days=63 if day.month == 7 else 32)).replace(day=1)
        self._next_day = self._compute_meeting_day(next_month)
        absent = rng.sample(self._committee[4:], rng.randrange(0, 3))
        present = [member for member in self._committee if member not in absent]
        roles = {name: f" ({role})" for role, name in self._officers.items() if role != "master"}
        heading = (
            f"{self._home} Harbour Committee\nMinutes of the meeting on {self._format_date(day)}\n\nPresent: "
            + ", ".join(member + roles.get(member, "") for member in present)
            + f".\nApologies: {' and '.join(absent) or 'none'}."
        )
        items = [("Minutes of the last meeting", self._write_approval(day))]
        if day.month == 1 and self._previous_day:
            items.append(("Annual business", self._write_elections(day)))
        for _ in range(rng.randrange(8, 12)):
            item = self._item_deck.draw()
            slots: dict[str, str] = {}
            title = self.fill(item["title"], day, slots)
            items.append((title, self.fill(self._paragraph_decks[item["title"]].draw(), day, slots)))
        spent, received = rng.randrange(200, 1_900), rng.randrange(200, 2_000)
        self._balance += received - spent
        items.append(
            (
                "Finance",
                self.fill(
                    f"[In the month £{received:,} came in and £{spent:,} went out|Receipts were £{received:,} and "
                    f"payments £{spent:,}], [which leaves|so that there is] £{self._balance:,} in the "
                    "[current account|bank]. "
                    "[The largest payment was {sum}|{few} bills are open|{treasurer} answered {few} questions|"
                    "{member} had checked {count} receipts].",
                    day,
                    {},
                ),
            )
        )
        end = self.fill(
            f"The next meeting [is|will be] on {self._format_date(self._next_day)} [at half past seven|in the "
            f"committee room]. {{chair}} [closed the meeting|thanked those present and closed] "
            f"at 9.{rng.randrange(2, 58):02d} pm.",
            day,
            {},
        )
        self._previous_day = day
        return _Meeting(day, heading, items, end)

    def add_fact(
        self, fact: dict[str, Any], meetings: list[_Meeting], meeting_index: int, generator: random.Random
    ) -> tuple[str, str, str, str, tuple[str, ...]]:
        """Add a fact to a meeting; return question, answer, sentence, subject and required phrases."""
        day, kind = meetings[meeting_index].day, fact["kind"]
        question, old_value = generator.choice(fact["questions"]), ""
        phrases: tuple[str, ...]
        if kind in {"why", "where"}:
            value, *phrases_of_value = generator.choice(fact["values"])
            phrases = tuple(phrases_of_value)
        elif kind == "who":
            surname = self._reserved.pop()
            words = _load_texts()["words"]
            value, phrases = f"{generator.choice(words['women'] + words['men'])} {surname}", (surname,)
        elif kind in {"date", "until"}:
            fact_date = day + timedelta(days=generator.randrange(20, 60) + 365 * 5 * (kind == "until"))
            value = f"{fact_date.day} {fact_date:%B}" + f" {fact_date.year}" * (kind == "until")
            phrases = (f"{fact_date.day} {fact_date:%B}|{fact_date:%B} {fact_date.day}",)
            phrases += (str(fact_date.year),) * (kind == "until")
        else:
            amount = generator.randrange(*fact["range"])
            value = f"{amount}" if kind == "count" else f"£{amount:,}"
            phrases, old_value = (str(amount),), f"£{amount - generator.randrange(4, 9)}"
        slots = {"value": value, "old": old_value}
        texts = {
            part: self.fill(generator.choice(fact[part]), day, slots) for part in ("before", "statements", "after")
        }
        self._insert(meetings[meeting_index], fact["title"], " ".join(texts.values()), generator)
        if kind == "changed":
            earlier_meeting = meetings[meeting_index // 2]
            text = self.fill(generator.choice(fact["earlier"]), earlier_meeting.day, slots)
            self._insert(earlier_meeting, fact["title"], text, generator)
        return question, value, texts["statements"], fact["subject"], phrases

    def fill(self, template: str, day: date, slots: dict[str, str]) -> str:
        """Return a template with random choices and filled slots; `slots` keeps the values for the item's next text."""
        text_with_slots = _CHOICE.sub(lambda match: self._generator.choice(match[1].split("|")), template)
        for match in _SLOT.finditer(text_with_slots):
            slot = match[0][1:-1]
            while slot not in slots:
                value = self._draw_value(match[1], day)
                if value not in slots.values():
                    slots[slot] = value
        text = _SLOT.sub(lambda match: slots[match[0][1:-1]], text_with_slots)
        return _SENTENCE_START.sub(lambda match: match[0].upper(), text)

    def _draw_value(self, kind: str, day: date) -> str:  # noqa: PLR0911
        rng = self._generator
        if kind in self._officers:
            return self._officers[kind]
        if kind in self._word_decks:
            return str(self._word_decks[kind].draw()).replace("{surname}", self._surname_deck.draw())
        ranges = {"sum": (40, 480), "large": (700, 7_000), "small": (6, 38), "count": (13, 60), "berth": (2, 48)}
        if kind in ranges:
            amount = rng.randrange(*ranges[kind])
            return f"£{amount:,}" if kind in {"sum", "large", "small"} else str(amount)
        if kind in {"past", "soon"}:
            shifted_day = day + timedelta(days=rng.randrange(3, 25) * (1 if kind == "soon" else -1))
            return f"{shifted_day.day} {shifted_day:%B}"
        match kind:
            case "person":
                return f"{self._first_name_deck.draw()} {self._surname_deck.draw()}"
            case "member":
                return rng.choice(self._committee[4:])
            case "few":
                return rng.choice(_NUMBER_WORDS)
            case "month":
                return f"{day + timedelta(days=rng.randrange(40, 150)):%B}"
            case "weekday":
                return f"{day + timedelta(days=rng.randrange(7)):%A}"
            case "home":
                return str(self._home)
        raise ValueError(f"no slot is called {kind}")

    def _write_approval(self, day: date) -> str:
        last_meeting = "the last meeting of the old year"
        if self._previous_day:
            last_meeting = f"the meeting on {self._format_date(self._previous_day)}"
        return self.fill(
            f"The minutes of {last_meeting} were [approved|read and approved|taken as read], [without change|after a "
            "date was corrected|on the motion of {member}].",
            day,
            {},
        )

    def _write_elections(self, day: date) -> str:
        old_treasurer, old_subscription = self._officers["treasurer"], self._subscription
        # The treasurer and another member exchange their places in the list.
        member_index = self._generator.randrange(4, 9)
        self._committee[2], self._committee[member_index] = self._committee[member_index], self._committee[2]
        self._officers["treasurer"] = self._committee[2]
        self._subscription += self._generator.randrange(1, 4)
        return self.fill(
            f"{old_treasurer} did not stand again as treasurer, and {self._committee[2]} was elected [without "
            f"opposition|by a large majority]. The other officers [stay|were elected again]. The subscription "
            f"[rises|goes up] from £{old_subscription} to £{self._subscription} [a head|for each member].",
            day,
            {},
        )

    def _compute_meeting_day(self, first_day: date) -> date:
        """Return the second of the committee's weekdays in a month that begins on `first_day`."""
        return first_day + timedelta(days=(self._weekday - first_day.weekday()) % 7 + 7)

    @staticmethod
    def _format_date(day: date) -> str:
        return f"{day:%A}, {day.day} {day:%B} {day.year}"

    @staticmethod
    def _insert(meeting: _Meeting, title: str, text: str, generator: random.Random) -> None:
        meeting.items.insert(generator.randrange(1, len(meeting.items)), (title, text))

"""Makes training rows: a section of prose with planted facts, and many questions about it as branches of one sequence.

The trunk of a row is the prompt up to the end of the section. Each branch continues from there with a memory, a problem
and the scripted reader's reply, and attends only to the trunk and itself: this is the format of inference, but all
questions share the cost of the section. Answer prompts, which have no section, are branches that do not see the trunk.

The scripted reader copies a memory that is not empty. On an empty memory it writes the requested value if the section
has the complete fact, and otherwise "none".
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from memagent_evaluation.planted_facts import Fact, PlantedFacts, redraw_question

EMPTY = "none"
FIRST_TOKEN_WEIGHT = 2.0
"""The weight of an update's first token, which decides between a value and "none"."""
_FIELD = re.compile(r"\{(?:memory|prompt|chunk)\}")


@dataclass(frozen=True)
class PromptFormat:
    """The shipped templates and tokenizer, combined as by the reader and the chat template."""

    encoding: tiktoken.Encoding
    trunk_template: str
    """The beginning of an update prompt, up to the end of the section."""
    branch_template: str
    """The rest of an update prompt."""
    answer_template: str

    @classmethod
    def load(cls, folder: Path, encoding: tiktoken.Encoding) -> PromptFormat:
        """Read the templates of a model folder; the section must come first, and a token always ends at its end."""
        names = ("update.txt", "answer.txt")
        update, answer = ((folder / "templates" / name).read_text(encoding="utf-8") for name in names)
        head, separator, tail = update.partition("</section>\n")
        if not separator or "{memory}" in head or "{prompt}" in head:
            raise SystemExit(f"{folder} has a template for updates in which the section is not first")
        return cls(encoding, head + separator, tail, answer)

    def encode_trunk(self, chunk: str) -> list[int]:
        """Return the tokens with which the update prompts of all questions on a section begin."""
        return self._encode_special("<|user|>") + self.encoding.encode_ordinary(
            self.trunk_template.replace("{chunk}", chunk)
        )

    def encode_question(self, memory: str, problem: str) -> list[int]:
        """Return the tokens of an update prompt after the trunk."""
        fields = {"{memory}": memory, "{prompt}": problem}
        text = _FIELD.sub(lambda match: fields[match[0]], self.branch_template)
        return self.encoding.encode_ordinary(text) + self._encode_special("<|end|>", "<|assistant|>")

    def find_question_tags(self) -> set[int]:
        """Return the tokens that are in every question part and rarely elsewhere."""
        return set(self.encode_question("", "")) - set(self.encoding.encode_ordinary(" >\n </> "))

    def encode_answer_prompt(self, memory: str, problem: str) -> list[int]:
        """Return the tokens of a whole answer prompt."""
        text = self.answer_template.replace("{memory}", memory).replace("{prompt}", problem)
        ids = self.encoding.encode_ordinary(text)
        return self._encode_special("<|user|>") + ids + self._encode_special("<|end|>", "<|assistant|>")

    def encode_reply(self, text: str) -> list[int]:
        """Return the tokens of a completion, including its end token."""
        return self.encoding.encode_ordinary(" " + text) + self._encode_special("<|end|>")

    def _encode_special(self, *tokens: str) -> list[int]:
        return [self.encoding.encode_single_token(token) for token in tokens]


@dataclass(frozen=True)
class RowSection:
    """A section's text, the facts that it states completely, and the facts that its edges cut off."""

    text: str
    present_facts: tuple[Fact, ...]
    cut_facts: tuple[Fact, ...]


@dataclass(frozen=True)
class RowBranch:
    """The rest of a prompt with its reply: tokens, and (index, target, weight) for each learned token.

    `kind` is the kind of reply: "value", "none", "copy" (of the memory) or "answer".
    """

    tokens: list[int]
    learned_tokens: list[tuple[int, int, float]]
    sees_trunk: bool
    kind: str

    @classmethod
    def from_reply(
        cls, prompt: list[int], reply: list[int], sees_trunk: bool, kind: str, first_weight: float
    ) -> RowBranch:
        """Return the branch of a prompt and its reply, without the reply's last token, which is only predicted."""
        positions = enumerate(reply, start=len(prompt) - 1)
        learned_tokens = [
            (position, token, 1.0 if position >= len(prompt) else first_weight) for position, token in positions
        ]
        return cls(prompt + reply[:-1], learned_tokens, sees_trunk, kind)


@dataclass(frozen=True)
class Row:
    """One training sequence: the trunk's tokens, and the branches that continue from it."""

    trunk: list[int]
    branches: list[RowBranch]

    @property
    def size(self) -> int:
        """The number of tokens of trunk and branches."""
        return len(self.trunk) + sum(len(branch.tokens) for branch in self.branches)


class Prose:
    """Random pieces of a corpus file."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8").replace("\x00", "\n\n")

    def draw_piece(self, rng: random.Random, characters: int) -> str:
        """Return a piece from a random position."""
        start = rng.randrange(max(1, len(self.text) - characters))
        return self.text[start : start + characters]

    def find_common_words(self, count: int) -> list[str]:
        """Return lower-case words of four to ten letters that occur often, for the facts' vocabulary."""
        word_counts = Counter(re.findall(r"(?<![\w-])[a-z]{4,10}(?![\w-])", self.text[:6_000_000]))
        return sorted(word_counts, key=lambda word: (-word_counts[word], word))[:count]


def plant_statements(rng: random.Random, prose: str, statements: Sequence[str]) -> str:
    """Insert the statements between words of the prose, mostly after a sentence."""
    sentence_ends = [match.end() for match in re.finditer(r"[.!?:]\s+", prose)]
    gaps = [match.end() for match in re.finditer(r"\s+", prose)]
    positions = []
    for statement in statements:
        candidates = sentence_ends if sentence_ends and rng.random() < 0.7 else gaps
        positions.append((rng.choice(candidates) if candidates else 0, statement))
    for position, statement in sorted(positions, key=lambda pair: -pair[0]):
        space_before = "\n\n" if rng.random() < 0.25 else ""
        space_after = rng.choices((" ", "\n", "\n\n"), (60, 15, 25))[0]
        prose = prose[:position] + space_before + statement + space_after + prose[position:]
    return prose


def judge_presence(fact: Fact, text: str) -> bool | None:
    """Return whether the text states the fact: True, False, or None if that is unclear because an edge cuts it."""
    if fact.statement in text:
        return True
    if fact.value not in text or fact.entity.split()[-1] not in text or fact.attribute.split()[-1] not in text:
        return False
    return None


class RowBuilder:
    """Composes rows from prose and facts; all randomness comes from the generator that each call gets."""

    def __init__(self, prompt_format: PromptFormat, prose: Prose, *, held_out: bool = False) -> None:
        self.prompt_format = prompt_format
        self.prose = prose
        self.held_out = held_out
        self.words = [] if held_out else prose.find_common_words(6000)

    def draw_section(self, rng: random.Random, facts: PlantedFacts, tokens: int) -> RowSection:
        """Return about `tokens` tokens of prose with planted facts; half of the sections are cut like chunks."""
        planted_facts: list[Fact] = []
        fact_count = rng.choices((0, 1, 2, 3, 4), (20, 25, 25, 20, 10))[0]
        used_keys: set[tuple[str, str]] = set()
        while len(planted_facts) < fact_count:
            is_similar = bool(planted_facts) and rng.random() < 0.35
            fact = facts.draw_near_miss(rng.choice(planted_facts)) if is_similar else facts.draw_fact()
            key = (fact.attribute, fact.entity.lower())
            if key not in used_keys:
                used_keys.add(key)
                planted_facts.append(fact)
        is_chunk = rng.random() < 0.5
        text = self.prose.draw_piece(rng, int(tokens * (4.6 if is_chunk else 3.6)))
        text = plant_statements(rng, text, [fact.statement for fact in planted_facts])
        if is_chunk or tokens > 400:
            token_ids = self.prompt_format.encoding.encode_ordinary(text)
            start = rng.randrange(max(1, len(token_ids) - tokens)) if is_chunk else 0
            text = self.prompt_format.encoding.decode(token_ids[start : start + tokens]).strip("\ufffd")
        presences = [(fact, judge_presence(fact, text)) for fact in planted_facts]
        return RowSection(
            text,
            tuple(fact for fact, is_present in presences if is_present),
            tuple(fact for fact, is_present in presences if is_present is False),
        )

    def draw_row(self, rng: random.Random, section_tokens: int, branches: int, hardness: float = 1.0) -> Row:
        """Return one section with its branches, and two answer prompts."""
        facts = PlantedFacts(rng, held_out=self.held_out, words=self.words, number_fraction=1.0)
        section = self.draw_section(rng, facts, section_tokens)
        row_branches = []
        for _ in range(branches):
            memory, problem, reply = self.draw_turn(rng, facts, section, hardness)
            kind = "copy" if memory != EMPTY else "none" if reply == EMPTY else "value"
            prompt = self.prompt_format.encode_question(memory, problem)
            row_branches.append(
                RowBranch.from_reply(prompt, self.prompt_format.encode_reply(reply), True, kind, FIRST_TOKEN_WEIGHT)
            )
        for _ in range(2):
            memory = EMPTY if rng.random() < 0.2 else self.draw_memory(rng, facts)
            prompt = self.prompt_format.encode_answer_prompt(memory, facts.draw_fact().question)
            boxed = self.prompt_format.encode_reply("\\boxed{ " + memory + "}")
            row_branches.append(RowBranch.from_reply(prompt, boxed, False, "answer", 1.0))
        return Row(self.prompt_format.encode_trunk(section.text), row_branches)

    def draw_question_prompts(self, rng: random.Random, count: int) -> list[list[int]]:
        """Return the tokens of update prompts after the section, on an empty memory."""
        facts = PlantedFacts(rng, held_out=self.held_out, words=self.words)
        return [self.prompt_format.encode_question(EMPTY, facts.draw_fact().question) for _ in range(count)]

    def draw_turn(
        self, rng: random.Random, facts: PlantedFacts, section: RowSection, hardness: float
    ) -> tuple[str, str, str]:
        """Return memory, problem and reply of a branch: easy ones ask for facts in the section, hard ones do not."""
        present_facts = section.present_facts
        chance = rng.random()
        if chance < 0.12:
            fact = rng.choice(present_facts) if present_facts and rng.random() < 0.4 else facts.draw_fact()
            memory = self.draw_memory(rng, facts)
            return memory, fact.question, memory
        if chance < 0.55 - 0.15 * hardness and present_facts:
            fact = redraw_question(facts, rng.choice(present_facts))
            return EMPTY, fact.question, fact.value
        if chance < 0.7 and section.cut_facts:
            return EMPTY, rng.choice(section.cut_facts).question, EMPTY
        while True:
            is_similar = present_facts and rng.random() < 0.15 + 0.35 * hardness
            fact = facts.draw_near_miss(rng.choice(present_facts)) if is_similar else facts.draw_fact()
            if (fact.attribute, fact.entity) not in {(other.attribute, other.entity) for other in present_facts}:
                return EMPTY, fact.question, EMPTY

    def draw_memory(self, rng: random.Random, facts: PlantedFacts) -> str:
        """Return a memory to keep: mostly a value, sometimes other words."""
        chance = rng.random()
        if chance < 0.8:
            return facts.draw_fact().value
        words = self.prose.draw_piece(rng, 120).split()
        garbage = " ".join(words[1 : 1 + rng.randint(1, 8)])
        token_ids = self.prompt_format.encoding.encode_ordinary(garbage)[:24]
        text = self.prompt_format.encoding.decode(token_ids).replace("\ufffd", "").replace("<", "").strip()
        return text if text and text != EMPTY else facts.draw_fact().value

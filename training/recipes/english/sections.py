"""Cuts the sources' prose into sections as the reader cuts documents: up to a number of tokens, at a sentence's end.

    python -m recipes.english.sections                        # prints each source's length, sections and SHA-256
    python -m recipes.english.sections --held-out prose.txt   # writes the held-out prose, to measure on

The sections of a source depend only on its text and its name, so a row of `questions.jsonl` identifies a section by its
source and its characters.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from recipes.english.exclusion import Exclusion
from recipes.english.pinned_texts import PinnedText, read_pins, read_text

SOURCES_PATH: Final = Path(__file__).with_name("prose.toml")
CHARACTERS_PER_TOKEN: Final = 4.2
"""The average of English prose with the base's tokenizer. Sections are cut by characters, without a tokenizer."""
MAX_SECTION_TOKENS: Final = 512
_END_WINDOW: Final = 0.15
"""The last fraction of a section, in which it is cut at the end of a sentence."""
_SENTENCE_END: Final = re.compile(r"[.!?][\"'”’)\]]*\s+|\n\s*\n\s*")
_TABLE_CHARACTER: Final = re.compile(r"[|+=_*#~<>{}\\]")


@dataclass(frozen=True, slots=True)
class ProseSection:
    """A part of a source's text, from character `start` to character `end`."""

    source: str
    kind: str
    start: int
    end: int
    text: str

    @property
    def is_prose(self) -> bool:
        """Whether it is running text rather than a table, a listing or a list of names."""
        letter_or_space_count = sum(character.isalpha() or character == " " for character in self.text)
        surplus_space_count = len(self.text) - len(" ".join(self.text.split()))
        sign_count = len(_TABLE_CHARACTER.findall(self.text))
        visible_count = max(1, len(self.text) - surplus_space_count)
        words = self.text.split()
        uppercase_words = sum(word.isupper() and len(word) > 1 for word in words)
        return (
            letter_or_space_count / visible_count > 0.85
            and sign_count / visible_count < 0.012
            and uppercase_words < 0.12 * len(words)
        )


def cut_spans(text: str, rng: random.Random) -> Iterator[tuple[int, int]]:
    """Yield the spans of consecutive sections: half have the maximum length, the others down to a fifth of it."""
    start = 0
    while start < len(text):
        tokens = MAX_SECTION_TOKENS if rng.random() < 0.5 else rng.randint(MAX_SECTION_TOKENS // 5, MAX_SECTION_TOKENS)
        max_characters = int(tokens * CHARACTERS_PER_TOKEN)
        end = start + max_characters
        if end < len(text):
            sentence_ends = [
                match.end() for match in _SENTENCE_END.finditer(text, int(end - _END_WINDOW * max_characters), end)
            ]
            end = sentence_ends[-1] if sentence_ends else end
        yield start, min(end, len(text))
        start = end


def cut_source(source: PinnedText, text: str) -> Iterator[ProseSection]:
    """Yield the sections of a source's text."""
    name = f"{source.package}/{source.file}"
    kind = source.kind
    for start, end in cut_spans(text, random.Random(name)):
        yield ProseSection(name, kind, start, end, text[start:end].strip("\n"))


def load_sections(exclusion: Exclusion, *, held_out: bool = False, cache: Path | None = None) -> list[ProseSection]:
    """Return the prose sections of all sources in a random order in which the kinds of source alternate.

    Sources that are marked as held out are only for measuring, never for training.
    """
    sections = [
        section
        for source in read_pins(SOURCES_PATH)
        if source.held_out == held_out
        for section in cut_source(source, read_text(source, cache))
        if section.is_prose and not exclusion.overlaps(section.text)
    ]
    random.Random("sections").shuffle(sections)
    counts_by_kind: Counter[str] = Counter()
    ranked_sections: list[tuple[int, str, ProseSection]] = []
    for section in sections:
        counts_by_kind[section.kind] += 1
        ranked_sections.append((counts_by_kind[section.kind], section.kind, section))
    return [section for _, _, section in sorted(ranked_sections, key=lambda item: item[:2])]


def main() -> None:
    """Print each source's sections, or write the held-out prose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--held-out", type=Path, help="the file to write the sections of held-out sources to")
    exclusion, path = Exclusion.load(), parser.parse_args().held_out
    if path:
        sections = load_sections(exclusion, held_out=True)
        path.write_text("\n\n".join(section.text for section in sections), "utf-8")
        return
    for source in read_pins(SOURCES_PATH):
        text = read_text(source)
        sections = list(cut_source(source, text))
        prose_sections = [section for section in sections if section.is_prose]
        clear_sections = [section for section in prose_sections if not exclusion.overlaps(section.text)]
        digest = hashlib.sha256(text.encode()).hexdigest()
        counts = f"{len(sections)} sections, {len(prose_sections)} prose, {len(clear_sections)} clear"
        print(f"{source.name}: {len(text)} characters, {counts}")
        print(f'  sha256 = "{digest}"')
    kinds = Counter(
        section.kind for held_out in (False, True) for section in load_sections(exclusion, held_out=held_out)
    )
    print(dict(kinds))


if __name__ == "__main__":
    main()

"""Keeps texts with which the policy is measured, and near-duplicates of them, out of training data.

`exclusion.toml` lists these texts, and `exclusion.bin` has the hashes of their n-grams of 13 words, so that data can be
made on a machine that has none of the texts. A text overlaps if it has an n-gram of an excluded text, without case and
punctuation; a short text, such as a question, overlaps if it has the same words as an excluded one. All code that makes
data checks every text (`Exclusion.overlaps`), and drops texts that overlap.

    python -m recipes.english.exclusion            # writes exclusion.bin again, after a change of exclusion.toml
"""

from __future__ import annotations

import array
import importlib
import importlib.metadata
import pydoc_data.topics
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from memagent_evaluation.demo_document import iter_demo_texts
from memagent_graph.errors import MemAgentError
from recipes.english.pinned_texts import PinnedText, read_text

FOLDER: Final = Path(__file__).parent
REPOSITORY: Final = FOLDER.parents[2]
NGRAM_WORDS: Final = 13
_WORD: Final = re.compile(r"[^\W_]+")


class ExclusionError(MemAgentError):
    """An excluded text cannot be read, or training data overlap with one."""


def split_words(text: str) -> list[str]:
    """Return a text's words in lower case; words that are hyphenated at the end of a line are joined."""
    return _WORD.findall(re.sub(r"(?<=[a-z])-\n\s*(?=[a-z])", "", text).casefold())


def hash_ngrams(text: str) -> Iterator[int]:
    """Yield a 64-bit hash of each n-gram of 13 words, or of all words of a text that has fewer."""
    words = split_words(text)
    for start in range(max(1, len(words) - NGRAM_WORDS + 1)):
        ngram = " ".join(words[start : start + NGRAM_WORDS])
        if ngram:
            yield int.from_bytes(blake2b(ngram.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Hashes of excluded n-grams, and excluded names."""

    hashes: frozenset[int]
    names: frozenset[str] = frozenset()
    """Single words, such as held-out people and towns, in lower case."""

    @classmethod
    def load(cls, folder: Path = FOLDER) -> Exclusion:
        """Read `exclusion.bin` and the names of `exclusion.toml`.

        Raises:
            ExclusionError: one of the two files is missing; then no data must be made.
        """
        try:
            table = tomllib.loads((folder / "exclusion.toml").read_text("utf-8"))
            content = (folder / "exclusion.bin").read_bytes()
        except OSError as error:
            raise ExclusionError(f"the exclusion file cannot be read: {error}", hint="Restore it from git.") from error
        hashes = array.array("Q", content)
        names = (name.casefold() for module in table["names"] for name in _call_by_name(module))
        return cls(frozenset(hashes), frozenset(names))

    def overlaps(self, text: str) -> bool:
        """Return whether a text shares an n-gram, or a held-out name, with an excluded one."""
        has_ngram = any(value in self.hashes for value in hash_ngrams(text))
        return has_ngram or not self.names.isdisjoint(split_words(text))

    def require_clear(self, texts: Iterable[str]) -> None:
        """Refuse texts that overlap; this is the last check before rows are trained on.

        Raises:
            ExclusionError: a text overlaps; the message has its beginning.
        """
        for text in texts:
            if self.overlaps(text):
                raise ExclusionError(
                    f"training data overlap with what the policy is measured on: {text[:80]!r}",
                    hint="Make the rows again with this exclusion file; older rows may have been made before it.",
                )


def read_excluded_texts(folder: Path = FOLDER) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of everything that `exclusion.toml` lists."""
    table = tomllib.loads((folder / "exclusion.toml").read_text("utf-8"))
    for name in table["files"]:
        yield name, (REPOSITORY / name).read_text("utf-8")
    for name in table["manuals"]:
        yield name, str(importlib.metadata.metadata(name).get_payload())  # type: ignore[attr-defined]
    for name in table["topics"]:
        yield name, pydoc_data.topics.topics[name]
    for name in table["questions"]:
        for text in tomllib.loads((REPOSITORY / name).read_text("utf-8"))["texts"]:
            yield from ((name, question["ask"]) for question in text["questions"])
            if "package" in text:
                source = PinnedText.from_table(text)
                yield source.name, read_text(source)
    for function in table["documents"]:
        yield from ((function, text) for text in _call_by_name(function))


def _call_by_name(function: str) -> Iterable[str]:
    """Return what a function, written as `module:name`, returns."""
    module, _, name = function.partition(":")
    result: Any = getattr(importlib.import_module(module), name)()
    return tuple(result)


def yield_held_out_names() -> Iterator[str]:
    """Yield the people and the towns that `memagent_evaluation` keeps for measuring."""
    from memagent_evaluation.english_facts import list_words  # noqa: PLC0415  only to write and to load the names

    for kind in ("first_names", "family_names", "towns"):
        yield from list_words(kind, held_out=True)


def make_demonstrations() -> Iterator[str]:
    """Yield the texts of the demonstration."""
    yield from iter_demo_texts(range(10), tokens=8_000)


def main() -> None:
    """Write `exclusion.bin`."""
    hashes: set[int] = set()
    for name, text in read_excluded_texts():
        old_count = len(hashes)
        hashes.update(hash_ngrams(text))
        if len(text) > 200:
            print(f"{name}: {len(text)} characters, {len(hashes) - old_count} n-grams")
    (FOLDER / "exclusion.bin").write_bytes(array.array("Q", sorted(hashes)).tobytes())
    print(f"{len(hashes)} n-grams of {NGRAM_WORDS} words")


if __name__ == "__main__":
    main()

"""Questions on real prose, written by the base itself and kept only if they survive a round trip.

    python -m recipes.english.prose_questions --base FOLDER --minutes 30

A section's spans (`facts_in_prose.py`) are answers; the model writes a question for each. A question is kept if the
model's own answer to it is the span with the section, and neither without a section nor with another section of the
same source. An answer counts as the model's if its tokens are likely ones: that takes one forward pass for all
questions on a section, where decoding would take one for each token.

Rows are appended to `questions.jsonl` section by section, after which the next run goes on; each row names its section
by source and characters, so that the file holds no text but questions, answers and the sentences' places. What the
exclusion file excludes is dropped and counted.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from memagent_training.forward.layouts import lay_out
from memagent_training.forward.scoring import completion_logprobs
from recipes.english.exclusion import Exclusion
from recipes.english.facts_in_prose import AnswerSpan, spans
from recipes.english.sections import ProseSection, all_sections

ROWS: Final = Path(__file__).with_name("questions.jsonl")
HELD_OUT_ROWS: Final = Path(__file__).with_name("held_out_questions.jsonl")
WRITTEN_ROWS: Final = Path(__file__).with_name("written_questions.jsonl")
"""Written by hand on sections of the training sources, in other words than theirs."""
END: Final = "<|im_end|>"
_PER_SECTION: Final = 8
LIKELY, GAIN = -1.6, 1.5
"""The mean log-prob of an answer's tokens with its section at least, and by how much it is greater than without it."""
_WRITE: Final = Path(__file__).with_name("writing_prompt.txt").read_text("utf-8")
"""How questions are asked for, with examples."""
_ASK: Final = """<|im_start|>user
{section}

Answer the question from the text above, in a few words of the text.

Question: {question}<|im_end|>
<|im_start|>assistant
The answer in the words of the text is \""""
_ASKS: Final = {
    "when": r"when|how long|until when|after what|how often|in (?:which|what)",
    "how many": r"how|what is the (?:maximum|minimum|size|length|number|price|limit|default)",
    "why": r"why|for what|what (?:is|was) the (?:reason|purpose)",
    "what for": r"what (?:is|are) .* (?:used )?for|why|what is the purpose|how",
    "where": r"where|in (?:which|what)|from (?:which|where)|to (?:which|where)|at (?:which|what)",
    "who": r"who|whom|by whom|which",
    "which": r"what|which",
    "how": r"how|by what|with what|in (?:which|what) way",
    "what if": r"what happens|what will|what if",
    "what": r"what|which",
}
"""How a question for an answer of each kind begins."""
_POINTING: Final = re.compile(
    r"\b(?:the (?:sentence|text|passage|answer)|mentioned|described here"
    r"|it|this|that|these|those|he|she|they|his|her|their|you|your)\b",
    re.IGNORECASE,
)
"""What a question must not have, for it points to something that whoever reads the question does not see."""


@dataclass(frozen=True, slots=True)
class ProseQuestion:
    """A question on a section, with its answer and the sentence that holds it."""

    source: str
    start: int
    end: int
    """Of the section, in characters of the source's text."""
    kind: str
    question: str
    answer: str
    sentence: str
    """Empty if the section does not answer."""

    @property
    def is_answered(self) -> bool:
        """Whether the section answers it."""
        return bool(self.sentence)

    def row(self, section: str) -> str:
        """Return one line of JSON, in which the sentence is its place in the section's text with single spaces."""
        start = _spaced(section).index(self.sentence)
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(values | {"sentence": [start, start + len(self.sentence)]}, ensure_ascii=False)


def read_rows(*paths: Path, sections: Iterable[ProseSection]) -> list[ProseQuestion]:
    """Return the questions of files that are on these sections, with their sentences."""
    texts = {(section.source, section.start, section.end): _spaced(section.text) for section in sections}
    return [
        ProseQuestion(**row | {"sentence": _sentence(texts[place], row)})
        for row in question_rows(*paths)
        if (place := (row["source"], row["start"], row["end"])) in texts
    ]


def _sentence(text: str, row: dict[str, Any]) -> str:
    """Return the sentence of a row, which begins and ends with whole words.

    Raises:
        ValueError: the row's place is not that of a sentence of this text.
    """
    if row["sentence"] is None:
        return ""
    start, end = row["sentence"]
    if not (0 <= start < end <= len(text)) or text[start - 1 : start].strip() or text[end : end + 1].strip():
        raise ValueError(f"the sentence of {row['question']!r} is not at {start} to {end} of its section")
    return text[start:end]


def question_rows(*paths: Path) -> list[dict[str, Any]]:
    """Return the rows of files that are questions; the others are the cursor of the sections that are done."""
    lines = [line for path in paths if path.exists() for line in path.read_text("utf-8").splitlines()]
    return [row for row in map(json.loads, lines) if "question" in row]


def _spaced(text: str) -> str:
    return " ".join(text.split())


def cursor(path: Path) -> int:
    """Return how many sections are done."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return max((row["sections"] for row in map(json.loads, lines) if "sections" in row), default=0)


def is_well_formed(question: str, span: AnswerSpan) -> bool:
    """Return whether a question can stand by itself and does not hold its answer."""
    words = question.split()
    return (
        question.endswith("?")
        and question.count("?") == 1
        and 4 <= len(words) <= 24
        and "\n" not in question
        and re.match(_ASKS[span.kind], question, re.IGNORECASE) is not None
        and not span.answer.startswith("be ")
        and not _POINTING.search(question)
        and span.answer.casefold() not in question.casefold()
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt and the reply whose log-prob is wanted."""

    prompt_ids_P: array[int]
    completion_ids_T: array[int]


class QuestionWriter:
    """The base, writing questions and answering them."""

    def __init__(self, base: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415  slow to import

        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._examples_cache: Any = None

    @torch.no_grad()
    def write(self, answer_spans: Sequence[AnswerSpan]) -> list[str]:
        """Return a question for each span, greedily, in one batch; the examples are forwarded once for all."""
        prompts = [
            f"<|im_start|>user\nSentence: {span.sentence}\nAnswer: {span.answer}{END}\n<|im_start|>assistant\n"
            for span in answer_spans
        ]
        own = self._tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        shared = torch.tensor([self._ids(_WRITE).tolist()]).expand(len(prompts), -1)
        cache = copy.deepcopy(self._examples())
        cache.batch_repeat_interleave(len(prompts))
        input_ids = torch.cat([shared, own["input_ids"]], dim=1)
        output = self._model.generate(
            input_ids=input_ids,
            attention_mask=torch.cat([torch.ones_like(shared), own["attention_mask"]], dim=1),
            past_key_values=cache,
            max_new_tokens=28,
            do_sample=False,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        texts = self._tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=False)
        return [re.split(r"<\|", text)[0].strip() for text in texts]

    def _examples(self) -> Any:
        """Return the keys and values of the examples of writing."""
        if self._examples_cache is None:
            output = self._model(torch.tensor([self._ids(_WRITE).tolist()]), use_cache=True, logits_to_keep=1)
            self._examples_cache = output.past_key_values
        return self._examples_cache

    @torch.no_grad()
    def likelihood(self, section: str, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the mean log-prob of the tokens of each pair's answer to its question, given a section."""
        rows = [
            _Row(self._ids(_ASK.format(section=section, question=question)), self._ids(answer + '"'))
            for question, answer in pairs
        ]
        scores = completion_logprobs(self._model, lay_out(rows, "prefix_tree", pad_id=0))
        sums_B = (scores.logprobs_BT * scores.mask_BT).sum(1) / scores.mask_BT.sum(1)
        return [float(value) for value in sums_B]

    def _ids(self, text: str) -> array[int]:
        return array("q", self._tokenizer(text, add_special_tokens=False)["input_ids"])


def choose(section: ProseSection, rng: random.Random) -> list[AnswerSpan]:
    """Return the spans of a section to ask about."""
    candidates = list(spans(section.text))
    return rng.sample(candidates, min(len(candidates), _PER_SECTION))


def questions_on(
    section: ProseSection, other: ProseSection, writer: QuestionWriter, exclusion: Exclusion, counts: dict[str, int]
) -> Iterator[ProseQuestion]:
    """Yield the questions on a section that survive the round trip."""
    answer_spans = choose(section, random.Random(f"{section.source}/{section.start}"))
    counts["spans"] = counts.get("spans", 0) + len(answer_spans)
    if not answer_spans:
        return
    drafts = [
        (span, text)
        for span, text in zip(answer_spans, writer.write(answer_spans), strict=True)
        if is_well_formed(text, span) and not exclusion.overlap(text, "question")
    ]
    counts["well formed"] = counts.get("well formed", 0) + len(drafts)
    if not drafts:
        return
    pairs = [(text, span.answer) for span, text in drafts]
    candidates = [
        (span, text, score)
        for (span, text), score in zip(drafts, writer.likelihood(section.text, pairs), strict=True)
        if score >= LIKELY
    ]
    counts["answered with the section"] = counts.get("answered with the section", 0) + len(candidates)
    if not candidates:
        return
    pairs = [(text, span.answer) for span, text, _ in candidates]
    without = writer.likelihood("(The text is missing.)", pairs)
    elsewhere = writer.likelihood(other.text, pairs)
    for (span, text, here), alone, there in zip(candidates, without, elsewhere, strict=True):
        if max(alone, there) <= here - GAIN:
            counts["kept"] = counts.get("kept", 0) + 1
            yield ProseQuestion(section.source, section.start, section.end, span.kind, text, span.answer, span.sentence)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="the base in transformers' format")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--held-out", action="store_true", help="questions on the sources that are for measuring")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    exclusion = Exclusion.load()
    path = HELD_OUT_ROWS if arguments.held_out else ROWS
    sections = all_sections(exclusion, held_out=arguments.held_out)
    writer = QuestionWriter(arguments.base)
    counts: dict[str, int] = {}
    until, first = time.monotonic() + 60 * arguments.minutes, cursor(path)
    with path.open("a", encoding="utf-8") as file:
        for number in range(first, len(sections)):
            if time.monotonic() > until:
                break
            section = sections[number]
            nearby = [other for other in sections if other.source == section.source and other is not section]
            other = random.Random(number).choice(nearby or sections)
            lines = [question.row(section.text) for question in questions_on(section, other, writer, exclusion, counts)]
            file.write("\n".join([*lines, json.dumps({"sections": number + 1})]) + "\n")
            file.flush()
            if number % 10 == 0:
                print(f"section {number + 1} of {len(sections)}: {counts} dropped {exclusion.overlaps}", flush=True)
    print(f"{cursor(path)} sections, {len(question_rows(path))} questions; {counts}; dropped {exclusion.overlaps}")


if __name__ == "__main__":
    main()

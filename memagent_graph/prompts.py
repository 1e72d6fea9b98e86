"""Prompt templates with fields such as {prompt}, {memory} and {chunk}. A text cannot break out of its field.

Every field is between tags. Document text and memory are not trusted. If they contain a tag of the template, or a
control token of the model's chat template, a backslash is inserted after its first character (`</section>` becomes
`<\\/section>`), so they cannot close their part of the prompt or open another. The control tokens come from the
model's files, or else from all known families (`chat_markers`). All fields are filled in one pass, so `{memory}` in a
document is not replaced.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

from memagent_graph.chat_markers import FAMILY_MARKERS
from memagent_graph.errors import PromptError
from memagent_graph.grouping import group_values
from memagent_graph.policy import Message
from memagent_graph.storage.bounded_files import MAX_WORDING_BYTES, read_text_file

COMMON_FIELDS = frozenset({"prompt", "memory", "chunk"})
"""The fields that every template may have. A role may allow further fields."""
ANSWER_FIELDS = frozenset({"prompt", "memory", "schema"})
"""The fields that the answer's template may have. {schema} is empty unless the answer is structured."""
_TAG = re.compile(r"</?\s*([A-Za-z][\w-]*)\s*>")
_BRACE = re.compile(r"\\boxed\{|[{}]")

EMPTY_MEMORY = "(empty)"
"""The text of the memory before the first update."""


class PromptLayout(StrEnum):
    """The order of the parts of an update prompt."""

    PAPER = "paper"
    """Problem, memory, section: the paper's order."""
    SECTION_FIRST = "section_first"
    """Section, memory, problem: all questions on a document share the section's cached prefix."""


class AnswerFormat(StrEnum):
    """The form of the answer in the completion."""

    BOXED = "boxed"
    """Inside the last \\boxed{...}, as in the paper."""
    PLAIN = "plain"
    """The whole completion."""


@dataclass(frozen=True)
class PromptTemplate:
    """A user message with fields. `source` says where the text comes from, for error messages."""

    text: str
    source: str = "template"
    names: frozenset[str] = COMMON_FIELDS
    """The names of possible fields. Other names in braces are ordinary text."""

    def __post_init__(self) -> None:
        open_tags: list[str] = []
        for token in re.finditer(rf"{_TAG.pattern}|{self._field.pattern}", self.text):
            if token[0].startswith("{"):
                if not open_tags:
                    raise PromptError(
                        f"{self.source}: {token[0]} is not between tags",
                        hint=f"Put tags around it, such as <section> {token[0]} </section>, so that a document "
                        "cannot pose as another part of the prompt.",
                    )
            elif not token[0].startswith("</"):
                open_tags.append(token[1])
            elif token[1] in open_tags:
                del open_tags[len(open_tags) - 1 - open_tags[::-1].index(token[1]) :]

    @cached_property
    def _field(self) -> re.Pattern[str]:
        return re.compile(rf"\{{({'|'.join(sorted(map(re.escape, self.names)))})\}}")

    @cached_property
    def fields(self) -> frozenset[str]:
        """The names of the fields in the text."""
        return frozenset(self._field.findall(self.text))

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Literal text and field names alternately, beginning and ending with literal text."""
        return tuple(self._field.split(self.text))

    @property
    def literal(self) -> str:
        """The text with empty fields, whose tokens count against the budget."""
        return "".join(self.parts[::2])

    def require(self, needed: frozenset[str], allowed: frozenset[str]) -> None:
        """Raise `PromptError` if a needed field is missing or a field is not allowed."""
        if missing_fields := needed - self.fields:
            names = ", ".join(f"{{{name}}}" for name in sorted(missing_fields))
            raise PromptError(f"{self.source}: the field {names} is missing", hint=f"Add {names} to the template.")
        if unknown_fields := self.fields - allowed:
            names = ", ".join(f"{{{name}}}" for name in sorted(unknown_fields))
            raise PromptError(f"{self.source}: {names} cannot be filled in here", hint=f"Remove {names}.")

    def render(self, **values: str) -> str:
        """Return the text with its fields filled in. The values must be neutralised."""
        return "".join(values[part] if index % 2 else part for index, part in enumerate(self.parts))


@dataclass(frozen=True)
class Prompts:
    """The prompts of a reader: for memory updates, for answers, and for further roles."""

    update: PromptTemplate
    answer: PromptTemplate
    answer_format: AnswerFormat = AnswerFormat.BOXED
    empty_memory: str = EMPTY_MEMORY
    """The text of the memory before the first update."""
    control_tokens: frozenset[str] = field(default=frozenset(), repr=False)
    """Control tokens of the model's chat template, such as <|im_end|>."""
    guards_families: bool = field(default=False, repr=False)
    """Whether to escape the control tokens of all known families, because those of the model are unknown."""
    others: Mapping[str, PromptTemplate] = field(default_factory=dict, hash=False)
    """The templates of further roles, by the role's name; see `memagent_graph.roles`."""

    def __post_init__(self) -> None:
        self.update.require(needed=COMMON_FIELDS, allowed=COMMON_FIELDS)
        self.answer.require(needed=COMMON_FIELDS - {"chunk"}, allowed=ANSWER_FIELDS)

    @property
    def wording(self) -> dict[str, str]:
        """All texts of the prompts, as JSON values."""
        return {
            "update": self.update.text,
            "answer": self.answer.text,
            "answer_format": self.answer_format.value,
            "empty_memory": self.empty_memory,
            **{name: template.text for name, template in sorted(self.others.items())},
        }

    @cached_property
    def templates(self) -> Mapping[str, PromptTemplate]:
        """The templates by the name of the role."""
        return {"update": self.update, "answer": self.answer, **self.others}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the wording. Runs with different fingerprints are neither compared nor trained on together."""
        texts = "".join(f"{text}\0" for text in (*self.wording.values(), *sorted(self.others)))
        return hashlib.sha256(texts.encode()).hexdigest()[:16]

    @cached_property
    def _escape_patterns(self) -> dict[str, re.Pattern[str]]:
        """The patterns to escape in a field, by their first character, which makes the search fast."""
        names = {tag for template in self.templates.values() for tag in _TAG.findall(template.text)}
        tags = "|".join(sorted(map(re.escape, names)))
        continuations = [("<", rf"\s*(?:/\s*)?(?:{tags})\b")]
        continuations += [(token[0], re.escape(token[1:])) for token in sorted(self.control_tokens) if len(token) > 1]
        continuations += FAMILY_MARKERS.items() if self.guards_families else ()
        return {
            first: re.compile(f"{re.escape(first)}(?={'|'.join(alternatives)})", re.IGNORECASE)
            for first, alternatives in group_values(continuations).items()
        }

    def neutralise(self, text: str) -> str:
        """Escape what could close a part of the prompt, open another, or end the message."""
        for first, pattern in self._escape_patterns.items():
            if first in text:
                text = pattern.sub(lambda match: match[0] + "\\", text)
        return text

    def messages(self, role: str, question: str, **fields: str) -> list[Message]:
        """Return the prompt of a role, with neutralised fields. An empty memory becomes `empty_memory`."""
        template = self.templates[role]
        values = {name: self.neutralise(fields.get(name, "")) for name in template.fields}
        values["prompt"] = self.neutralise(question)
        if "memory" in values:
            values["memory"] = values["memory"] or self.empty_memory
        return [Message(role="user", content=template.render(**values))]

    def extract_answer(self, text: str) -> str | None:
        """Return the answer in a completion, or None if it does not have the required format."""
        return extract_last_boxed(text) if self.answer_format is AnswerFormat.BOXED else text.strip()


def extract_last_boxed(text: str) -> str | None:
    r"""Return the stripped content of the last complete \boxed{...} (with balanced braces) of a text, or None."""
    openings: list[re.Match[str]] = []
    answer, answer_start = None, -1
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            openings.append(brace)
        elif openings and (opening := openings.pop())[0] != "{" and opening.end() > answer_start:
            answer_start = opening.end()
            answer = text[answer_start : brace.start()].strip()
    return answer


def load_prompts(
    layout: PromptLayout | str | None = None,
    answer_format: AnswerFormat | str | None = None,
    *,
    update_template: Path | str | None = None,
    answer_template: Path | str | None = None,
    empty_memory: str | None = None,
    base: Prompts | None = None,
) -> Prompts:
    """Return the prompts of `base` (by default the paper's) with some parts replaced. None leaves a part unchanged.

    Args:
        layout: the order of the package's update prompt; ignored with `update_template`.
        answer_format: the form of the answer. Without `answer_template`, the package's prompt for this form is used.
        update_template: a UTF-8 text file with {prompt}, {memory} and {chunk} between tags.
        answer_template: a UTF-8 text file with {prompt} and {memory} between tags, and {schema} for structured answers.
        empty_memory: the text of the memory before the first update.
        base: prompts to start from, such as the prompts of a policy's training.

    Raises:
        PromptError: a file cannot be read, or a field is missing, unknown or not between tags.
    """
    base = base or Prompts(_load_packaged("update_paper"), _load_packaged("answer_boxed"))
    update, answer = base.update, base.answer
    chosen_format = AnswerFormat(answer_format or base.answer_format)
    if update_template:
        update = load_template(update_template)
    elif layout:
        update = _load_packaged(f"update_{PromptLayout(layout).value}")
    if answer_template:
        answer = load_template(answer_template, ANSWER_FIELDS)
    elif answer_format:
        answer = _load_packaged(f"answer_{chosen_format.value}")
    return replace(
        base,
        update=update,
        answer=answer,
        answer_format=chosen_format,
        empty_memory=base.empty_memory if empty_memory is None else empty_memory,
    )


@cache
def read_template(name: str) -> str:
    """Return the text of a template of this package."""
    return resources.files("memagent_graph").joinpath("templates", f"{name}.txt").read_text("utf-8").rstrip("\n")


def _load_packaged(name: str) -> PromptTemplate:
    return PromptTemplate(read_template(name), source=f"{name}.txt")


def load_template(path: Path | str, names: frozenset[str] = frozenset()) -> PromptTemplate:
    """Load a template from a file. `names` are fields that it may have in addition to `COMMON_FIELDS`.

    Raises:
        PromptError: the file cannot be read, or a field is not between tags.
    """
    try:
        text = read_text_file(Path(path), MAX_WORDING_BYTES)
    except (OSError, ValueError) as error:
        raise PromptError(f"the template {path} cannot be read: {error}", hint="Use a UTF-8 text file.") from error
    return PromptTemplate(text.rstrip("\n"), source=str(path), names=COMMON_FIELDS | names)

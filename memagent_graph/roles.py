"""Roles: the kinds of calls of the policy. A role has a template, a maximum reply length, and a reply parser.

The template of a role is its default, a file of the policy's profile (`templates/NAME.txt`), or a user's file. A policy
that was trained on its own templates understands no others. If its profile has no template for a role, the template of
the role's `fallback` is used, and fields without a value are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from memagent_graph.budget import CHAT_TEMPLATE_TOKENS, Budget
from memagent_graph.errors import BudgetError, StrategyError
from memagent_graph.events import EventKind
from memagent_graph.prompts import COMMON_FIELDS, AnswerFormat, Prompts, PromptTemplate, read_template
from memagent_graph.trace import Writes


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply that has the form that its role requires."""

    text: str | None
    """The text to write, such as the new memory; None leaves the memory unchanged."""
    value: Any = None
    """A further value from the reply, for the strategy."""


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """The reason why a reply cannot be parsed. The update rule for its kind decides what happens."""

    kind: EventKind
    detail: str


Parser: TypeAlias = Callable[[str, Prompts], ParsedReply | ParseFailure]
"""A function that parses a reply, which is never empty and has no reasoning."""


def keep_whole_text(text: str, _: Prompts) -> ParsedReply:
    """Return the reply unchanged. It is a named function, so that roles can be pickled."""
    return ParsedReply(text)


@dataclass(frozen=True)
class Role:
    """One kind of call of the policy.

    Args:
        name: a unique name in the strategy. Logs, rewards and training use it.
        writes: the kind of result, such as a memory or an answer.
        fields: the fields that the template must have in addition to {prompt}, such as {memory} or {chunk}.
        template: the default template, or a function from the answer format to the template. "update" and "answer" need
            none, because every reader has their templates.
        max_tokens: the maximum length of the reply: the name of a part of the budget, or a number of tokens.
        parse: parses the reply, by default as one text. Answers are parsed by the reader's answer format.
        fallback: the role whose template is used if this role has none, or the policy knows only its own prompts.
        fills_window: whether its step fills the context window with {chunk}, beyond `chunk_tokens`.
        optional: whether the strategy also works if the policy has no template for the role.
    """

    name: str
    writes: Writes = Writes.MEMORY
    fields: frozenset[str] = frozenset({"memory", "chunk"})
    template: str | Callable[[AnswerFormat], str] = ""
    max_tokens: Literal["memory_tokens", "answer_tokens", "question_tokens"] | int = "memory_tokens"
    parse: Parser = keep_whole_text
    fallback: str | None = None
    fills_window: bool = False
    optional: bool = False

    @property
    def signature(self) -> str:
        """The role's part of a strategy's fingerprint. Its template is in the fingerprint of the prompts."""
        return f"{self.name}:{self.writes.value}:{','.join(sorted(self.fields))}:{self.max_tokens}"

    def count_reply_tokens(self, budget: Budget) -> int:
        """Return the maximum number of tokens of the reply."""
        return self.max_tokens if isinstance(self.max_tokens, int) else int(getattr(budget, self.max_tokens))


UPDATE = Role("update")
"""The memory update of the paper."""
ANSWER = Role("answer", Writes.ANSWER, frozenset({"memory"}), max_tokens="answer_tokens")
"""The answer of the paper, from memory alone."""


def read_answer_instructions(answer_format: AnswerFormat) -> str:
    """Return the instructions for the form of the answer, which end the package's answer prompt."""
    return read_template(f"answer_{answer_format.value}").rpartition("\n\n")[2]


REPAIR = Role(
    "repair",
    Writes.ANSWER,
    frozenset({"memory", "schema", "reply", "error"}),
    lambda _: read_template("repair"),
    max_tokens="answer_tokens",
)
"""The role that rewrites an answer without the required form."""


def complete_prompts(roles: Iterable[Role], prompts: Prompts, *, trained_prompts_only: bool = False) -> Prompts:
    """Return prompts with a template for every role.

    Args:
        roles: the roles of a strategy.
        prompts: the prompts of the reader. Their templates take precedence over those of the roles.
        trained_prompts_only: whether the policy understands only the prompts that it was trained on. If so, an optional
            role without a template in `prompts` and without a `fallback` gets no template; see `Prompts.templates`.

    Raises:
        PromptError: a template lacks a field of its role, or has a field that its role does not fill.
        StrategyError: a role has no template, or the policy understands none of its templates.
    """
    templates: dict[str, PromptTemplate] = {}
    for role in roles:
        template = prompts.templates.get(role.name)
        if template is None and role.template and not trained_prompts_only:
            text = role.template if isinstance(role.template, str) else role.template(prompts.answer_format)
            template = PromptTemplate(text, f"the role {role.name}")
        if template is not None:
            template, needed_fields = replace(template, names=COMMON_FIELDS | role.fields), role.fields | {"prompt"}
            template.require(needed=needed_fields, allowed=needed_fields)
        elif role.fallback is not None:
            template = prompts.templates[role.fallback]
        elif trained_prompts_only and role.optional:
            continue
        elif trained_prompts_only:
            raise StrategyError(
                f"the policy has no prompt for the role {role.name!r}",
                hint="It understands only the prompts that it was trained on, and its profile has no "
                f"templates/{role.name}.txt. Use a policy that follows instructions, or another --strategy.",
            )
        else:
            raise StrategyError(
                f"the role {role.name!r} has no template", hint="Set `template` to a text with {prompt} between tags."
            )
        if role.name not in {"update", "answer"}:
            templates[role.name] = template
    return replace(prompts, others=templates)


def require_room(
    roles: Iterable[Role], prompts: Prompts, budget: Budget, count: Callable[[str], int], **lengths: int
) -> None:
    """Check that prompts and replies of roles fit the context window even if all fields have their maximum length.

    Args:
        roles: the roles.
        prompts: the templates of the roles.
        budget: the maximum tokens of question, memory, chunk and replies.
        count: returns the number of tokens of a text.
        lengths: the maximum tokens of further fields of the templates, by name.

    Raises:
        BudgetError: a role does not fit. The message names the role, its parts and a remedy.
    """
    for role in roles:
        tokens_by_part = _count_part_tokens(role, prompts, budget, count, lengths)
        needed_tokens = sum(tokens_by_part.values())
        if (excess := needed_tokens - budget.context_window) <= 0:
            continue
        counts = {"question": 1, "memory": 1 + ("new memory" in tokens_by_part), "answer": 1}
        names = [name for name in counts if name in tokens_by_part]
        smaller = {name: getattr(budget, f"{name}_tokens") + -excess // counts[name] for name in names}
        remedies = ["ask for fewer fields"] if "schema" in tokens_by_part else []
        if tokens_by_part.get("chunk", 0) > excess:
            smaller, remedies = {"chunk": budget.chunk_tokens - excess}, []
        remedies += [f"use --{name}-tokens {tokens}" for name, tokens in smaller.items() if tokens > 0]
        remedies += [f"serve the model with a window of at least {needed_tokens} tokens."]
        subject = {"update": "a memory update", "answer": "an answer"}.get(role.name, f"the role {role.name!r}")
        terms = " + ".join(f"{name} {tokens}" for name, tokens in tokens_by_part.items())
        raise BudgetError(
            f"{subject} needs {needed_tokens} tokens ({terms}) and the context window has {budget.context_window}",
            hint=", or ".join([remedies[0].capitalize(), *remedies[1:]]),
        )


def fit_chunk_tokens(roles: Iterable[Role], prompts: Prompts, budget: Budget, count: Callable[[str], int]) -> int:
    """Return the tokens of a chunk, at most the budget's, with which every prompt and its reply fit the window.

    The number is 0 or negative if a prompt does not fit the window even without a chunk.
    """
    chunk_roles = [role for role in roles if "chunk" in role.fields and not role.fills_window]
    needed_tokens = [sum(_count_part_tokens(role, prompts, budget, count, {}).values()) for role in chunk_roles]
    return budget.chunk_tokens - max(0, max(needed_tokens, default=0) - budget.context_window)


def _count_part_tokens(
    role: Role, prompts: Prompts, budget: Budget, count: Callable[[str], int], lengths: Mapping[str, int]
) -> dict[str, int]:
    """Return the maximum tokens of each part of a call; empty if the role has no template."""
    if role.name not in prompts.templates:
        return {}
    template, part_names = prompts.templates[role.name], {"prompt": "question"}
    chunk_tokens = 1 if role.fills_window else budget.chunk_tokens
    tokens = {"prompt": budget.question_tokens, "memory": budget.memory_tokens, "chunk": chunk_tokens, **lengths}
    filled_fields = template.fields & {"prompt", *role.fields, *lengths}
    return {
        **{part_names.get(name, name): tokens[name] for name in tokens if name in filled_fields},
        **dict.fromkeys(sorted(filled_fields - tokens.keys()), budget.memory_tokens),
        "answer" if role.writes is Writes.ANSWER else "new memory": role.count_reply_tokens(budget),
        "template": count(template.literal),
        "chat template": CHAT_TEMPLATE_TOKENS,
    }

"""Roles: the kinds of calls of the policy. A role has a template, a maximum reply length, and a reply parser.

The template of a role is its default, a file of the policy's profile (`templates/NAME.txt`), or a file of the user. A
policy that was trained on its own templates understands no others. If its profile has no template for a role, the
template of `fallback` is used, and unfilled fields stay empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from memagent_graph.budget import CHAT_TEMPLATE_TOKENS, Budget
from memagent_graph.calls import Writes
from memagent_graph.errors import BudgetError, StrategyError
from memagent_graph.events import EventKind
from memagent_graph.prompts import COMMON_FIELDS, AnswerFormat, Prompts, PromptTemplate, read_template


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply in the required form."""

    text: str | None
    """The text that the reply writes; None leaves the memory unchanged."""
    value: Any = None
    """Another value that the strategy reads from the reply."""


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """The problem of a reply. The update rule for its kind decides what happens."""

    kind: EventKind
    detail: str


Parser: TypeAlias = Callable[[str, Prompts], ParsedReply | ParseFailure]
"""Parses a reply. The reply is never empty, and has no reasoning."""


def keep_whole_text(text: str, _: Prompts) -> ParsedReply:
    """Return the reply as it is."""
    return ParsedReply(text)


@dataclass(frozen=True)
class Role:
    """One kind of call of the policy.

    Args:
        name: a unique name in the strategy. Logs, rewards and training use it.
        writes: the kind of result, such as a memory or an answer.
        fields: the fields that the template must have besides {prompt}, such as {memory} or {chunk}.
        template: the default template, or a function from the answer format to the template. "update" and "answer" need
            none, because every reader has their templates.
        max_tokens: the maximum length of the reply: the name of a part of the budget, or a number of tokens.
        parse: parses the reply. Answers are parsed by the reader's answer format.
        fallback: the role whose template is used if this role has none, or the policy understands only its own prompts.
        fills_window: whether its step fills {chunk} up to the context window instead of `chunk_tokens`.
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
        """The role's part of a strategy's fingerprint. Its wording is in the fingerprint of the prompts."""
        return f"{self.name}:{self.writes.value}:{','.join(sorted(self.fields))}:{self.max_tokens}"

    def tokens(self, budget: Budget) -> int:
        """Return the maximum tokens of the reply."""
        return self.max_tokens if isinstance(self.max_tokens, int) else int(getattr(budget, self.max_tokens))


UPDATE = Role("update")
"""The memory update of the paper."""
ANSWER = Role("answer", Writes.ANSWER, frozenset({"memory"}), max_tokens="answer_tokens")
"""The answer of the paper, from memory alone."""


def read_answer_form(answer_format: AnswerFormat) -> str:
    """Return the instructions on the form of the answer, the end of the package's answer prompt."""
    return read_template(f"answer_{answer_format.value}").rpartition("\n\n")[2]


REPAIR = Role(
    "repair",
    Writes.ANSWER,
    frozenset({"memory", "schema", "reply", "error"}),
    lambda _: read_template("repair"),
    max_tokens="answer_tokens",
)
"""Rewrites an answer that does not have the required form."""


def require_valid_roles(roles: Iterable[Role], strategy: str) -> None:
    """Check a strategy's roles.

    Raises:
        StrategyError: there are no roles, or two roles with the same name.
    """
    names = [role.name for role in roles]
    if not names:
        raise StrategyError(
            f"the strategy {strategy} has no roles",
            hint="List in `roles` every role that its steps use, such as (UPDATE, ANSWER).",
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise StrategyError(
            f"the strategy {strategy} has two roles {twice!r}", hint="Use a unique name for every role."
        )


def complete_prompts(roles: Iterable[Role], prompts: Prompts, *, trained_prompts_only: bool = False) -> Prompts:
    """Return prompts with a template for every role.

    Args:
        roles: the roles of a strategy.
        prompts: the prompts of the reader. Their template for a role has priority.
        trained_prompts_only: whether the policy understands only the prompts that it was trained on. If so, an optional
            role without a template in `prompts` and without a `fallback` gets no template; see `Prompts.templates`.

    Raises:
        PromptError: a template lacks a field of its role, or has one that is not filled.
        StrategyError: a role has no template, or the policy understands none of its templates.
    """
    others: dict[str, PromptTemplate] = {}
    for role in roles:
        template = prompts.templates.get(role.name)
        if template is None and role.template and not trained_prompts_only:
            text = role.template if isinstance(role.template, str) else role.template(prompts.answer_format)
            template = PromptTemplate(text, f"the role {role.name}")
        if template is not None:
            template, needed = replace(template, names=COMMON_FIELDS | role.fields), role.fields | {"prompt"}
            template.require(needed=needed, allowed=needed)
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
            others[role.name] = template
    return replace(prompts, others=others)


def require_room(
    roles: Iterable[Role], prompts: Prompts, budget: Budget, count: Callable[[str], int], **lengths: int
) -> None:
    """Check that the prompts and replies of roles fit the window if all fields have their maximum length.

    Args:
        roles: the roles.
        prompts: their templates.
        budget: the lengths of question, memory, chunk and replies.
        count: counts the tokens of a text.
        lengths: the maximum tokens of other fields of the templates, by name.

    Raises:
        BudgetError: a role does not fit. The message names the role, its parts and a remedy.
    """
    for role in roles:
        parts = _count_parts(role, prompts, budget, count, lengths)
        needed = sum(parts.values())
        if (excess := needed - budget.context_window) <= 0:
            continue
        names = [name for name in ("question", "memory", "answer") if name in parts]
        lower = " or ".join(f"--{name}-tokens (now {getattr(budget, f'{name}_tokens')})" for name in names)
        remedy = f"Lower {lower} by {excess}"
        if parts.get("chunk", 0) > excess:
            remedy = f"Use --chunk-tokens {budget.chunk_tokens - excess}"
        elif "schema" in parts:
            remedy = f"Ask for fewer fields. {remedy}"
        what = {"update": "a memory update", "answer": "an answer"}.get(role.name, f"the role {role.name!r}")
        raise BudgetError(
            f"{what} needs {needed} tokens ({' + '.join(f'{name} {parts[name]}' for name in parts)}) "
            f"and the context window has {budget.context_window}",
            hint=f"{remedy}, or serve the model with a window of at least {needed} tokens.",
        )


def count_excess_tokens(roles: Iterable[Role], prompts: Prompts, budget: Budget, count: Callable[[str], int]) -> int:
    """Return the excess tokens of the longest prompt with a chunk, and its reply; 0 or less if they fit."""
    with_chunk = [role for role in roles if "chunk" in role.fields and not role.fills_window]
    needed = [sum(_count_parts(role, prompts, budget, count, {}).values()) for role in with_chunk]
    return max(needed, default=0) - budget.context_window if with_chunk else 0


def _count_parts(
    role: Role, prompts: Prompts, budget: Budget, count: Callable[[str], int], lengths: Mapping[str, int]
) -> dict[str, int]:
    """Return the maximum tokens of the parts of a call; nothing if the role has no template."""
    if role.name not in prompts.templates:
        return {}
    template, names = prompts.templates[role.name], {"prompt": "question"}
    chunk_tokens = 1 if role.fills_window else budget.chunk_tokens
    tokens = {"prompt": budget.question_tokens, "memory": budget.memory_tokens, "chunk": chunk_tokens, **lengths}
    filled = template.fields & {"prompt", *role.fields, *lengths}
    return {
        **{names.get(name, name): tokens[name] for name in tokens if name in filled},
        **dict.fromkeys(sorted(filled - tokens.keys()), budget.memory_tokens),
        "answer" if role.writes is Writes.ANSWER else "new memory": role.tokens(budget),
        "template": count(template.literal),
        "chat template": CHAT_TEMPLATE_TOKENS,
    }

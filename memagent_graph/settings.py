"""The settings of a read, as one frozen object that every interface builds: `ReadSettings`.

Command line, Python, tool, node, MCP, serve, corpus, evaluation and training fill in the same fields, so that the same
choices give the same reading everywhere. Each field is declared once: the command line takes its option from it,
`langgraph dev` its environment variable, the run log its value.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from dataclasses import replace as replaced
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Self, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

from memagent_graph.errors import MemAgentError, NoPolicyError, RunError, RunLogError
from memagent_graph.events import UpdateRule
from memagent_graph.plain_text import did_you_mean
from memagent_graph.policies.added import KNOWN, added_folder, default_policy
from memagent_graph.policies.server_url import NO_KEY, origin, without_password

log = logging.getLogger(__name__)

NameOrObject: TypeAlias = Any
"""The name of something, or the thing itself: a policy, a profile, a tokenizer, a strategy. Names can be logged."""
_TEXT: Final = str | None
_PREFIX: Final = "MEMAGENT_"
_SWITCH: Final = {"true": True, "1": True, "false": False, "0": False}
_OBJECTS: Final = "objects"
"""In the log: the fields whose values were objects."""
_PLAIN: Final = (str, int, float, Path, tuple)

_REASONS: Final = {
    None: "the one you named",
    "environment": "the server in OPENAI_BASE_URL, because no policy is named",
    "added": "the policy that was added to this machine, because no policy and no server is named",
}
_ABILITIES: Final = {
    "embedded": "It is tiny: it finds a number that is asked for, such as an access code, in English text, and "
    "understands nothing else. `memagent policy add english` adds one that reads English",
    "english": "It is small: it answers most questions whose answer one passage states, and reasons little",
}
"""What the small policies can do, by name. Others are not known here."""


def setting(
    default: Any,
    help: str = "",  # noqa: A002  as in typer
    *,
    shown: str | None = None,
    kind: Any = None,
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    logged: bool = True,
) -> Any:
    """Return a field of the settings.

    Args:
        default: its value if nothing is chosen.
        help: the help text; without it, the field can only be set in Python.
        shown: the default in words, if the value does not say it.
        kind: the type of its text form, if the field also takes objects.
        minimum: the smallest value that is allowed.
        maximum: the largest value that is allowed.
        secret: whether it must not be shown.
        logged: whether the run log keeps it.
    """
    notes = {"help": help, "shown": shown, "kind": kind, "min": minimum, "max": maximum, "logged": logged}
    return field(default=default, repr=not secret, metadata=notes)


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Which policy reads, how it is reached or computed, and how its tokens are counted."""

    policy: NameOrObject = setting(
        None,
        "A policy by name: embedded, english, local, server, or one from an installed package.",
        shown="by --model and --base-url",
        kind=_TEXT,
    )
    model: str | None = setting(
        None,
        'A name on the server; without a server, a folder, a hub id, "embedded", or "english" after it was added.',
        shown="$OPENAI_BASE_URL's, else english if it was added",
    )
    base_url: str | None = setting(None, "The server's API, as in http://localhost:8000/v1.", shown="$OPENAI_BASE_URL")
    api_key: str | None = setting(None, "The server's key.", shown="$OPENAI_API_KEY", secret=True, logged=False)
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None,
        "Number format of a policy in this process.",
        shown="the policy's where it is fast, or float32",
    )
    tokenizer: NameOrObject = setting(
        None,
        'A tiktoken encoding or model, a tokenizer.json or its folder, a hub id, or "embedded".',
        shown="the policy's",
        kind=_TEXT,
    )
    concurrency: int = setting(128, "Most requests at the same time.", minimum=1)
    timeout: float = setting(300.0, "Most seconds for one completion.", minimum=0.1)
    retries: int = setting(4, "How often to retry a failed request.", minimum=0)
    session_header: str | None = setting(
        None,
        "Send the document's key in this header of every request, such as X-Session-Id, so that a router can send all "
        "requests of a document to the same replica.",
        shown="none",
    )
    unsupported: str | tuple[str, ...] | None = setting(
        None,
        "Fields that the server does not take, separated by commas, such as temperature,top_p. Those that it names "
        "when it refuses a request are found out.",
        shown="none",
        kind=_TEXT,
    )
    chat_template_kwargs: str | None = setting(
        None,
        'Arguments of the policy\'s chat template, as a JSON object, such as {"enable_thinking": false}.',
        shown="none",
    )
    header: Any = setting(
        None,
        'A header of every request, as "Name: value"; may be repeated.',
        shown="none",
        kind=list[str] | None,
        secret=True,
        logged=False,
    )
    ca_file: str | None = setting(
        None,
        "Certificates (PEM) that the server's must be signed by.",
        shown="$SSL_CERT_FILE's, or the usual ones",
        logged=False,
    )
    proxy: str | None = setting(
        None, "The proxy to the server.", shown="$HTTPS_PROXY's, without $NO_PROXY's", secret=True, logged=False
    )

    @property
    def policy_name(self) -> str:
        """The policy's name in the registry: the one given, or the one that follows from model and server."""
        if self.policy is not None:
            return str(self.policy)
        if self.base_url is None:
            if self.model == "embedded":
                return "embedded"
            if added_folder(str(self.model)) or (self.model in KNOWN and not os.environ.get("OPENAI_BASE_URL")):
                return "local"
            is_folder = self.model is not None and Path(self.model).expanduser().is_dir()
            # With a slash it is a hub id or a misspelt folder.
            if is_folder or ("/" in str(self.model) and not os.environ.get("OPENAI_BASE_URL")):
                return "local"
        return "server"


@dataclass(frozen=True, kw_only=True)
class WordingSettings:
    """The prompts and budgets, and where chunks end. For what is None, the policy's profile decides."""

    strategy: NameOrObject = setting(
        None,
        "The way of reading, with options as in gated:stop=yes; your own: path/to/file.py:Name.",
        shown="the profile's, or overwrite, the paper's",
        kind=_TEXT,
    )
    profile: NameOrObject = setting(
        None,
        'Budgets and prompts that the policy was trained with: a folder with memagent.json, "embedded", "english", or '
        '"rl-memoryagent" (RL-MemoryAgent-7B and -14B, with their authors\' wording).',
        kind=_TEXT,
    )
    layout: Literal["paper", "section_first"] | None = setting(None, "Order of the update prompt's parts.")
    answer_format: Literal["boxed", "plain"] | None = setting(None, "How the answer is asked for.")
    update_template: str | None = setting(None, "Your own update prompt: a text file.")
    answer_template: str | None = setting(None, "Your own answer prompt: a text file.")
    empty_memory: str | None = setting(
        None, "The text of the memory at the first chunk.", shown="the policy's, or (empty)"
    )
    context_window: int | None = setting(
        None, "Context window, in tokens.", shown="the policy's or the server's, or 8192"
    )
    question_tokens: int | None = setting(None, "Most tokens of the question.", shown="the policy's, or 1024")
    memory_tokens: int | None = setting(None, "Most tokens of the memory.", shown="the policy's, or 1024")
    chunk_tokens: int | None = setting(None, "Tokens of a chunk.", shown="the policy's, or 5000")
    answer_tokens: int | None = setting(None, "Most tokens of the answer.", shown="the policy's, or 1024")
    boundary: Literal["token", "sentence", "paragraph", "heading"] | None = setting(
        None,
        "Where chunks may end. With `token`, the paper's, some sentences are cut in two (about 3% at 512 tokens); with "
        "`sentence`, none that ends in a chunk's last 15%, for 2% more chunks. `heading`: before the last heading or "
        "numbered clause in a chunk's second half.",
        shown="the policy's, or token",
    )


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """What happens to texts that cannot be used, or are lost: memories, replies, parts of documents."""

    on_truncated: UpdateRule = setting(UpdateRule.ACCEPT, "What to do with a memory that was cut off or is too long.")
    on_empty: UpdateRule = setting(UpdateRule.KEEP_PREVIOUS, "What to do with an empty memory.")
    on_refused: UpdateRule = setting(UpdateRule.KEEP_PREVIOUS, "What to do when the policy refuses to write one.")
    on_invented: UpdateRule | None = setting(
        None,
        "What to do with a memory that has a word or a number which is not in its prompt.",
        shown="the policy's, or accept",
    )
    on_malformed: UpdateRule = setting(UpdateRule.RETRY)
    """What to do with a reply that does not have the form that its role asks for."""
    update_retries: int = setting(2)
    """How often the rule `retry` asks again."""
    replace_undecodable: bool = setting(False, "Replace bytes that cannot be decoded with U+FFFD.")
    on_incomplete: Literal["report", "stop"] = setting(
        "report",
        "What to do where text does not reach the policy, as on pages that are images: report it as an event, or stop.",
    )
    converter: str | None = setting(
        None,
        "Your own converter of files that are not plain text, also for scanned pages: path/to/file.py:function or "
        "module:function.",
        shown="none",
        logged=False,
    )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How completions are sampled; the budget sets their length."""

    temperature: float | None = setting(None, "0 is greedy.", shown="the profile's, or 0", minimum=0.0)
    top_p: float | None = setting(
        None,
        "Sample from the most likely tokens with this mass.",
        shown="the profile's, or 1",
        minimum=0.0,
        maximum=1.0,
    )
    seed: int | None = setting(None, "Seed of the sampling.")
    logprobs: bool | None = setting(
        None, "Ask for token ids and log-probs.", shown="if logged, and the policy has them"
    )
    stop_texts: tuple[str, ...] = setting(())
    """Texts at which a completion ends."""


@dataclass(frozen=True, kw_only=True)
class ReadSettings(PolicySettings, WordingSettings, RuleSettings, SamplingSettings):
    """Every choice about a read except document, question and where things are kept.

    `MemAgent` takes the fields as keyword arguments, and these groups of fields: `budget` (a `Budget`), `sampling` (a
    `SamplingParams`), `rules` (an `UpdateRules`). A single field overrides its group. None leaves a choice to the
    policy's profile, or to the default.
    """

    prompts: Any = setting(None, kind=type(None))
    """The prompt templates, a `Prompts`, in place of the profile's. No log has them."""
    branches: int = setting(16, minimum=1)
    """How many branches of one read run in parallel, if the strategy has branches."""
    limits: Any = setting(None, logged=False)
    """Where each call stops early: `Limits`."""
    chosen_by: Literal["environment", "added"] | None = setting(None, logged=False)
    """Why this policy reads, if none was named; `resolve` sets it."""

    def replace(self, **changes: Any) -> Self:
        """Return these settings with other values of fields, or of groups of fields.

        Raises:
            MemAgentError: there is no such field.
        """
        values: dict[str, Any] = {}
        for group, names in _GROUPS.items():
            if (value := changes.pop(group, None)) is not None:
                values |= {name: getattr(value, part) for name, part in names.items()}
        known_names = {field.name for field in fields(self)}
        if unknown := next((name for name in changes if name not in known_names), None):
            hint = _ELSEWHERE.get(unknown) or did_you_mean(
                unknown, (*known_names, *_GROUPS), f"Settings are: {', '.join(sorted(known_names - {'chosen_by'}))}."
            )
            raise MemAgentError(f"there is no setting {unknown!r}", hint=hint)
        return replaced(self, **values | changes)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Return the settings in variables named MEMAGENT_ plus a field's name; empty ones count as unset.

        Raises:
            MemAgentError: a value of the wrong type, or a name that looks like a misspelt one.
        """
        kinds = {name: kind for name, (_, kind) in text_fields(cls).items()}
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            name = variable.removeprefix(_PREFIX).lower()
            if not variable.startswith(_PREFIX) or not text:
                continue
            if name in kinds:
                values[name] = _value(variable, text, kinds[name])
            elif near := get_close_matches(name, kinds, n=1, cutoff=0.85):
                raise MemAgentError(
                    f"{variable} is not a setting",
                    hint=f"Unset it, or, if it is meant, call it {_PREFIX}{near[0].upper()}.",
                )
        return cls(**values)

    @classmethod
    def from_log(cls, values: Mapping[str, Any], run_id: str) -> Self:
        """Return the settings that a run was logged with.

        A log may be somebody else's: the server that it names gets no key, unless it is that of OPENAI_BASE_URL.

        Raises:
            RunError: the run was not started from settings, but from a `MemAgent` with objects made in Python.
            RunLogError: a value has another type than its field, or is out of its bounds.
        """
        if objects := values.get(_OBJECTS, () if values.keys() - {"response_format"} else ["reader"]):
            raise RunError(
                f"the log does not say how this run's reader was made: its {' and '.join(objects)} came from Python",
                hint="Resume it where it was started, with MemAgent.resume().",
                run_id=run_id,
            )
        logged_fields = {field.name: field for field in fields(cls) if field.metadata["logged"]}
        kinds = get_type_hints(cls)
        restored: dict[str, Any] = {}
        for name in values.keys() & logged_fields.keys():
            notes = logged_fields[name].metadata
            try:
                restored[name] = msgspec.convert(values[name], notes["kind"] if kinds[name] is Any else kinds[name])
                _check_bounds(restored[name], notes["min"], notes["max"])
            except ValueError as error:
                raise RunLogError(
                    f"the log's settings of run {run_id} are damaged: {name}: {error}",
                    hint="Restore the log from a copy, or read the document again.",
                ) from error
        settings = cls(**restored)
        own_url = os.environ.get("OPENAI_BASE_URL")
        if settings.base_url is None or (own_url and origin(own_url) == origin(settings.base_url)):
            return settings
        return replaced(settings, api_key=NO_KEY)

    def for_log(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, JSON-ready, without keys and passwords.

        Objects, from which no other process could make this reader, are there by the names of their fields.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.metadata["logged"]}
        values = {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
        if objects := [name for name, value in values.items() if not isinstance(value, _PLAIN)]:
            values = {name: value for name, value in values.items() if name not in objects} | {_OBJECTS: objects}
        values = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        if "policy" not in objects:
            values.setdefault("model", None)
        if self.base_url:
            values["base_url"] = without_password(self.base_url)
        return values

    def resolve(self) -> Self:
        """Return these settings with the policy chosen: the one named, else OPENAI_BASE_URL's, else one that was added.

        That URL is also used for a name that only a server can know. The choice is logged.

        Raises:
            NoPolicyError: none is named, there is no such server, and none was added to this machine.
        """
        if isinstance(self.model, str) and "://" in self.model:
            raise MemAgentError(
                f"the model is the address of a server, {without_password(self.model)}",
                hint="Pass it as base_url (--base-url); the model is a name on that server, and may be left out.",
            )
        if isinstance(self.policy, str) and "://" in self.policy:
            return replaced(self, policy=None, base_url=self.base_url or self.policy).resolve()
        url = os.environ.get("OPENAI_BASE_URL")
        is_open = self.policy is None and self.model is None and self.base_url is None
        if url and self.base_url is None and (is_open or self.policy_name == "server"):
            resolved = replaced(self, base_url=url, chosen_by="environment" if is_open else self.chosen_by)
        elif is_open:
            if (name := default_policy()) is None:
                raise NoPolicyError(
                    "no policy is named, there is no OPENAI_BASE_URL, and none was added to this machine",
                    hint="Name a server with --base-url or a model with --model, or add a policy to this machine: "
                    f"`memagent policy add {KNOWN[0]}`.",
                )
            resolved = replaced(self, model=name, chosen_by="added")
        else:
            resolved = self
        log.info("%s", resolved.policy_reason)
        return resolved

    @property
    def policy_reason(self) -> str:
        """Which policy reads, and why, in one line."""
        model = without_password(self.base_url) if self.base_url and self.model is None else self.model
        name = str(self.policy or model)
        return ". ".join([f"policy {name}: {_REASONS[self.chosen_by]}", *filter(None, [_ABILITIES.get(name)])])

    def with_other(
        self,
        *,
        policy: str | None = None,
        model: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        header: Any = None,
        strategy: str | None = None,
    ) -> Self:
        """Return these settings with another policy or strategy, if one is given.

        A policy is given by its name, with its model and server, or by model or server alone. Key and headers go to a
        server that is given here, or in OPENAI_BASE_URL.

        Raises:
            RunError: there is a key or a header, but only the log names the server.
        """
        server_is_logged = self.api_key == NO_KEY and policy is None and base_url is None
        if server_is_logged and (api_key or header):
            raise RunError(
                f"the {'key' if api_key else 'header'} is not sent to {self.base_url}: only the log names this server",
                hint=f"If it is your server, add --base-url {self.base_url}.",
            )
        key = NO_KEY if server_is_logged else api_key
        if policy is not None:
            changed = replaced(self, policy=policy, model=model, base_url=base_url, api_key=key, chosen_by=None)
        elif model is not None or base_url is not None:
            url = base_url or self.base_url
            changed = replaced(self, policy=None, model=model or self.model, base_url=url, api_key=key, chosen_by=None)
        else:
            changed = replaced(self, api_key=key)
        return replaced(changed, strategy=strategy or self.strategy, header=header)


_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "budget": {
        name: name for name in ("context_window", "question_tokens", "memory_tokens", "chunk_tokens", "answer_tokens")
    },
    "sampling": {
        "temperature": "temperature", "top_p": "top_p", "seed": "seed", "logprobs": "logprobs", "stop_texts": "stop"
    },
    "rules": {
        "on_truncated": "truncated", "on_empty": "empty", "on_refused": "refused", "on_invented": "invented",
        "on_malformed": "malformed", "update_retries": "retries",
    },
}  # fmt: skip
"""The groups of fields, and the name of each field in its group's class."""
_LIMITS: Final = "It is a limit, of `memagent_graph.Limits`: limits=Limits({}=...)."
_ELSEWHERE: Final[Mapping[str, str]] = {
    name: _LIMITS.format(name) for name in ("max_chunks", "max_tokens_total", "max_seconds")
}
"""Where what looks like a setting is chosen."""
_DEFAULTS: Final = ReadSettings()


def text_fields(cls: type) -> dict[str, tuple[Field[Any], Any]]:
    """Return the fields that can be given as text, by name, with the types of their values."""
    kinds = get_type_hints(cls)
    return {
        field.name: (field, field.metadata["kind"] or kinds[field.name])
        for field in fields(cls)
        if field.metadata["help"]
    }


def _check_bounds(value: float | None, low: float | None, high: float | None) -> None:
    if value is not None and not ((low is None or low <= value) and (high is None or value <= high)):
        raise ValueError(f"{value} is out of bounds")


def _value(variable: str, text: str, kind: Any) -> Any:
    """Return a variable's value as a field's type has it."""
    alternatives = get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)
    kind = next(option for option in alternatives if option is not type(None))
    if get_origin(kind) is list:
        return text.splitlines()
    choices: Mapping[str, Any] = _SWITCH if kind is bool else {choice: choice for choice in get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = {member.value: member for member in kind}
    try:
        return choices[text.lower()] if choices else kind(text)
    except (KeyError, ValueError) as error:
        expected = " or ".join(choices) or ("a whole number" if kind is int else "a number")
        raise MemAgentError(f"{variable} is {text!r} and not {expected}", hint="Correct it, or unset it.") from error

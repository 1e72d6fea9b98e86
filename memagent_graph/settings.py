"""The settings of a read, as one frozen object that every interface builds: `ReadSettings`.

All interfaces (command line, Python, tool, node, MCP, serve, corpus, evaluation, training) fill in the same fields, so
the same settings give the same read everywhere. A field is declared once: the command line makes an option from it,
`langgraph dev` reads an environment variable for it, and the run log stores its value.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from dataclasses import replace as dataclass_replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias, get_type_hints

import msgspec

from memagent_graph.errors import MemAgentError, NoPolicyError, RunError, RunLogError
from memagent_graph.events import UpdateRule
from memagent_graph.plain_text import did_you_mean
from memagent_graph.policies.added import ADDABLE_POLICIES, find_added_policy_folder, find_default_policy
from memagent_graph.policies.server_url import NO_KEY, parse_origin, remove_credentials

log = logging.getLogger(__name__)

NameOrObject: TypeAlias = Any
"""A policy, profile, tokenizer or strategy: its name, or the object itself. Only names can be logged."""
_OPTIONAL_TEXT: Final = str | None
_ENVIRONMENT_PREFIX: Final = "MEMAGENT_"
_OBJECTS_KEY: Final = "objects"
"""The log's key for the names of fields whose values were objects."""
_LOGGED_TYPES: Final = (str, int, float, Path, tuple)

_CHOICE_REASONS: Final = {
    None: "the one you named",
    "environment": "the server in OPENAI_BASE_URL, because no policy is named",
    "added": "the policy that was added to this machine, because no policy and no server is named",
}
_ABILITIES: Final = {
    "embedded": "It is tiny: it finds a number that is asked for, such as an access code, in English text, and "
    "understands nothing else. `memagent policy add english` adds one that reads English",
    "english": "It is small: it answers most questions whose answer one passage states, and reasons little",
}
"""The abilities of small policies, by the policy's name."""


def setting(
    default: Any,
    help: str = "",  # noqa: A002  as in typer
    *,
    default_text: str | None = None,
    text_type: Any = None,
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    logged: bool = True,
) -> Any:
    """Return a field of the settings.

    Args:
        default: the default value.
        help: the help text. A field without a help text can be set only in Python.
        default_text: the default in words, if it is computed.
        text_type: the type of values given as text, for a field that also accepts objects.
        minimum: the smallest value that is allowed.
        maximum: the largest value that is allowed.
        secret: whether the value must not be shown.
        logged: whether the run log stores the value.
    """
    metadata = {
        "help": help,
        "default_text": default_text,
        "text_type": text_type,
        "min": minimum,
        "max": maximum,
        "logged": logged,
    }
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The policy, its server or number format, and its tokenizer."""

    policy: NameOrObject = setting(
        None,
        "Name of the policy: embedded, english, local, server, or one from an installed package.",
        default_text="from --model and --base-url",
        text_type=_OPTIONAL_TEXT,
    )
    model: str | None = setting(
        None,
        'Name of the model on the server. Without a server: a folder, a hub id, "embedded", or "english" (if added).',
        default_text="the model of $OPENAI_BASE_URL, or english if it was added",
    )
    base_url: str | None = setting(
        None, "URL of the server's API, such as http://localhost:8000/v1.", default_text="$OPENAI_BASE_URL"
    )
    api_key: str | None = setting(
        None, "API key of the server.", default_text="$OPENAI_API_KEY", secret=True, logged=False
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None,
        "Number format of a policy in this process.",
        default_text="the policy's if it is fast here, or float32",
    )
    tokenizer: NameOrObject = setting(
        None,
        'A tiktoken encoding or model, a tokenizer.json or its folder, a hub id, or "embedded".',
        default_text="the policy's",
        text_type=_OPTIONAL_TEXT,
    )
    concurrency: int = setting(128, "Maximum number of requests at the same time.", minimum=1)
    timeout: float = setting(300.0, "Maximum number of seconds for one completion.", minimum=0.1)
    retries: int = setting(4, "Number of retries of a failed request.", minimum=0)
    session_header: str | None = setting(
        None,
        "Header that carries the document's key in every request, such as X-Session-Id. With it, a router can send all "
        "requests about a document to the same replica.",
        default_text="none",
    )
    unsupported: str | tuple[str, ...] | None = setting(
        None,
        "Request fields that the server does not accept, separated by commas, such as temperature,top_p. Fields that "
        "the server names when it refuses a request are detected.",
        default_text="none",
        text_type=_OPTIONAL_TEXT,
    )
    chat_template_kwargs: str | None = setting(
        None,
        'Arguments for the chat template, as a JSON object, such as {"enable_thinking": false}.',
        default_text="none",
    )
    header: list[str] | None = setting(
        None,
        'Header to send with every request, as "Name: value". Repeat it for several headers.',
        default_text="none",
        secret=True,
        logged=False,
    )
    ca_file: NameOrObject = setting(
        None,
        "File with the CA certificates (PEM) to check the server's certificate with.",
        default_text="$SSL_CERT_FILE, or the system's",
        text_type=_OPTIONAL_TEXT,
        logged=False,
    )
    proxy: str | None = setting(
        None, "URL of the proxy to use.", default_text="$HTTPS_PROXY, except for $NO_PROXY", secret=True, logged=False
    )

    @property
    def policy_name(self) -> str:
        """The policy's name in the registry: the value of `policy`, or the name that follows from model and server."""
        if self.policy is not None:
            return str(self.policy)
        if self.model is None or self.base_url is not None:
            return "server"
        if self.model == "embedded":
            return "embedded"
        is_here = find_added_policy_folder(self.model) is not None or Path(self.model).expanduser().is_dir()
        # A name with a slash is a hub id or a misspelt folder.
        is_local_name = self.model in ADDABLE_POLICIES or "/" in self.model
        return "local" if is_here or (is_local_name and not os.environ.get("OPENAI_BASE_URL")) else "server"


@dataclass(frozen=True, kw_only=True)
class WordingSettings:
    """The strategy, the prompts, the budget and where chunks end. If a field is None, the policy's profile decides."""

    strategy: NameOrObject = setting(
        None,
        "Reading strategy, with its options, such as gated:stop=yes. Your own: path/to/file.py:Name.",
        default_text="the profile's, or overwrite, as in the paper",
        text_type=_OPTIONAL_TEXT,
    )
    profile: NameOrObject = setting(
        None,
        'Budget and prompts that the policy was trained with: a folder with memagent.json, "embedded", "english", or '
        '"rl-memoryagent" (for RL-MemoryAgent-7B and -14B, with the prompts of their authors).',
        text_type=_OPTIONAL_TEXT,
    )
    layout: Literal["paper", "section_first"] | None = setting(None, "Order of the parts of the update prompt.")
    answer_format: Literal["boxed", "plain"] | None = setting(None, "Form of the answer that the prompt asks for.")
    update_template: str | None = setting(None, "Text file with your own update prompt.")
    answer_template: str | None = setting(None, "Text file with your own answer prompt.")
    empty_memory: str | None = setting(
        None, "Text that stands for the empty memory before the first chunk.", default_text="the policy's, or (empty)"
    )
    context_window: int | None = setting(
        None, "Context window, in tokens.", default_text="the policy's or the server's, or 8192"
    )
    question_tokens: int | None = setting(
        None, "Maximum number of tokens of the question.", default_text="the policy's, or 1024"
    )
    memory_tokens: int | None = setting(
        None, "Maximum number of tokens of the memory.", default_text="the policy's, or 1024"
    )
    chunk_tokens: int | None = setting(None, "Number of tokens of a chunk.", default_text="the policy's, or 5000")
    answer_tokens: int | None = setting(
        None, "Maximum number of tokens of the answer.", default_text="the policy's, or 1024"
    )
    boundary: Literal["token", "sentence", "paragraph", "heading"] | None = setting(
        None,
        "Where chunks may end. `token`, as in the paper, cuts some sentences in two (about 3% at 512 tokens). "
        "`sentence` and `paragraph` end a chunk after one that ends in its last 15%, for about 2% more chunks. "
        "`heading` ends a chunk before the last heading or numbered clause in its second half.",
        default_text="the policy's, or token",
    )


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """The rules for memories and replies that cannot be used, and for parts of the document that are missing."""

    on_truncated: UpdateRule = setting(UpdateRule.ACCEPT, "Rule for a memory that was cut off or is too long.")
    on_empty: UpdateRule = setting(UpdateRule.KEEP_PREVIOUS, "Rule for an empty memory.")
    on_refused: UpdateRule = setting(UpdateRule.KEEP_PREVIOUS, "Rule for a refusal of the policy to write a memory.")
    on_invented: UpdateRule | None = setting(
        None,
        "Rule for a memory with a word or number that is not in its prompt.",
        default_text="the policy's, or accept",
    )
    on_malformed: UpdateRule = setting(UpdateRule.RETRY)
    """Rule for a reply that does not have the form that its role needs."""
    update_retries: int = setting(2, minimum=0)
    """Maximum number of retries of a reply: by the rule `retry`, for an answer that is empty, or to repair its form."""
    replace_undecodable: bool = setting(False, "Replace bytes that cannot be decoded with U+FFFD.")
    on_incomplete: Literal["report", "stop"] = setting(
        "report",
        "Rule for text that does not reach the policy, such as pages that are images: report an event, or stop.",
    )
    converter: str | None = setting(
        None,
        "Your own converter for files that are not plain text or for scanned pages: path/to/file.py:function, or "
        "module:function.",
        default_text="none",
        logged=False,
    )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The sampling of completions. The budget bounds their length."""

    temperature: float | None = setting(
        None, "Sampling temperature. 0 is greedy.", default_text="the profile's, or 0", minimum=0.0
    )
    top_p: float | None = setting(
        None,
        "Sample from the smallest set of likely tokens with this probability mass.",
        default_text="the profile's, or 1",
        minimum=1e-6,
        maximum=1.0,
    )
    seed: int | None = setting(None, "Seed for the sampling.")
    logprobs: bool | None = setting(
        None, "Request token ids and log-probs.", default_text="if the run is logged and the policy returns them"
    )
    stop_texts: tuple[str, ...] = setting(())
    """Texts before which a completion ends."""


@dataclass(frozen=True, kw_only=True)
class ReadSettings(PolicySettings, WordingSettings, RuleSettings, SamplingSettings):
    """All settings of a read, except document, question and the locations of files.

    `MemAgent` accepts the fields as keyword arguments, and these groups of fields: `budget` (a `Budget`), `sampling` (a
    `SamplingParams`), `rules` (an `UpdateRules`). A single field overrides its group. None means the value of the
    policy's profile, or the default.

    Raises:
        MemAgentError: a value is out of bounds or of another type.
    """

    prompts: Any = setting(None, text_type=type(None))
    """Prompt templates (`Prompts`) that replace the profile's. They are not logged."""
    branches: int = setting(16, minimum=1)
    """Maximum number of branches of one read that run in parallel."""
    limits: Any = setting(None, logged=False)
    """Limits (`Limits`) at which a read stops early."""
    chosen_by: Literal["environment", "added"] | None = setting(None, logged=False)
    """Why this policy was chosen, if none was named. `resolve` sets it."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        types = _get_value_types(cls)
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None or value is option.default:
                object.__setattr__(self, option.name, option.default)
                continue
            try:
                value = _convert(value, types[option.name])
            except ValueError as error:
                shown = (
                    f"{value!r:.80}" if isinstance(value, str | float) else f"a value of type {type(value).__name__}"
                )
                raise MemAgentError(f"{option.name} is {shown}: {error}", hint=f"Correct {option.name}.") from None
            object.__setattr__(self, option.name, value)
            low, high = option.metadata["min"], option.metadata["max"]
            is_within = (low is None or low <= value) and (high is None or value <= high)
            if not is_within:  # NaN is not, either
                bounds = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
                raise MemAgentError(
                    f"{option.name} must be {bounds}, got {value}", hint=f"Choose a {option.name} within these bounds."
                )

    def replace(self, **changes: Any) -> Self:
        """Return these settings with changed fields or groups of fields.

        Raises:
            MemAgentError: there is no such field, or a value is out of bounds or of another type.
        """
        values: dict[str, Any] = {}
        for group, names in _GROUPS.items():
            if (value := changes.pop(group, None)) is not None:
                values |= {name: getattr(value, attribute) for name, attribute in names.items()}
        known_names = {field.name for field in fields(self)}
        if unknown_name := next((name for name in changes if name not in known_names), None):
            hint = _HINT_BY_NAME.get(unknown_name) or did_you_mean(
                unknown_name,
                (*known_names, *_GROUPS),
                f"Choose one of: {', '.join(sorted(known_names - {'chosen_by'}))}.",
            )
            raise MemAgentError(f"there is no setting {unknown_name!r}", hint=hint)
        return dataclass_replace(self, **values | changes)

    def group(self, name: str) -> dict[str, Any]:
        """Return the fields of a group that are set, by their names in the group's class."""
        values = {attribute: getattr(self, field_name) for field_name, attribute in _GROUPS[name].items()}
        return {attribute: value for attribute, value in values.items() if value is not None}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Return the settings in variables named MEMAGENT_ plus a field's name. Empty variables count as unset.

        Raises:
            MemAgentError: a value has the wrong type or is out of bounds, or a name looks like a misspelt field.
        """
        types = {name: text_type for name, (_, text_type) in list_text_fields(cls).items()}
        settings = cls()
        for variable, text in environment.items():
            name = variable.removeprefix(_ENVIRONMENT_PREFIX).lower()
            if not variable.startswith(_ENVIRONMENT_PREFIX) or not text:
                continue
            if name in types:
                try:
                    settings = dataclass_replace(settings, **{name: parse_text(text, types[name])})
                except (ValueError, MemAgentError) as error:
                    reason = error.message if isinstance(error, MemAgentError) else error
                    raise MemAgentError(f"{variable}={text!r}: {reason}", hint="Correct it, or unset it.") from error
            elif names := get_close_matches(name, types, n=1, cutoff=0.85):
                raise MemAgentError(
                    f"{variable} is not a setting",
                    hint=f"Unset it, or rename it to {_ENVIRONMENT_PREFIX}{names[0].upper()} if you meant that.",
                )
        return settings

    @classmethod
    def from_log(cls, values: Mapping[str, Any], run_id: str) -> Self:
        """Return the settings with which a run was logged.

        The log may come from somebody else, so its server gets a key only if it is the server of OPENAI_BASE_URL.

        Raises:
            RunError: the run was started from a `MemAgent` with objects created in Python, not from settings.
            RunLogError: a value has the wrong type, or is out of bounds.
        """
        if objects := values.get(_OBJECTS_KEY, () if values.keys() - {"response_format"} else ["reader"]):
            raise RunError(
                f"the log does not say how this run's reader was made: its {' and '.join(objects)} came from Python",
                hint="Resume it where it was started, with MemAgent.resume().",
                run_id=run_id,
            )
        logged_fields = {field.name: field for field in fields(cls) if field.metadata["logged"]}
        types, settings = get_type_hints(cls), cls()
        for name in values.keys() & logged_fields.keys():
            field_type = logged_fields[name].metadata["text_type"] if types[name] is Any else types[name]
            try:
                settings = dataclass_replace(settings, **{name: msgspec.convert(values[name], field_type)})
            except (ValueError, MemAgentError) as error:
                reason = error.message if isinstance(error, MemAgentError) else error
                raise RunLogError(
                    f"the log's settings of run {run_id} are damaged: {name}: {reason}",
                    hint="Restore the log from a copy, or read the document again.",
                ) from error
        own_url = os.environ.get("OPENAI_BASE_URL")
        if settings.base_url is None or (own_url and parse_origin(own_url) == parse_origin(settings.base_url)):
            return settings
        return dataclass_replace(settings, api_key=NO_KEY)

    def for_log(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as JSON values, without keys and passwords.

        Objects, which another process could not create, are represented only by the names of their fields.
        """
        changed_fields = [field for field in fields(self) if getattr(self, field.name) != field.default]
        values = {field.name: getattr(self, field.name) for field in changed_fields if field.metadata["logged"]}
        if objects := [name for name, value in values.items() if not isinstance(value, _LOGGED_TYPES)]:
            values = {name: value for name, value in values.items() if name not in objects} | {_OBJECTS_KEY: objects}
        values = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        if "policy" not in objects:
            values.setdefault("model", None)
        if self.base_url:
            values["base_url"] = remove_credentials(self.base_url)
        return values

    def resolve(self) -> Self:
        """Return these settings with a policy: the named one, else the server of OPENAI_BASE_URL, else an added policy.

        OPENAI_BASE_URL is also used for a model name that only a server can know. A log message has the choice.

        Raises:
            NoPolicyError: no policy is named, OPENAI_BASE_URL is not set, and no policy was added to this machine.
        """
        if isinstance(self.model, str) and "://" in self.model:
            raise MemAgentError(
                f"the model is the address of a server, {remove_credentials(self.model)}",
                hint="Pass the address as base_url (--base-url). The model is a name on that server, and is optional.",
            )
        if isinstance(self.policy, str) and "://" in self.policy:
            return dataclass_replace(self, policy=None, base_url=self.base_url or self.policy).resolve()
        settings, url = self, os.environ.get("OPENAI_BASE_URL")
        is_unnamed = self.policy is None and self.model is None and self.base_url is None
        if url and self.base_url is None and (is_unnamed or self.policy_name == "server"):
            settings = dataclass_replace(self, base_url=url, chosen_by="environment" if is_unnamed else self.chosen_by)
        elif is_unnamed:
            if (name := find_default_policy()) is None:
                raise NoPolicyError(
                    "no policy is named, OPENAI_BASE_URL is not set, and no policy was added to this machine",
                    hint="Pass a server with --base-url or a model with --model, or add a policy to this machine: "
                    f"`memagent policy add {ADDABLE_POLICIES[0]}`.",
                )
            settings = dataclass_replace(self, model=name, chosen_by="added")
        log.info("%s", settings.policy_reason)
        return settings

    @property
    def policy_reason(self) -> str:
        """The policy that is used and the reason for it, in one line."""
        model = remove_credentials(self.base_url) if self.base_url and self.model is None else self.model
        name = str(self.policy or model)
        return ". ".join([f"policy {name}: {_CHOICE_REASONS[self.chosen_by]}", *filter(None, [_ABILITIES.get(name)])])


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
"""The groups of fields, with each field's name in the group's class."""
_HINT_BY_NAME: Final[Mapping[str, str]] = {
    name: f"Pass limits=Limits({name}=...), with memagent_graph.Limits."
    for name in ("max_chunks", "max_tokens_total", "max_seconds")
}
"""Hints for names that are not settings, because they are passed in another way."""


_get_value_types: Final = cache(get_type_hints)


def list_text_fields(cls: type) -> dict[str, tuple[Field[Any], Any]]:
    """Return the fields that can be given as text, by name, with the types of their values."""
    types = get_type_hints(cls)
    return {
        field.name: (field, field.metadata["text_type"] or types[field.name])
        for field in fields(cls)
        if field.metadata["help"]
    }


def iter_differences(
    old_settings: Mapping[str, Any], new_settings: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield nested settings that differ: the dotted name, the old value and the new one, both as JSON values.

    A missing setting counts as None.
    """
    for name in dict.fromkeys((*old_settings, *new_settings)):
        old, new = json.loads(json.dumps((old_settings.get(name), new_settings.get(name))))
        if isinstance(old, dict) and isinstance(new, dict):
            yield from iter_differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield prefix + name, old, new


def _convert(value: Any, value_type: Any) -> Any:
    """Return a value of a field as its type: numbers of numpy, paths and texts of numbers are accepted, too.

    Raises:
        ValueError: it is of another type. The message says what is allowed.
    """
    try:
        return msgspec.convert(value, value_type)
    except msgspec.ValidationError:
        # A folder "english" is not the policy of that name.
        return parse_text(str(Path(value).absolute()) if isinstance(value, os.PathLike) else value, value_type)


def parse_text(text: str, text_type: Any) -> Any:
    """Return the value of a text, such as 5, 0.7, yes or the name of an enum's member.

    Args:
        text: the text. For a list, it has one item per line.
        text_type: the type of the value.

    Raises:
        ValueError: the text is not a value of this type. The message says what is allowed.
    """
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415  slow to import, rarely needed

    is_list = isinstance(text, str) and text_type == list[str] | None
    try:
        return TypeAdapter(text_type).validate_python(text.splitlines() if is_list else text)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error

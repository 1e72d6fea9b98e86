"""The settings of a reader as plain data: the command line fills them in, the run log keeps them for resuming."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from memagent_graph.budget import Budget
from memagent_graph.documents import DocumentStore
from memagent_graph.documents.chunking import Boundary
from memagent_graph.errors import RunError
from memagent_graph.events import UpdateRule
from memagent_graph.policies.added import KNOWN, added_folder, default_policy
from memagent_graph.policies.named import PolicyRequest, make_policy
from memagent_graph.policies.profile import load_profile
from memagent_graph.policies.server_url import without_password
from memagent_graph.policy import Policy, SamplingParams
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import Limits, UpdateRules
from memagent_graph.run_log import RunLog

log = logging.getLogger(__name__)

_REASONS: Final = {
    None: "the one you named",
    "environment": "the server in OPENAI_BASE_URL, because no policy is named",
    "added": "the policy that was added to this machine, because no policy and no server is named",
    "embedded": "no policy and no server is named, and none was added to this machine",
}
_ABILITIES: Final = {
    "embedded": "It is tiny: it finds a number that is asked for, such as an access code, in English text, and "
    "understands nothing else. `memagent policy add smollm2` adds one that reads English; --base-url uses a server",
    "smollm2": "It is small: it finds most facts that a sentence states, and cannot reason; --base-url uses a server",
}
"""What the small policies can do, by name. Others are not known here."""


@dataclass(frozen=True)
class ReaderSettings:
    """Everything except document, question and key. None leaves a choice to the policy, or to the default."""

    policy: str | None = None
    """A name that `memagent_graph.policies.named` knows; None leaves it to `model` and `base_url`."""
    model: str | None = None
    """A name on the server; without a server a folder or hub id, "embedded", or a policy that was added."""
    base_url: str | None = None
    tokenizer: str | None = None
    profile: str | None = None
    """A folder with `memagent.json`, or "embedded": budgets and prompts that the policy was trained with."""
    strategy: str | None = None
    """The way of reading: a strategy's name, or a user's own as `file.py:Name`."""
    layout: str | None = None
    answer_format: str | None = None
    update_template: str | None = None
    answer_template: str | None = None
    empty_memory: str | None = None
    context_window: int | None = None
    question_tokens: int | None = None
    memory_tokens: int | None = None
    chunk_tokens: int | None = None
    answer_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    dtype: str | None = None
    """The number format of a policy in this process; see `LocalPolicy`."""
    logprobs: bool | None = None
    boundary: Boundary | None = None
    on_truncated: str = UpdateRule.ACCEPT.value
    on_empty: str = UpdateRule.KEEP_PREVIOUS.value
    on_refused: str = UpdateRule.KEEP_PREVIOUS.value
    on_invented: str | None = None
    replace_undecodable: bool = False
    concurrency: int = 128
    timeout: float = 300.0
    retries: int = 4
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    session_header: str | None = None
    chosen: Literal["environment", "added", "embedded"] | None = None
    """Why this policy reads, if none was named; see `decided`."""
    strategy_of_profile: bool = False
    """Whether the policy's profile named the strategy."""

    @classmethod
    def from_log(cls, values: Mapping[str, Any], run_id: str) -> ReaderSettings:
        """The settings that a run was logged with.

        Raises:
            RunError: the run was not started from settings, but from a `MemAgent` made in Python.
        """
        if not values.keys() - {"response_format"}:  # what the read was asked for is no setting of the reader
            raise RunError(
                "the log does not say how this run's reader was made",
                hint="Resume it where it was started, with MemAgent.resume().",
                run_id=run_id,
            )
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def for_log(self) -> dict[str, Any]:
        """The settings that differ from the defaults, JSON-ready, without a user name or password in the URL."""
        values = {name: value for name, value in asdict(self).items() if value != getattr(_DEFAULTS, name)}
        values.setdefault("model", "embedded" if self.policy_name == "embedded" else None)
        if self.base_url:
            values["base_url"] = without_password(self.base_url)
        return values

    @property
    def policy_name(self) -> str:
        """The policy's name in the registry: the one given, or the one that follows from model and server."""
        if self.policy is not None:
            return self.policy
        if self.base_url is None:
            if self.model in {None, "embedded"}:
                return "embedded"
            if added_folder(str(self.model)) or (self.model in KNOWN and not os.environ.get("OPENAI_BASE_URL")):
                return "local"
            is_folder = Path(str(self.model)).expanduser().is_dir()
            # With a slash it is a hub id or a misspelt folder.
            if is_folder or ("/" in str(self.model) and not os.environ.get("OPENAI_BASE_URL")):
                return "local"
        return "server"

    def decided(self) -> ReaderSettings:
        """These settings with the policy chosen: the one named, else OPENAI_BASE_URL's, one added, or "embedded".

        That URL is also used for a name that only a server can know. If no strategy is named, it is the one in the
        policy's profile, if there is one. The choice is logged.

        Raises:
            ProfileError, PromptError: the profile cannot be parsed.
        """
        url = os.environ.get("OPENAI_BASE_URL")
        is_open = self.policy is None and self.model is None and self.base_url is None
        if url and self.base_url is None and (is_open or self.policy_name == "server"):
            decided = replace(self, base_url=url, chosen="environment" if is_open else self.chosen)
        elif is_open:
            name = default_policy()
            decided = replace(self, model=name, chosen="embedded" if name == "embedded" else "added")
        else:
            decided = self
        name = decided.policy_name
        folder = decided.profile or (decided.model if name == "local" else name if name in KNOWN else None)
        if decided.strategy is None and folder and (profile := load_profile(folder)) and profile.strategy:
            decided = replace(decided, strategy=profile.strategy, strategy_of_profile=True)
        log.info("%s", decided.policy_told)
        return decided

    @property
    def policy_told(self) -> str:
        """Which policy reads, and why, in one line."""
        model = without_password(self.base_url) if self.base_url and self.model is None else self.model
        name = self.policy or model or "embedded"
        way = f"It reads with {self.strategy}; --strategy names another way" if self.strategy_of_profile else None
        return ". ".join([f"policy {name}: {_REASONS[self.chosen]}", *filter(None, [_ABILITIES.get(name), way])])

    def with_other(
        self,
        *,
        policy: str | None = None,
        model: str | None = None,
        base_url: str | None = None,
        strategy: str | None = None,
    ) -> ReaderSettings:
        """These settings with another policy or strategy, if one is given.

        A policy is given by its name, with its model and server, or by model or server alone.
        """
        if policy is not None:
            changed = replace(self, policy=policy, model=model, base_url=base_url, chosen=None)
        elif model is not None or base_url is not None:
            changed = replace(
                self, policy=None, model=model or self.model, base_url=base_url or self.base_url, chosen=None
            )
        else:
            changed = self
        return replace(changed, strategy=strategy or self.strategy)

    def make_policy(self, api_key: str | None = None) -> Policy:
        """The policy that these settings name.

        Raises:
            MissingExtraError: a local policy without the extra "local".
            PolicyError: a policy that does not exist or cannot be loaded.
        """
        known = {each.name: getattr(self, each.name) for each in fields(PolicyRequest) if each.name != "api_key"}
        return make_policy(self.policy_name, PolicyRequest(**known, api_key=api_key))

    def make_reader(
        self,
        *,
        api_key: str | None = None,
        store: DocumentStore | Path | None = None,
        checkpoints: Path | str | None = None,
        run_log: RunLog | Path | str | bool = True,
        limits: Limits | None = None,
    ) -> MemAgent:
        """The reader that these settings describe.

        Raises:
            ProfileError, PromptError, TokenizerError, BudgetError, PolicyError: a setting cannot be used.
        """
        asked = {each.name: getattr(self, each.name) for each in fields(Budget) if getattr(self, each.name) is not None}
        parts = ("layout", "answer_format", "update_template", "answer_template", "empty_memory")
        wording = {name: value for name in parts if (value := getattr(self, name))}
        return MemAgent(
            self.make_policy(api_key),
            profile=self.profile or None,
            tokenizer=self.tokenizer or None,
            budget_changes=asked,
            prompt_changes=wording,
            sampling=SamplingParams(
                temperature=self.temperature, top_p=self.top_p, seed=self.seed, logprobs=self.logprobs
            ),
            rules=UpdateRules(
                truncated=UpdateRule(self.on_truncated),
                empty=UpdateRule(self.on_empty),
                refused=UpdateRule(self.on_refused),
                invented=UpdateRule(self.on_invented) if self.on_invented else None,
            ),
            limits=limits,
            boundary=self.boundary,
            store=store,
            checkpoints=checkpoints,
            run_log=run_log,
            settings=self.for_log(),
            replace_undecodable=self.replace_undecodable,
            strategy=self.strategy,
        )


_DEFAULTS = ReaderSettings()

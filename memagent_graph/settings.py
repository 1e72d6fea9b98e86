"""What a reader is built from, as plain data: the command line fills it in, the run log keeps it for resuming."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from memagent_graph.budget import Budget
from memagent_graph.documents.chunking import Boundary
from memagent_graph.errors import PolicyError, RunError
from memagent_graph.events import UpdateRule
from memagent_graph.policies.server_url import without_password
from memagent_graph.policy import Policy, SamplingParams
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import Limits, UpdateRules
from memagent_graph.run_log import RunLog


@dataclass(frozen=True)
class ReaderSettings:
    """Everything but the document, the question and the key. None leaves a choice to the policy, or to the default."""

    model: str | None = None
    """A name on the server; without a server a folder or hub id, or "embedded"."""
    base_url: str | None = None
    tokenizer: str | None = None
    profile: str | None = None
    """A folder with `memagent.json`, or "embedded": budgets and prompts that the policy was trained with."""
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

    @classmethod
    def from_log(cls, values: Mapping[str, Any], run_id: str) -> ReaderSettings:
        """The settings that a run was logged with.

        Raises:
            RunError: the run was not started from settings (but from a `MemAgent` made by hand).
        """
        if not values:
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
        values.setdefault("model", self.model or ("embedded" if self.is_local else None))
        if self.base_url:
            values["base_url"] = without_password(self.base_url)
        return values

    @property
    def is_local(self) -> bool:
        """Whether the policy runs in this process."""
        if self.base_url is not None:
            return False
        if self.model in {None, "embedded"} or Path(str(self.model)).expanduser().is_dir():
            return True
        return "/" in str(self.model) and not os.environ.get("OPENAI_BASE_URL")  # a hub id, or a folder misspelt

    def with_server_of_environment(self) -> ReaderSettings:
        """These settings with OPENAI_BASE_URL in force, where they name neither a server nor a local model."""
        url = os.environ.get("OPENAI_BASE_URL")
        if url and self.base_url is None and not (self.model and self.is_local):
            return replace(self, base_url=url)
        return self

    def make_policy(self, api_key: str | None = None) -> Policy:
        """The policy that these settings name.

        Raises:
            MissingExtraError: a local policy without the extra "local".
            PolicyError: a local policy that cannot be loaded.
        """
        from memagent_graph.policies import LocalPolicy, OpenAICompatiblePolicy  # noqa: PLC0415

        if self.is_local:
            if self.model in {None, "embedded"}:
                return LocalPolicy.embedded()
            return LocalPolicy(str(self.model))
        has_server = self.base_url or os.environ.get("OPENAI_BASE_URL")
        if not (has_server or api_key or os.environ.get("OPENAI_API_KEY")):
            raise PolicyError(
                f"{self.model} is no folder here, and no server is named that might have it",
                hint="Name its server (--base-url), a folder, or a hub id; with OPENAI_API_KEY, OpenAI's own is asked.",
            )
        return OpenAICompatiblePolicy(
            self.model,
            base_url=self.base_url,
            api_key=api_key,
            max_concurrency=self.concurrency,
            read_timeout=self.timeout,
            max_retries=self.retries,
        )

    def make_reader(
        self,
        *,
        api_key: str | None = None,
        store: Path | None = None,
        checkpoints: Path | str | None = None,
        run_log: RunLog | Path | str | bool = True,
        limits: Limits | None = None,
    ) -> MemAgent:
        """The reader that these settings describe.

        Raises:
            ProfileError, PromptError, TokenizerError, BudgetError, PolicyError: a setting that cannot be had.
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
        )


_DEFAULTS = ReaderSettings()

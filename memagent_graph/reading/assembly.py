"""Builds the reader's context from its settings and what the policy reports about itself."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from memagent_graph.budget import Budget
from memagent_graph.documents import DocumentStore
from memagent_graph.errors import TokenizerError
from memagent_graph.events import UpdateRule
from memagent_graph.policies.model_info import ModelInfo, SelfDescribing
from memagent_graph.policies.profile import Profile
from memagent_graph.policy import Policy, SamplingParams
from memagent_graph.prompts import Prompts, load_prompts
from memagent_graph.reading.prompt_cuts import PromptCutDetector
from memagent_graph.reading.state import Limits, ReaderContext, UpdateRules
from memagent_graph.roles import ANSWER, UPDATE, require_room
from memagent_graph.run_log import RunLog
from memagent_graph.settings import ReadSettings
from memagent_graph.tokenizers import Tokenizer


@dataclass(frozen=True)
class ReaderParts:
    """The settings of a reader, and the objects that they name."""

    settings: ReadSettings
    policy: Policy
    store: DocumentStore
    profile: Profile | None = None
    """The policy's profile; None if the policy reports it."""
    tokenizer: Tokenizer | None = None
    run_log: RunLog | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the policy need not be asked for any part."""
        needs_logprobs = self.run_log is not None and self.settings.logprobs is None
        needs_profile = self.profile is None and (self.settings.on_invented is None or self.settings.strategy is None)
        should_ask = isinstance(self.policy, SelfDescribing) and (needs_logprobs or needs_profile)
        return self.is_sufficient and not should_ask

    @property
    def is_sufficient(self) -> bool:
        """Whether a read can begin without a request to the policy."""
        has_wording = self.settings.prompts is not None and len(self.settings.group("budget")) == len(fields(Budget))
        return self.tokenizer is not None and (self.profile is not None or has_wording)


def assemble(parts: ReaderParts, info: ModelInfo) -> ReaderContext:
    """Choose all parts that the settings leave open, and check that the budget fits.

    Raises:
        TokenizerError: the policy's tokenizer is unknown.
        MissingExtraError: it needs a package that is not installed.
        BudgetError: the budget does not fit the context window.
        ValueError: a number is outside its range.
    """
    settings = parts.settings
    tokenizer = parts.tokenizer or info.tokenizer
    if tokenizer is None and info.missing_extra is not None:
        raise info.missing_extra
    if tokenizer is None:
        raise TokenizerError(
            f"it is not known which tokenizer {parts.policy.name} uses",
            hint="Set it (--tokenizer): a tiktoken encoding, a folder or file with tokenizer.json, a hub id, or "
            "--tokenizer embedded, because a similar count is enough.",
        )
    profile = parts.profile or info.profile
    prompts = load_prompts(
        base=settings.prompts or (profile.prompts if profile else None),
        layout=settings.layout,
        answer_format=settings.answer_format,
        update_template=settings.update_template,
        answer_template=settings.answer_template,
        empty_memory=settings.empty_memory,
    )
    budget = _choose_budget(settings, info.context_window, profile, tokenizer, prompts)
    defaults = profile or SamplingParams()
    # For logged runs, token ids and log-probs are requested if the policy can return them.
    logprobs = parts.run_log is not None and info.gives_token_ids
    sampling = SamplingParams(temperature=defaults.temperature, top_p=defaults.top_p, logprobs=logprobs)
    rules: dict[str, Any] = {
        "invented": UpdateRule(profile.on_invented) if profile else None,
        **settings.group("rules"),
    }
    return ReaderContext(
        policy=parts.policy,
        tokenizer=tokenizer,
        store=parts.store,
        # The tokenizer may be another one than the model's. Only the model's own control tokens have to be escaped.
        prompts=replace(
            prompts,
            control_tokens=prompts.control_tokens | tokenizer.special_tokens | info.control_tokens,
            guards_families=prompts.guards_families or not info.knows_control_tokens,
        ),
        budget=budget,
        may_shrink_chunks=profile is None and settings.chunk_tokens is None,
        sampling=replace(sampling, **settings.group("sampling")),
        rules=UpdateRules(**rules),
        limits=settings.limits or Limits(),
        concurrency=settings.branches,
        window=info.context_window,
        trained_prompts_only=profile is not None and profile.prompts.fingerprint == prompts.fingerprint,
        boundary=settings.boundary or (profile.boundary if profile else "token"),
        shape=info.shape,
        on_incomplete=settings.on_incomplete,
        prompt_cut_detector=None if info.number_format else PromptCutDetector(tokenizer),
        run_log=parts.run_log,
        log_settings=settings.for_log(),
    )


def _choose_budget(
    settings: ReadSettings, window: int | None, profile: Profile | None, tokenizer: Tokenizer, prompts: Prompts
) -> Budget:
    budget = profile.budget if profile else Budget(context_window=window or Budget().context_window)
    budget = replace(budget, **settings.group("budget"))
    if window is not None and window < budget.context_window:
        budget = replace(budget, context_window=window)
    require_room((UPDATE, ANSWER), prompts, budget, tokenizer.count)
    return budget

"""Builds the reader's context from the user's choices and what the policy reports about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memagent_graph.budget import Budget
from memagent_graph.documents import DocumentStore
from memagent_graph.documents.chunking import Boundary
from memagent_graph.errors import TokenizerError
from memagent_graph.policies.model_info import ModelInfo, SelfDescribing
from memagent_graph.policies.profile import Profile
from memagent_graph.policy import Policy, SamplingParams
from memagent_graph.prompts import Prompts, changed_prompts, load_prompts
from memagent_graph.reading.state import Limits, ReaderContext, UpdateRules
from memagent_graph.run_log import RunLog
from memagent_graph.tokenizers import Tokenizer


@dataclass(frozen=True)
class Choices:
    """A user's choices for a reader; None leaves a choice to the profile, then to the defaults."""

    policy: Policy
    store: DocumentStore
    profile: Profile | None = None
    """What the policy was trained with; None if it reports that itself."""
    tokenizer: Tokenizer | None = None
    budget: Budget | None = None
    budget_changes: Mapping[str, int] = field(default_factory=dict)
    prompts: Prompts | None = None
    prompt_changes: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rules: UpdateRules = field(default_factory=UpdateRules)
    limits: Limits = field(default_factory=Limits)
    boundary: Boundary | None = None
    concurrency: int = 16
    replace_undecodable: bool = False
    run_log: RunLog | None = None
    log_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the policy need not be asked for anything."""
        of_logprobs = self.run_log is not None and self.sampling.logprobs is None
        of_rules = self.profile is None and self.rules.invented is None
        asks = isinstance(self.policy, SelfDescribing) and (of_logprobs or of_rules)
        return self.is_sufficient and not asks

    @property
    def is_sufficient(self) -> bool:
        """Whether a read is possible without asking the policy for anything."""
        wording = self.profile is not None or (self.budget is not None and self.prompts is not None)
        return self.tokenizer is not None and wording


def assemble(choices: Choices, info: ModelInfo) -> ReaderContext:
    """Make every open choice, and check that the budget fits.

    Raises:
        TokenizerError: it is not known which tokenizer the policy uses.
        MissingExtraError: it needs a package that is not installed.
        BudgetError: the budget does not fit the context window.
    """
    tokenizer = choices.tokenizer or info.tokenizer
    if tokenizer is None and info.missing is not None:
        raise info.missing
    if tokenizer is None:
        raise TokenizerError(
            f"it is not known which tokenizer {choices.policy.name} uses",
            hint="Name it (--tokenizer): a tiktoken encoding, a folder or file with tokenizer.json, or a hub id.",
        )
    profile = choices.profile or info.profile
    prompts = choices.prompts or (profile.prompts if profile else load_prompts())
    if choices.prompt_changes:
        prompts = changed_prompts(prompts, **choices.prompt_changes)
    return ReaderContext(
        policy=choices.policy,
        tokenizer=tokenizer,
        store=choices.store,
        # The tokenizer that counts need not be the model's, whose control tokens are those that matter.
        prompts=replace(
            prompts,
            control_tokens=prompts.control_tokens | tokenizer.special_tokens | info.control_tokens,
            guards_families=prompts.guards_families or not info.knows_control_tokens,
        ),
        budget=_budget(choices, info.context_window, profile, tokenizer, prompts),
        may_shrink=choices.budget is None and profile is None and "chunk_tokens" not in choices.budget_changes,
        sampling=_sampling(choices, info),
        rules=_rules(choices.rules, profile),
        limits=choices.limits,
        concurrency=choices.concurrency,
        window=info.context_window,
        own_words_only=profile is not None and profile.prompts.fingerprint == prompts.fingerprint,
        boundary=choices.boundary or (profile.boundary if profile else "token"),
        shape=info.shape,
        replace_undecodable=choices.replace_undecodable,
        run_log=choices.run_log,
        log_settings=choices.log_settings,
    )


def _sampling(choices: Choices, info: ModelInfo) -> SamplingParams:
    """Logged runs have token ids and log-probs if the policy can return them, unless the user decides otherwise."""
    if choices.sampling.logprobs is not None:
        return choices.sampling
    return replace(choices.sampling, logprobs=choices.run_log is not None and info.gives_token_ids)


def _rules(rules: UpdateRules, profile: Profile | None) -> UpdateRules:
    if rules.invented is not None or profile is None:
        return rules
    return replace(rules, invented=profile.on_invented)


def _budget(
    choices: Choices, window: int | None, profile: Profile | None, tokenizer: Tokenizer, prompts: Prompts
) -> Budget:
    budget = choices.budget or (profile.budget if profile else None)
    if budget is None:
        budget = Budget(context_window=window or Budget().context_window)
    elif window is not None and window < budget.context_window:
        budget = replace(budget, context_window=window)
    budget = replace(budget, **choices.budget_changes)
    budget.require(tokenizer.count(prompts.update.literal), tokenizer.count(prompts.answer.literal))
    return budget

"""The profile that a loop's policy reads with, if the job changes its wording, budgets or chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Final

from memagent_graph.budget import Budget
from memagent_graph.policies.profile import Profile, load_profile, require_profile
from memagent_graph.prompts import load_prompts
from memagent_graph.roles import Role, prompts_for
from memagent_graph.settings import WordingSettings
from memagent_graph.tokenizers import Tokenizer
from memagent_training.job.base_model import BaseModel

_WORDING: Final = ("layout", "answer_format", "update_template", "answer_template", "empty_memory")


def profile_of(reading: WordingSettings, base: BaseModel) -> Profile | None:
    """Return the profile that is changed: the one named, or the model's own, if it has one."""
    return load_profile(base.folder) if reading.profile is None else require_profile(reading.profile)


def reading_profile(
    reading: WordingSettings, base: BaseModel, tokenizer: Tokenizer, roles: Iterable[Role] = ()
) -> Profile | None:
    """Return the profile that the policy reads with, and gets in its folder; None if nothing was chosen.

    A model without a profile was not trained on any templates, so it also gets those of the strategy's `roles`.

    Raises:
        ProfileError, PromptError, BudgetError: it cannot be made; the message says what to do.
    """
    if replace(reading, strategy=None) == WordingSettings():
        return None
    former = profile_of(reading, base)
    profile = former or Profile(Budget(), load_prompts())
    prompts = load_prompts(base=profile.prompts, **{name: getattr(reading, name) for name in _WORDING})
    prompts = prompts_for(roles, prompts) if former is None else prompts
    window = min(profile.budget.context_window, base.window or Budget().context_window)
    limits = {limit.name: value for limit in fields(Budget) if (value := getattr(reading, limit.name)) is not None}
    budget = replace(profile.budget, **({"context_window": window} | limits))
    budget.require(tokenizer.count(prompts.update.literal), tokenizer.count(prompts.answer.literal))
    return replace(profile, budget=budget, prompts=prompts, boundary=reading.boundary or profile.boundary)

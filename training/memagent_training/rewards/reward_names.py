"""Finds reward functions by name: the same names for `train`, `rl`, `collect` and evaluations.

A built-in reward that compares with gold answers is used only if there are gold answers; without them, the same name
means a reward in the log, from `RunLog.reward` or `collect`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from memagent_evaluation.samples import Metric
from memagent_evaluation.scorers import REWARD_NAMES
from memagent_graph.grouping import group_values
from memagent_graph.own_code import is_own_code_name, load_own_code
from memagent_graph.plain_text import did_you_mean
from memagent_training.algorithm.credit import CreditTerm, Scope
from memagent_training.data.reward_functions import (
    LoggedReward,
    LoggedStepReward,
    RewardFunction,
    StepRewardFunction,
    get_reward_name,
)
from memagent_training.data.rollouts import OUTCOME
from memagent_training.rewards.conversation_rewards import FormatReward, RecallGain
from memagent_training.rewards.evidence_rewards import EvidenceF2, EvidenceF2Gain, ExitInTime, GateRight, LongRLVR
from memagent_training.rewards.outcome_rewards import (
    BoxedExactMatch,
    ExactMatch,
    LenientMatch,
    MemAgentReleased,
    StringMatch,
    TokenF1,
)
from memagent_training.training_errors import RewardError

OUTCOME_REWARDS: Final[Mapping[str, RewardFunction]] = {
    "exact_match": ExactMatch(),
    "boxed_exact_match": BoxedExactMatch(),
    "lenient_match": LenientMatch(),
    "token_f1": TokenF1(),
    "string_match": StringMatch(),
    "string_match_part": StringMatch(Metric.ANY),
    "evidence_f2": EvidenceF2(),
    "longrlvr": LongRLVR(),
    "exit_in_time": ExitInTime(),
    "memagent_released": MemAgentReleased(),
}
"""Rewards that compare a run with gold answers or evidence. Names of evaluation scores (`REWARD_NAMES`) are aliases."""
STEP_REWARDS: Final[Mapping[str, StepRewardFunction]] = {
    "evidence_f2_gain": EvidenceF2Gain(),
    "gate_right": GateRight(),
    "recall_gain": RecallGain(),
    "format": FormatReward(),
}
"""Rewards of each conversation. All but `format` compare it with gold answers or evidence; so `format` always means the
built-in, never a logged reward."""
REWARD_SIGNATURE: Final = "Write def reward(run: TrainingRun) -> float | None"
"""The signature of a user's reward function, for error hints."""
EVIDENCE_REWARDS: Final = frozenset({"evidence_f2", "evidence_f2_gain", "longrlvr", "gate_right", "exit_in_time"})
"""Rewards that need the evidence of the answers, not only gold answers."""


def resolve_reward(reward: str | RewardFunction) -> tuple[str, RewardFunction]:
    """Return a reward's name in the log, and its function.

    Args:
        reward: a built-in's name, or a function.

    Raises:
        RewardError: there is no such built-in.
    """
    if not isinstance(reward, str):
        return get_reward_name(reward), reward
    return REWARD_NAMES.get(reward, reward), _find_outcome_reward(reward)


def choose_reward(text: str, *, has_gold: bool = False) -> str | RewardFunction:
    """Return the reward function that `text` names, or the name of a logged reward.

    Args:
        text: "module:function" or "file.py:function", or the name of a built-in or logged reward.
        has_gold: whether the runs have gold answers. If so, a name means a built-in.

    Raises:
        RewardError: there is no such built-in, or no such code.
    """
    user_function: RewardFunction | None = _load_user_function(text)
    if user_function is not None:
        return user_function
    return _find_outcome_reward(text) if has_gold else text


def find_built_in_reward(name: str) -> RewardFunction | StepRewardFunction:
    """Return the built-in reward of that name, of runs or of conversations.

    Raises:
        RewardError: there is no such built-in.
    """
    return STEP_REWARDS.get(name) or _find_outcome_reward(name, [*OUTCOME_REWARDS, *STEP_REWARDS])


def choose_term_rewards(
    terms: Sequence[CreditTerm], *, has_gold: bool, has_logged: bool = True
) -> dict[str, RewardFunction | StepRewardFunction]:
    """Return the reward function of each term of the advantage. The outcome reward is chosen separately.

    Args:
        terms: the terms.
        has_gold: whether runs have gold answers. If so, the name of a built-in means the built-in.
        has_logged: whether other names mean rewards in the log.

    Raises:
        RewardError: there is no such reward, no such code, or a reward of whole runs has another scope.
    """
    scopes = group_values((term.reward, term.scope) for term in terms if term.reward != OUTCOME)
    functions: dict[str, RewardFunction | StepRewardFunction] = {}
    for name, term_scopes in scopes.items():
        user_function: RewardFunction | StepRewardFunction | None = _load_user_function(name)
        is_run_reward = REWARD_NAMES.get(name, name) in OUTCOME_REWARDS
        if user_function is not None:
            functions[name] = user_function
        elif has_gold and is_run_reward and set(term_scopes) != {Scope.RUN}:
            hint = f'Set its scope to "run", or choose one of conversations: {", ".join(STEP_REWARDS)}.'
            raise RewardError(f"the credit term {name!r} is a reward of whole runs", hint=hint)
        elif name == "format" or not has_logged or (has_gold and (is_run_reward or name in STEP_REWARDS)):
            functions[name] = find_built_in_reward(name)
        else:
            functions[name] = LoggedReward(name) if set(term_scopes) == {Scope.RUN} else LoggedStepReward(name)
    return functions


def _find_outcome_reward(name: str, choices: Collection[str] = tuple(OUTCOME_REWARDS)) -> RewardFunction:
    """Return a built-in reward of whole runs; if there is none, the error suggests one of `choices`."""
    reward = OUTCOME_REWARDS.get(REWARD_NAMES.get(name, name))
    if reward is None:
        hint = did_you_mean(name, choices, f"Choose one of: {', '.join(choices)}.")
        raise RewardError(f"there is no reward {name!r} that comes with the package", hint=hint)
    return reward


def _load_user_function(text: str) -> Any:
    """Return the user's own function; None if `text` does not name code."""
    if not is_own_code_name(text):
        return None
    user_function = load_own_code(text, noun="a reward", error=RewardError)
    hint = f"{REWARD_SIGNATURE}, which can use run.answer, run.question, run.gold and more; or a callable instance."
    if not callable(user_function) or isinstance(user_function, type):
        raise RewardError(f"{text} is not a function", hint=hint)
    try:
        signature = inspect.signature(user_function)
    except (TypeError, ValueError):  # functions written in C have no signature, and others a wrong one
        return user_function
    try:
        signature.bind(object())
    except TypeError as error:
        raise RewardError(f"{text}{signature} cannot be called with a run alone: {error}", hint=hint) from error
    return user_function

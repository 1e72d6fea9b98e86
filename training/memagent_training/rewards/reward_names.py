"""Reward functions by their names: the same names for `train`, `rl`, `collect` and evaluations.

A built-in that compares with gold answers is used only if there are gold answers; without them, the same name is a
reward in the log, from `RunLog.reward` or `collect`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from memagent_evaluation.samples import Metric
from memagent_evaluation.scorers import REWARD_NAMES
from memagent_graph.own_code import load_own, names_own_code
from memagent_graph.plain_text import did_you_mean
from memagent_training.algorithm.credit import CreditTerm, Scope
from memagent_training.data.reward_functions import (
    LoggedReward,
    LoggedStepReward,
    RewardFunction,
    StepRewardFunction,
    name_function,
)
from memagent_training.data.rollouts import OUTCOME
from memagent_training.rewards.evidence_rewards import EvidenceF2, EvidenceF2Gain, ExitInTime, GateRight, LongRLVR
from memagent_training.rewards.outcome_rewards import (
    BoxedExactMatch,
    ExactMatch,
    LenientMatch,
    MemAgentReleased,
    StringMatch,
    TokenF1,
)
from memagent_training.rewards.step_rewards import FormatReward, RecallGain
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
"""Rewards of each conversation. All but `format` compare it with gold answers or evidence."""
SIGNATURE: Final = "Write def reward(run: TrainingRun) -> float | None"
"""The form of a reward of the user's own."""
NEED_EVIDENCE: Final = frozenset({"evidence_f2", "evidence_f2_gain", "longrlvr", "gate_right", "exit_in_time"})
"""Rewards that need more than gold answers."""
_NEED_NO_GOLD: Final = frozenset({"format"})
"""Names that always mean the built-in reward, never a logged one."""


def name_reward(reward: str | RewardFunction) -> tuple[str, RewardFunction]:
    """Return a reward's name in the log, and the function, which compares with the runs' gold answers.

    Args:
        reward: a built-in's name, or a function.

    Raises:
        RewardError: there is no such built-in.
    """
    if not isinstance(reward, str):
        return name_function(reward), reward
    return REWARD_NAMES.get(reward, reward), _outcome_reward(reward)


def choose_reward(text: str, *, has_gold: bool = False) -> str | RewardFunction:
    """Return the reward function for `text`, or the name of a logged reward.

    Args:
        text: "module:function" or "file.py:function", a built-in's name, or a logged reward's.
        has_gold: whether the runs have gold answers. If so, a name is a built-in's.

    Raises:
        RewardError: there is no such built-in, or no such code.
    """
    own: RewardFunction | None = _load_own(text)
    if own is not None:
        return own
    return _outcome_reward(text) if has_gold else text


def find_built_in(name: str) -> RewardFunction | StepRewardFunction:
    """Return the reward of that name that comes with the package, of runs or of conversations.

    Raises:
        RewardError: there is none.
    """
    return STEP_REWARDS.get(name) or _outcome_reward(name, [*OUTCOME_REWARDS, *STEP_REWARDS])


def choose_term_rewards(
    terms: Sequence[CreditTerm], *, has_gold: bool, has_logged: bool = True
) -> dict[str, RewardFunction | StepRewardFunction]:
    """Return the reward function of each term of the advantage. The outcome reward is chosen separately.

    Args:
        terms: the terms.
        has_gold: whether runs have gold answers. If so, a built-in's name is the built-in.
        has_logged: whether any other name means a reward in the log.

    Raises:
        RewardError: there is no such reward, no such code, or a reward of whole runs has another scope.
    """
    scopes: dict[str, set[Scope]] = {}
    for term in terms:
        if term.reward != OUTCOME:
            scopes.setdefault(term.reward, set()).add(term.scope)
    functions: dict[str, RewardFunction | StepRewardFunction] = {}
    for name, term_scopes in scopes.items():
        own: RewardFunction | StepRewardFunction | None = _load_own(name)
        is_of_runs = REWARD_NAMES.get(name, name) in OUTCOME_REWARDS
        if own is not None:
            functions[name] = own
        elif has_gold and is_of_runs and term_scopes != {Scope.RUN}:
            hint = f'Set its scope to "run", or choose one of conversations: {", ".join(STEP_REWARDS)}.'
            raise RewardError(f"the credit term {name!r} is a reward of whole runs", hint=hint)
        elif name in _NEED_NO_GOLD or not has_logged or (has_gold and (is_of_runs or name in STEP_REWARDS)):
            functions[name] = find_built_in(name)
        else:
            functions[name] = LoggedReward(name) if term_scopes == {Scope.RUN} else LoggedStepReward(name)
    return functions


def _outcome_reward(name: str, choices: Collection[str] = tuple(OUTCOME_REWARDS)) -> RewardFunction:
    """Return a reward of whole runs; `choices` are the names for the message if there is none."""
    reward = OUTCOME_REWARDS.get(REWARD_NAMES.get(name, name))
    if reward is None:
        hint = did_you_mean(name, choices, f"Choose one of: {', '.join(choices)}.")
        raise RewardError(f"there is no reward {name!r} that comes with the package", hint=hint)
    return reward


def _load_own(text: str) -> Any:
    """Return the user's own function; None if `text` does not name code."""
    if not names_own_code(text):
        return None
    value = load_own(text, what="a reward", error=RewardError)
    hint = f"{SIGNATURE}: run.answer, run.question, run.gold.answers and more, or an instance that is called like it."
    if not callable(value) or isinstance(value, type):
        raise RewardError(f"{text} is not a function", hint=hint)
    try:
        signature = inspect.signature(value)
        signature.bind(object())
    except TypeError as error:
        raise RewardError(f"{text}{signature} cannot be called with a run alone: {error}", hint=hint) from error
    except ValueError:  # one that is written in C has no signature
        pass
    return value

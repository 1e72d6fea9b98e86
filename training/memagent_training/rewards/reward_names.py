"""Reward functions by their names: the same names for `train`, `rl`, `collect` and evaluations.

A built-in that compares with gold answers is used only if there are gold answers; without them, the same name is a
reward in the log, from `RunLog.reward` or `collect`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
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
    name_of,
)
from memagent_training.data.rollouts import OUTCOME
from memagent_training.rewards.evidence_rewards import (
    EvidenceF2,
    EvidenceF2Gain,
    ExitInTime,
    GateRight,
    LongRLVR,
)
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.outcome_rewards import (
    BoxedExactMatch,
    ExactMatch,
    LenientMatch,
    MemAgentReleased,
    StringMatch,
    TokenF1,
)
from memagent_training.rewards.step_rewards import EvidenceInMemory, FormatReward, RecallGain
from memagent_training.training_errors import RewardError

OUTCOME_REWARDS: Final[Mapping[str, Callable[[GoldAnswers | None], RewardFunction]]] = {
    "exact_match": ExactMatch,
    "boxed_exact_match": BoxedExactMatch,
    "lenient_match": LenientMatch,
    "token_f1": TokenF1,
    "string_match": StringMatch,
    "string_match_part": partial(StringMatch, metric=Metric.ANY),
    "evidence_f2": EvidenceF2,
    "longrlvr": LongRLVR,
    "exit_in_time": ExitInTime,
    "memagent_released": MemAgentReleased,
}
"""They compare a run with gold answers or evidence. An evaluation's names for scores (`REWARD_NAMES`) do, too."""
STEP_REWARDS: Final[Mapping[str, Callable[[GoldAnswers | None], StepRewardFunction]]] = {
    "evidence_in_memory": EvidenceInMemory,
    "evidence_f2_gain": EvidenceF2Gain,
    "gate_right": GateRight,
    "recall_gain": RecallGain,
}
"""They compare each conversation with gold answers or evidence."""
SIGNATURE: Final = "Write def reward(run: TrainingRun) -> float | None"
"""The form of a reward of the user's own."""
NEED_EVIDENCE: Final = frozenset({"evidence_f2", "evidence_f2_gain", "longrlvr", "gate_right", "exit_in_time"})
"""Those that need more than gold answers."""
FORMAT_REWARDS: Final[Mapping[str, StepRewardFunction]] = {
    "format": FormatReward(boxed=None),
    "boxed_format": FormatReward(),
    "plain_format": FormatReward(boxed=False),
}
"""They need no gold answers, so their names are never those of a logged reward."""


def name_reward(reward: str | RewardFunction) -> tuple[str, RewardFunction]:
    """Return a reward's name in the log, and the function, which compares with the runs' gold answers.

    Args:
        reward: a built-in's name, or a function.

    Raises:
        RewardError: there is no such built-in.
    """
    if not isinstance(reward, str):
        return name_of(reward), reward
    return REWARD_NAMES.get(reward, reward), _outcome_reward(reward, None)


def choose_reward(text: str, gold: GoldAnswers | None = None) -> str | RewardFunction:
    """Return the reward function for `text`, or the name of a logged reward.

    Args:
        text: "module:function" or "file.py:function", a built-in's name, or a logged reward's.
        gold: if given, a name is a built-in's.

    Raises:
        RewardError: there is no such built-in, or no such code.
    """
    own: RewardFunction | None = _own(text)
    if own is not None:
        return own
    return text if gold is None else _outcome_reward(text, gold)


def built_in(name: str, gold: GoldAnswers | None = None) -> RewardFunction | StepRewardFunction:
    """Return the reward of that name that comes with the package, of runs or of conversations.

    Args:
        name: as in terms of an advantage.
        gold: where to find the gold answers; the runs' own if left out.

    Raises:
        RewardError: there is none.
    """
    if name in FORMAT_REWARDS:
        return FORMAT_REWARDS[name]
    if name in STEP_REWARDS:
        return STEP_REWARDS[name](gold)
    return _outcome_reward(name, gold, [*OUTCOME_REWARDS, *STEP_REWARDS, *FORMAT_REWARDS])


def term_rewards(
    terms: Sequence[CreditTerm], *, gold: bool, logged: bool = True
) -> dict[str, RewardFunction | StepRewardFunction]:
    """Return the functions of the rewards in terms of an advantage, except the outcome, which a training names.

    Args:
        terms: the terms.
        gold: whether runs have gold answers. If so, a built-in's name is the built-in.
        logged: whether any other name is that of a reward in the log.

    Raises:
        RewardError: there is no such reward, no such code, or a reward of whole runs has another scope.
    """
    scopes: dict[str, set[Scope]] = {}
    for term in terms:
        if term.reward != OUTCOME:
            scopes.setdefault(term.reward, set()).add(term.scope)
    found: dict[str, RewardFunction | StepRewardFunction] = {}
    for name, of in scopes.items():
        own: RewardFunction | StepRewardFunction | None = _own(name)
        of_runs = REWARD_NAMES.get(name, name) in OUTCOME_REWARDS and name not in STEP_REWARDS
        if own is not None:
            found[name] = own
        elif gold and of_runs and of != {Scope.RUN}:
            hint = f'Give it the scope "run", or choose one of conversations: {", ".join(STEP_REWARDS)}.'
            raise RewardError(f"the credit term {name!r} is a reward of whole runs", hint=hint)
        elif name in FORMAT_REWARDS or not logged or (gold and (of_runs or name in STEP_REWARDS)):
            found[name] = built_in(name)
        else:
            found[name] = LoggedReward(name) if of == {Scope.RUN} else LoggedStepReward(name)
    return found


def _outcome_reward(
    name: str, gold: GoldAnswers | None, known: Collection[str] = tuple(OUTCOME_REWARDS)
) -> RewardFunction:
    """Return a reward of whole runs; `known` are the names for the message if there is none."""
    reward = OUTCOME_REWARDS.get(REWARD_NAMES.get(name, name))
    if reward is None:
        hint = did_you_mean(name, known, f"Choose one of {', '.join(known)}.")
        raise RewardError(f"there is no reward {name!r} that comes with the package", hint=hint)
    return reward(gold)


def _own(text: str) -> Any:
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

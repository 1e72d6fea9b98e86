"""Reward functions, which score a logged run: the same ones for training, the closed loop and old runs.

Any callable works. It takes a `TrainingRun` and returns a number, or None if it cannot score the run (no gold answer,
or a redacted text):

    def short_and_right(run: TrainingRun) -> float | None:
        if run.answer is None:
            return None
        return float("4711" in run.answer) - 0.001 * len(run.answer)

The functions in this module only look up logged values; the others are in `memagent_training.rewards`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from memagent_graph.errors import MemAgentError
from memagent_training.data.rollouts import RewardValue
from memagent_training.data.training_runs import TrainingRun
from memagent_training.training_errors import RewardError


class RewardFunction(Protocol):
    """Scores a run."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return the run's reward, a finite number; None if it cannot be scored."""
        ...


class StepRewardFunction(Protocol):
    """Scores each conversation of a run."""

    def __call__(self, run: TrainingRun, /) -> Sequence[float] | None:
        """Return one finite number for each of `run.conversations_K`; None if they cannot be scored."""
        ...


def explain_unknown(function: object, run: TrainingRun) -> str:
    """Return why a function returned None for a run, from its method of this name if it has one."""
    explain: Callable[[TrainingRun], str] | None = getattr(function, "explain_unknown", None)
    return "the function returned None" if explain is None else explain(run)


@dataclass(frozen=True, slots=True)
class LoggedReward:
    """The run's newest logged reward of a name: a person's feedback, or the value of a function."""

    name: str | None = "reward"
    """The reward's name; None accepts any name."""
    source: str | None = None
    """The source that the reward must have; None accepts any source."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return the logged value; None if there is none."""
        return _find_newest_values(run, self.name, self.source).get(None)

    def explain_unknown(self, _run: TrainingRun, /) -> str:
        """Return why the run has no reward."""
        return "the log holds no such reward"


@dataclass(frozen=True, slots=True)
class LoggedStepReward:
    """Each conversation's newest logged reward of a name."""

    name: str

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """Return the logged values; None if a conversation that can be trained on has none."""
        newest = _find_newest_values(run, self.name)
        if any(conversation.id not in newest for conversation in run.sampled_conversations):
            return None
        return [newest.get(conversation.id, 0.0) for conversation in run.conversations_K]

    def explain_unknown(self, _run: TrainingRun, /) -> str:
        """Return why the run has no reward."""
        return "the log holds no such reward for each conversation"


def _find_newest_values(run: TrainingRun, name: str | None, source: str | None = None) -> dict[int | None, float]:
    """Return the newest logged values by conversation id; the key None stands for the run itself."""
    rewards = (reward for reward in run.rewards if name in {None, reward.name} and source in {None, reward.source})
    return {reward.conversation: reward.value for reward in rewards}


def call_reward_function(
    function: RewardFunction | StepRewardFunction, run: TrainingRun, name: str
) -> RewardValue | None:
    """Return the reward of a run from a function: a number, or one for each conversation; None if it is unknown.

    Raises:
        RewardError: the function raised an error of Python, or returned something else.
        MemAgentError: the function raised it; it may read a document or ask a policy.
    """
    try:
        value: Any = function(run)
        if isinstance(value, str):
            raise TypeError(f"it returned the text {value!r}")
        is_number = not isinstance(value, Iterable) or getattr(value, "ndim", None) == 0  # or an array of one number
        return value if value is None else float(value) if is_number else tuple(map(float, value))
    except MemAgentError:
        raise
    except Exception as error:  # the function may be a user's
        raise RewardError(
            f"the reward {name!r} failed: {type(error).__name__}: {error}",
            run_id=run.run_id,
            hint="Correct the reward function, which has to return a number, or one for each conversation, or None.",
        ) from error


def get_reward_name(reward: str | RewardFunction) -> str:
    """Return a reward's name: the name itself, or that of the function or of its class."""
    name = reward if isinstance(reward, str) else getattr(reward, "__name__", None)
    return name if isinstance(name, str) else type(reward).__name__


def identify_reward(reward: str | RewardFunction) -> str:
    """Return a reward's name. A function's has a hash of its source, because most functions are called `reward`."""
    name = get_reward_name(reward)
    with suppress(OSError, TypeError):  # a function without source, such as a builtin
        if not isinstance(reward, str):
            source = inspect.getsource(reward if inspect.isroutine(reward) else type(reward))
            return f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    return name

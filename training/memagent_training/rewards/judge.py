r"""A language model as reward function: it grades a run's answer from 0 to 10, or with yes or no, inside \boxed{}."""

from __future__ import annotations

from dataclasses import dataclass, field

from memagent_evaluation.grading import GRADE_PROMPT, Grader
from memagent_graph.concurrency.background import run_sync
from memagent_graph.errors import EvaluationError, PolicyError
from memagent_graph.policy import Policy, SamplingParams
from memagent_training.data.training_runs import TrainingRun
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.training_errors import RewardError


@dataclass(frozen=True, slots=True)
class JudgedBy:
    """A language model's grade of a run's answer, 0 to 1 (`Grader`). The calling thread waits for it."""

    policy: Policy
    prompt: str = GRADE_PROMPT
    """With the fields {question}, {answer} and {expected}; their values cannot close their tags."""
    gold: GoldAnswers | None = None
    """The expected answer, if known."""
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __call__(self, run: TrainingRun, /) -> float | None:
        """0 to 1; None if the answer is not in the log.

        Raises:
            RewardError: the reply has no such grade.
            PolicyError: the judge cannot be reached.
        """
        return None if run.answer is None else run_sync(self.judge(run, run.answer))

    async def judge(self, run: TrainingRun, answer: str) -> float:
        """Return the grade of an answer to the run's question; for callers with an event loop."""
        gold = run.gold if self.gold is None else self.gold.gold_of(run)
        grader = Grader(self.policy, self.prompt, self.sampling)
        try:
            return await grader.grade(run.question, answer, gold.answers if gold else ())
        except PolicyError as error:
            error.run_id = error.run_id or run.run_id
            raise
        except EvaluationError as error:
            raise RewardError(error.message, run_id=run.run_id, hint=error.hint) from error

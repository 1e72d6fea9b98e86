"""What runs and single conversations are worth: reward functions, their names, the gold answers they compare with."""

from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.outcome_rewards import BoxedExactMatch, relabel

__all__ = ["BoxedExactMatch", "GoldAnswers", "relabel"]

"""Rewards of runs and single conversations: functions, their names, and the gold answers they compare with."""

from memagent_training.rewards.evidence_rewards import EvidenceF2, EvidenceF2Gain, ExitInTime, GateRight, LongRLVR
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.outcome_rewards import (
    BoxedExactMatch,
    ExactMatch,
    LenientMatch,
    MemAgentReleased,
    StringMatch,
    TokenF1,
)
from memagent_training.rewards.step_rewards import FormatReward, RecallGain

__all__ = [
    "BoxedExactMatch",
    "EvidenceF2",
    "EvidenceF2Gain",
    "ExactMatch",
    "ExitInTime",
    "FormatReward",
    "GateRight",
    "GoldAnswers",
    "LenientMatch",
    "LongRLVR",
    "MemAgentReleased",
    "RecallGain",
    "StringMatch",
    "TokenF1",
]

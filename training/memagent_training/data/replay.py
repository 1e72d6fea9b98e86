"""Makes groups of rollouts from logged runs: whole runs in whole groups. A run that is refused has a reason.

Nothing is tokenised here: a rollout has the logged token ids and log-probs, one `TrainingConversation` for each prompt
and completion. Not every conversation is trained on:

- An update whose text did not become the memory, for example because it was empty, is kept: it was sampled like others.
- An update that a guard replaced, because the policy refused or invented something, is masked: the run's reward is for
  the memory that was kept instead.
- An attempt that was discarded and retried is left out: the run's reward is not about it.
- Greedy calls are part of what rewards look at, and are left out afterwards.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from pathlib import Path
from typing import Any, Final, Literal

from memagent_graph.calls import Writes
from memagent_graph.events import EventKind, StopReason
from memagent_graph.grouping import group_values
from memagent_graph.policy import FinishReason
from memagent_graph.run_log import Conversation, Outcome, RunFilter, RunLog
from memagent_graph.settings import PolicySettings
from memagent_training.data.replay_report import Refusal, ReplayReport, ZeroVarianceGroup
from memagent_training.data.reward_functions import (
    LoggedReward,
    RewardFunction,
    StepRewardFunction,
    why_unknown,
)
from memagent_training.data.rollouts import (
    MAX_REWARD,
    OUTCOME,
    RewardValue,
    Rollout,
    RolloutGroup,
    TrainingConversation,
)
from memagent_training.data.training_runs import Gold, TrainingRun, read_runs
from memagent_training.training_errors import ReplayError, RewardError

_TRAINABLE: Final = frozenset(reason.value for reason in StopReason if not reason.resumable)
_MAX_LOGPROB: Final = 1e-3
"""Values that are above 0 only by rounding."""
_IMMATERIAL_SETTINGS: Final = frozenset({"seed", "logprobs"}).union(
    {setting.name for setting in fields(PolicySettings)} - {"unsupported", "chat_template_kwargs"}
)
"""Settings in which rollouts of one group may differ: they say where the policy is and how it is reached.
Policies are compared by version, which has the number format, and tokenizers by fingerprint."""
_GUARDED: Final = frozenset({EventKind.INVENTED, EventKind.REFUSED})
_IMMATERIAL_SAMPLING: Final = frozenset({"seed", "logprobs"})


@dataclass(frozen=True, slots=True)
class Replay:
    """Groups to train on, and a report on all runs."""

    groups: list[RolloutGroup]
    """The groups, in the order of their oldest runs."""
    report: ReplayReport

    def require_groups(self) -> list[RolloutGroup]:
        """Return the groups; there must be at least one.

        Raises:
            ReplayError: every run was refused; the message names all reasons, causes first.
        """
        report = self.report
        if self.groups:
            return self.groups
        if not report.refused:
            raise ReplayError(f"there are no runs in {report.source}", hint="Collect some first.")
        raise ReplayError(
            f"none of the {report.runs} runs in {report.source} can be trained on ({report.reasons})",
            hint=report.remedies,
            run_id=next(iter(report.refused.values()))[0],
        )


def load_groups(
    source: RunLog | Path | str,
    *,
    reward: str | RewardFunction = "reward",
    term_rewards: Mapping[str, RewardFunction | StepRewardFunction] | None = None,
    find_gold: Callable[[TrainingRun], Gold | None] | None = None,
    run_filter: RunFilter | None = None,
    groups: Mapping[str, str] | None = None,
    whole_groups: bool = True,
    min_group: int = 2,
    max_tokens: int | None = None,
    policy_versions: Sequence[str] | None = None,
    tokenizer: str | None = None,
    template: str | None = None,
) -> Replay:
    """Return the groups in a run log, or in an export of one.

    Args:
        source: the log or its path, or the path of an export.
        reward: the name of a logged reward, whose newest value counts, or a function that scores the runs now.
        term_rewards: more rewards, by their names in the terms of the advantage.
        find_gold: the correct answer of each run, for rewards without their own gold answers.
        run_filter: selects runs of a log.
        groups: the group of each run, by its id; a run without one is left out. Without it, runs of one question on
            one document form a group if they began with the same chunk, and with the same sampling and settings but
            for the seed and where the model is. Runs of different policy versions are in different groups, unless
            `policy_versions` allows several.
        whole_groups: refuse all rollouts of a group if one is refused. Runs by weights, a tokenizer or prompts that
            were not chosen do not count as part of it. Otherwise the rest of the group is compared.
        min_group: a group with fewer rollouts is refused.
        max_tokens: the model's window, for prompt and completion together.
        policy_versions: the versions that may have written a run, oldest first.
        tokenizer: the fingerprint to train on, if the runs have several.
        template: the prompts' fingerprint to train on, if the runs have several.

    Raises:
        ReplayError: there are runs of several tokenizers or prompts and none was chosen; or the source cannot be
            replayed.
        RewardError: a reward function failed.
        RunLogError, MissingExtraError: the source cannot be read.
    """
    if policy_versions is not None and not policy_versions:
        raise ReplayError("no policy version is allowed", hint="Name at least one (--policy-versions).")
    versions = None if policy_versions is None else frozenset(policy_versions)
    ledger = _Ledger()
    for logged_run in read_runs(source, run_filter):
        run = logged_run if find_gold is None else replace(logged_run, gold=find_gold(logged_run))
        scored = run.without_discarded()
        refusals = _find_refusals(
            run, scored.sampled_conversations,
            versions=versions, max_tokens=max_tokens, tokenizer=tokenizer, template=template,
        )  # fmt: skip
        group = _find_group(run, groups)
        if groups is None and versions is None:
            group = ledger.group_of_version(group, run)
        ledger.enter(scored, group, next(refusals, None))
    missing = {run_id: group for run_id, group in (groups or {}).items() if run_id not in ledger.group_of}
    ledger.broken |= set(missing.values())
    tokenizer = _find_only_fingerprint("tokenizer", ledger.candidates.values())
    template = _find_only_fingerprint("template", ledger.candidates.values())
    functions: dict[str, RewardFunction | StepRewardFunction] = {
        OUTCOME: LoggedReward(reward) if isinstance(reward, str) else reward
    }
    functions |= term_rewards or {}
    rollouts: dict[str, Rollout] = {}
    for run in list(ledger.candidates.values()):
        rollout = _make_rollout(run, functions, ledger.details)
        if isinstance(rollout, Refusal):
            ledger.refuse(run.run_id, rollout)
        else:
            rollouts[run.run_id] = rollout
    if whole_groups:
        for run_id in [run_id for run_id in ledger.candidates if ledger.group_of[run_id] in ledger.broken]:
            ledger.refuse(run_id, Refusal.INCOMPLETE_GROUP)
    sizes = Counter(ledger.group_of[run_id] for run_id in ledger.candidates)
    small = {run_id for run_id in ledger.candidates if sizes[ledger.group_of[run_id]] < min_group}
    if groups is None and small:
        ledger.details += _explain_small_groups(small, ledger.candidates.values())
    for run_id in small:
        ledger.refuse(run_id, Refusal.GROUP_TOO_SMALL)
    members = group_values((ledger.group_of[run_id] or "", rollouts[run_id]) for run_id in ledger.candidates)
    kept_groups = [RolloutGroup(group_id, tuple(rollouts_G)) for group_id, rollouts_G in members.items()]
    name = str(source.path if isinstance(source, RunLog) else source)
    return Replay(kept_groups, _report(name, ledger, kept_groups, policy_versions, tokenizer, template, tuple(missing)))


@dataclass
class _Ledger:
    """The candidate runs, and the refused ones; by id, oldest first."""

    candidates: dict[str, TrainingRun] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    group_of: dict[str, str | None] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """Groups with a refused member."""
    details: Counter[str] = field(default_factory=Counter)
    """Counts of refused runs by details that the reason does not have."""
    version_of: dict[str, str] = field(default_factory=dict)
    """The policy version of a group's first run."""

    def group_of_version(self, group: str | None, run: TrainingRun) -> str | None:
        """Return the group of the run's policy version; rewards of different versions are not compared."""
        if group is None:
            return None
        version = run.conversations_K[0].policy_version
        return group if self.version_of.setdefault(group, version) == version else f"{group}-{version}"

    def enter(self, run: TrainingRun, group: str | None, refusal: Refusal | None) -> None:
        """Add the next run."""
        self.group_of[run.run_id], self.candidates[run.run_id] = group, run
        if refusal is not None or group is None:
            self.refuse(run.run_id, refusal or Refusal.NOT_GROUPED)

    def refuse(self, run_id: str, reason: Refusal) -> None:
        """Refuse a run."""
        self.candidates.pop(run_id, None)
        self.refused[run_id] = reason
        group = self.group_of[run_id]
        if group is not None and not reason.is_outside_group:
            self.broken.add(group)

    def by_reason(self) -> dict[Refusal, tuple[str, ...]]:
        """Return the refused runs, the oldest of each reason first."""
        ids = [run_id for run_id in self.group_of if run_id in self.refused]
        runs = {reason: tuple(run_id for run_id in ids if self.refused[run_id] is reason) for reason in Refusal}
        return {reason: run_ids for reason, run_ids in runs.items() if run_ids}


def _find_refusals(
    run: TrainingRun,
    kept: Sequence[Conversation],
    *,
    versions: frozenset[str] | None,
    max_tokens: int | None,
    tokenizer: str | None,
    template: str | None,
) -> Iterator[Refusal]:
    """Yield the reasons why a single run cannot be trained on; `kept` are its conversations to train on.

    Reasons why it does not belong to its group come first, since such a run leaves no gap in the group.
    """
    if versions is not None and any(conversation.policy_version not in versions for conversation in kept):
        yield Refusal.STALE
    if tokenizer is not None and any(conversation.tokenizer != tokenizer for conversation in kept):
        yield Refusal.OTHER_TOKENIZER
    if template is not None and any(conversation.template != template for conversation in kept):
        yield Refusal.OTHER_TEMPLATE
    if run.record.stop_reason not in _TRAINABLE:
        yield Refusal.UNFINISHED
    # Edits of an earlier reading of this run do not count.
    call_ids = {conversation.call_id for conversation in run.conversations_K}
    of_run = (event for event in run.events if event.call_id is None or event.call_id in call_ids)
    if any(event.kind == EventKind.MEMORY_EDITED for event in of_run):
        yield Refusal.EDITED
    if not _is_unbroken(run):
        yield Refusal.LOST_CONVERSATIONS
    if not all(conversation.has_ids for conversation in kept):
        yield Refusal.NO_TOKEN_IDS
    if not all(map(_is_sound, kept)):
        yield Refusal.DAMAGED_TOKENS
    lengths = [len(logged.prompt_token_ids or ()) + len(logged.token_ids or ()) for logged in kept]
    if max_tokens is not None and max(lengths, default=0) > max_tokens:
        yield Refusal.TOO_LONG


def _find_group(run: TrainingRun, groups: Mapping[str, str] | None) -> str | None:
    if groups is not None:
        return groups.get(run.run_id)
    if not run.conversations_K:
        return None  # nothing was sampled that could be missing
    # Only the first conversation: a run that was killed later must still count as a member of its group.
    first, record = run.conversations_K[0], run.record
    same: list[Any] = [
        record.question,
        record.document["key"],
        first.role,
        *_get_first_span(first),
        _select_settings(run),
        _select_sampling(first),
    ]
    if record.strategy_fingerprint:  # a program that logs runs of its own need not have one
        same += [record.strategy, record.strategy_fingerprint]
    if not record.question:  # it was redacted; equal questions on equal chunks make equal prompts
        if first.prompt_token_ids is None:
            return None
        same.append(list(first.prompt_token_ids))
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def _select_settings(run: TrainingRun) -> dict[str, Any]:
    """Return the settings that runs of a group share."""
    settings = {name: value for name, value in run.record.settings.items() if name not in _IMMATERIAL_SETTINGS}
    objects = [name for name in settings.pop("objects", ()) if name not in _IMMATERIAL_SETTINGS]
    return {**settings, "objects": objects} if objects else settings


def _select_sampling(first: Conversation) -> dict[str, Any]:
    return {name: value for name, value in first.sampling.items() if name not in _IMMATERIAL_SAMPLING}


def _get_first_span(first: Conversation) -> tuple[int | None, int | None]:
    return (None, None) if first.span is None else (first.span.start_byte, first.span.end_byte)


def _explain_small_groups(small: Set[str], runs: Iterable[TrainingRun]) -> Counter[str]:
    """Count runs of small groups by what separates them from others of the same question and document."""
    of_question = group_values(((run.question, str(run.record.document["key"])), run) for run in runs)
    reasons: Counter[str] = Counter()
    for alike in of_question.values():
        conditions = [
            {
                "policy_version": run.conversations_K[0].policy_version,
                "first chunk": _get_first_span(run.conversations_K[0]),
                "strategy": run.record.strategy,
                **_select_settings(run),
                **_select_sampling(run.conversations_K[0]),
            }
            for run in alike
        ]
        names = {name for values in conditions for name in values}
        names = {name for name in names if len({str(values.get(name)) for values in conditions}) > 1}
        if names:
            reason = f"one question in several groups, by {', '.join(sorted(names))}"
            reasons[reason] += sum(run.run_id in small for run in alike)
    return +reasons


def _is_unbroken(run: TrainingRun) -> bool:
    """Return whether every call with all its attempts is there, and an answer."""
    attempts_of = group_values((conversation.call_id, conversation) for conversation in run.conversations_K)
    for attempts in attempts_of.values():
        outcomes = [attempt.outcome is Outcome.DISCARDED for attempt in attempts]
        if (
            [attempt.attempt for attempt in attempts] != list(range(len(attempts)))
            or len({(attempt.role, attempt.branch, attempt.slot) for attempt in attempts}) != 1
            or outcomes != [True] * (len(attempts) - 1) + [False]
            or not attempts_of.keys() >= set(attempts[-1].parents)
        ):
            return False
    firsts = [attempts[0] for attempts in attempts_of.values()]
    positions = {(first.role, first.branch, first.slot) for first in firsts}
    return len(positions) == len(firsts) and any(first.writes is Writes.ANSWER for first in firsts)


def _is_sound(conversation: Conversation) -> bool:
    logprobs = conversation.logprobs or ()
    return (
        len(conversation.prompt_token_ids or ()) > 0
        and len(conversation.token_ids or ()) == len(logprobs)
        and all(math.isfinite(logprob) and logprob <= _MAX_LOGPROB for logprob in logprobs)
    )


def _find_only_fingerprint(kind: Literal["tokenizer", "template"], runs: Iterable[TrainingRun]) -> str | None:
    """Return the only fingerprint of the runs; None if there are no runs."""
    run_ids = group_values(
        (name, run.run_id)
        for run in runs
        for name in {getattr(conversation, kind) for conversation in run.sampled_conversations}
    )
    if len(run_ids) > 1:
        counts = "; ".join(f"{name!r}: {len(ids)} of them, such as {ids[0]!r}" for name, ids in sorted(run_ids.items()))
        commonest = max(sorted(run_ids), key=lambda name: len(run_ids[name]))
        raise ReplayError(
            f"the runs were made with {len(run_ids)} {kind}s, which cannot be trained on together ({counts})",
            hint=f"Choose one, as in --{kind} {commonest}; the others are then left out.",
        )
    return next(iter(run_ids), None)


def _make_rollout(
    run: TrainingRun, functions: Mapping[str, RewardFunction | StepRewardFunction], details: Counter[str]
) -> Rollout | Refusal:
    rewards: dict[str, RewardValue] = {}
    for name, function in functions.items():
        value = function(run)
        if value is None:
            details[f"{name}: {why_unknown(function, run)}"] += 1
            return Refusal.NO_REWARD
        values = tuple(value) if isinstance(value, Iterable) else (value,)
        if not all(abs(number) <= MAX_REWARD for number in values):
            return Refusal.NON_FINITE_REWARD
        if not isinstance(value, Iterable):
            rewards[name] = float(value)
        elif len(values) == len(run.conversations_K):
            rewards[name] = tuple(compress(map(float, values), run.sampled_mask))
        else:
            raise RewardError(
                f"the reward {name!r} has {len(values)} values for {len(run.conversations_K)} conversations",
                hint="Return one for each of run.conversations_K.",
                run_id=run.run_id,
            )
    outcome = rewards.pop(OUTCOME)
    if isinstance(outcome, tuple):
        raise RewardError(
            f"the {OUTCOME} must be one number, got {outcome}",
            hint="Return one number; rewards of conversations are terms of the advantage (credit).",
            run_id=run.run_id,
        )
    return Rollout(run.run_id, tuple(map(_make_training_conversation, run.sampled_conversations)), outcome, rewards)


def _is_replaced(logged: Conversation) -> bool:
    """Return whether a guard kept another memory than the one that was written."""
    kinds = {event.kind for event in logged.events}
    return logged.outcome is Outcome.KEPT_PREVIOUS and not kinds.isdisjoint(_GUARDED)


def _make_training_conversation(logged: Conversation) -> TrainingConversation:
    return TrainingConversation(
        array("I", logged.prompt_token_ids or ()),
        array("I", logged.token_ids or ()),
        array("f", logged.logprobs or ()),
        logged.role,
        logged.branch,
        logged.slot,
        truncated=logged.finish_reason == FinishReason.LENGTH.value,
        policy_version=logged.policy_version,
        loss_mask_T=(False,) * len(logged.token_ids or ()) if _is_replaced(logged) else None,
    )


def _report(
    source: str,
    ledger: _Ledger,
    groups: Sequence[RolloutGroup],
    policy_versions: Sequence[str] | None,
    tokenizer: str | None,
    template: str | None,
    missing: tuple[str, ...],
) -> ReplayReport:
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    conversations = [conversation for rollout in rollouts for conversation in rollout.conversations_K]
    sampled = [logged for run in ledger.candidates.values() for logged in run.sampled_conversations]
    newest = len(policy_versions or ()) - 1
    lag = {name: newest - index for index, name in enumerate(policy_versions or ())}
    staleness = Counter(
        max(lag[conversation.policy_version] for conversation in rollout.conversations_K) for rollout in rollouts if lag
    )
    lengths = [(len(conversation.prompt_ids_P), len(conversation.completion_ids_T)) for conversation in conversations]
    return ReplayReport(
        source=source,
        runs=len(ledger.group_of),
        refused=ledger.by_reason(),
        details=dict(ledger.details),
        groups=len(groups),
        rollouts=len(rollouts),
        conversations=len(conversations),
        prompt_tokens=sum(prompt for prompt, _ in lengths),
        completion_tokens=sum(completion for _, completion in lengths),
        longest=max(map(sum, lengths), default=0),
        zero_variance_groups=tuple(
            ZeroVarianceGroup(
                group.group_id, ledger.candidates[first.run_id].question, len(group.rollouts_G), first.reward
            )
            for group in groups
            for first in group.rollouts_G[:1]
            if len({(rollout.reward, *sorted(rollout.term_rewards.items())) for rollout in group.rollouts_G}) == 1
        ),
        tokenizer=tokenizer if rollouts else None,
        template=template if rollouts else None,
        versions=dict(Counter(conversation.policy_version for conversation in conversations)),
        staleness=dict(staleness),
        missing_run_ids=missing,
        temperatures=dict(Counter(float(logged.sampling.get("temperature", 1.0)) for logged in sampled)),
        masked_conversations=sum(map(_is_replaced, sampled)),
        non_default_sampling=tuple(run.run_id for run in ledger.candidates.values() if _has_non_default_sampling(run)),
    )


def _has_non_default_sampling(run: TrainingRun) -> bool:
    samplings = [conversation.sampling for conversation in run.sampled_conversations]
    return any(sampling.get(name, 1.0) != 1.0 for sampling in samplings for name in ("temperature", "top_p"))

"""Makes groups of rollouts from logged runs: complete runs in complete groups. Each refused run has a reason.

Nothing is tokenised here: a rollout has the logged token ids and log-probs, one `TrainingConversation` for each prompt
and completion. Not every conversation is trained on:

- An update whose text did not become the memory, for example because it was empty, is kept: it was sampled like others.
- An update that a guard replaced, because the policy refused or invented something, is masked: the run's reward is for
  the memory that was kept instead.
- An attempt that was discarded and retried is left out: the run's reward is not for it.
- Reward functions see greedy calls, but these are not trained on.
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

from memagent_graph.events import EventKind, StopReason
from memagent_graph.grouping import group_values
from memagent_graph.policy import FinishReason
from memagent_graph.run_log import Conversation, Outcome, RunFilter, RunLog
from memagent_graph.settings import PolicySettings
from memagent_graph.trace import Writes
from memagent_training.data.replay_report import Refusal, ReplayReport, ZeroVarianceGroup
from memagent_training.data.reward_functions import (
    LoggedReward,
    RewardFunction,
    StepRewardFunction,
    call_reward_function,
    explain_unknown,
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

_TRAINABLE_STOP_REASONS: Final = frozenset(reason.value for reason in StopReason if not reason.resumable)
_MAX_LOGPROB: Final = 1e-3
"""Log-probs up to this value may be above 0 by rounding."""
_IMMATERIAL_SETTINGS: Final = frozenset({"seed", "logprobs"}).union(
    {setting.name for setting in fields(PolicySettings)} - {"unsupported", "chat_template_kwargs"}
)
"""Settings in which rollouts of one group may differ, such as the policy's address. Policies are compared by version,
which includes the number format, and tokenizers by fingerprint."""
_GUARD_EVENTS: Final = frozenset({EventKind.INVENTED, EventKind.REFUSED})
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
            ReplayError: there are no runs, or every run was refused; the message names all reasons.
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
        term_rewards: the other rewards, by their names in the terms of the advantage.
        find_gold: returns the gold answers of a run, for rewards that compare with them.
        run_filter: selects runs of a log.
        groups: the group of each run, by run id; a run without one is refused. By default, runs of one question on one
            document form a group if they began with the same chunk and have the same sampling and settings, except
            for the seed and the policy's address. Runs of different policy versions are in different groups, unless
            `policy_versions` allows several.
        whole_groups: refuse all rollouts of a group if one is refused; runs by weights, a tokenizer or prompts that
            were not chosen do not count as part of the group. Otherwise the rest of the group is compared.
        min_group: the minimum number of rollouts; a smaller group is refused.
        max_tokens: the maximum tokens of a prompt and its completion together, such as the model's context window.
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
        raise ReplayError("no policy version is allowed", hint="Give at least one (--policy-versions).")
    allowed_versions = None if policy_versions is None else frozenset(policy_versions)
    selection = _RunSelection()
    for logged_run in read_runs(source, run_filter):
        run = logged_run if find_gold is None else replace(logged_run, gold=find_gold(logged_run))
        final_run = run.without_discarded()
        refusals = _find_refusals(
            run, final_run.sampled_conversations,
            versions=allowed_versions, max_tokens=max_tokens, tokenizer=tokenizer, template=template,
        )  # fmt: skip
        group = _find_group(run, groups)
        if groups is None and allowed_versions is None:
            group = selection.choose_version_group(group, run)
        selection.add(final_run, group, next(refusals, None))
    missing_runs = {run_id: group for run_id, group in (groups or {}).items() if run_id not in selection.group_by_run}
    selection.incomplete_groups |= set(missing_runs.values())
    tokenizer = _find_only_fingerprint("tokenizer", selection.candidates.values())
    template = _find_only_fingerprint("template", selection.candidates.values())
    reward_functions: dict[str, RewardFunction | StepRewardFunction] = {
        OUTCOME: LoggedReward(reward) if isinstance(reward, str) else reward
    }
    reward_functions |= term_rewards or {}
    rollouts: dict[str, Rollout] = {}
    for run in list(selection.candidates.values()):
        rollout = _make_rollout(run, reward_functions, selection.details)
        if isinstance(rollout, Refusal):
            selection.refuse(run.run_id, rollout)
        else:
            rollouts[run.run_id] = rollout
    if whole_groups:
        for run_id in list(selection.candidates):
            if selection.group_by_run[run_id] in selection.incomplete_groups:
                selection.refuse(run_id, Refusal.INCOMPLETE_GROUP)
    group_sizes = Counter(selection.group_by_run[run_id] for run_id in selection.candidates)
    small_group_runs = {
        run_id for run_id in selection.candidates if group_sizes[selection.group_by_run[run_id]] < min_group
    }
    if groups is None and small_group_runs:
        selection.details += _explain_small_groups(small_group_runs, selection.candidates.values())
    for run_id in small_group_runs:
        selection.refuse(run_id, Refusal.GROUP_TOO_SMALL)
    rollouts_by_group = group_values(
        (selection.group_by_run[run_id] or "", rollouts[run_id]) for run_id in selection.candidates
    )
    kept_groups = [RolloutGroup(group_id, tuple(rollouts_G)) for group_id, rollouts_G in rollouts_by_group.items()]
    source_name = str(source.path if isinstance(source, RunLog) else source)
    return Replay(
        kept_groups,
        _make_report(source_name, selection, kept_groups, policy_versions, tokenizer, template, tuple(missing_runs)),
    )


@dataclass
class _RunSelection:
    """The runs to train on and the refused ones, by id, oldest first."""

    candidates: dict[str, TrainingRun] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    group_by_run: dict[str, str | None] = field(default_factory=dict)
    incomplete_groups: set[str] = field(default_factory=set)
    """Groups with a refused or missing run."""
    details: Counter[str] = field(default_factory=Counter)
    """Counts of refused runs by a detail of the reason."""
    version_by_group: dict[str, str] = field(default_factory=dict)
    """The policy version of a group's first run."""

    def choose_version_group(self, group: str | None, run: TrainingRun) -> str | None:
        """Return the group for the run's policy version, because rewards of different versions are not compared."""
        if group is None:
            return None
        version = run.conversations_K[0].policy_version
        return group if self.version_by_group.setdefault(group, version) == version else f"{group}-{version}"

    def add(self, run: TrainingRun, group: str | None, refusal: Refusal | None) -> None:
        """Add the next run, with its group and the reason to refuse it, if any."""
        self.group_by_run[run.run_id], self.candidates[run.run_id] = group, run
        if refusal is not None or group is None:
            self.refuse(run.run_id, refusal or Refusal.NOT_GROUPED)

    def refuse(self, run_id: str, reason: Refusal) -> None:
        """Refuse a run."""
        self.candidates.pop(run_id, None)
        self.refusals[run_id] = reason
        group = self.group_by_run[run_id]
        if group is not None and not reason.is_outside_group:
            self.incomplete_groups.add(group)

    def list_refused(self) -> dict[Refusal, tuple[str, ...]]:
        """Return the refused runs by reason, oldest first."""
        refused_ids = (run_id for run_id in self.group_by_run if run_id in self.refusals)
        runs_by_reason = group_values((self.refusals[run_id], run_id) for run_id in refused_ids)
        return {reason: tuple(runs_by_reason[reason]) for reason in Refusal if reason in runs_by_reason}


def _find_refusals(
    run: TrainingRun,
    conversations: Sequence[Conversation],
    *,
    versions: frozenset[str] | None,
    max_tokens: int | None,
    tokenizer: str | None,
    template: str | None,
) -> Iterator[Refusal]:
    """Yield the reasons why a run cannot be trained on; `conversations` are those of the run that would be trained on.

    Reasons why the run does not belong to its group come first, because such a run does not make the group incomplete.
    """
    if versions is not None and any(conversation.policy_version not in versions for conversation in conversations):
        yield Refusal.STALE
    if tokenizer is not None and any(conversation.tokenizer != tokenizer for conversation in conversations):
        yield Refusal.OTHER_TOKENIZER
    if template is not None and any(conversation.template != template for conversation in conversations):
        yield Refusal.OTHER_TEMPLATE
    if run.record.stop_reason not in _TRAINABLE_STOP_REASONS:
        yield Refusal.UNFINISHED
    # Edits of an earlier reading of this run do not count.
    call_ids = {conversation.call_id for conversation in run.conversations_K}
    run_events = (event for event in run.events if event.call_id is None or event.call_id in call_ids)
    if any(event.kind == EventKind.MEMORY_EDITED for event in run_events):
        yield Refusal.EDITED
    if not _is_complete(run):
        yield Refusal.LOST_CONVERSATIONS
    if not all(conversation.has_ids for conversation in conversations):
        yield Refusal.NO_TOKEN_IDS
    if not all(map(_has_valid_tokens, conversations)):
        yield Refusal.DAMAGED_TOKENS
    lengths = [
        len(conversation.prompt_token_ids or ()) + len(conversation.token_ids or ()) for conversation in conversations
    ]
    if max_tokens is not None and max(lengths, default=0) > max_tokens:
        yield Refusal.TOO_LONG


def _find_group(run: TrainingRun, groups: Mapping[str, str] | None) -> str | None:
    if groups is not None:
        return groups.get(run.run_id)
    if not run.conversations_K:
        return None  # without a conversation, its group is not incomplete
    # Only the first conversation counts: a run that was killed later must still be a member of its group.
    first_conversation, record = run.conversations_K[0], run.record
    shared_values: list[Any] = [
        record.question,
        record.document["key"],
        first_conversation.role,
        *_get_byte_span(first_conversation),
        _select_settings(run),
        _select_sampling(first_conversation),
    ]
    if record.strategy_fingerprint:  # missing if another program logged the run
        shared_values += [record.strategy, record.strategy_fingerprint]
    if not record.question:  # redacted; equal questions on equal chunks have equal prompts
        if first_conversation.prompt_token_ids is None:
            return None
        shared_values.append(list(first_conversation.prompt_token_ids))
    return hashlib.sha256(json.dumps(shared_values, sort_keys=True).encode()).hexdigest()[:16]


def _select_settings(run: TrainingRun) -> dict[str, Any]:
    """Return the settings that runs of a group share."""
    settings = {name: value for name, value in run.record.settings.items() if name not in _IMMATERIAL_SETTINGS}
    objects = [name for name in settings.pop("objects", ()) if name not in _IMMATERIAL_SETTINGS]
    return {**settings, "objects": objects} if objects else settings


def _select_sampling(conversation: Conversation) -> dict[str, Any]:
    return {name: value for name, value in conversation.sampling.items() if name not in _IMMATERIAL_SAMPLING}


def _get_byte_span(conversation: Conversation) -> tuple[int | None, int | None]:
    return (None, None) if conversation.span is None else (conversation.span.start_byte, conversation.span.end_byte)


def _explain_small_groups(small_group_runs: Set[str], runs: Iterable[TrainingRun]) -> Counter[str]:
    """Count runs of small groups by what separates them from others of the same question and document."""
    runs_by_question = group_values(((run.question, str(run.record.document["key"])), run) for run in runs)
    reasons: Counter[str] = Counter()
    for question_runs in runs_by_question.values():
        conditions = [
            {
                "policy_version": run.conversations_K[0].policy_version,
                "first chunk": _get_byte_span(run.conversations_K[0]),
                "strategy": run.record.strategy,
                **_select_settings(run),
                **_select_sampling(run.conversations_K[0]),
            }
            for run in question_runs
        ]
        names = {name for values in conditions for name in values}
        differing_names = {name for name in names if len({str(values.get(name)) for values in conditions}) > 1}
        if differing_names:
            reason = f"one question in several groups, by {', '.join(sorted(differing_names))}"
            reasons[reason] += sum(run.run_id in small_group_runs for run in question_runs)
    return +reasons


def _is_complete(run: TrainingRun) -> bool:
    """Return whether the run has all attempts of every call, and an answer."""
    attempts_by_call = group_values((conversation.call_id, conversation) for conversation in run.conversations_K)
    for attempts in attempts_by_call.values():
        discarded = [attempt.outcome is Outcome.DISCARDED for attempt in attempts]
        if (
            [attempt.attempt for attempt in attempts] != list(range(len(attempts)))
            or len({(attempt.role, attempt.branch, attempt.slot) for attempt in attempts}) != 1
            or discarded != [True] * (len(attempts) - 1) + [False]
            or not attempts_by_call.keys() >= set(attempts[-1].parents)
        ):
            return False
    first_attempts = [attempts[0] for attempts in attempts_by_call.values()]
    positions = {(first.role, first.branch, first.slot) for first in first_attempts}
    return len(positions) == len(first_attempts) and any(first.writes is Writes.ANSWER for first in first_attempts)


def _has_valid_tokens(conversation: Conversation) -> bool:
    logprobs = conversation.logprobs or ()
    return (
        len(conversation.prompt_token_ids or ()) > 0
        and len(conversation.token_ids or ()) == len(logprobs)
        and all(math.isfinite(logprob) and logprob <= _MAX_LOGPROB for logprob in logprobs)
    )


def _find_only_fingerprint(kind: Literal["tokenizer", "template"], runs: Iterable[TrainingRun]) -> str | None:
    """Return the only fingerprint of the runs; None if there are no runs."""
    runs_by_fingerprint = group_values(
        (fingerprint, run.run_id)
        for run in runs
        for fingerprint in {getattr(conversation, kind) for conversation in run.sampled_conversations}
    )
    if len(runs_by_fingerprint) > 1:
        counts = "; ".join(
            f"{fingerprint!r}: {len(run_ids)} of them, such as {run_ids[0]!r}"
            for fingerprint, run_ids in sorted(runs_by_fingerprint.items())
        )
        commonest = max(sorted(runs_by_fingerprint), key=lambda fingerprint: len(runs_by_fingerprint[fingerprint]))
        raise ReplayError(
            f"the runs were made with {len(runs_by_fingerprint)} {kind}s, which cannot be trained on together "
            f"({counts})",
            hint=f"Choose one, as in --{kind} {commonest}; the others are then left out.",
        )
    return next(iter(runs_by_fingerprint), None)


def _make_rollout(
    run: TrainingRun, reward_functions: Mapping[str, RewardFunction | StepRewardFunction], details: Counter[str]
) -> Rollout | Refusal:
    rewards: dict[str, RewardValue] = {}
    for name, reward_function in reward_functions.items():
        value = call_reward_function(reward_function, run, name)
        if value is None:
            details[f"{name}: {explain_unknown(reward_function, run)}"] += 1
            return Refusal.NO_REWARD
        if not all(abs(number) <= MAX_REWARD for number in (value if isinstance(value, tuple) else (value,))):
            return Refusal.NON_FINITE_REWARD
        if not isinstance(value, tuple):
            rewards[name] = value
        elif len(value) == len(run.conversations_K):
            rewards[name] = tuple(compress(value, run.sampled_mask))
        else:
            raise RewardError(
                f"the reward {name!r} has {len(value)} values for {len(run.conversations_K)} conversations",
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


def _is_memory_replaced(conversation: Conversation) -> bool:
    """Return whether a guard kept another memory than the one that was written."""
    kinds = {event.kind for event in conversation.events}
    return conversation.outcome is Outcome.KEPT_PREVIOUS and not kinds.isdisjoint(_GUARD_EVENTS)


def _make_training_conversation(conversation: Conversation) -> TrainingConversation:
    return TrainingConversation(
        array("I", conversation.prompt_token_ids or ()),
        array("I", conversation.token_ids or ()),
        array("f", conversation.logprobs or ()),
        conversation.role,
        conversation.branch,
        conversation.slot,
        truncated=conversation.finish_reason == FinishReason.LENGTH.value,
        policy_version=conversation.policy_version,
        loss_mask_T=(False,) * len(conversation.token_ids or ()) if _is_memory_replaced(conversation) else None,
    )


def _make_report(
    source: str,
    selection: _RunSelection,
    groups: Sequence[RolloutGroup],
    policy_versions: Sequence[str] | None,
    tokenizer: str | None,
    template: str | None,
    missing: tuple[str, ...],
) -> ReplayReport:
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    conversations = [conversation for rollout in rollouts for conversation in rollout.conversations_K]
    sampled_conversations = [
        conversation for run in selection.candidates.values() for conversation in run.sampled_conversations
    ]
    newest_index = len(policy_versions or ()) - 1
    lag_by_version = {name: newest_index - index for index, name in enumerate(policy_versions or ())}
    staleness = Counter(
        max(lag_by_version[conversation.policy_version] for conversation in rollout.conversations_K)
        for rollout in rollouts
        if lag_by_version
    )
    token_counts = [
        (len(conversation.prompt_ids_P), len(conversation.completion_ids_T)) for conversation in conversations
    ]
    return ReplayReport(
        source=source,
        runs=len(selection.group_by_run),
        refused=selection.list_refused(),
        details=dict(selection.details),
        groups=len(groups),
        rollouts=len(rollouts),
        conversations=len(conversations),
        prompt_tokens=sum(prompt for prompt, _ in token_counts),
        completion_tokens=sum(completion for _, completion in token_counts),
        longest=max(map(sum, token_counts), default=0),
        zero_variance_groups=tuple(
            ZeroVarianceGroup(
                group.group_id,
                selection.candidates[first_rollout.run_id].question,
                len(group.rollouts_G),
                first_rollout.reward,
            )
            for group in groups
            for first_rollout in group.rollouts_G[:1]
            if len({(rollout.reward, *sorted(rollout.term_rewards.items())) for rollout in group.rollouts_G}) == 1
        ),
        tokenizer=tokenizer if rollouts else None,
        template=template if rollouts else None,
        versions=dict(Counter(conversation.policy_version for conversation in conversations)),
        staleness=dict(staleness),
        missing_run_ids=missing,
        temperatures=dict(
            Counter(float(conversation.sampling.get("temperature", 1.0)) for conversation in sampled_conversations)
        ),
        masked_conversations=sum(map(_is_memory_replaced, sampled_conversations)),
        non_default_sampling=tuple(
            run.run_id for run in selection.candidates.values() if _has_non_default_sampling(run)
        ),
    )


def _has_non_default_sampling(run: TrainingRun) -> bool:
    samplings = [conversation.sampling for conversation in run.sampled_conversations]
    return any(sampling.get(name, 1.0) != 1.0 for sampling in samplings for name in ("temperature", "top_p"))

"""Replay: logged runs become groups of rollouts exactly as they were sampled, or are refused by name."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conversations import DOCUMENT, conversation
from support.scripts import document_with, part, perfect_reader, with_ids

from memagent_graph import Completion, Limits, RunFilter, RunLog, ScriptedPolicy, UpdateRule, UpdateRules
from memagent_graph.calls import Span
from memagent_graph.errors import RunLogError
from memagent_graph.run_log import Conversation, LoggedRun, Outcome, Reward, RunRecord
from memagent_graph.run_log.exchange import export_runs, import_runs
from memagent_training.data.replay import load_groups
from memagent_training.data.replay_report import Refusal
from memagent_training.data.reward_functions import LoggedStepReward
from memagent_training.data.rollouts import RolloutGroup
from memagent_training.data.training_runs import TrainingRun
from memagent_training.training_errors import ReplayError, RewardError

TEXT = document_with({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=400)
QUESTION = "What is the key of harbor?"


@pytest.fixture
def reader(make_reader, log, tmp_path):
    """Its policy returns token ids, and its runs can be resumed."""
    return make_reader(ScriptedPolicy(exactly), run_log=log, checkpoints=tmp_path / "c.sqlite")


def exactly(prompt: str, text: str | None = None) -> Completion:
    return with_ids(prompt, perfect_reader(prompt) if text is None else text)


def turn(run_id: str, position: int, answer_at: int, **changes: Any) -> Conversation:
    ids = {"prompt_token_ids": [1, 2, 3 + position], "token_ids": [5, 6], "logprobs": [-0.5, -0.25]}
    sampling = {"temperature": 1.0, "top_p": 1.0, "seed": None, "max_tokens": 9}
    values = {"run_id": run_id, "answers": position == answer_at, "policy_version": "v1", "sampling": sampling, **ids}
    return conversation(position, **(values | changes))


_clock = itertools.count()


def write(
    log: RunLog,
    run_id: str,
    *,
    reward: float | None = 1.0,
    question: str = QUESTION,
    document: str = "0",
    stop_reason: str | None = "answered",
    settings: dict[str, Any] | None = None,
    conversations: list[Conversation] | None = None,
    at: dict[int, dict[str, Any]] | None = None,
    **changes: Any,
) -> None:
    """A run of two updates and an answer; `changes` apply to every conversation, `at` to one."""
    record = RunRecord(
        run_id, float(next(_clock)), 2.0, question, {**DOCUMENT, "key": "sha256:" + document * 64}, settings or {},
        stop_reason, "4711",
    )  # fmt: skip
    if conversations is None:
        conversations = [turn(run_id, index, 2, **(changes | (at or {}).get(index, {}))) for index in range(3)]
    rewards = [] if reward is None else [Reward(run_id, "reward", reward, "test", 5.0)]
    log.add(LoggedRun(record, conversations, rewards=rewards))


def members(groups: list[RolloutGroup]) -> list[list[str]]:
    return [[rollout.run_id for rollout in group.rollouts_G] for group in groups]


def refusals(log: RunLog, **options: Any) -> dict[Refusal, tuple[str, ...]]:
    return dict(load_groups(log, **options).report.refused)


# What is taken


def test_a_rollout_has_the_policys_prompts_and_replies_token_for_token(make_reader, log) -> None:
    policy = ScriptedPolicy(exactly)
    reader = make_reader(policy, run_log=log)
    for run_id, reward in (("a", 1.0), ("b", 0.0)):
        reader.read(TEXT, QUESTION, run_id=run_id)
        log.reward(run_id, reward)
    replay = load_groups(log)
    (group,) = replay.groups
    rewards = [(rollout.run_id, rollout.reward, rollout.term_rewards) for rollout in group.rollouts_G]
    assert rewards == [("a", 1.0, {}), ("b", 0.0, {})]
    conversations = [conversation for rollout in group.rollouts_G for conversation in rollout.conversations_K]
    assert [bytes(list(conversation.prompt_ids_P)).decode() for conversation in conversations] == policy.prompts
    assert [bytes(list(conversation.completion_ids_T)).decode() for conversation in conversations] == list(
        map(perfect_reader, policy.prompts)
    )
    assert all(set(conversation.logprobs_T) == {-0.25} for conversation in conversations)
    for rollout in group.rollouts_G:
        *updates, answer = (conversation.slot_key for conversation in rollout.conversations_K)
        assert updates == [("update", "", k) for k in range(len(updates))]
        assert answer == ("answer", "", 0)
    assert {
        (conversation.policy_version, conversation.truncated, conversation.loss_mask_T)
        for conversation in conversations
    } == {("v7", False, None)}
    report = replay.report
    assert (report.runs, report.groups, report.rollouts) == (2, 1, 2)
    assert report.conversations == len(conversations) == report.versions["v7"]
    assert report.prompt_tokens == sum(len(prompt) for prompt in policy.prompts)
    assert report.refused == {}
    assert report.non_default_sampling == ("a", "b")  # the reader samples greedily


@pytest.mark.parametrize("suffix", ["sqlite", "parquet"])
def test_a_log_its_path_and_its_exports_give_the_same_groups(tmp_path, log, suffix) -> None:
    for run_id in "dcba":
        write(log, run_id, reward=ord(run_id) / 3, logprobs=[-1 / 3, -0.1])
    write(log, "unfinished", stop_reason=None, question="Another?")
    write(log, "edited", question="A third?")
    step = next(log.conversations("edited")).step
    log.wait(log.edit("edited", 0, "better", step=step, remaining=[step]))
    log.wait(log.record(turn("edited", 1, 1, step="anew")))
    log.wait(log.end("edited", "answered", "1"))
    path = log.path if suffix == "sqlite" else tmp_path / f"runs.{suffix}"
    if suffix != "sqlite":
        export_runs(log, path)
    direct, read = load_groups(log), load_groups(path)
    assert read.groups == direct.groups
    assert members(read.groups) == [["d", "c", "b", "a"]]
    assert replace(read.report, source="") == replace(direct.report, source="")
    assert read.report.refused == {Refusal.UNFINISHED: ("unfinished",), Refusal.EDITED: ("edited",)}


def test_an_update_that_kept_the_memory_is_trained_on(make_reader, log) -> None:
    reader = make_reader(ScriptedPolicy(lambda p: exactly(p, " " if "word0 " in p else None)), run_log=log)
    reader.read(TEXT, QUESTION, run_id="a")
    log.reward("a", 1.0)
    first = next(iter(log.conversations("a")))
    assert first.outcome is Outcome.KEPT_PREVIOUS
    (group,) = load_groups(log, min_group=1).groups
    assert list(group.rollouts_G[0].conversations_K[0].completion_ids_T) == [ord(" ")]


def test_a_memory_that_a_guard_replaced_is_masked_and_counted(make_reader, log) -> None:
    """The answer was saved by the memory that was kept: the invented one must not be rewarded for it."""

    def inventing(prompt: str) -> Completion:
        word = part(prompt, "section").split()[0] if "<section>" in prompt else "\\boxed{4711}"
        return exactly(prompt, "harbor 99999" if next(calls) == 1 else word)

    for run_id in ("a", "b"):
        calls = iter(range(10_000))
        rules = UpdateRules(invented=UpdateRule.KEEP_PREVIOUS)
        make_reader(ScriptedPolicy(inventing), run_log=log, rules=rules).read(TEXT, QUESTION, run_id=run_id)
        log.reward(run_id, float(run_id == "a"))
    replay = load_groups(log)
    counts = [conversation.learned_tokens for conversation in replay.groups[0].rollouts_G[0].conversations_K]
    assert counts[1] == 0 and min(counts[0], *counts[2:]) > 0
    assert replay.report.replaced == 2
    assert "a guard kept another memory: 2 conversations" in "\n".join(replay.report.summary())


def test_discarded_attempts_are_left_out(make_reader, log) -> None:
    calls = iter(range(1, 10_000))

    def script(prompt: str) -> Completion:
        return exactly(prompt, " " if next(calls) in {2, 3} else None)

    reader = make_reader(ScriptedPolicy(script), run_log=log, rules=UpdateRules(empty=UpdateRule.RETRY))
    result = reader.read(TEXT, QUESTION, run_id="a")
    log.reward("a", 1.0)
    (without,) = load_groups(log, min_group=1).groups
    assert len(without.rollouts_G[0].conversations_K) == result.chunks_read + 1


def test_a_discarded_attempt_without_ids_does_no_harm_where_it_is_not_trained_on(log) -> None:
    attempt = turn("a", 0, 1, outcome=Outcome.DISCARDED, token_ids=None, logprobs=None)
    write(log, "a", conversations=[attempt, turn("a", 0, 1, attempt=1), turn("a", 1, 1)])
    assert refusals(log, min_group=1) == {}


def test_a_run_is_scored_as_it_was_and_greedy_calls_are_left_out_afterwards(log) -> None:
    """A greedy call that wrote the memory is part of what a step reward looks at, as when rewards are given at once."""
    greedy = turn("a", 1, 9, role="tidy", slot=0, sampling={"temperature": 0.0}, text="the fact")
    write(
        log,
        "a",
        conversations=[
            turn("a", 0, 9, text="nothing"),
            replace(greedy, parents=(turn("a", 0, 9).step,)),
            replace(turn("a", 2, 9, text="the fact"), slot=1, parents=(greedy.step,)),
            replace(turn("a", 3, 3), parents=(turn("a", 2, 9).step,)),
        ],
    )

    def gain(run: TrainingRun) -> list[float]:
        knowledge = ["fact" in (memory or "") for memory in run.memories]
        return [float(now) - float(before) for before, now in zip([False, *knowledge], knowledge, strict=False)]

    (group,) = load_groups(log, term_rewards={"step": gain}, min_group=1).groups
    (rollout,) = group.rollouts_G
    assert [one.role for one in rollout.conversations_K] == ["update", "update", "answer"]
    assert rollout.term_rewards == {"step": (0.0, 0.0, 0.0)}
    for one in log.conversations("a"):
        if one.sampling["temperature"]:
            log.reward("a", 0.5, name="step", conversation=one.id)
    (group,) = load_groups(log, term_rewards={"step": LoggedStepReward("step")}, min_group=1).groups
    assert group.rollouts_G[0].term_rewards == {"step": (0.5, 0.5, 0.5)}


def test_runs_whose_question_was_redacted_are_grouped_by_what_the_policy_was_shown(log) -> None:
    for run_id, ids in (("a", [1, 2]), ("b", [1, 2]), ("c", [1, 3]), ("d", [1, 3]), ("e", None)):
        first = turn(run_id, 0, 1, prompt_token_ids=ids)
        write(log, run_id, question="", conversations=[first, turn(run_id, 1, 1)])
    replay = load_groups(log)
    assert sorted(members(replay.groups)) == [["a", "b"], ["c", "d"]]
    assert replay.report.refused == {Refusal.NO_TOKEN_IDS: ("e",)}


def test_superseded_conversations_are_left_out(log) -> None:
    write(log, "a")
    log.wait(log.record(turn("a", 1, 9, step="again", token_ids=[7, 7, 7], logprobs=[-1.0] * 3)))
    log.wait(log.record(turn("a", 2, 2, step="and again", parents=("again",))))
    log.wait(log.end("a", "answered", "1"))
    (group,) = load_groups(log, min_group=1).groups
    completions = [list(row.completion_ids_T) for row in group.rollouts_G[0].conversations_K]
    assert completions == [[5, 6], [7, 7, 7], [5, 6]]


def test_a_run_in_which_the_policy_gave_no_answer_counts(log) -> None:
    cut_off = {"finish_reason": "length", "token_ids": [], "logprobs": []}
    write(log, "a", reward=0.0, stop_reason="no_answer", at={2: cut_off})
    (group,) = load_groups(log, min_group=1).groups
    assert [row.truncated for row in group.rollouts_G[0].conversations_K] == [False, False, True]


def test_rewards_are_the_newest_of_a_name_or_computed_now(log) -> None:
    write(log, "a", reward=0.0)
    log.reward("a", 0.5)
    log.reward("a", 0.75, name="other")
    rows = [conversation.id for conversation in log.conversations("a")]
    for value, row in enumerate(rows):
        log.reward("a", value, name="step", conversation=row)

    def rollout(**options: Any) -> Any:
        (group,) = load_groups(log, min_group=1, **options).groups
        return group.rollouts_G[0]

    assert rollout().reward == 0.5
    assert rollout(reward="other").reward == 0.75
    assert rollout(reward=lambda run: len(run.conversations_K)).reward == 3.0
    assert rollout(term_rewards={"step": LoggedStepReward("step")}).term_rewards == {"step": (0.0, 1.0, 2.0)}
    tenths = rollout(term_rewards={"step": lambda run: [0.1] * len(run.conversations_K)})
    assert tenths.term_rewards == {"step": (0.1, 0.1, 0.1)}
    with pytest.raises(RewardError, match=r"1 values for 3 conversations \(run a\)"):
        rollout(term_rewards={"step": lambda run: [1.0]})


# Groups


def test_a_group_is_one_question_on_one_document_read_in_one_way(log) -> None:
    for index, changes in enumerate((
        {},
        {"question": "Another?"},
        {"document": "1"},
        {"settings": {"on_empty": "retry"}},
        {"at": {0: {"reads": (Span(0, 0, 99, 0, 99, 4),)}}},
        {"sampling": {"temperature": 0.5}},
    )):  # fmt: skip
        for seed in range(2):
            write(log, f"{index}.{seed}", **changes)
    assert members(load_groups(log).groups) == [[f"{index}.0", f"{index}.1"] for index in range(6)]


def test_rollouts_of_a_group_may_differ_in_seed_and_server_and_in_version_if_that_is_allowed(log) -> None:
    for seed in range(3):
        sampling = {"temperature": 1.0, "seed": seed}
        settings = {"seed": seed, "base_url": f"http://host{seed}/v1", "model": f"adapter-{seed}", "chunk_tokens": 100}
        write(
            log, f"r{seed}", sampling=sampling, settings=settings, policy_version=f"v{seed}", policy=f"adapter-{seed}"
        )
    (group,) = load_groups(log, policy_versions=["v0", "v1", "v2"]).groups
    assert len(group.rollouts_G) == 3
    assert refusals(log) == {Refusal.GROUP_TOO_SMALL: ("r0", "r1", "r2")}, "each version is compared with itself alone"


def test_runs_of_the_command_line_and_of_python_are_one_group(log) -> None:
    write(log, "command", settings={"model": "embedded", "policy": "local", "dtype": "float32"})
    write(log, "python", settings={"objects": ["policy", "tokenizer"]})
    assert members(load_groups(log).groups) == [["command", "python"]]


def test_differences_between_groups_of_one_question_are_named(log) -> None:
    write(log, "a", settings={"objects": ["policy"]})
    write(log, "b", settings={"objects": ["prompts"], "on_empty": "retry"}, sampling={"temperature": 0.5})
    write(log, "c", question="Another?")
    report = load_groups(log).report
    assert report.refused == {Refusal.GROUP_TOO_SMALL: ("a", "b", "c")}
    assert report.details == {"one question in several groups, by max_tokens, objects, on_empty, temperature, top_p": 2}
    assert load_groups(log, groups={run_id: run_id for run_id in "abc"}).report.details == {}, "those were asked for"


def test_groups_can_be_named(log) -> None:
    for run_id in "abcd":
        write(log, run_id)
    replay = load_groups(log, groups={"a": "one", "c": "one", "b": "two", "d": "two"})
    assert [group.group_id for group in replay.groups] == ["one", "two"]
    assert members(replay.groups) == [["a", "c"], ["b", "d"]]
    replay = load_groups(log, groups=dict.fromkeys("abc", "x"))
    assert members(replay.groups) == [["a", "b", "c"]]
    assert replay.report.refused == {Refusal.NOT_GROUPED: ("d",)}


def test_a_run_that_the_groups_name_and_the_log_lacks_breaks_its_group(log) -> None:
    for run_id in "abcd":
        write(log, run_id)
    named = {"a": "one", "c": "one", "gone": "one", "b": "two", "d": "two"}
    replay = load_groups(log, groups=named)
    assert members(replay.groups) == [["b", "d"]]
    assert replay.report.refused == {Refusal.INCOMPLETE_GROUP: ("a", "c")}
    assert replay.report.missing == ("gone",)
    assert "named in the groups, but missing: 1 run (gone)" in replay.report.summary()
    assert members(load_groups(log, groups=named, whole_groups=False).groups) == [["a", "c"], ["b", "d"]]


def test_a_reward_is_of_one_attempt_and_stays_in_the_log(reader, log, tmp_path) -> None:
    reader.read(TEXT, QUESTION, run_id="again")
    log.reward("again", 1.0)
    reader.read(TEXT, QUESTION, run_id="again")
    reader.read(TEXT, QUESTION, run_id="resumed", limits=Limits(max_chunks=1))
    log.reward("resumed", 0.5)
    assert refusals(log)[Refusal.UNFINISHED] == ("resumed",)
    reader.resume("resumed")
    for run_id, value in (("again", 1.0), ("resumed", 0.5)):
        assert log.latest_rewards(run_id) == {} and log.rewards(run_id) == []
        assert [reward.value for reward in log.rewards(run_id, earlier=True)] == [value]
    assert refusals(log)[Refusal.NO_REWARD] == ("again", "resumed")
    export_runs(log, tmp_path / "runs.parquet")
    other = RunLog(tmp_path / "other.sqlite")
    import_runs(other, tmp_path / "runs.parquet")
    assert refusals(other)[Refusal.NO_REWARD] == ("again", "resumed")
    other.close()


def test_the_runs_of_a_log_can_be_chosen(tmp_path, log) -> None:
    for run_id in "abc":
        write(log, run_id)
    assert members(load_groups(log, chosen=RunFilter(run_ids=["a", "c"])).groups) == [["a", "c"]]
    export_runs(log, tmp_path / "runs.parquet")
    with pytest.raises(ReplayError, match="Choose them when exporting"):
        load_groups(tmp_path / "runs.parquet", chosen=RunFilter(newest=1))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
@settings(max_examples=12)
def test_only_whole_groups_are_taken_and_every_run_is_accounted_for(runs) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(Path(folder, "r.sqlite"))
        for index, (group, has_ended) in enumerate(runs):
            write(log, f"r{index}", question=f"{group}?", stop_reason="answered" if has_ended else None)
        replay = load_groups(log)
        log.close()
    groups = [[f"r{i}" for i, (g, _) in enumerate(runs) if g == group] for group in dict.fromkeys(g for g, _ in runs)]
    whole = [ids for ids in groups if len(ids) > 1 and all(runs[int(id_[1:])][1] for id_ in ids)]
    assert members(replay.groups) == whole
    of_groups = [id_ for ids in whole for id_ in ids]
    left = [id_ for run_ids in replay.report.refused.values() for id_ in run_ids]
    assert sorted(of_groups + left) == sorted(f"r{i}" for i in range(len(runs)))


# What is refused

HALF = {"token_ids": None}
BAD: dict[Refusal, tuple[dict[str, Any], dict[str, Any]]] = {
    Refusal.UNFINISHED: ({"stop_reason": None}, {}),
    Refusal.NO_TOKEN_IDS: ({"at": {1: HALF}}, {}),
    Refusal.DAMAGED_TOKENS: ({"at": {1: {"logprobs": [-0.5, float("nan")]}}}, {}),
    Refusal.OTHER_TOKENIZER: ({"tokenizer": "t2"}, {"tokenizer": "t"}),
    Refusal.OTHER_TEMPLATE: ({"at": {2: {"template": "w2"}}}, {"template": "w"}),
    Refusal.STALE: ({"at": {0: {"policy_version": "v0"}}}, {"policy_versions": ["v1"]}),
    Refusal.TOO_LONG: ({"at": {1: {"prompt_token_ids": [1] * 4}}}, {"max_tokens": 5}),  # others fit exactly
    Refusal.NO_REWARD: ({"reward": None}, {}),
    Refusal.NON_FINITE_REWARD: ({"reward": float("inf")}, {}),
    Refusal.NOT_GROUPED: ({}, {"groups": {"good 0": "g", "good 1": "g"}}),
    Refusal.GROUP_TOO_SMALL: ({"question": "Asked once?"}, {}),
}


@pytest.mark.parametrize("reason", BAD, ids=lambda reason: reason.value)
def test_a_bad_run_is_refused_by_name_and_breaks_its_group_if_it_belongs_to_it(log, reason) -> None:
    changes, options = BAD[reason]
    write(log, "good 0")
    write(log, "bad", **changes)
    write(log, "good 1")
    apart = reason.is_outside_group or reason is Refusal.GROUP_TOO_SMALL
    replay = load_groups(log, **options)
    assert replay.report.refused[reason] == ("bad",)
    assert members(replay.groups) == ([["good 0", "good 1"]] if apart else [])
    assert replay.report.refused.get(Refusal.INCOMPLETE_GROUP, ()) == (() if apart else ("good 0", "good 1"))
    partly = load_groups(log, **options, whole_groups=False)
    assert members(partly.groups) == [["good 0", "good 1"]]
    assert partly.report.refused == {reason: ("bad",)}
    assert any(f"refused, {reason.value}: 1 run (bad); {reason.remedy}" == line for line in partly.report.summary())


def test_every_refusal_is_tested_here() -> None:
    elsewhere = {Refusal.EDITED, Refusal.LOST_CONVERSATIONS, Refusal.INCOMPLETE_GROUP}
    assert set(BAD) | elsewhere == set(Refusal)
    assert all(reason.remedy for reason in Refusal)


def test_a_run_whose_memory_a_person_replaced_is_refused(reader, log) -> None:
    reader.read(TEXT, QUESTION, run_id="a")
    reader.edit_memory("a", 1, "harbor 99")
    reader.resume("a")
    log.reward("a", 1.0)
    assert refusals(log) == {Refusal.EDITED: ("a",)}


@pytest.mark.parametrize(
    "conversations",
    [
        [turn("a", 0, 2), turn("a", 2, 2)],
        [turn("a", 1, 2), turn("a", 2, 2)],
        [turn("a", 0, 9), turn("a", 1, 9)],
        [turn("a", 0, 1, attempt=1), turn("a", 1, 1)],
        [turn("a", 0, 1, outcome=Outcome.DISCARDED), turn("a", 1, 1)],
        [],
    ],
    ids=["hole", "beginning", "answer", "attempt", "what came of it", "everything"],
)
def test_a_run_with_missing_conversations_is_refused(log, conversations) -> None:
    write(log, "a", conversations=conversations)
    assert refusals(log, min_group=1) == {Refusal.LOST_CONVERSATIONS: ("a",)}


@pytest.mark.parametrize(
    "damage",
    [{"logprobs": [-0.5]}, {"logprobs": [-0.5, float("-inf")]}, {"logprobs": [-0.5, 0.7]}, {"prompt_token_ids": []}],
    ids=["too few", "impossible", "positive", "no prompt"],
)
def test_invalid_tokens_and_log_probs_are_refused(log, damage) -> None:
    write(log, "a", at={1: damage})
    assert refusals(log, min_group=1) == {Refusal.DAMAGED_TOKENS: ("a",)}


def test_a_function_that_gives_nan_or_cannot_tell_gets_the_run_refused(log) -> None:
    write(log, "a")
    for value in (float("nan"), 1e39):
        assert refusals(log, reward=lambda run, value=value: value) == {Refusal.NON_FINITE_REWARD: ("a",)}
    assert refusals(log, reward=lambda run: None) == {Refusal.NO_REWARD: ("a",)}
    with_nan = {"step": lambda run: [0.0, float("nan"), 0.0]}
    assert refusals(log, term_rewards=with_nan) == {Refusal.NON_FINITE_REWARD: ("a",)}
    assert refusals(log, term_rewards={"step": LoggedStepReward("step")}) == {Refusal.NO_REWARD: ("a",)}


# Mixtures


@pytest.mark.parametrize("what", ["tokenizer", "template"])
def test_a_mixture_needs_a_choice_and_names_a_run_of_each(log, what) -> None:
    write(log, "a", **{what: "old"})
    for run_id in "bc":
        write(log, run_id, **{what: "new"})
    with pytest.raises(ReplayError) as refusal:
        load_groups(log)
    assert f"2 {what}s" in str(refusal.value)
    assert "'new': 2 of them, such as 'b'; 'old': 1 of them, such as 'a'" in str(refusal.value)
    assert f"as in {what} new" in str(refusal.value)
    replay = load_groups(log, **{what: "new"})
    assert members(replay.groups) == [["b", "c"]]
    assert getattr(replay.report, what) == "new"


def test_a_mixture_within_a_run_is_one_too(log) -> None:
    write(log, "a", at={2: {"tokenizer": "other"}})
    with pytest.raises(ReplayError, match=r"such as 'a'.*such as 'a'"):
        load_groups(log)


def test_runs_that_are_refused_anyway_make_no_mixture(log) -> None:
    write(log, "foreign", tokenizer="other", token_ids=None)
    write(log, "a")
    assert refusals(log, min_group=1, whole_groups=False) == {Refusal.NO_TOKEN_IDS: ("foreign",)}


# Versions


def test_staleness_is_counted_in_versions_and_bounded(log) -> None:
    versions = ["v0", "v1", "v2", "v3"]
    for index, version in enumerate(versions):
        for twin in "ab":
            write(log, f"{version}{twin}", policy_version=version, question=f"{index}?")
    write(log, "mixed a", policy_version="v3", at={0: {"policy_version": "v2"}})
    write(log, "mixed b", policy_version="v3")
    report = load_groups(log, policy_versions=versions).report
    assert report.staleness == {3: 2, 2: 2, 1: 3, 0: 3}
    assert report.versions == {"v0": 6, "v1": 6, "v2": 7, "v3": 11}
    report = load_groups(log, policy_versions=versions[2:]).report
    assert report.refused == {Refusal.STALE: ("v0a", "v0b", "v1a", "v1b")}
    assert report.staleness == {1: 3, 0: 3}
    report = load_groups(log, policy_versions=versions[3:]).report
    assert report.refused[Refusal.STALE][-1] == "mixed a"
    assert report.refused[Refusal.GROUP_TOO_SMALL] == ("mixed b",)


def test_an_empty_list_of_versions_is_refused(log) -> None:
    with pytest.raises(ReplayError, match="no policy version is allowed"):
        load_groups(log, policy_versions=[])


# The report, and sources that are none


def test_the_summary_says_in_lines_what_was_taken_and_what_not(log) -> None:
    for run_id in "abcdef":
        write(log, run_id, stop_reason=None if run_id < "e" else "answered", question=f"{run_id < 'e'}")
    assert load_groups(log, policy_versions=["v1"]).report.summary() == [
        f"{log.path}: 2 rollouts in 1 group of 6 runs",
        "6 conversations, 18 prompt and 12 completion tokens, the longest 5",
        "policy versions: v1 (6)",
        "staleness: 0 (2)",
        "1 group with all rewards equal: 'False' (2 runs, each 1)",
        "refused, unfinished: 4 runs (a, b, c and 1 more); resume them, or delete them from the log",
    ]


def test_a_replay_without_groups_is_an_error_with_run_reason_and_hint(log) -> None:
    with pytest.raises(ReplayError, match="no runs in"):
        load_groups(log).require_groups()
    write(log, "a", reward=None)
    with pytest.raises(
        ReplayError,
        match=r"none of the 1 runs .* \(no_reward: a; outcome: .* in 1\) \(run a\).*memagent reward.*gold",
    ):
        load_groups(log).require_groups()
    log.reward("a", 1.0)
    replay = load_groups(log, min_group=1)
    assert replay.require_groups() == replay.groups


def test_a_source_that_is_neither_log_nor_export_is_named(tmp_path) -> None:
    with pytest.raises(ReplayError, match=r"nowhere\.sqlite cannot be read: No such file"):
        load_groups(tmp_path / "nowhere.sqlite")
    assert not (tmp_path / "nowhere.sqlite").exists()
    (tmp_path / "noise.sqlite").write_text("noise")
    with pytest.raises(RunLogError, match="noise"):
        load_groups(tmp_path / "noise.sqlite")


def test_an_edit_of_an_earlier_reading_does_not_count(reader, log) -> None:
    reader.read(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=2))
    reader.edit_memory("r", 1, "better")
    reader.read(TEXT, QUESTION, run_id="r")
    reader.read(TEXT, QUESTION, run_id="s")
    for run_id in "rs":
        log.reward(run_id, float(run_id == "r"))
    assert load_groups(log).report.refused == {}

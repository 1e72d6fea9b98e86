"""Replay turns logged runs into groups of rollouts exactly as sampled, or refuses them with a reason."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conversations import DOCUMENT, make_conversation
from support.scripts import extract, make_completion, make_document, read_perfectly

from memagent_graph import Completion, Limits, RunFilter, RunLog, ScriptedPolicy, UpdateRule, UpdateRules
from memagent_graph.errors import RunLogError
from memagent_graph.run_log import Conversation, LoggedRun, Outcome, Reward, RunRecord
from memagent_graph.run_log.exchange import export_runs, import_runs
from memagent_graph.trace import Span
from memagent_training.data.replay import load_groups
from memagent_training.data.replay_report import Refusal
from memagent_training.data.reward_functions import LoggedStepReward
from memagent_training.data.rollouts import RolloutGroup
from memagent_training.data.training_runs import TrainingRun
from memagent_training.training_errors import ReplayError, RewardError

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=400)
QUESTION = "What is the key of harbor?"


@pytest.fixture
def reader(make_reader, log, tmp_path):
    """A reader whose policy returns token ids and whose runs can be resumed."""
    return make_reader(ScriptedPolicy(complete_with_ids), run_log=log, checkpoints=tmp_path / "c.sqlite")


def complete_with_ids(prompt: str, text: str | None = None) -> Completion:
    return make_completion(prompt, read_perfectly(prompt) if text is None else text)


def make_attempt(run_id: str, position: int, answer_at: int, **changes: Any) -> Conversation:
    ids = {"prompt_token_ids": [1, 2, 3 + position], "token_ids": [5, 6], "logprobs": [-0.5, -0.25]}
    sampling = {"temperature": 1.0, "top_p": 1.0, "seed": None, "max_tokens": 9}
    values = {"run_id": run_id, "answers": position == answer_at, "policy_version": "v1", "sampling": sampling, **ids}
    return make_conversation(position, **(values | changes))


_clock = itertools.count()


def log_run(
    log: RunLog,
    run_id: str,
    *,
    reward: float | None = 1.0,
    question: str = QUESTION,
    document: str = "0",
    stop_reason: str | None = "answered",
    settings: dict[str, Any] | None = None,
    conversations: list[Conversation] | None = None,
    by_index: dict[int, dict[str, Any]] | None = None,
    **changes: Any,
) -> None:
    """Log a run of two updates and an answer; `changes` apply to every conversation, `by_index` to one."""
    record = RunRecord(
        run_id, float(next(_clock)), 2.0, question, {**DOCUMENT, "key": "sha256:" + document * 64}, settings or {},
        stop_reason, "4711",
    )  # fmt: skip
    if conversations is None:
        fields = [changes | (by_index or {}).get(index, {}) for index in range(3)]
        conversations = [make_attempt(run_id, index, 2, **fields[index]) for index in range(3)]
    rewards = [] if reward is None else [Reward(run_id, "reward", reward, "test", 5.0)]
    log.add(LoggedRun(record, conversations, rewards=rewards))


def get_run_ids(groups: list[RolloutGroup]) -> list[list[str]]:
    return [[rollout.run_id for rollout in group.rollouts_G] for group in groups]


def load_refusals(log: RunLog, **options: Any) -> dict[Refusal, tuple[str, ...]]:
    return dict(load_groups(log, **options).report.refused)


# Accepted runs


def test_rollout_has_the_exact_tokens_of_prompts_and_replies(make_reader, log) -> None:
    policy = ScriptedPolicy(complete_with_ids)
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
        map(read_perfectly, policy.prompts)
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
    assert report.non_default_sampling == ("a", "b")  # this reader samples greedily


@pytest.mark.parametrize("suffix", ["sqlite", "parquet"])
def test_log_path_and_export_give_the_same_groups(tmp_path, log, suffix) -> None:
    for run_id in "dcba":
        log_run(log, run_id, reward=ord(run_id) / 3, logprobs=[-1 / 3, -0.1])
    log_run(log, "unfinished", stop_reason=None, question="Another?")
    log_run(log, "edited", question="A third?")
    call_id = next(log.conversations("edited")).call_id
    log.wait(log.edit("edited", 0, "better", call_id=call_id, remaining=[call_id]))
    log.wait(log.record(make_attempt("edited", 1, 1, call_id="anew")))
    log.wait(log.end("edited", "answered", "1"))
    path = log.path if suffix == "sqlite" else tmp_path / f"runs.{suffix}"
    if suffix != "sqlite":
        export_runs(log, path)
    replay_of_log, replay_of_path = load_groups(log), load_groups(path)
    assert replay_of_path.groups == replay_of_log.groups
    assert get_run_ids(replay_of_path.groups) == [["d", "c", "b", "a"]]
    assert replace(replay_of_path.report, source="") == replace(replay_of_log.report, source="")
    assert replay_of_path.report.refused == {Refusal.UNFINISHED: ("unfinished",), Refusal.EDITED: ("edited",)}


def test_update_that_kept_the_memory_is_trained_on(make_reader, log) -> None:
    policy = ScriptedPolicy(lambda prompt: complete_with_ids(prompt, " " if "word0 " in prompt else None))
    reader = make_reader(policy, run_log=log)
    reader.read(TEXT, QUESTION, run_id="a")
    log.reward("a", 1.0)
    assert next(iter(log.conversations("a"))).outcome is Outcome.KEPT_PREVIOUS
    (group,) = load_groups(log, min_group=1).groups
    assert list(group.rollouts_G[0].conversations_K[0].completion_ids_T) == [ord(" ")]


def test_memory_replaced_by_a_rule_is_masked_and_counted(make_reader, log) -> None:
    """The kept memory led to the answer, so the replaced one must not be rewarded for it."""

    def invent_once(prompt: str) -> Completion:
        word = extract(prompt, "section").split()[0] if "<section>" in prompt else "\\boxed{4711}"
        return complete_with_ids(prompt, "harbor 99999" if next(calls) == 1 else word)

    for run_id in ("a", "b"):
        calls = iter(range(10_000))
        rules = UpdateRules(invented=UpdateRule.KEEP_PREVIOUS)
        make_reader(ScriptedPolicy(invent_once), run_log=log, rules=rules).read(TEXT, QUESTION, run_id=run_id)
        log.reward(run_id, float(run_id == "a"))
    replay = load_groups(log)
    learned_counts = [conversation.learned_tokens for conversation in replay.groups[0].rollouts_G[0].conversations_K]
    assert learned_counts[1] == 0 and min(learned_counts[0], *learned_counts[2:]) > 0
    assert replay.report.masked_conversations == 2
    assert "a guard kept another memory: 2 conversations" in "\n".join(replay.report.format_lines())


def test_discarded_attempts_are_left_out(make_reader, log) -> None:
    calls = iter(range(1, 10_000))

    def script(prompt: str) -> Completion:
        return complete_with_ids(prompt, " " if next(calls) in {2, 3} else None)

    reader = make_reader(ScriptedPolicy(script), run_log=log, rules=UpdateRules(empty=UpdateRule.RETRY))
    result = reader.read(TEXT, QUESTION, run_id="a")
    log.reward("a", 1.0)
    (group,) = load_groups(log, min_group=1).groups
    assert len(group.rollouts_G[0].conversations_K) == result.chunks_read + 1


def test_discarded_attempt_without_ids_does_not_refuse_its_run(log) -> None:
    attempt = make_attempt("a", 0, 1, outcome=Outcome.DISCARDED, token_ids=None, logprobs=None)
    log_run(log, "a", conversations=[attempt, make_attempt("a", 0, 1, attempt=1), make_attempt("a", 1, 1)])
    assert load_refusals(log, min_group=1) == {}


def test_greedy_calls_are_passed_to_rewards_but_not_trained_on(log) -> None:
    """A step reward also sees greedy calls that wrote a memory, as in the closed loop."""
    greedy_call = make_attempt("a", 1, 9, role="tidy", slot=0, sampling={"temperature": 0.0}, text="the fact")
    log_run(
        log,
        "a",
        conversations=[
            make_attempt("a", 0, 9, text="nothing"),
            replace(greedy_call, parents=(make_attempt("a", 0, 9).call_id,)),
            replace(make_attempt("a", 2, 9, text="the fact"), slot=1, parents=(greedy_call.call_id,)),
            replace(make_attempt("a", 3, 3), parents=(make_attempt("a", 2, 9).call_id,)),
        ],
    )

    def compute_gain(run: TrainingRun) -> list[float]:
        knowledge = ["fact" in (memory or "") for memory in run.memories]
        return [float(new) - float(old) for old, new in zip([False, *knowledge], knowledge, strict=False)]

    (group,) = load_groups(log, term_rewards={"step": compute_gain}, min_group=1).groups
    (rollout,) = group.rollouts_G
    assert [conversation.role for conversation in rollout.conversations_K] == ["update", "update", "answer"]
    assert rollout.term_rewards == {"step": (0.0, 0.0, 0.0)}
    for conversation in log.conversations("a"):
        if conversation.sampling["temperature"]:
            log.reward("a", 0.5, name="step", conversation=conversation.id)
    (group,) = load_groups(log, term_rewards={"step": LoggedStepReward("step")}, min_group=1).groups
    assert group.rollouts_G[0].term_rewards == {"step": (0.5, 0.5, 0.5)}


def test_runs_with_redacted_questions_are_grouped_by_prompt(log) -> None:
    for run_id, ids in (("a", [1, 2]), ("b", [1, 2]), ("c", [1, 3]), ("d", [1, 3]), ("e", None)):
        first = make_attempt(run_id, 0, 1, prompt_token_ids=ids)
        log_run(log, run_id, question="", conversations=[first, make_attempt(run_id, 1, 1)])
    replay = load_groups(log)
    assert sorted(get_run_ids(replay.groups)) == [["a", "b"], ["c", "d"]]
    assert replay.report.refused == {Refusal.NO_TOKEN_IDS: ("e",)}


def test_superseded_conversations_are_left_out(log) -> None:
    log_run(log, "a")
    log.wait(log.record(make_attempt("a", 1, 9, call_id="again", token_ids=[7, 7, 7], logprobs=[-1.0] * 3)))
    log.wait(log.record(make_attempt("a", 2, 2, call_id="and again", parents=("again",))))
    log.wait(log.end("a", "answered", "1"))
    (group,) = load_groups(log, min_group=1).groups
    completions = [list(row.completion_ids_T) for row in group.rollouts_G[0].conversations_K]
    assert completions == [[5, 6], [7, 7, 7], [5, 6]]


def test_run_without_an_answer_is_trained_on(log) -> None:
    cut_off = {"finish_reason": "length", "token_ids": [], "logprobs": []}
    log_run(log, "a", reward=0.0, stop_reason="no_answer", by_index={2: cut_off})
    (group,) = load_groups(log, min_group=1).groups
    assert [row.truncated for row in group.rollouts_G[0].conversations_K] == [False, False, True]


def test_reward_is_the_newest_logged_one_or_computed_by_a_function(log) -> None:
    log_run(log, "a", reward=0.0)
    log.reward("a", 0.5)
    log.reward("a", 0.75, name="other")
    rows = [conversation.id for conversation in log.conversations("a")]
    for value, row in enumerate(rows):
        log.reward("a", value, name="step", conversation=row)

    def load_rollout(**options: Any) -> Any:
        (group,) = load_groups(log, min_group=1, **options).groups
        return group.rollouts_G[0]

    assert load_rollout().reward == 0.5
    assert load_rollout(reward="other").reward == 0.75
    assert load_rollout(reward=lambda run: len(run.conversations_K)).reward == 3.0
    assert load_rollout(term_rewards={"step": LoggedStepReward("step")}).term_rewards == {"step": (0.0, 1.0, 2.0)}
    rollout = load_rollout(term_rewards={"step": lambda run: [0.1] * len(run.conversations_K)})
    assert rollout.term_rewards == {"step": (0.1, 0.1, 0.1)}
    with pytest.raises(RewardError, match=r"1 values for 3 conversations \(run a\)"):
        load_rollout(term_rewards={"step": lambda run: [1.0]})


# Groups


def test_group_shares_question_document_settings_and_sampling(log) -> None:
    for index, changes in enumerate((
        {},
        {"question": "Another?"},
        {"document": "1"},
        {"settings": {"on_empty": "retry"}},
        {"by_index": {0: {"reads": (Span(0, 0, 99, 0, 99, 4),)}}},
        {"sampling": {"temperature": 0.5}},
    )):  # fmt: skip
        for seed in range(2):
            log_run(log, f"{index}.{seed}", **changes)
    assert get_run_ids(load_groups(log).groups) == [[f"{index}.0", f"{index}.1"] for index in range(6)]


def test_group_may_differ_in_seed_server_and_allowed_versions(log) -> None:
    for seed in range(3):
        sampling = {"temperature": 1.0, "seed": seed}
        settings = {"seed": seed, "base_url": f"http://host{seed}/v1", "model": f"adapter-{seed}", "chunk_tokens": 100}
        log_run(
            log, f"r{seed}", sampling=sampling, settings=settings, policy_version=f"v{seed}", policy=f"adapter-{seed}"
        )
    (group,) = load_groups(log, policy_versions=["v0", "v1", "v2"]).groups
    assert len(group.rollouts_G) == 3
    assert load_refusals(log) == {Refusal.GROUP_TOO_SMALL: ("r0", "r1", "r2")}, "each version is a group of its own"


def test_runs_from_the_command_line_and_python_are_one_group(log) -> None:
    log_run(log, "command", settings={"model": "embedded", "policy": "local", "dtype": "float32"})
    log_run(log, "python", settings={"objects": ["policy", "tokenizer"]})
    assert get_run_ids(load_groups(log).groups) == [["command", "python"]]


def test_differences_between_groups_of_one_question_are_named(log) -> None:
    log_run(log, "a", settings={"objects": ["policy"]})
    log_run(log, "b", settings={"objects": ["prompts"], "on_empty": "retry"}, sampling={"temperature": 0.5})
    log_run(log, "c", question="Another?")
    report = load_groups(log).report
    assert report.refused == {Refusal.GROUP_TOO_SMALL: ("a", "b", "c")}
    assert report.details == {"one question in several groups, by max_tokens, objects, on_empty, temperature, top_p": 2}
    assert load_groups(log, groups={run_id: run_id for run_id in "abc"}).report.details == {}, "these are explicit"


def test_groups_can_be_given_as_run_ids(log) -> None:
    for run_id in "abcd":
        log_run(log, run_id)
    replay = load_groups(log, groups={"a": "one", "c": "one", "b": "two", "d": "two"})
    assert [group.group_id for group in replay.groups] == ["one", "two"]
    assert get_run_ids(replay.groups) == [["a", "c"], ["b", "d"]]
    replay = load_groups(log, groups=dict.fromkeys("abc", "x"))
    assert get_run_ids(replay.groups) == [["a", "b", "c"]]
    assert replay.report.refused == {Refusal.NOT_GROUPED: ("d",)}


def test_run_missing_from_the_log_makes_its_group_incomplete(log) -> None:
    for run_id in "abcd":
        log_run(log, run_id)
    group_names = {"a": "one", "c": "one", "gone": "one", "b": "two", "d": "two"}
    replay = load_groups(log, groups=group_names)
    assert get_run_ids(replay.groups) == [["b", "d"]]
    assert replay.report.refused == {Refusal.INCOMPLETE_GROUP: ("a", "c")}
    assert replay.report.missing_run_ids == ("gone",)
    assert "named in the groups, but missing: 1 run (gone)" in replay.report.format_lines()
    assert get_run_ids(load_groups(log, groups=group_names, whole_groups=False).groups) == [["a", "c"], ["b", "d"]]


def test_reward_of_an_earlier_reading_is_kept_but_not_used(reader, log, tmp_path) -> None:
    reader.read(TEXT, QUESTION, run_id="again")
    log.reward("again", 1.0)
    reader.read(TEXT, QUESTION, run_id="again")
    reader.read(TEXT, QUESTION, run_id="resumed", limits=Limits(max_chunks=1))
    log.reward("resumed", 0.5)
    assert load_refusals(log)[Refusal.UNFINISHED] == ("resumed",)
    reader.resume("resumed")
    for run_id, value in (("again", 1.0), ("resumed", 0.5)):
        assert log.latest_rewards(run_id) == {} and log.rewards(run_id) == []
        assert [reward.value for reward in log.rewards(run_id, earlier=True)] == [value]
    assert load_refusals(log)[Refusal.NO_REWARD] == ("again", "resumed")
    export_runs(log, tmp_path / "runs.parquet")
    imported_log = RunLog(tmp_path / "other.sqlite")
    import_runs(imported_log, tmp_path / "runs.parquet")
    assert load_refusals(imported_log)[Refusal.NO_REWARD] == ("again", "resumed")
    imported_log.close()


def test_runs_of_a_log_can_be_filtered(tmp_path, log) -> None:
    for run_id in "abc":
        log_run(log, run_id)
    assert get_run_ids(load_groups(log, run_filter=RunFilter(run_ids=["a", "c"])).groups) == [["a", "c"]]
    export_runs(log, tmp_path / "runs.parquet")
    for name, message in (("runs.parquet", "Choose them when exporting"), ("absent", "cannot be read")):
        with pytest.raises(ReplayError, match=message):
            load_groups(tmp_path / name, run_filter=RunFilter(newest=1))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
@settings(max_examples=12)
def test_only_complete_groups_are_taken_and_every_run_is_reported(runs) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(Path(folder, "r.sqlite"))
        for index, (group, has_ended) in enumerate(runs):
            log_run(log, f"r{index}", question=f"{group}?", stop_reason="answered" if has_ended else None)
        replay = load_groups(log)
        log.close()
    groups = [[f"r{i}" for i, (g, _) in enumerate(runs) if g == group] for group in dict.fromkeys(g for g, _ in runs)]
    complete_groups = [ids for ids in groups if len(ids) > 1 and all(runs[int(run_id[1:])][1] for run_id in ids)]
    assert get_run_ids(replay.groups) == complete_groups
    accepted_ids = [run_id for ids in complete_groups for run_id in ids]
    refused_ids = [run_id for run_ids in replay.report.refused.values() for run_id in run_ids]
    assert sorted(accepted_ids + refused_ids) == sorted(f"r{index}" for index in range(len(runs)))


# Refused runs

WITHOUT_TOKEN_IDS = {"token_ids": None}
REFUSED_RUNS: dict[Refusal, tuple[dict[str, Any], dict[str, Any]]] = {
    Refusal.UNFINISHED: ({"stop_reason": None}, {}),
    Refusal.NO_TOKEN_IDS: ({"by_index": {1: WITHOUT_TOKEN_IDS}}, {}),
    Refusal.DAMAGED_TOKENS: ({"by_index": {1: {"logprobs": [-0.5, float("nan")]}}}, {}),
    Refusal.OTHER_TOKENIZER: ({"tokenizer": "t2"}, {"tokenizer": "t"}),
    Refusal.OTHER_TEMPLATE: ({"by_index": {2: {"template": "w2"}}}, {"template": "w"}),
    Refusal.STALE: ({"by_index": {0: {"policy_version": "v0"}}}, {"policy_versions": ["v1"]}),
    Refusal.TOO_LONG: ({"by_index": {1: {"prompt_token_ids": [1] * 4}}}, {"max_tokens": 5}),  # others fit exactly
    Refusal.NO_REWARD: ({"reward": None}, {}),
    Refusal.NON_FINITE_REWARD: ({"reward": float("inf")}, {}),
    Refusal.NOT_GROUPED: ({}, {"groups": {"good 0": "g", "good 1": "g"}}),
    Refusal.GROUP_TOO_SMALL: ({"question": "Asked once?"}, {}),
}


@pytest.mark.parametrize("reason", REFUSED_RUNS, ids=lambda reason: reason.value)
def test_refused_run_is_named_and_may_make_its_group_incomplete(log, reason) -> None:
    changes, options = REFUSED_RUNS[reason]
    log_run(log, "good 0")
    log_run(log, "bad", **changes)
    log_run(log, "good 1")
    keeps_group = reason.is_outside_group or reason is Refusal.GROUP_TOO_SMALL
    replay = load_groups(log, **options)
    assert replay.report.refused[reason] == ("bad",)
    assert get_run_ids(replay.groups) == ([["good 0", "good 1"]] if keeps_group else [])
    assert replay.report.refused.get(Refusal.INCOMPLETE_GROUP, ()) == (() if keeps_group else ("good 0", "good 1"))
    partial_replay = load_groups(log, **options, whole_groups=False)
    assert get_run_ids(partial_replay.groups) == [["good 0", "good 1"]]
    assert partial_replay.report.refused == {reason: ("bad",)}
    assert f"refused, {reason.value}: 1 run (bad); {reason.remedy}" in partial_replay.report.format_lines()


def test_every_refusal_has_a_test_and_a_remedy() -> None:
    tested_separately = {Refusal.EDITED, Refusal.LOST_CONVERSATIONS, Refusal.INCOMPLETE_GROUP}
    assert set(REFUSED_RUNS) | tested_separately == set(Refusal)
    assert all(reason.remedy for reason in Refusal)


def test_run_with_an_edited_memory_is_refused(reader, log) -> None:
    reader.read(TEXT, QUESTION, run_id="a")
    reader.edit_memory("a", 1, "harbor 99")
    reader.resume("a")
    log.reward("a", 1.0)
    assert load_refusals(log) == {Refusal.EDITED: ("a",)}


@pytest.mark.parametrize(
    "conversations",
    [
        [make_attempt("a", 0, 2), make_attempt("a", 2, 2)],
        [make_attempt("a", 1, 2), make_attempt("a", 2, 2)],
        [make_attempt("a", 0, 9), make_attempt("a", 1, 9)],
        [make_attempt("a", 0, 1, attempt=1), make_attempt("a", 1, 1)],
        [make_attempt("a", 0, 1, outcome=Outcome.DISCARDED), make_attempt("a", 1, 1)],
        [],
    ],
    ids=["a chunk", "the first chunk", "the answer", "an attempt", "an outcome", "everything"],
)
def test_run_with_missing_conversations_is_refused(log, conversations) -> None:
    log_run(log, "a", conversations=conversations)
    assert load_refusals(log, min_group=1) == {Refusal.LOST_CONVERSATIONS: ("a",)}


@pytest.mark.parametrize(
    "damage",
    [{"logprobs": [-0.5]}, {"logprobs": [-0.5, float("-inf")]}, {"logprobs": [-0.5, 0.7]}, {"prompt_token_ids": []}],
    ids=["too few", "impossible", "positive", "no prompt"],
)
def test_invalid_tokens_and_log_probs_are_refused(log, damage) -> None:
    log_run(log, "a", by_index={1: damage})
    assert load_refusals(log, min_group=1) == {Refusal.DAMAGED_TOKENS: ("a",)}


def test_runs_whose_computed_reward_is_nan_or_none_are_refused(log) -> None:
    log_run(log, "a")
    for value in (float("nan"), 1e39):
        assert load_refusals(log, reward=lambda run, value=value: value) == {Refusal.NON_FINITE_REWARD: ("a",)}
    assert load_refusals(log, reward=lambda run: None) == {Refusal.NO_REWARD: ("a",)}
    assert load_refusals(log, term_rewards={"step": lambda run: [float("nan")]}) == {Refusal.NON_FINITE_REWARD: ("a",)}
    for reward in (lambda run: {}["x"], lambda run: [0.5, None], lambda run: {"x": 0.5}):
        with pytest.raises(RewardError, match=r"the reward 'outcome' failed: (Key|Type|Value)Error: .+"):
            load_refusals(log, reward=reward)
    assert load_refusals(log, term_rewards={"step": LoggedStepReward("step")}) == {Refusal.NO_REWARD: ("a",)}


# Mixtures


@pytest.mark.parametrize("mixed_field", ["tokenizer", "template"])
def test_runs_with_two_tokenizers_or_templates_need_a_choice(log, mixed_field) -> None:
    log_run(log, "a", **{mixed_field: "old"})
    for run_id in "bc":
        log_run(log, run_id, **{mixed_field: "new"})
    with pytest.raises(ReplayError) as error:
        load_groups(log)
    assert f"2 {mixed_field}s" in str(error.value)
    assert "'new': 2 of them, such as 'b'; 'old': 1 of them, such as 'a'" in str(error.value)
    assert f"as in {mixed_field} new" in str(error.value)
    replay = load_groups(log, **{mixed_field: "new"})
    assert get_run_ids(replay.groups) == [["b", "c"]]
    assert getattr(replay.report, mixed_field) == "new"


def test_two_tokenizers_in_one_run_are_a_mixture(log) -> None:
    log_run(log, "a", by_index={2: {"tokenizer": "other"}})
    with pytest.raises(ReplayError, match=r"such as 'a'.*such as 'a'"):
        load_groups(log)


def test_refused_runs_do_not_count_as_a_mixture(log) -> None:
    log_run(log, "foreign", tokenizer="other", token_ids=None)
    log_run(log, "a")
    assert load_refusals(log, min_group=1, whole_groups=False) == {Refusal.NO_TOKEN_IDS: ("foreign",)}


# Versions


def test_staleness_is_counted_in_versions_and_limited(log) -> None:
    versions = ["v0", "v1", "v2", "v3"]
    for index, version in enumerate(versions):
        for suffix in "ab":
            log_run(log, f"{version}{suffix}", policy_version=version, question=f"{index}?")
    log_run(log, "mixed a", policy_version="v3", by_index={0: {"policy_version": "v2"}})
    log_run(log, "mixed b", policy_version="v3")
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


# The report, and damaged sources


def test_summary_lists_accepted_and_refused_runs(log) -> None:
    for run_id in "abcdef":
        log_run(log, run_id, stop_reason=None if run_id < "e" else "answered", question=f"{run_id < 'e'}")
    assert load_groups(log, policy_versions=["v1"]).report.format_lines() == [
        f"{log.path}: 2 rollouts in 1 group of 6 runs",
        "6 conversations, 18 prompt and 12 completion tokens, the longest 5",
        "policy versions: v1 (6)",
        "staleness: 0 (2)",
        "1 group with all rewards equal: 'False' (2 runs, each 1)",
        "refused, unfinished: 4 runs (a, b, c and 1 more); resume them, or delete them from the log",
    ]


def test_replay_without_groups_is_an_error_with_reason_and_hint(log) -> None:
    with pytest.raises(ReplayError, match="no runs in"):
        load_groups(log).require_groups()
    log_run(log, "a", reward=None)
    with pytest.raises(
        ReplayError,
        match=r"none of the 1 runs .* \(no_reward: a; outcome: .* in 1\) \(run a\).*memagent reward.*gold",
    ):
        load_groups(log).require_groups()
    log.reward("a", 1.0)
    replay = load_groups(log, min_group=1)
    assert replay.require_groups() == replay.groups


def test_unreadable_source_error_names_the_file(tmp_path) -> None:
    with pytest.raises(ReplayError, match=r"nowhere\.sqlite cannot be read: No such file"):
        load_groups(tmp_path / "nowhere.sqlite")
    assert not (tmp_path / "nowhere.sqlite").exists()
    (tmp_path / "noise.sqlite").write_text("noise")
    with pytest.raises(RunLogError, match="noise"):
        load_groups(tmp_path / "noise.sqlite")


def test_edit_of_an_earlier_reading_is_ignored(reader, log) -> None:
    reader.read(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=2))
    reader.edit_memory("r", 1, "better")
    reader.read(TEXT, QUESTION, run_id="r")
    reader.read(TEXT, QUESTION, run_id="s")
    for run_id in "rs":
        log.reward(run_id, float(run_id == "r"))
    assert load_groups(log).report.refused == {}

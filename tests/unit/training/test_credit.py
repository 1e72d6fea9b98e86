"""Terms of an advantage, and the rewards that presets name: evidence, gate, exit and word recall."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from made_rollouts import make_conversation
from support.rl_loops import SETTINGS, make_job
from support.scripts import extract, make_completion, make_document, read_perfectly
from support.strategies import answer_perfectly

from memagent_graph import MemAgentError, RunLog, ScriptedPolicy
from memagent_graph.reading.state import Limits
from memagent_training.algorithm.advantages import AdvantageSettings, find_drop_reason, prepare_batch
from memagent_training.algorithm.credit import CreditTerm, Scope, parse_credit_terms, require_roles
from memagent_training.data.replay import load_groups
from memagent_training.data.rollouts import Rollout, RolloutGroup
from memagent_training.data.training_runs import Gold, TrainingRun, read_runs
from memagent_training.job.job_settings import load_preset
from memagent_training.rewards.conversation_rewards import RecallGain
from memagent_training.rewards.evidence_rewards import (
    EvidenceF2,
    EvidenceF2Gain,
    ExitInTime,
    GateRight,
    LongRLVR,
    compute_f2,
)
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.reward_names import choose_term_rewards
from memagent_training.rl.rl_job import prepare
from memagent_training.training_errors import TrainingError

FACT = "The key of harbor is 4711."
TEXT = make_document({0.4: FACT, 0.8: "The key of castle is 12."}, words=400)
QUESTION = "What is the key of harbor?"
GOLD = Gold(("4711",), evidence=(FACT,))


def reply_as_gate(prompt: str) -> str:
    """Reply as a gate that rewrites the memory when there is something new, and reads to the end."""
    memory = read_perfectly(prompt)
    if "<section>" not in prompt:
        return memory
    return "KEEP" if memory in {extract(prompt, "memory"), "nothing yet"} else f"REWRITE\n{memory}"


@pytest.fixture
def read_run(make_reader, log: RunLog) -> Callable[..., TrainingRun]:
    """Read the text with a policy; return the run with its gold answer and evidence."""

    def read_with_policy(
        policy: Any = reply_as_gate, strategy: str = "gated:stop=yes", gold: Gold | None = GOLD, **options: Any
    ) -> TrainingRun:
        make_reader(ScriptedPolicy(policy), strategy=strategy, run_log=log, **options).read(TEXT, QUESTION, run_id="r")
        (run,) = read_runs(log)
        return replace(run.without_discarded(), gold=gold)

    return read_with_policy


def find_gold_chunk(run: TrainingRun) -> int:
    start = TEXT.encode().find(FACT.encode())
    return next(
        row.span.index for row in run.conversations_K if row.span and row.span.start_byte <= start < row.span.end_byte
    )


def test_f2_weighs_recall_above_precision() -> None:
    assert compute_f2({1, 2}, {1, 2}) == 1.0
    assert compute_f2({1}, {1, 2}) == pytest.approx(5 * 1 * 0.5 / (4 * 1 + 0.5))
    assert compute_f2({1, 2}, {1}) == pytest.approx(5 * 0.5 * 1 / (4 * 0.5 + 1))
    assert compute_f2({1}, {1}, unread=1) == compute_f2({1}, {1, 2})
    assert compute_f2(set(), {1}) == compute_f2({3}, {1}) == compute_f2(set(), set()) == 0.0


def test_memory_with_all_evidence_earns_full_reward_at_its_chunk(read_run) -> None:
    run = read_run()
    assert EvidenceF2()(run) == 1.0
    assert LongRLVR()(run) == pytest.approx(1 + 0.1 + 0.9)
    gains = EvidenceF2Gain()(run)
    assert [index for index, gain in enumerate(gains) if gain] == [find_gold_chunk(run)]
    assert sum(gains) == 1.0
    assert RecallGain()(run)[find_gold_chunk(run)] == sum(RecallGain()(run)) == 1.0


def test_recalled_passage_does_not_replace_its_chunk(read_run) -> None:
    run = read_run()
    chunk = find_gold_chunk(run)
    rows = run.conversations_K
    later_index = next(index for index, row in enumerate(rows) if row.reads and row.reads[0].index > chunk)
    gold_span = next(span for row in rows for span in row.reads if span.index == chunk)
    passage = replace(gold_span, start_byte=gold_span.end_byte - 5)
    conversations = list(rows)
    conversations[later_index] = replace(rows[later_index], reads=(*rows[later_index].reads, passage))
    assert EvidenceF2()(replace(run, conversations_K=tuple(conversations))) == 1.0


def test_gate_is_right_if_it_rewrites_at_evidence_and_keeps_elsewhere(read_run) -> None:
    run = read_run()
    values = GateRight()(run)
    assert values == [1.0] * (len(run.conversations_K) - 1) + [0.0]  # the answer has no gate
    assert ExitInTime()(run) == 0.0  # it read to the end


def test_gate_that_always_rewrites_is_right_only_at_the_evidence(read_run) -> None:
    run = read_run(lambda prompt: "REWRITE\n" * ("<section>" in prompt) + read_perfectly(prompt))
    assert [index for index, value in enumerate(GateRight()(run)) if value] == [find_gold_chunk(run)]


@pytest.mark.parametrize(("delay", "min_reward", "max_reward"), [(-1, -1.0, -1.0), (0, 1.0, 1.0), (1, 0.01, 0.99)])
def test_exit_reward_is_highest_at_the_last_evidence(read_run, delay, min_reward: float, max_reward: float) -> None:
    has_fact_by_chunk: list[bool] = []

    def reply_with_stop(prompt: str) -> str:
        if "<section>" not in prompt:
            return read_perfectly(prompt)
        has_fact_by_chunk.append(FACT in prompt)
        chunks_read = len(has_fact_by_chunk)
        is_delay_over = True in has_fact_by_chunk and chunks_read - 1 - has_fact_by_chunk.index(True) == delay
        should_stop = is_delay_over or (delay < 0 and chunks_read == 1)
        return f"STOP\n{read_perfectly(prompt)}" if should_stop else reply_as_gate(prompt)

    run = read_run(reply_with_stop)
    assert min_reward <= ExitInTime()(run) <= max_reward
    assert EvidenceF2()(run) == float(delay >= 0)  # unread evidence counts as missed


@pytest.mark.parametrize("strategy", ["parallel", "reread"])
def test_second_reading_without_new_facts_loses_no_credit(read_run, strategy: str) -> None:
    run = read_run(answer_perfectly, strategy)
    chunk, rows = find_gold_chunk(run), run.conversations_K
    indices = [index for index, row in enumerate(rows) if row.span and row.span.index == chunk]
    assert len(indices) == 2, "each chunk is read twice"
    for gains in (EvidenceF2Gain()(run), RecallGain()(run)):
        assert gains[indices[0]] == 1.0
        assert not any(gain for index, gain in enumerate(gains) if rows[index].reads and index != indices[0])


@pytest.mark.parametrize("strategy", ["map_reduce", "parallel", "segments:count=3", "reread"])
def test_runs_with_branches_have_no_exit_reward(read_run, strategy: str) -> None:
    run = read_run(answer_perfectly, strategy)
    assert ExitInTime()(run) is None
    assert "several branches" in ExitInTime().explain_unknown(run)


def test_run_stopped_by_a_limit_has_no_exit_reward(read_run) -> None:
    run = read_run(limits=Limits(max_chunks=1))
    assert ExitInTime()(run) is None
    assert ExitInTime().explain_unknown(run) == "it has no answer"
    assert LongRLVR()(run) is None
    assert LongRLVR().explain_unknown(run) == "it has no answer"


def test_unknown_rewards_state_their_reason(read_run) -> None:
    run = read_run(gold=None)
    cases = [
        (run, "no gold evidence is known"),
        (replace(run, gold=Gold(("4711",))), "no gold evidence is known"),
        (replace(run, gold=GOLD, store=None), "its document is not kept"),
        (replace(run, gold=Gold(("x",), evidence=(FACT, "not there"))), "'not there' is not in the document"),
    ]
    for incomplete_run, reason in cases:
        for function in (EvidenceF2(), EvidenceF2Gain(), GateRight(), ExitInTime(), LongRLVR()):
            assert function(incomplete_run) is None
            assert reason in function.explain_unknown(incomplete_run)


def test_old_runs_are_scored_from_a_gold_file_with_evidence(read_run, tmp_path: Path) -> None:
    run = read_run(gold=None)
    (tmp_path / "gold.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "4711", "evidence": [FACT]}))
    gold = GoldAnswers.load(tmp_path / "gold.jsonl")
    run_with_gold = replace(run, gold=gold.find(run))
    assert EvidenceF2()(run_with_gold) == 1.0
    assert GateRight()(run_with_gold) is not None
    (tmp_path / "gold.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "4711", "evidence": [""]}))
    with pytest.raises(MemAgentError, match="line 1: evidence without text"):
        GoldAnswers.load(tmp_path / "gold.jsonl")


def test_runs_without_a_terms_reward_are_refused_and_counted(read_run, tmp_path: Path) -> None:
    read_run(lambda prompt: make_completion(prompt, reply_as_gate(prompt)))
    terms = parse_credit_terms([{"reward": "kindness"}, {"reward": "evidence_f2"}])
    replay = load_groups(
        tmp_path / "runs.sqlite", reward=lambda _: 1.0, term_rewards=choose_term_rewards(terms, has_gold=False)
    )
    assert replay.report.details == {"kindness: the log holds no such reward": 1}
    with pytest.raises(MemAgentError, match="kindness: the log holds no such reward in 1"):
        replay.require_groups()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("outcome", "not a credit term"),
        ({"weight": 1}, "not a credit term"),
        ({"reward": "outcome", "wieght": 1}, "Did you mean weight"),
        ({"reward": "outcome", "weight": math.nan}, "weight of nan"),
        ({"reward": "outcome", "weight": math.inf}, "weight of inf"),
        ({"reward": "outcome", "weight": 0}, "other than 0"),
        ({"reward": "outcome", "weight": "much"}, "Expected `float`, got `str`.*weight"),
        ({"reward": "outcome", "scope": "turn"}, "Scopes: run, role, conversation"),
        ({"reward": "format", "scope": "role"}, "Give a role"),
        ({"reward": "format", "of": "answer"}, "Give a role"),
        ({"reward": "outcome", "scope": "conversation"}, "is a reward of whole runs"),
        ({"reward": "outcome", "scope": "role", "of": "answer"}, "is a reward of whole runs"),
        ({"reward": "outcome", "roles": []}, r"has roles: \[\]"),
        ({"reward": "outcome", "roles": [1]}, r"Expected `str`, got `int`.*roles"),
    ],
    ids=str,
)
def test_invalid_credit_terms_are_refused(entry: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=message):
        load_preset("dapo", output_dir=str(tmp_path), credit=[entry], use_cpu=True, bf16=False)


def test_an_overlong_penalty_without_an_outcome_term_is_refused(tmp_path: Path) -> None:
    penalty = {"overlong_max_length": 8, "overlong_cache_length": 4, "use_cpu": True, "bf16": False}
    with pytest.raises(TrainingError, match="no credit term is about the outcome"):
        load_preset("longrlvr", output_dir=str(tmp_path), **penalty)
    assert load_preset("gru-mem", output_dir=str(tmp_path), **penalty).advantage_settings.overlong_penalty


def test_run_reward_in_a_conversation_term_is_refused() -> None:
    conversation = make_conversation([1], [2], ("answer", "", 0))
    rollouts = tuple(Rollout(name, (conversation,), 0.0, term_rewards={"own.py:kind": 1.0}) for name in ("a", "b"))
    term = CreditTerm("own.py:kind", scope=Scope.CONVERSATION)
    settings = AdvantageSettings(credit=(term,), drop_zero_variance=True)
    for check in (find_drop_reason, lambda group, settings: prepare_batch([group], settings)):
        with pytest.raises(TrainingError, match=r"own\.py:kind.* reward of whole runs .*run a"):
            check(RolloutGroup("g", rollouts), settings)


def test_term_for_a_missing_role_names_the_roles_of_the_runs() -> None:
    require_roles([CreditTerm("outcome", roles=("gated_*", "answer"))], {"gated_update", "answer"})
    with pytest.raises(TrainingError, match=r"role 'gated_\*', and the runs have answer, update.*strategy"):
        require_roles([CreditTerm("outcome", roles=("gated_*",))], {"update", "answer"})


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        ([{"reward": "evidence_f3"}], "no reward 'evidence_f3'.*evidence_f2"),
        ([{"reward": "step", "scope": "conversation"}], "there is no reward 'step'"),
        ([{"reward": "outcome", "roles": "gated_*"}], r"role 'gated_\*'"),
        ([{"reward": "evidence_f2", "scope": "conversation"}], "is a reward of whole runs"),
    ],
    ids=str,
)
def test_a_loop_refuses_invalid_credit_terms(credit: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(MemAgentError, match=message):
        prepare(make_job(tmp_path / "rl", settings={**SETTINGS, "credit": credit}))


def test_loop_accepts_an_unhashable_reward(tmp_path: Path) -> None:
    @dataclass
    class UnhashableReward:
        weight: float = 1.0

        def __call__(self, run: TrainingRun, /) -> float:
            return self.weight

    assert prepare(make_job(tmp_path / "rl", reward=UnhashableReward())).job.reward == UnhashableReward()

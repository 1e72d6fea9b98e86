"""Terms of an advantage, and the rewards that presets name: evidence, gate, exit and word recall."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from support.rl_loops import SETTINGS, make_job
from support.scripts import extract, make_completion, make_document, read_perfectly
from support.strategies import answer_perfectly

from memagent_graph import MemAgentError, RunLog, ScriptedPolicy
from memagent_graph.reading.state import Limits
from memagent_training.algorithm.advantages import AdvantageSettings, find_drop_reason, prepare_batch
from memagent_training.algorithm.credit import CreditTerm, Scope, parse_credit_terms, require_roles
from memagent_training.data.replay import load_groups
from memagent_training.data.rollouts import Rollout, RolloutGroup, TrainingConversation
from memagent_training.data.training_runs import Gold, TrainingRun, read_runs
from memagent_training.job.job_settings import load_preset
from memagent_training.rewards.evidence_rewards import (
    EvidenceF2,
    EvidenceF2Gain,
    ExitInTime,
    GateRight,
    LongRLVR,
    compute_f2,
)
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.reward_names import RecallGain, choose_term_rewards
from memagent_training.rl.rl_job import prepare
from memagent_training.training_errors import TrainingError

FACT = "The key of harbor is 4711."
TEXT = make_document({0.4: FACT, 0.8: "The key of castle is 12."}, words=400)
QUESTION = "What is the key of harbor?"
GOLD = Gold(("4711",), evidence=(FACT,))


def reads(prompt: str) -> str:
    """A gate that rewrites where something is new, and goes on to the end."""
    memory = read_perfectly(prompt)
    if "<section>" not in prompt:
        return memory
    return "KEEP" if memory in {extract(prompt, "memory"), "nothing yet"} else f"REWRITE\n{memory}"


@pytest.fixture
def read(make_reader, log: RunLog) -> Callable[..., TrainingRun]:
    """Read the text with a policy: the run, with its gold answer and evidence."""

    def read(
        policy: Any = reads, strategy: str = "gated:stop=yes", gold: Gold | None = GOLD, **options: Any
    ) -> TrainingRun:
        make_reader(ScriptedPolicy(policy), strategy=strategy, run_log=log, **options).read(TEXT, QUESTION, run_id="r")
        (run,) = read_runs(log)
        return replace(run.without_discarded(), gold=gold)

    return read


def gold_chunk(run: TrainingRun) -> int:
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


def test_a_memory_that_rests_on_the_evidence_earns_all_of_it_where_it_was_written(read) -> None:
    run = read()
    assert EvidenceF2()(run) == 1.0
    assert LongRLVR()(run) == pytest.approx(1 + 0.1 + 0.9)
    gains = EvidenceF2Gain()(run)
    assert [at for at, gain in enumerate(gains) if gain] == [gold_chunk(run)]
    assert sum(gains) == 1.0
    assert RecallGain()(run)[gold_chunk(run)] == sum(RecallGain()(run)) == 1.0


def test_a_passage_that_was_looked_up_does_not_replace_its_chunk(read) -> None:
    run = read()
    chunk = gold_chunk(run)
    place = next(at for at, row in enumerate(run.conversations_K) if row.reads and row.reads[0].index > chunk)
    later, whole = run.conversations_K[place], next(
        span for row in run.conversations_K for span in row.reads if span.index == chunk
    )  # fmt: skip
    passage = replace(whole, start_byte=whole.end_byte - 5)
    conversations = list(run.conversations_K)
    conversations[place] = replace(later, reads=(*later.reads, passage))
    assert EvidenceF2()(replace(run, conversations_K=tuple(conversations))) == 1.0


def test_a_gate_is_right_where_it_rewrites_at_evidence_and_keeps_elsewhere(read) -> None:
    run = read()
    right = GateRight()(run)
    assert right == [1.0] * (len(run.conversations_K) - 1) + [0.0]  # the answer is no gate
    assert ExitInTime()(run) == 0.0  # it read to the end


def test_a_gate_that_always_rewrites_is_right_at_the_evidence_alone(read) -> None:
    run = read(lambda prompt: f"REWRITE\n{read_perfectly(prompt)}" if "<section>" in prompt else read_perfectly(prompt))
    assert [at for at, value in enumerate(GateRight()(run)) if value] == [gold_chunk(run)]


@pytest.mark.parametrize(("late", "least", "most"), [(-1, -1.0, -1.0), (0, 1.0, 1.0), (1, 0.01, 0.99)])
def test_a_read_ends_best_with_the_chunk_of_the_last_evidence(read, late: int, least: float, most: float) -> None:
    sightings: list[bool] = []

    def stops(prompt: str) -> str:
        if "<section>" not in prompt:
            return read_perfectly(prompt)
        sightings.append(FACT in prompt)
        is_late = True in sightings and len(sightings) - 1 - sightings.index(True) == late
        is_end = is_late or (late < 0 and len(sightings) == 1)
        return f"STOP\n{read_perfectly(prompt)}" if is_end else reads(prompt)

    run = read(stops)
    assert least <= ExitInTime()(run) <= most
    assert EvidenceF2()(run) == float(late >= 0)  # evidence that was not read counts as missed


@pytest.mark.parametrize("strategy", ["parallel", "reread"])
def test_a_second_reading_without_new_facts_loses_no_credit(read, strategy: str) -> None:
    run = read(answer_perfectly, strategy)
    places = [at for at, row in enumerate(run.conversations_K) if row.span and row.span.index == gold_chunk(run)]
    assert len(places) == 2, "each chunk is read twice"
    for gains in (EvidenceF2Gain()(run), RecallGain()(run)):
        assert gains[places[0]] == 1.0
        read_for_nothing = [gain for at, gain in enumerate(gains) if run.conversations_K[at].reads and at != places[0]]
        assert read_for_nothing == [0.0] * len(read_for_nothing)


@pytest.mark.parametrize("strategy", ["map_reduce", "parallel", "segments:count=3", "reread"])
def test_runs_with_branches_have_no_exit_reward(read, strategy: str) -> None:
    run = read(answer_perfectly, strategy)
    assert ExitInTime()(run) is None
    assert "several branches" in ExitInTime().why_unknown(run)


def test_a_run_that_a_limit_ended_has_no_exit_reward(read) -> None:
    run = read(limits=Limits(max_chunks=1))
    assert ExitInTime()(run) is None
    assert ExitInTime().why_unknown(run) == "it has no answer"
    assert LongRLVR()(run) is None
    assert LongRLVR().why_unknown(run) == "it has no answer"


def test_unknown_rewards_state_their_reason(read) -> None:
    run = read(gold=None)
    cases = [
        (run, "no gold evidence is known"),
        (replace(run, gold=Gold(("4711",))), "no gold evidence is known"),
        (replace(run, gold=GOLD, store=None), "its document is not kept"),
        (replace(run, gold=Gold(("x",), evidence=(FACT, "not there"))), "'not there' is not in the document"),
    ]
    for case, why in cases:
        for function in (EvidenceF2(), EvidenceF2Gain(), GateRight(), ExitInTime(), LongRLVR()):
            assert function(case) is None
            assert why in function.why_unknown(case)


def test_old_runs_are_scored_from_a_file_that_knows_their_evidence(read, tmp_path: Path) -> None:
    run = read(gold=None)
    (tmp_path / "gold.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "4711", "evidence": [FACT]}))
    gold = GoldAnswers.load(tmp_path / "gold.jsonl")
    rescored = replace(run, gold=gold.find(run))
    assert EvidenceF2()(rescored) == 1.0
    assert GateRight()(rescored) is not None
    (tmp_path / "gold.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "4711", "evidence": [""]}))
    with pytest.raises(MemAgentError, match="line 1: evidence without text"):
        GoldAnswers.load(tmp_path / "gold.jsonl")


def test_runs_without_a_terms_reward_are_refused_and_counted(read, tmp_path: Path) -> None:
    read(lambda prompt: make_completion(prompt, reads(prompt)))
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
        ({"reward": "format", "scope": "role"}, "Name a role"),
        ({"reward": "format", "of": "answer"}, "Name a role"),
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


def test_a_reward_of_whole_runs_for_single_conversations_is_refused_wherever_groups_are_looked_at() -> None:
    turn = TrainingConversation(array("I", [1]), array("I", [2]), array("f", [-0.5]), "answer", "", 0, False, "v1")
    rollouts = tuple(Rollout(name, (turn,), 0.0, term_rewards={"own.py:kind": 1.0}) for name in ("a", "b"))
    term = CreditTerm("own.py:kind", scope=Scope.CONVERSATION)
    settings = AdvantageSettings(credit=(term,), drop_zero_variance=True)
    for look in (find_drop_reason, lambda group, settings: prepare_batch([group], settings)):
        with pytest.raises(TrainingError, match=r"own\.py:kind.* reward of whole runs .*run a"):
            look(RolloutGroup("g", rollouts), settings)


def test_a_term_for_no_role_of_the_runs_names_their_roles() -> None:
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


def test_a_loop_takes_a_reward_that_has_no_hash(tmp_path: Path) -> None:
    @dataclass
    class Mine:
        weight: float = 1.0

        def __call__(self, run: TrainingRun, /) -> float:
            return self.weight

    assert prepare(make_job(tmp_path / "rl", reward=Mine())).job.reward == Mine()

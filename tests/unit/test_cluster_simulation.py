"""The simulation for the cost page serves every request once and agrees with simple cases calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cluster_simulation import (
    PREFILL_STEP,
    Operation,
    Replica,
    Workload,
    make_document_rng,
    plan_stages,
    simulate,
)
from benchmarks.corpus_cost import Hardware, estimate_longest_document_hours, main

REPLICA = Replica(tokens_per_second=30_000, weights_seconds=0.005, sequence_seconds=0.0001, batch=16)
FAULTY = Operation(
    4, 64, slow_share=0.25, hours_between_failures=0.02, repair_seconds=20, hours_between_kills=0.02, restart_seconds=5
)
STRATEGIES = ("overwrite", "gated", "segments", "parallel")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("operation", [Operation(4, 64), FAULTY], ids=["calm", "faulty"])
def test_every_request_is_served_once_and_no_replica_is_busy_beyond_the_elapsed_time(strategy, operation) -> None:
    workload = Workload(60, mean_tokens=40_000, questions=2, strategy=strategy)
    outcome = simulate(REPLICA, workload, operation)
    requests = [
        request
        for document_index in range(workload.documents)
        for stage in plan_stages(workload, make_document_rng(operation.seed, document_index))
        for request in stage
    ]
    assert outcome.requests == len(requests) == len(outcome.latencies)
    assert outcome.prompt_tokens == sum(prompt for prompt, _, _ in requests)
    assert outcome.computed_tokens == sum(prompt - cached for prompt, cached, _ in requests)
    assert outcome.reply_tokens == sum(reply for _, _, reply in requests)
    assert 0 < outcome.busy_share <= 1 and min(outcome.latencies) > 0
    assert (outcome.repeats > 0) == (operation is FAULTY)
    min_seconds = outcome.computed_tokens / REPLICA.tokens_per_second / operation.replicas
    assert outcome.seconds >= min_seconds


def test_the_time_of_one_document_equals_the_calculated_time() -> None:
    workload = Workload(1, mean_tokens=50_000, spread=0.0)
    outcome = simulate(REPLICA, workload, Operation(1, 1))
    prefill_token_s = PREFILL_STEP / REPLICA.tokens_per_second / PREFILL_STEP
    reply_token_s = REPLICA.weights_seconds + REPLICA.sequence_seconds
    chunk_s = (5000 + 600 + 300) * prefill_token_s + 600 * reply_token_s
    assert outcome.seconds == pytest.approx(10 * chunk_s + 900 * prefill_token_s + 100 * reply_token_s, rel=1e-4)
    assert outcome.busy_share == pytest.approx(1.0)
    hardware = Hardware()
    long_document = replace(workload, mean_tokens=5_000_000)
    assert estimate_longest_document_hours(workload, hardware) == pytest.approx(
        simulate(hardware.make_replica(long_document), long_document, Operation(1, 1)).seconds / 3600
    )


def test_questions_share_a_section_only_with_a_prefix_cache() -> None:
    workload = Workload(4, mean_tokens=20_000, spread=0.0, questions=8)
    cached = simulate(REPLICA, workload, Operation(1, 32))
    uncached = simulate(REPLICA, replace(workload, shares_sections=False), Operation(1, 32))
    assert uncached.computed_tokens == uncached.prompt_tokens == cached.prompt_tokens
    assert cached.prompt_tokens - cached.computed_tokens == 4 * 4 * 7 * 5000
    assert cached.seconds < uncached.seconds


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--simulated", "1", "--in-flight", "16", "--price", "2", "--longest", "200000"])
    output = capsys.readouterr().out
    assert output.count("\n| overwrite") == 5 and "GPU hours" in output and "price" in output
    assert "The longest document (200,000 tokens) alone" in output

"""The benchmark of an optimizer step: rows, counted tokens, equal work of contenders, and the results page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import training_contenders, training_step
from benchmarks.training_contenders import Contender, Lengths, PromptOrder, Step, Workload, compare, make_group
from benchmarks.training_step import PADDED, PREFIX_TREE, main, write_section
from memagent_training.data.rollouts import RolloutGroup, TrainingConversation
from memagent_training.forward.layouts import lay_out_as_tree

WORKLOAD = Workload(model_size="tiny", lengths=Lengths(3, 12, 4), rollouts=4, conversations=3)
ONE_BATCH = Contender(PromptOrder.SECTION_FIRST, None, batch_size=WORKLOAD.rollouts)


def list_rows(group: RolloutGroup) -> list[TrainingConversation]:
    return [row for rollout in group.rollouts_G for row in rollout.conversations_K]


def count_tree_tokens(group: RolloutGroup) -> int:
    return len(lay_out_as_tree([row.prompt_ids_P + row.completion_ids_T for row in list_rows(group)]).ids)


@pytest.fixture(scope="module")
def steps_by_contender() -> dict[Contender, list[Step]]:
    """The steps of the most different contenders at a tiny size; `compare` refuses them unless losses are equal."""
    return compare((PADDED, PREFIX_TREE, ONE_BATCH, replace(PREFIX_TREE, checkpointing=True)), WORKLOAD)


def test_prompt_orders_have_equal_tokens_and_different_prefixes() -> None:
    workload = replace(Workload(), lengths=WORKLOAD.lengths)
    section_first, paper_order = (make_group("g", order, workload, 250) for order in PromptOrder)
    for row, paper_row in zip(list_rows(section_first), list_rows(paper_order), strict=True):
        assert sorted(row.prompt_ids_P) == sorted(paper_row.prompt_ids_P)
        assert row.completion_ids_T == paper_row.completion_ids_T
    assert count_tree_tokens(section_first) < count_tree_tokens(paper_order) / 2


def test_forwarded_tokens_are_counted_in_the_model(steps_by_contender: dict[Contender, list[Step]]) -> None:
    tokens_by_contender = {contender: step.cost.forwarded_tokens for contender, (step,) in steps_by_contender.items()}
    row_tokens = WORKLOAD.rollouts * (WORKLOAD.conversations * (3 + 12 + 4) + (WORKLOAD.conversations - 1) * 4)
    assert tokens_by_contender[ONE_BATCH] == row_tokens
    assert tokens_by_contender[PADDED] >= row_tokens
    assert abs(steps_by_contender[PADDED][0].loss) > 1e-4, "losses of 0 would always be equal"
    assert tokens_by_contender[PREFIX_TREE] < row_tokens
    assert tokens_by_contender[replace(PREFIX_TREE, checkpointing=True)] == tokens_by_contender[PREFIX_TREE]


def test_contender_that_does_other_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_options = {**training_contenders._TRAINER_OPTIONS, "epsilon": 0.1}
    original = training_contenders.run_contender

    def run_with_other_options(contender: Contender, workload: Workload) -> list[Step]:
        if contender == PREFIX_TREE:
            monkeypatch.setattr(training_contenders, "_TRAINER_OPTIONS", trainer_options)
        return original(contender, workload)

    monkeypatch.setattr(training_contenders, "run_contender", run_with_other_options)
    with pytest.raises(ValueError, match="do different work"):
        compare((PADDED, PREFIX_TREE), WORKLOAD)


def test_results_name_device_and_command_and_keep_other_sections(
    steps_by_contender: dict[Contender, list[Step]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training_step, "compare", lambda contenders, workload: steps_by_contender)
    path = tmp_path / "RESULTS.md"
    arguments = ["--model-size", "tiny", "--lengths", "3", "12", "4", "--results", str(path)]
    with pytest.raises(SystemExit):
        main(arguments)
    text = path.read_text()
    assert "not measured: no gpu was available" in text.lower()
    assert "python -m benchmarks.training_step --model-size tiny --lengths 3 12 4" in text
    assert training_step.read_device_name("cpu") in text
    lines = [line for line in text.splitlines() if line.startswith(("| section first", "| paper's order"))]
    assert len(lines) == len(steps_by_contender)
    write_section(path, "cuda", "measured on a GPU")
    write_section(path, "cpu", "measured again")
    assert path.read_text().endswith("## CPU\n\nmeasured again\n\n## GPU\n\nmeasured on a GPU\n")

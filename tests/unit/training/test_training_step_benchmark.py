"""The benchmark of an optimizer step: its rows are what it says, its contenders do the same work, and it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import training_contenders, training_step
from benchmarks.training_contenders import Contender, Lengths, PromptOrder, Step, Workload, compare, make_group
from benchmarks.training_step import PADDED, PREFIX_TREE, main, write_section
from memagent_training.data.rollouts import RolloutGroup, TrainingConversation
from memagent_training.forward.layouts import lay_out_as_tree

TINY = Workload(model_size="tiny", lengths=Lengths(3, 12, 4), rollouts=4, conversations=3)
AT_ONCE = Contender(PromptOrder.SECTION_FIRST, None, batch_size=TINY.rollouts)


def _rows(group: RolloutGroup) -> list[TrainingConversation]:
    return [row for rollout in group.rollouts_G for row in rollout.conversations_K]


def _tree(group: RolloutGroup) -> int:
    return len(lay_out_as_tree([row.prompt_ids_P + row.completion_ids_T for row in _rows(group)]).ids)


@pytest.fixture(scope="module")
def measured() -> dict[Contender, list[Step]]:
    """The steps of those that differ most, at a tiny size; they have the same loss, or `compare` refuses them."""
    return compare((PADDED, PREFIX_TREE, AT_ONCE, replace(PREFIX_TREE, checkpointing=True)), TINY)


def test_both_orders_hold_the_same_tokens_and_only_one_shares_sections() -> None:
    whole = replace(Workload(), lengths=TINY.lengths)
    first, paper = (make_group("g", order, whole, 250) for order in PromptOrder)
    for a, b in zip(_rows(first), _rows(paper), strict=True):
        assert sorted(a.prompt_ids_P) == sorted(b.prompt_ids_P)
        assert a.completion_ids_T == b.completion_ids_T
    assert _tree(first) < _tree(paper) / 2


def test_forwarded_tokens_are_counted_at_the_model(measured: dict[Contender, list[Step]]) -> None:
    tokens = {contender: step.cost.forwarded_tokens for contender, (step,) in measured.items()}
    rows = TINY.rollouts * (TINY.conversations * (3 + 12 + 4) + (TINY.conversations - 1) * 4)
    assert tokens[AT_ONCE] == rows
    assert tokens[PADDED] >= rows
    assert abs(measured[PADDED][0].loss) > 1e-4, "a loss of nothing agrees with everything"
    assert tokens[PREFIX_TREE] < rows
    assert tokens[replace(PREFIX_TREE, checkpointing=True)] == tokens[PREFIX_TREE]


def test_a_contender_that_does_other_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_options = {**training_contenders._TRAINER_OPTIONS, "epsilon": 0.1}
    real = training_contenders.run_contender

    def run(contender: Contender, workload: Workload) -> list[Step]:
        if contender == PREFIX_TREE:
            monkeypatch.setattr(training_contenders, "_TRAINER_OPTIONS", trainer_options)
        return real(contender, workload)

    monkeypatch.setattr(training_contenders, "run_contender", run)
    with pytest.raises(ValueError, match="do different work"):
        compare((PADDED, PREFIX_TREE), TINY)


def test_the_results_name_device_and_command_and_keep_the_other_kind(
    measured: dict[Contender, list[Step]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training_step, "compare", lambda contenders, workload: measured)
    path = tmp_path / "RESULTS.md"
    arguments = ["--model-size", "tiny", "--lengths", "3", "12", "4", "--results", str(path)]
    with pytest.raises(SystemExit):
        main(arguments)
    text = path.read_text()
    assert "not measured: no gpu was available" in text.lower()
    assert "python -m benchmarks.training_step --model-size tiny --lengths 3 12 4" in text
    assert training_step.read_device_name("cpu") in text
    assert sum(line.startswith(("| section first", "| paper's order")) for line in text.splitlines()) == len(measured)
    write_section(path, "cuda", "measured on a GPU")
    write_section(path, "cpu", "measured again")
    assert path.read_text().endswith("## CPU\n\nmeasured again\n\n## GPU\n\nmeasured on a GPU\n")

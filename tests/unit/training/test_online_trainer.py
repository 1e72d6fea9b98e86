"""Training over several iterations equals a loop written by hand, also when it is resumed."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.programs import run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

import multi_conv_dapo as dapo  # noqa: E402
from made_rollouts import MACHINE_METRICS, copy_weights, edit_rollout, find_changes, read_logs  # noqa: E402
from support import online_world  # noqa: E402
from support.online_world import FAILURES, GROUPS, ITERATIONS, Training  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from memagent_graph.errors import MemAgentError  # noqa: E402
from memagent_training.data.rollouts import RolloutGroup  # noqa: E402
from memagent_training.forward.layouts import IdRow  # noqa: E402
from memagent_training.rl.online_trainer import EndOfLoop  # noqa: E402
from memagent_training.serving.policy_sync.probe import score_with_folder  # noqa: E402
from memagent_training.training_errors import TrainingError  # noqa: E402

ROOT = Path(__file__).parents[3]
STEPS_PER_ITERATION = [1, 3]
World = tuple[Path, list[list[RolloutGroup]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    return folder, online_world.make_world(folder)


@pytest.fixture(scope="module")
def trainings(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Training, Path]]:
    """Trainings from the first iteration to the last, by optimizer steps per iteration."""
    torch.set_num_threads(1)
    by_steps = {}
    for steps in STEPS_PER_ITERATION:
        output = tmp_path_factory.mktemp("trained")
        training = online_world.make_training(world[0], output, steps)
        training.trainer.train()
        by_steps[steps] = (training, output)
    return by_steps


# Equality


def train_by_hand(world: World, order: list[list[str]], steps: int) -> list[dict[str, Any]]:
    """Return the weights before each iteration and after the last, with the example's loss and torch's AdamW."""
    folder, iterations = world
    settings = replace(dapo.DAPO, importance_cap=2.0)
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    learning_rate = online_world.SMALL_SETTINGS["learning_rate"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    weights = []
    for iteration, groups in enumerate(iterations):
        weights.append(copy_weights(model))
        with torch.no_grad():
            old_logprobs = {
                (rollout.run_id, k): dapo.forward(model, row, 1.0)[0]
                for group in groups
                for rollout in group.rollouts_G
                for k, row in enumerate(rollout.conversations_K)
            }
        for names in order[iteration * steps : (iteration + 1) * steps]:
            optimizer.zero_grad()
            dapo.compute_step_loss(
                model, [group for group in groups if group.group_id in names], settings, old=old_logprobs
            ).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return [*weights, copy_weights(model)]


def find_max_difference(weights: dict[str, Any], other_weights: dict[str, Any]) -> float:
    assert weights.keys() == other_weights.keys()
    return float(max((tensor - other_weights[name]).abs().max().item() for name, tensor in weights.items()))


@pytest.mark.parametrize("steps", STEPS_PER_ITERATION)
def test_training_equals_a_loop_by_hand_with_one_optimizer(steps: int, world, trainings) -> None:
    """AdamW divides by the root of past gradients, so small differences of gradients may be large in steps."""
    training, _ = trainings[steps]
    expected = train_by_hand(world, training.steps.groups, steps)
    weights = [training.policies[number] for number in range(ITERATIONS)] + [training.weights()]
    total_difference = find_max_difference(expected[0], expected[-1])
    assert total_difference > 0.005
    for iteration_weights, expected_weights in zip(weights, expected, strict=True):
        assert find_max_difference(iteration_weights, expected_weights) < 0.01 * total_difference


@pytest.mark.parametrize("steps", STEPS_PER_ITERATION)
def test_each_group_is_in_exactly_one_step_of_its_iteration(steps: int, world, trainings) -> None:
    training, _ = trainings[steps]
    names_of_steps = training.steps.groups
    assert [len(names) for names in names_of_steps] == [GROUPS // steps] * (ITERATIONS * steps)
    for number, groups in enumerate(world[1]):
        names = [name for step in names_of_steps[number * steps : (number + 1) * steps] for name in step]
        assert Counter(names) == Counter(group.group_id for group in groups)


@pytest.mark.parametrize("steps", STEPS_PER_ITERATION)
def test_source_is_called_once_per_iteration_after_the_policy_is_saved(steps: int, trainings) -> None:
    training, _ = trainings[steps]
    assert training.source.iterations == list(range(ITERATIONS))
    assert training.source.saved_before == [list(range(number + 1)) for number in range(ITERATIONS)]
    initial_weights = training.policies[0]
    assert all(find_max_difference(initial_weights, training.policies[number]) > 0 for number in range(1, ITERATIONS))


def test_ratios_compare_with_the_initial_weights_of_the_iteration(world, trainings) -> None:
    training, _ = trainings[3]
    for step, old_logprobs in enumerate(training.steps.old_logprobs):
        groups = world[1][step // 3]
        rollouts = {rollout.run_id: rollout for group in groups for rollout in group.rollouts_G}
        assert {run_id for run_id, _ in old_logprobs} == set(rollouts)  # none of the previous iteration
        model = LlamaForCausalLM.from_pretrained(world[0] / "model", dtype=torch.float32).eval()
        model.load_state_dict(training.policies[step // 3], strict=True)
        for (run_id, index), logprobs in list(old_logprobs.items())[:4]:
            with torch.no_grad():
                conversation = rollouts[run_id].conversations_K[index]
                expected = dapo.forward(model, conversation, 1.0)[0]
            assert torch.allclose(logprobs, expected, atol=1e-5)
    ratios = [entry["ratio/mean"] for entry in read_logs(training.trainer)]
    assert ratios[::3] == pytest.approx([1.0] * ITERATIONS, abs=1e-5)
    assert all(abs(ratio - 1) > 1e-5 for ratio in ratios[1::3])


def test_collection_metrics_are_logged_at_the_first_step_of_an_iteration(trainings) -> None:
    for steps, (training, _) in trainings.items():
        logs = read_logs(training.trainer)
        assert [entry.get("collect/reward") for entry in logs[::steps]] == [0.0, 1.0, 2.0]
        assert sum("collect/reward" in entry for entry in logs) == ITERATIONS
        staleness = [entry.get("staleness/mean") for entry in logs[::steps]]
        assert staleness == [None, 0.0, 1.0]  # the version v1 of the runs is unknown, then newest, then one behind


# Resuming


@pytest.mark.parametrize(("iteration", "steps"), [(1, 3), (2, 1), (3, 1)])
def test_resuming_from_any_checkpoint_gives_the_same_bits(
    iteration: int, steps: int, world, trainings, tmp_path
) -> None:
    full_training, output = trainings[steps]
    resumed_training = online_world.make_training(world[0], tmp_path, steps)
    resumed_training.trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{iteration * steps}"))
    assert resumed_training.source.iterations == list(range(iteration, ITERATIONS))
    for number, policy in resumed_training.policies.items():
        assert not find_changes(full_training.policies[number], policy)
    assert not find_changes(full_training.weights(), resumed_training.weights())
    assert resumed_training.steps.groups == full_training.steps.groups[iteration * steps :]
    histories = [read_logs(run.trainer, without=MACHINE_METRICS) for run in (full_training, resumed_training)]
    assert histories[0] == histories[1]


def test_row_log_probs_equal_those_of_the_saved_folder(trainings) -> None:
    (training, output), *_ = trainings.values()
    rows = [IdRow((5,), (7, 9, 11)), IdRow((5,), (3, 4))]
    training.trainer.save_model(str(output / "saved"))
    assert training.trainer.row_scorer is not None
    logprobs, expected = training.trainer.row_scorer(rows), score_with_folder(output / "saved", rows)
    assert [len(row) for row in logprobs] == [3, 2]
    assert logprobs == [pytest.approx(row, abs=1e-5) for row in expected]


def test_iterations_can_be_added_on_resume(world, trainings, tmp_path) -> None:
    """A loop of two iterations that continues for a third equals a loop of three."""
    first_training = online_world.make_training(world[0], tmp_path, 1, iterations=2)
    first_training.trainer.train()
    continued_training = online_world.make_training(world[0], tmp_path, 1)
    continued_training.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert continued_training.source.iterations == [2]
    assert not find_changes(trainings[1][0].weights(), continued_training.weights())


# Errors and several processes


def test_too_few_groups_and_groups_of_another_model_are_refused(world: World, tmp_path: Path) -> None:
    training = online_world.make_training(world[0], tmp_path, 3)
    training.source.groups[0] = training.source.groups[0][:2]
    with pytest.raises(TrainingError, match=r"2 groups for 3 optimizer steps"):
        training.trainer.train()
    training = online_world.make_training(world[0], tmp_path, 3)
    training.source.groups[0] = edit_rollout(training.source.groups[0], prompt_ids_P=array("I", [999]))
    with pytest.raises(MemAgentError, match="token id 999"):
        training.trainer.train()


def test_two_ranks_equal_one_and_end_together(world, trainings, tmp_path) -> None:
    """Only the main process calls the source; the other process receives its groups, end and errors."""
    script = ROOT / "tests" / "support" / "online_world.py"
    for rank in run_ranks([sys.executable, script, world[0], tmp_path, *FAILURES], 2):
        assert rank.returncode == 0, rank.stderr[-4000:]
    main, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))

    single_process = trainings[1][0]
    assert find_max_difference(main["whole"]["weights"], single_process.weights()) < 1e-4
    for case in FAILURES:
        assert find_max_difference(main[case]["weights"], other[case]["weights"]) == 0
        assert main[case]["steps"] == other[case]["steps"] == (ITERATIONS if case == "whole" else 1)
        assert main[case]["saved"] == other[case]["saved"]  # on every process, as sharded weights need
        assert (main[case]["iterations"], other[case]["iterations"]) == (main[case]["saved"], [])
    for rank in (main, other):
        assert rank["whole"]["error"] is None
        assert isinstance(rank["end"]["error"], EndOfLoop)
        assert str(rank["end"]["error"]) == "all is learnt"
        error = rank["error"]["error"]
        assert (error.message, error.hint, error.run_id) == ("the server is gone", "Start it.", "run-7")
    assert isinstance(main["defect"]["error"], KeyError)
    assert 'the main process failed with KeyError("of the source\'s own")' in other["defect"]["error"].message

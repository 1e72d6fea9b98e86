"""What once went wrong without a word: each of these was a fault that a review found."""

from __future__ import annotations

import importlib
import itertools
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from support import training_world  # noqa: E402
from support.training_log import comparable, write_log  # noqa: E402

from memagent_graph import Completion, FinishReason, PolicyError  # noqa: E402
from memagent_training.algorithm.advantages import AdvantageSettings, OverlongPenalty, prepare_batch  # noqa: E402
from memagent_training.algorithm.step_metrics import compute_row_metrics  # noqa: E402
from memagent_training.data.rollouts import RolloutGroup  # noqa: E402
from memagent_training.job.config import MultiConvDAPOConfig  # noqa: E402
from memagent_training.job.job_settings import load_preset  # noqa: E402
from memagent_training.job.trainer import MultiConvDAPOTrainer  # noqa: E402
from memagent_training.training_errors import TrainingError  # noqa: E402

QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
STRANGE = {"max_logprob_gap": 9}
"""The runs of the world have made-up log-probs, .23 nats off."""
SMALL = {"groups_per_step": 2, "token_budget": 200, "learning_rate": 0.005, "warmup_steps": 0, "save_strategy": "no"}

World = tuple[Path, list[RolloutGroup]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    return folder, training_world.make_world(folder)


def settings(output: Path, preset: str = "memagent-paper", **changes: Any) -> MultiConvDAPOConfig:
    return load_preset(preset, output_dir=str(output), **(QUIET | STRANGE | SMALL | changes))


def trained(
    world: World, output: Path, preset: str = "memagent-paper", *, resume: str | None = None, **changes: Any
) -> Any:
    trainer = MultiConvDAPOTrainer(str(world[0] / "model"), world[1], settings(output, preset, **changes))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


# Was so: TRL divides its denominator by steps_per_generation.
@pytest.mark.parametrize(
    "changes", [{"steps_per_generation": 4}, {"generation_batch_size": 16}, {"scale_rewards": "none"}], ids=str
)
def test_an_option_of_trl_s_own_loop_is_refused(changes: dict[str, Any], world: World, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=rf"{next(iter(changes))}=.* is not supported"):
        trained(world, tmp_path / "scaled", max_steps=1, **changes)


# Was so: a training of one step kept no log-probs of the first weights: what went on from it had a ratio of 1.
def test_a_training_of_one_step_goes_on_as_a_longer_one_would_have(world: World, tmp_path: Path) -> None:
    whole = trained(world, tmp_path / "whole", max_steps=3)
    trained(world, tmp_path / "parts", max_steps=1, save_strategy="steps", save_steps=1)
    longer = trained(world, tmp_path / "parts", max_steps=3, resume=str(tmp_path / "parts" / "checkpoint-1"))
    expected = dict(whole.model.named_parameters())
    assert all(torch.equal(each, expected[name]) for name, each in longer.model.named_parameters())


# Was so: without an optimizer in it, a checkpoint counts as whole; warm-up and Adam's moments begin anew, silently.
def test_a_checkpoint_without_the_optimizer_is_not_gone_on_from(world: World, tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        trained(world, tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_only_model=True)
        trained(world, tmp_path, max_steps=3, resume=str(tmp_path / "checkpoint-2"))


# Was so: _log_step clears what TRL's log would have averaged, so that the last step speaks for all, beside a mean loss.
def test_metrics_are_means_over_the_steps_between_two_logs(world: World, tmp_path: Path) -> None:
    each = logs_of(trained(world, tmp_path / "each", max_steps=3))
    together = logs_of(trained(world, tmp_path / "together", max_steps=3, logging_steps=3))
    assert together[0]["loss"] == pytest.approx(sum(entry["loss"] for entry in each) / 3, abs=1e-5)
    assert together[0]["reward"] == pytest.approx(sum(entry["reward"] for entry in each) / 3, abs=1e-5)


# Was so: compute_row_metrics saw learned rows alone, without truncated ones, while penalties counted all rollouts.
def test_shares_of_a_step_are_shares_of_all_its_rollouts(world: World) -> None:
    def truncated_but_for_the_first(group: RolloutGroup) -> RolloutGroup:
        rollouts = [
            replace(rollout, conversations_K=tuple(replace(each, truncated=at > 0) for each in rollout.conversations_K))
            for at, rollout in enumerate(group.rollouts_G)
        ]
        return replace(group, rollouts_G=tuple(rollouts))

    chosen = AdvantageSettings(mask_truncated=True, overlong_penalty=OverlongPenalty(4, 3))
    groups = [truncated_but_for_the_first(group) for group in world[1]]
    batch = prepare_batch(groups, chosen)
    assert len(batch.rows) < sum(len(rollout.conversations_K) for group in groups for rollout in group.rollouts_G)
    metrics = compute_row_metrics(groups, batch, ())
    assert metrics["penalised_fraction"] <= 1
    assert metrics["completions/clipped_ratio"] > 0


# Was so: logged log-probs are those before temperature, and are compared with those after it.
def test_the_gap_in_the_log_is_of_equal_temperatures(world: World, tmp_path: Path) -> None:
    gaps = [
        logs_of(trained(world, tmp_path / str(temperature), max_steps=1, temperature=temperature))[0]
        for temperature in (1.0, 0.5)
    ]
    name = "sampling/sampling_logp_difference/mean"
    assert 0 < gaps[1][name] <= 2 * gaps[0][name]  # with them it is that of the heaviest micro-batch alone


# Was so: with fewer steps than warm-up has, hardly anything is learned; in one step, whose learning rate is 0, nothing.
def test_a_training_that_ends_before_its_warm_up_is_refused(world: World, tmp_path: Path) -> None:
    from memagent_training.job.training_job import TrainingJob, prepare, train

    folder = world[0]
    runs = write_log(tmp_path / "runs.sqlite", comparable(world[1]), folder / "model")
    wishes = QUIET | {"groups_per_step": 99, "max_logprob_gap": 9.0}
    job = TrainingJob(runs=runs, model=str(folder / "model"), out=tmp_path / "out", settings=wishes)
    with pytest.raises(TrainingError, match=r"warms up over 320 optimizer steps.*warmup_steps lower"):
        train(prepare(job))
    assert not (tmp_path / "out").exists()


def test_several_gpus_without_a_launcher_are_refused_with_the_remedy(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memagent_training.job.training_job import TrainingJob, prepare, train

    runs = write_log(tmp_path / "runs.sqlite", comparable(world[1]), world[0] / "model")
    job = TrainingJob(
        runs=runs,
        model=str(world[0] / "model"),
        out=tmp_path / "out",
        settings=QUIET | STRANGE | {"groups_per_step": 2},
    )
    monkeypatch.setattr(MultiConvDAPOConfig, "n_gpu", property(lambda _: 4))
    with pytest.raises(TrainingError, match="accelerate launch"):
        train(prepare(job))


# Was so: an attempt that failed stays in the log as an unfinished member, and replay refuses its whole group.
async def test_a_read_that_was_tried_again_leaves_its_group_whole(tmp_path: Path) -> None:
    collecting: Any = importlib.import_module("test_collect")
    from memagent_training.data.replay import load_groups
    from memagent_training.job.collect import CollectSettings, collect

    calls = itertools.count()

    def reply(number: int, read: int) -> Any:
        if next(calls) == 0:
            return PolicyError("gone")
        return with_ids(collecting.half(number, read))

    agent = collecting.reader(tmp_path, reply)
    script = agent.policy.script
    agent.policy.script = lambda prompt: with_ids(script(prompt))
    found = await collect(
        agent, collecting.questions(1), CollectSettings(rollouts=4, groups=1, max_questions=1), name="x"
    )
    assert len(found.groups) == 1
    replay = load_groups(agent.run_log, reward="exact_match")
    assert [len(group.rollouts_G) for group in replay.groups] == [4], replay.report.refused


def with_ids(reply: Any) -> Any:
    """A scripted reply as one of a policy that tells token ids."""
    if not isinstance(reply, str):
        return reply
    return Completion(
        reply, FinishReason.STOP, "scripted", prompt_token_ids=[1, 2], token_ids=[3], logprobs=[-0.5],
        policy_version="v1",
    )  # fmt: skip


# Was so: ranks that read other rewards (a judge, a random function, another copy of the log) train on without a word.
def test_ranks_with_other_rewards_are_refused(world: World, tmp_path: Path) -> None:
    import sys

    from support.programs import run_ranks

    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, pickle, sys\n"
        "from dataclasses import replace\n"
        "from support.training_world import config_of\n"
        "from memagent_training.job.trainer import MultiConvDAPOTrainer\n"
        "folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        "groups = pickle.loads((folder / 'groups.pkl').read_bytes())\n"
        "if os.environ['RANK'] == '1':\n"
        "    groups = [replace(g, rollouts_G=tuple(replace(r, reward=1 - r.reward) for r in g.rollouts_G))"
        " for g in groups]\n"
        "config = config_of({'preset': 'memagent-paper', 'changes': {'max_steps': 1}}, out)\n"
        "MultiConvDAPOTrainer(str(folder / 'model'), groups, config).train()\n"
    )
    done = run_ranks([sys.executable, script, world[0], tmp_path / "out"], 2)
    assert any(each.returncode > 0 for each in done)
    assert any("TrainingError" in each.stderr for each in done)


# Was so: a log-prob of -120 made every weight NaN, and the log said a loss of 0.
@pytest.mark.parametrize("preset", ["memagent-paper", "dapo"])
def test_an_unlikely_logged_token_leaves_the_weights_finite(preset: str, world: World, tmp_path: Path) -> None:
    groups = [_with_logprob(group, -120.0) for group in world[1]]
    changes = {"old_logprobs": "logged", "max_logprob_gap": 1e9, "max_steps": 2}
    trainer = trained((world[0], groups), tmp_path, preset, **changes)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())
    assert trainer.skipped_steps == 0


def test_a_step_that_is_not_finite_moves_nothing_and_too_many_in_a_row_end_the_training(
    world: World, tmp_path: Path
) -> None:
    class Broken(MultiConvDAPOTrainer):
        broken: tuple[int, ...] = (1,)

        def _forward_backward(self, *given: Any) -> Any:
            loss = super()._forward_backward(*given)
            if self.state.global_step in self.broken:
                next(iter(self.model.parameters())).grad[0, 0] = float("nan")
            return loss

    trainer = Broken(str(world[0] / "model"), world[1], settings(tmp_path / "a", max_steps=3, max_grad_norm=1.0))
    trainer.train()
    assert [entry["skipped"] for entry in logs_of(trainer)] == [0.0, 1.0, 0.0]
    assert trainer.skipped_steps == 1
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())
    stopped = Broken(str(world[0] / "model"), world[1], settings(tmp_path / "b", max_steps=9, max_skipped_steps=1))
    stopped.broken = tuple(range(1, 9))
    with pytest.raises(TrainingError, match=r"not finite in 2 steps in a row, the last of them 3.*max_skipped_steps"):
        stopped.train()


def test_rewards_that_32_bits_cannot_hold_are_refused_with_the_run(world: World, tmp_path: Path) -> None:
    first = world[1][0]
    huge = replace(first, rollouts_G=(replace(first.rollouts_G[0], reward=1e39), *first.rollouts_G[1:]))
    with pytest.raises(TrainingError, match=rf"32 bits.*{first.rollouts_G[0].run_id}"):
        trained((world[0], [huge, *world[1][1:]]), tmp_path)


def _with_logprob(group: RolloutGroup, value: float) -> RolloutGroup:
    """The group with that log-prob for the first token of each rollout's last conversation."""
    rollouts = []
    for rollout in group.rollouts_G:
        *others, last = rollout.conversations_K
        changed = array("f", [value, *last.logprobs_T[1:]])
        rollouts.append(replace(rollout, conversations_K=(*others, replace(last, logprobs_T=changed))))
    return replace(group, rollouts_G=tuple(rollouts))

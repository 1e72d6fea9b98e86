"""Fixtures for the tests of training: one torch thread, because of two cores, and a shared tiny policy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from memagent_graph.policies.profile import EMBEDDED_FOLDER

if TYPE_CHECKING:
    from memagent_training.data.rollouts import RolloutGroup


@pytest.fixture(scope="module", autouse=True)
def single_torch_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(thread_count)


@pytest.fixture(scope="session", autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """accelerate collects garbage before each training, which is half the time of a small training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))
        yield


class World(NamedTuple):
    """A tiny policy and its rollouts, shared by all tests."""

    folder: Path
    groups: list[RolloutGroup]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def runs(self) -> Path:
        """The path of a run log with these rollouts, except those that no reader could have logged."""
        return self.folder / "runs.sqlite"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    from support.training_log import select_comparable, write_log
    from support.training_world import make_world

    folder = tmp_path_factory.mktemp("world")
    world = World(folder, make_world(folder))
    write_log(world.runs, select_comparable(world.groups), world.model)
    return world


@pytest.fixture(scope="session")
def small_settings() -> Callable[..., Any]:
    from support.training_world import SMALL_SETTINGS

    from memagent_training.job.job_settings import load_preset

    defaults = SMALL_SETTINGS | {"groups_per_step": 2, "save_strategy": "no"}

    def load(output: Path, preset: str = "memagent-paper", **changes: Any) -> Any:
        return load_preset(preset, output_dir=str(output), **(defaults | changes))

    return load


@pytest.fixture(scope="session")
def make_trainer(world: World, small_settings: Callable[..., Any]) -> Callable[..., Any]:
    """Make a trainer, by default of the shared model on the shared groups."""
    from memagent_training.job.trainer import MultiConvDAPOTrainer

    def make(
        output: Path, preset: str = "memagent-paper", *, groups: Any = None, kind: Any = MultiConvDAPOTrainer,
        model: Path = world.model, **changes: Any,
    ) -> Any:  # fmt: skip
        rollout_groups = world.groups if groups is None else groups
        return kind(str(model), rollout_groups, small_settings(output, preset, **changes))

    return make


@pytest.fixture
def plain_model(tmp_path: Path) -> Path:
    """The folder of a model without a profile or prompts, as from a model hub."""
    folder = tmp_path / "plain"
    shutil.copytree(EMBEDDED_FOLDER, folder, ignore=shutil.ignore_patterns("memagent.json", "templates"))
    return folder

"""The folder that a training run writes: checkpoints, a record of what determined them, and the finished policy."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from memagent_graph.storage.bounded_files import read_json_file
from memagent_graph.storage.private_files import write_atomically
from memagent_training.forward import recomputed
from memagent_training.training_errors import TrainingError

RECORD: Final = "training.json"
"""The inputs that determined a training run's weights: settings, base model, adapters."""
ADAPTER_FOLDER: Final = "adapter"
"""The folder of a training run's separate adapters; next to it are the merged weights."""

_STATE: Final = "trainer_state.json"
_POLICY_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "memagent.json",
)  # fmt: skip
"""The files that a policy has besides weights. A tokenizer's files are copied, not saved again: saving may change them,
and the runs of the new policy would seem to have another tokenizer."""
_NUMBER: Final = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of an output folder."""

    newest: Path | None
    """The newest complete one."""
    incomplete: tuple[Path, ...] = ()
    """Newer ones that are incomplete: the training run was killed while it wrote them."""


def find_checkpoints(out: Path) -> Checkpoints:
    """Find the newest complete checkpoint.

    A checkpoint is complete if it has the trainer's state and the file that `MultiConvDAPOTrainer` writes last.
    """
    incomplete: list[Path] = []
    for folder in _find_checkpoint_folders(out):
        if (folder / recomputed.FILE_NAME).is_file() and (folder / _STATE).is_file():
            return Checkpoints(folder, tuple(incomplete))
        incomplete.append(folder)
    return Checkpoints(None, tuple(incomplete))


def require_unused(out: Path) -> None:
    """Refuse the folder of an earlier training run.

    Raises:
        TrainingError: the folder has checkpoints or weights.
    """
    files = [*_find_checkpoint_folders(out), *(sorted(out.glob("*.safetensors")) if out.is_dir() else [])]
    if files:
        raise TrainingError(
            f"{out} already holds {files[0].name}, which would be overwritten",
            hint="Continue that training (--resume), or name another folder (--out).",
        )


def require_folder(out: Path, base: Path) -> None:
    """Refuse a folder that cannot be written to, and the base model's own folder.

    Raises:
        TrainingError: the folder is one of them.
    """
    if out.resolve() == base.resolve():
        raise TrainingError(
            f"{out} is the folder of the model to train, which would be overwritten",
            hint="Name another folder (--out).",
        )
    nearest = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise TrainingError(f"{out} cannot be written: {nearest} is not a writable folder", hint="Name one.")


def write_record(out: Path, record: Mapping[str, Any]) -> None:
    """Store what determines the weights; the file appears when it is complete."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / RECORD, json.dumps(record, indent=2, sort_keys=True) + "\n")


def require_same(out: Path, record: Mapping[str, Any]) -> None:
    """Refuse to continue with other settings, another base model or other adapters than a training run began with.

    A folder without a record is not checked; each checkpoint has its own record of runs and rewards.

    Raises:
        TrainingError: an input differs; the message says which.
    """
    try:
        recorded = read_json_file(out / RECORD)
        if not isinstance(recorded, dict) or not all(isinstance(part, dict) for part in recorded.values()):
            raise ValueError("it is no record of a training run")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{out / RECORD} cannot be read: {error}", hint="Begin again in another output folder."
        ) from error
    current = json.loads(json.dumps(record))
    differences = []
    for part in sorted(recorded.keys() | current.keys()):
        before, now = recorded.get(part, {}), current.get(part, {})  # without its name, a value is None
        for name in sorted(before.keys() | now.keys()):
            old, new = before.get(name), now.get(name)
            if old != new and not (
                name == "weights" and "" in {old, new}
            ):  # on the hub, without a hash before the download
                differences.append(f"{name} was {old!r} and is {new!r}")
    if differences:
        raise TrainingError(
            f"the training run in {out} was started with different inputs: {'; '.join(differences)}",
            hint="Resume with the same inputs, or begin again in another output folder.",
        )


def complete_policy(out: Path, base: Path) -> None:
    """Copy the other files of a policy next to the new weights: tokenizer, chat template, budgets and prompts."""
    for name in _POLICY_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, out / name)
    if (base / "templates").is_dir():
        shutil.copytree(base / "templates", out / "templates", dirs_exist_ok=True)
    if (out / "config.json").is_file():
        _restore_cache(out / "config.json", base / "config.json")


def _restore_cache(config: Path, base_config: Path) -> None:
    """Let generation use a cache if the base model does: the Transformers trainer turns it off in saved models."""
    settings, base_settings = map(read_json_file, (config, base_config))
    use_cache = base_settings.get("use_cache", True)
    if settings.get("use_cache", True) != use_cache:
        settings["use_cache"] = use_cache
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def parse_checkpoint_step(checkpoint: Path) -> int | None:
    """Return the optimizer step that a checkpoint's folder is named after; None for another folder."""
    match = _NUMBER.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def _find_checkpoint_folders(out: Path) -> list[Path]:
    """Return checkpoint folders, complete or not, the newest first."""
    numbered = [
        (parse_checkpoint_step(path), path) for path in (out.iterdir() if out.is_dir() else ()) if path.is_dir()
    ]
    return [path for _, path in sorted(((step, path) for step, path in numbered if step is not None), reverse=True)]

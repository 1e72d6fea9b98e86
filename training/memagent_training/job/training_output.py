"""The folder that a training run writes: checkpoints, a record of the inputs, and the finished policy."""

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

from memagent_graph.settings import iter_differences
from memagent_graph.storage.bounded_files import read_json_file
from memagent_graph.storage.private_files import write_atomically
from memagent_training.forward import recomputed_logprobs
from memagent_training.training_errors import TrainingError

RECORD: Final = "training.json"
"""The inputs that determined a training run's weights: settings, base model, adapters."""
ADAPTER_FOLDER: Final = "adapter"
"""The subfolder for separate adapters; the merged weights are in the output folder itself."""

_TRAINER_STATE: Final = "trainer_state.json"
_POLICY_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "memagent.json",
)  # fmt: skip
"""A policy's files other than weights and config.json. Tokenizer files are copied: saving a tokenizer may change them,
and then its fingerprint would differ from that of the logged runs."""
_CHECKPOINT_NAME: Final = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of an output folder."""

    newest: Path | None
    """The newest complete checkpoint."""
    incomplete: tuple[Path, ...] = ()
    """Newer checkpoints that are incomplete, because the training run was killed while it wrote them."""


def find_checkpoints(out: Path) -> Checkpoints:
    """Find the newest complete checkpoint.

    A checkpoint is complete if it has the trainer's state and the file that `MultiConvDAPOTrainer` writes last.
    """
    incomplete: list[Path] = []
    for folder in _find_checkpoint_folders(out):
        if (folder / recomputed_logprobs.FILE_NAME).is_file() and (folder / _TRAINER_STATE).is_file():
            return Checkpoints(folder, tuple(incomplete))
        incomplete.append(folder)
    return Checkpoints(None, tuple(incomplete))


def require_unused_folder(out: Path, *, resume: bool = False) -> None:
    """Refuse a folder that already holds a training run, unless `resume` continues it, or another README.md.

    Raises:
        TrainingError: the folder has checkpoints, weights or a README.md, which would be overwritten.
    """
    training_files = [*_find_checkpoint_folders(out), *sorted(out.glob("*.safetensors"))]
    if files := ([] if resume and training_files else training_files or [*out.glob("README.md")]):
        raise TrainingError(
            f"{out} already holds {files[0].name}, which would be overwritten",
            hint="Continue that training (--resume), or choose another folder (--out)."
            if training_files
            else "Choose another folder (--out).",
        )


def require_writable_folder(out: Path, base: Path) -> None:
    """Refuse an output folder that cannot be written, or that is the base model's own.

    Raises:
        TrainingError: the folder is one of these.
    """
    if out.resolve() == base.resolve():
        raise TrainingError(
            f"{out} is the folder of the model to train, which would be overwritten",
            hint="Choose another folder (--out).",
        )
    existing_folder = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    if not existing_folder.is_dir() or not os.access(existing_folder, os.W_OK):
        raise TrainingError(
            f"{out} cannot be written: {existing_folder} is not a writable folder", hint="Choose a writable folder."
        )


def write_record(out: Path, record: Mapping[str, Any]) -> None:
    """Write the inputs that determine the weights; the file appears when it is complete."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / RECORD, json.dumps(record, indent=2, sort_keys=True) + "\n")


def require_same_inputs(out: Path, record: Mapping[str, Any]) -> None:
    """Refuse to continue a training run with other settings, another base model or other adapters.

    A folder without a record is accepted. Runs and rewards are compared when the checkpoint is loaded.

    Raises:
        TrainingError: an input differs; the message says which.
    """
    try:
        recorded_inputs = read_json_file(out / RECORD)
        if not isinstance(recorded_inputs, dict) or not all(
            isinstance(section, dict) for section in recorded_inputs.values()
        ):
            raise ValueError("it is not a record of a training run")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{out / RECORD} cannot be read: {error}", hint="Begin again in another output folder."
        ) from error
    sections: dict[str, Any] = {section: {} for section in sorted(recorded_inputs.keys() | record.keys())}
    differences = [
        f"{name} was {old!r} and is {new!r}"
        for name, old, new in iter_differences(sections | recorded_inputs, sections | dict(record))
        if not (name == "model.weights" and "" in (old, new))  # a model on the hub, before its download
    ]
    if differences:
        raise TrainingError(
            f"the training run in {out} was started with different inputs: {'; '.join(differences)}",
            hint="Resume with the same inputs, or begin again in another output folder.",
        )


def copy_policy_files(out: Path, base: Path) -> None:
    """Copy the base policy's other files next to the new weights: tokenizer, chat template, budgets and prompts."""
    for name in _POLICY_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, out / name)
    if (base / "templates").is_dir():
        shutil.copytree(base / "templates", out / "templates", dirs_exist_ok=True)
    config = out / "config.json"
    if config.is_file():
        # The Transformers trainer turns off `use_cache` in saved models.
        settings, base_settings = map(read_json_file, (config, base / "config.json"))
        use_cache = base_settings.get("use_cache", True)
        if settings.get("use_cache", True) != use_cache:
            settings["use_cache"] = use_cache
            config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _find_checkpoint_folders(out: Path) -> list[Path]:
    """Return all checkpoint folders, complete or not, newest first."""
    folders_by_step = {
        int(match[1]): path
        for path in (out.iterdir() if out.is_dir() else ())
        if (match := _CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir()
    }
    return [folders_by_step[step] for step in sorted(folders_by_step, reverse=True)]

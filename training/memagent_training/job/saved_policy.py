"""Writes a trainer's weights as a policy folder: whole weights or adapters, tokenizer, profile, and a card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from huggingface_hub import metadata_load
from safetensors.torch import load_file, save_file

from memagent_graph.policies.profile import save_profile
from memagent_training.job import training_output
from memagent_training.job.base_model import BaseModel
from memagent_training.job.config import MultiConvDAPOConfig

README: Final = "README.md"


def save_policy(
    trainer: Any, base: BaseModel, out: Path, *, lora_rank: int | None = None, with_merged: bool = True
) -> Path | None:
    """Write the policy that a trainer holds. Call it on every rank.

    Args:
        trainer: a trainer of the Transformers library.
        base: the model that the training run started from, which has the tokenizer, chat template and profile.
        out: the policy's folder.
        lora_rank: the rank of adapters, if they are trained.
        with_merged: whether to write merged weights as well, if adapters are trained.

    Returns:
        The folder of the separate adapters, if they are trained.
    """
    adapter = None if lora_rank is None else out / training_output.ADAPTER_FOLDER
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    checkpoint_type = getattr(plugin, "state_dict_type", None)
    if plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")  # checkpoints may be sharded, but a policy must not be
    trainer.save_model(str(adapter or out))
    if plugin is not None:
        plugin.set_state_dict_type(checkpoint_type)
    if trainer.accelerator.is_main_process:
        if adapter is None:
            _copy_base_files(out, base)
            _convert_weights(out, trainer.args.save_dtype)
        elif with_merged:
            merge_adapter(base, adapter, out, trainer.args)
        _prepare_for_sharing(adapter or out)
    trainer.accelerator.wait_for_everyone()
    return adapter


def _copy_base_files(out: Path, base: BaseModel) -> None:
    training_output.copy_policy_files(out, base.folder)
    if base.profile is not None:
        save_profile(base.profile, out)


def _convert_weights(folder: Path, number_format: str | None) -> None:
    """Rewrite a policy's weights in a number format such as "bfloat16"; None leaves them as they are."""
    if number_format is None:
        return
    dtype: torch.dtype = getattr(torch, number_format)
    for path in folder.glob("*.safetensors"):
        unfinished_path = path.with_suffix(".unfinished")
        save_file({name: value.to(dtype) for name, value in load_file(path).items()}, unfinished_path, {"format": "pt"})
        unfinished_path.replace(path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"dtype": number_format}, indent=2), "utf-8")


def _prepare_for_sharing(folder: Path) -> None:
    """Give weights the mode of the other files, which other users' servers can read, and delete pickled settings."""
    (folder / "training_args.bin").unlink(missing_ok=True)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(next(folder.glob("*config.json")), weights)


def merge_adapter(base: BaseModel, adapter: Path, out: Path, config: MultiConvDAPOConfig) -> None:
    """Write a policy with merged adapters, in the precision in which the base was loaded for training."""
    from peft import PeftModel  # noqa: PLC0415  optional
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  slow to import

    init_kwargs: Any = config.model_init_kwargs or {}
    dtype = init_kwargs.get("dtype", "float32")
    model: Any = AutoModelForCausalLM.from_pretrained(base.source, dtype=dtype, trust_remote_code=False)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(out)
    _copy_base_files(out, base)
    _convert_weights(out, config.save_dtype)
    _prepare_for_sharing(out)


def write_card(out: Path, base: BaseModel, facts: Mapping[str, str], history: Sequence[Mapping[str, Any]]) -> None:
    """Write the card of a policy, its README.md: its base, its training data, and its rewards.

    Args:
        out: the policy's folder.
        base: the model that it was trained from; its card has the license.
        facts: other inputs by name: runs, reward, preset, steps.
        history: the trainer's log; the card has the rewards of its first and last step.
    """
    header: dict[str, Any] = {"library_name": "transformers", "tags": ["memagent", "multi-conv-dapo"]}
    if base.source == base.name and "/" in base.name and not Path(base.name).exists():
        header["base_model"] = base.name
    if (license_name := _find_license(base.folder / README)) is not None:
        header["license"] = license_name
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    rows = {"base": f"{base.name} ({base.weights_hash or 'weights on the hub'})", **facts}
    rows["license"] = license_name or "not stated by the base's card"
    if rewards:
        rows["mean reward of the first and the last step"] = f"{rewards[0]:.3f}, {rewards[-1]:.3f}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    out.joinpath(README).write_text(
        f"---\n{yaml.safe_dump(header, sort_keys=True)}---\n\n# {out.name}\n\n"
        "A policy that reads long documents chunk by chunk, trained with Multi-Conv DAPO (MemAgent, arXiv\n"
        "2507.02259). It is not a chat model: it answers the prompts of its profile, as in "
        f'`memagent read DOCUMENT --question "..." --model {out.name}`.\n\n| | |\n|---|---|\n{table}\n',
        "utf-8",
    )


def _find_license(card: Path) -> str | None:
    """Return the license that a card's header names; None without a card, or if it names none."""
    try:
        license_name = (metadata_load(card) or {}).get("license")
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return None
    return str(license_name) if license_name else None

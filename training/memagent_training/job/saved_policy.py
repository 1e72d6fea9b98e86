"""A trainer's weights as a folder to read with: whole weights or adapters, tokenizer, profile, and a card."""

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
from memagent_training.job import training_output as output
from memagent_training.job.base_model import BaseModel
from memagent_training.job.config import MultiConvDAPOConfig

README: Final = "README.md"


def save_policy(
    trainer: Any, base: BaseModel, out: Path, *, lora_rank: int | None = None, merged: bool = True
) -> Path | None:
    """Write the policy that a trainer holds. To be called on every rank.

    Args:
        trainer: a trainer of the Transformers library.
        base: the model that the training run started from; tokenizer, chat template and profile are taken from it.
        out: the policy's folder.
        lora_rank: the rank of adapters, if they are trained.
        merged: whether merged weights are written too.

    Returns:
        The folder of the separate adapters, if they are trained.
    """
    adapter = None if lora_rank is None else out / output.ADAPTER_FOLDER
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    kind_of_checkpoints = getattr(plugin, "state_dict_type", None)
    if plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")  # checkpoints may be sharded, but a policy must not be
    trainer.save_model(str(adapter or out))
    if plugin is not None:
        plugin.set_state_dict_type(kind_of_checkpoints)
    if trainer.accelerator.is_main_process:
        if adapter is None:
            _complete(out, base)
            _store_as(out, trainer.args.save_dtype)
        elif merged:
            merge_adapter(base, adapter, out, trainer.args)
        _make_sharable(adapter or out)
    trainer.accelerator.wait_for_everyone()
    return adapter


def _complete(out: Path, base: BaseModel) -> None:
    output.complete_policy(out, base.folder)
    if base.profile is not None:
        save_profile(base.profile, out)


def _store_as(folder: Path, number_format: str | None) -> None:
    """Write a policy's weights again in another number format."""
    if number_format is None:
        return
    dtype: torch.dtype = getattr(torch, number_format)
    for path in folder.glob("*.safetensors"):
        unfinished = path.with_suffix(".unfinished")
        save_file({name: value.to(dtype) for name, value in load_file(path).items()}, unfinished, {"format": "pt"})
        unfinished.replace(path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"dtype": number_format}, indent=2), "utf-8")


def _make_sharable(folder: Path) -> None:
    """Make the weights readable for another user's server, like the rest, and remove the pickle of this machine's
    settings.
    """
    (folder / "training_args.bin").unlink(missing_ok=True)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(next(folder.glob("*config.json")), weights)


def merge_adapter(base: BaseModel, adapter: Path, out: Path, config: MultiConvDAPOConfig) -> None:
    """Write a policy with merged adapters, in the precision of the training run."""
    from peft import PeftModel  # noqa: PLC0415  optional
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  slow to import

    options: Any = config.model_init_kwargs or {}
    dtype = options.get("dtype", "float32")
    model: Any = AutoModelForCausalLM.from_pretrained(base.source, dtype=dtype, trust_remote_code=False)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(out)
    _complete(out, base)
    _store_as(out, config.save_dtype)
    _make_sharable(out)


def write_card(out: Path, base: BaseModel, facts: Mapping[str, str], history: Sequence[Mapping[str, Any]]) -> None:
    """Write the card of a policy, its README.md: what it was made from, on what, and what changed.

    Args:
        out: its folder.
        base: what it was trained from; a license is taken from its own card.
        facts: what else determined it, by name: runs, reward, preset, steps.
        history: the trainer's log; the rewards of its first and last step are in the card.
    """
    header: dict[str, Any] = {"library_name": "transformers", "tags": ["memagent", "multi-conv-dapo"]}
    if base.source == base.name and "/" in base.name and not Path(base.name).exists():
        header["base_model"] = base.name
    if (license_name := _find_license(base.folder / README)) is not None:
        header["license"] = license_name
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    rows = {"base": f"{base.name} ({base.version or 'weights on the hub'})", **facts}
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

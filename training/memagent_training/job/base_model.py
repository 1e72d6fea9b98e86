"""The model that a training run starts from: what is known before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memagent_graph.errors import PolicyError
from memagent_graph.policies.added import INSTALLABLE_POLICIES
from memagent_graph.policies.hub import fetch_model_folder, is_hub_id
from memagent_graph.policies.model_info import hash_weights
from memagent_graph.policies.profile import Profile, find_policy_folder
from memagent_graph.tokenizers import load_tokenizer
from memagent_training.training_errors import TrainingError

_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A causal language model in a folder, or on the hub."""

    name: str
    """The name that the user typed."""
    source: str
    """The folder's path or hub id for transformers."""
    folder: Path
    """Where its configuration and tokenizer are; its weights, too, unless it is on the hub."""
    window: int | None
    """Prompt and completion together, in tokens."""
    tokenizer: str
    """The tokenizer's fingerprint."""
    version: str
    """The hash of the weights, as in the local policy; empty if they are not on this machine."""
    profile: Profile | None = None
    """The profile to read with, if it is not the folder's."""


def find_base_model(name: str) -> BaseModel:
    """Look at a model, without loading it.

    Args:
        name: a folder, a hub id, a policy that was added to this machine, or "embedded" for the one that comes with the
            package.

    Raises:
        TrainingError: there is no such model, or it is incomplete.
        TokenizerError: its tokenizer cannot be read.
    """
    folder, source = _locate(name)
    return BaseModel(
        name=name,
        source=source,
        folder=folder,
        window=getattr(read_text_config(folder), "max_position_embeddings", None),
        tokenizer=load_tokenizer(folder).fingerprint,
        version=hash_weights(folder),
    )


def _locate(name: str) -> tuple[Path, str]:
    """Return the model's folder, and the name for transformers."""
    folder = find_policy_folder(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            is_adapter = (folder / "adapter_config.json").is_file()
            raise TrainingError(
                f"{folder} has {'only adapters' if is_adapter else 'no config.json'}",
                hint="Name a folder of whole weights. A training with adapters also writes merged ones."
                if is_adapter
                else "Name a folder with config.json, weights and tokenizer, or a hub id.",
            )
        if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
            raise TrainingError(f"{folder} has no weights", hint=f"It needs {' or '.join(_WEIGHTS)}.")
        return folder, str(folder.resolve())  # adapters store it, wherever they are loaded
    if name in INSTALLABLE_POLICIES:
        raise TrainingError(f"the policy {name} is not on this machine", hint=f"Add it: memagent policy add {name}.")
    if folder.exists() or not is_hub_id(name):
        raise TrainingError(
            f"there is no model {name!r}",
            hint='Name a folder with config.json and weights, a hub id, "embedded", or one of '
            f"{', '.join(INSTALLABLE_POLICIES)}.",
        )
    try:
        return fetch_model_folder(name, with_weights=False), name
    except PolicyError as error:
        raise TrainingError(error.message, hint=error.hint) from error


def read_text_config(folder: Path) -> Any:
    """Return a model's configuration, of its text part.

    Raises:
        TrainingError: config.json cannot be parsed.
    """
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415  slow to import
    from transformers import AutoConfig  # noqa: PLC0415  slow to import

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise TrainingError(
            f"{folder / 'config.json'} cannot be parsed: {error}",
            hint="It must be of a causal language model that the installed transformers knows.",
        ) from error


def build_unloaded_model(source: str, *, lora_rank: int | None = None) -> nn.Module:
    """Return the model without its weights (on the device "meta"), with adapters if there is a rank.

    Raises:
        TrainingError: transformers does not know this causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  slow to import

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, trust_remote_code=False))
            if lora_rank is not None:
                from peft import get_peft_model  # noqa: PLC0415  optional

                model = get_peft_model(model, make_lora_config(lora_rank))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TrainingError(
            f"{source} is not a causal language model that transformers can build: {error}",
            hint="Name a folder with config.json and weights of a text model, or a hub id.",
        ) from error
    built: nn.Module = model
    return built


def make_lora_config(rank: int | None) -> Any:
    """Return peft's settings for adapters on every linear layer but the head, twice as strong as their rank.

    None without a rank.
    """
    if rank is None:
        return None
    from peft import LoraConfig  # noqa: PLC0415  optional

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")

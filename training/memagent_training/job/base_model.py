"""Finds the model that a training run starts from, and describes it before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memagent_graph.errors import PolicyError
from memagent_graph.policies.added import ADDABLE_POLICIES
from memagent_graph.policies.model_info import hash_weights
from memagent_graph.policies.profile import Profile, find_policy_folder
from memagent_graph.policies.weight_files import fetch_model_folder, is_hub_id
from memagent_graph.tokenizers import load_tokenizer
from memagent_training.training_errors import TrainingError

_WEIGHT_PATTERNS: Final = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A causal language model in a folder, or on the hub."""

    name: str
    """The name that the user typed."""
    source: str
    """The folder's path or hub id for transformers."""
    folder: Path
    """The folder with its configuration and tokenizer, and with its weights unless they are on the hub."""
    context_window: int | None
    """The maximum tokens of prompt and completion together."""
    tokenizer_fingerprint: str
    """The tokenizer's fingerprint."""
    weights_hash: str
    """The hash of the weights, as in `LocalPolicy`; empty if they are not on this machine."""
    profile: Profile | None = None
    """The profile to read with, if it replaces the folder's."""


def find_base_model(name: str) -> BaseModel:
    """Find a model by its name, and describe it without loading its weights.

    Args:
        name: a folder, a hub id, a policy that was added to this machine, or "embedded" for the one that comes with the
            package.

    Raises:
        TrainingError: there is no such model, or it is incomplete.
        TokenizerError: its tokenizer cannot be read.
    """
    folder, source = _locate_model(name)
    return BaseModel(
        name=name,
        source=source,
        folder=folder,
        context_window=getattr(read_text_config(folder), "max_position_embeddings", None),
        tokenizer_fingerprint=load_tokenizer(folder).fingerprint,
        weights_hash=hash_weights(folder),
    )


def _locate_model(name: str) -> tuple[Path, str]:
    """Return the model's folder, and the path or hub id for transformers."""
    folder = find_policy_folder(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            is_adapter = (folder / "adapter_config.json").is_file()
            raise TrainingError(
                f"{folder} has {'only adapters' if is_adapter else 'no config.json'}",
                hint="Give a folder with full weights. A training run with adapters also writes the merged weights."
                if is_adapter
                else "Give a folder with config.json, weights and tokenizer, or a hub id.",
            )
        if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
            raise TrainingError(f"{folder} has no weights", hint=f"It needs {' or '.join(_WEIGHT_PATTERNS)}.")
        return folder, str(folder.resolve())  # absolute, because adapters store it
    if name in ADDABLE_POLICIES:
        raise TrainingError(f"the policy {name} is not on this machine", hint=f"Add it: memagent policy add {name}.")
    if folder.exists() or not is_hub_id(name):
        raise TrainingError(
            f"there is no model {name!r}",
            hint='Give a folder with config.json and weights, a hub id, "embedded", or one of '
            f"{', '.join(ADDABLE_POLICIES)}.",
        )
    try:
        return fetch_model_folder(name, with_weights=False), name
    except PolicyError as error:
        raise TrainingError(error.message, hint=error.hint) from error


def read_text_config(folder: Path) -> Any:
    """Return the configuration of a model's text part.

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


def build_empty_model(source: str, *, lora_rank: int | None = None) -> nn.Module:
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
            hint="Give a folder with config.json and weights of a text model, or a hub id.",
        ) from error
    empty_model: nn.Module = model
    return empty_model


def make_lora_config(rank: int | None) -> Any:
    """Return peft's settings for adapters on every linear layer except the head, with an alpha of twice the rank.

    None without a rank.
    """
    if rank is None:
        return None
    from peft import LoraConfig  # noqa: PLC0415  optional

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")

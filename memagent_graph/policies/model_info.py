"""Information that a policy reports about its model, so that the user does not have to set it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from memagent_graph.chat_markers import find_folder_markers
from memagent_graph.errors import MemAgentError, MissingExtraError
from memagent_graph.policies.profile import Profile, load_profile
from memagent_graph.storage.bounded_files import read_json_file
from memagent_graph.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of a dense decoder. `parameters` excludes the input embedding, which needs no multiplication.

    A forward pass costs two floating-point operations per weight and token, plus `4 * layers * width` per token and
    attended position (scores and weighted sum), halved for causality. Sparse attention, mixture-of-experts routing and
    cached prefixes are not modelled.
    """

    parameters: int
    layers: int
    width: int

    def __post_init__(self) -> None:
        if not all(0 < value < 10**18 for value in (self.parameters, self.layers, self.width)):  # far above all models
            raise ValueError("this is not the size of a model")

    @classmethod
    def from_config(cls, folder: Path) -> ModelShape | None:
        """Return the shape in a Hugging Face `config.json`; None if the file is missing, damaged or of another kind."""
        try:
            config = read_json_file(folder / "config.json")
            width, layers, heads = (
                int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
            )
            head_width = int(config.get("head_dim") or width // heads)
            kv_heads = int(config.get("num_key_value_heads") or heads)
            attention = width * head_width * (2 * heads + 2 * kv_heads)
            mlp = 3 * width * int(config["intermediate_size"])
            output_weights = width * int(config["vocab_size"])
            return cls(parameters=layers * (attention + mlp) + output_weights, layers=layers, width=heads * head_width)
        except (OSError, ValueError, ArithmeticError, KeyError, TypeError):
            return None

    def forward_flops(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the floating-point operations of one call without a cached prefix."""
        tokens = prompt_tokens + completion_tokens
        return 2.0 * self.parameters * tokens + 2.0 * self.layers * self.width * tokens * tokens


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Information about the model of a policy. None means unknown."""

    context_window: int | None = None
    """The maximum tokens of prompt and completion together."""
    tokenizer: Tokenizer | None = None
    missing_extra: MissingExtraError | None = None
    """The error for an extra that is missing, and is needed to load the tokenizer."""
    shape: ModelShape | None = None
    profile: Profile | None = None
    """The budget and prompts that the model was trained with."""
    control_tokens: frozenset[str] = frozenset()
    """Known strings with a meaning in the tokenizer or chat template, such as <|im_end|>."""
    knows_control_tokens: bool = False
    """Whether `control_tokens` is complete."""
    gives_token_ids: bool = False
    """Whether completions can have token ids and log-probs."""
    number_format: str = ""
    """The number format, such as "float32"; empty if it is unknown, as for a server."""


def find_model_info(name: str, root: str, window: int | None, tokenizer: Tokenizer | None = None) -> ModelInfo:
    """Return information from the model's name and origin (a folder on this machine, or a hub id).

    Without `tokenizer`, the tokenizer is loaded from the origin or by the name.
    """
    missing_extra = None
    for spec in dict.fromkeys(filter(None, (root, name))):
        try:
            tokenizer = tokenizer or load_tokenizer(spec)
        except MissingExtraError as error:
            missing_extra = missing_extra or error
        except MemAgentError:
            continue
    folder = Path(root or name)
    is_local = os.path.isdir(folder)  # noqa: PTH112  False for a name that is too long for a path
    return ModelInfo(
        context_window=window,
        tokenizer=tokenizer,
        missing_extra=missing_extra,
        shape=ModelShape.from_config(folder),
        profile=load_profile(folder) if is_local else None,
        control_tokens=(tokenizer.special_tokens if tokenizer else frozenset()) | find_folder_markers(folder),
        knows_control_tokens=is_local and tokenizer is not None,
    )


_SAMPLE_BYTES: Final = 1 << 20


def hash_weights(folder: Path) -> str:
    """Return a short hash of the weights in a folder; empty if there are none (for a hub id, for example).

    Files are not read completely. The hash depends on the name and size of every file, and on a megabyte at its
    beginning, middle and end. A training step changes some of these bytes.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12] if files else ""


@runtime_checkable
class SelfDescribing(Protocol):
    """A policy that can describe its model."""

    async def describe(self) -> ModelInfo:
        """Return information about the model. Raises `PolicyError` if its server cannot be reached."""
        ...

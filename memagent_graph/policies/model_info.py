"""What a policy can report about its model, so that the user does not have to state it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from memagent_graph.errors import MissingExtraError
from memagent_graph.policies.flops import ModelShape
from memagent_graph.policies.profile import Profile
from memagent_graph.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known about the model behind a policy; None if it is unknown."""

    context_window: int | None = None
    """Prompt and completion together, in tokens."""
    tokenizer: Tokenizer | None = None
    missing: MissingExtraError | None = None
    """What has to be installed before its tokenizer can be loaded."""
    shape: ModelShape | None = None
    profile: Profile | None = None
    """The budget and prompts that the model was trained with."""
    control_tokens: frozenset[str] = frozenset()
    """Strings with a meaning in its tokenizer or chat template, such as <|im_end|>, as far as they are known."""
    knows_control_tokens: bool = False
    """Whether `control_tokens` are all of them."""
    gives_token_ids: bool = False
    """Whether its completions can carry token ids and log-probs."""
    number_format: str = ""
    """What it computes in, such as "float32"; empty if that is unknown, as with a server."""


_SAMPLE_BYTES: Final = 1 << 20


def weights_version(folder: Path) -> str:
    """Return a short hash of the weights in a folder; empty if there are none (for a hub id, for example).

    Files of several gigabytes are not read as a whole: the hash has each file's name, its size, and the megabytes at
    its beginning, middle and end; any training step changes some of these.
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
        """Return what is known about the model. Raises `PolicyError` if its server cannot be reached."""
        ...

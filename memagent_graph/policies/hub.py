"""Recognises ids of models on the hub, and finds or downloads the files of a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from memagent_graph.errors import PolicyError, load_extra

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_METADATA_FILES: Final = ("*.json", "*.txt", "*.jinja", "*.model", "templates/*")
_WEIGHT_FILES: Final = ("*.safetensors", "pytorch_model*.bin")


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a repository on the hub."""
    return _HUB_ID.fullmatch(name) is not None


def fetch_model_folder(repository: str, *, with_weights: bool) -> Path:
    """Return the local folder of a model on the hub, downloaded if it is not in the cache.

    Args:
        repository: the hub id.
        with_weights: whether to download the weights too, or only configuration, tokenizer and templates.

    Raises:
        PolicyError: the model does not exist, or cannot be downloaded.
        MissingExtraError: huggingface_hub is not installed.
    """
    hub = load_extra("huggingface_hub", "hub", f"the model {repository}")
    patterns = [*_METADATA_FILES, *(_WEIGHT_FILES if with_weights else ())]
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PolicyError(
            f"the model {repository} cannot be downloaded from the hub: {reason}",
            hint="Check the id's spelling, download it on a machine with a network (hf download), or name a folder.",
        ) from error

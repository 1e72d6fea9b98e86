"""Models by their hub ids: told apart from paths, and found in the hub's local cache or fetched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from memagent_graph.errors import MissingExtraError, PolicyError

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SMALL_FILES: Final = ("*.json", "*.txt", "*.jinja", "*.model", "templates/*")
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")


def is_hub_id(name: str) -> bool:
    """Whether a name is that of a repository on the hub, if it is not that of a folder."""
    return _HUB_ID.fullmatch(name) is not None


def model_folder(repository: str, *, with_weights: bool) -> Path:
    """The local folder of a model on the hub, fetched where it is not in the cache.

    Args:
        repository: its hub id.
        with_weights: whether the weights are wanted, too, or only configuration, tokenizer and templates.

    Raises:
        PolicyError: there is no such model, or it cannot be had here.
        MissingExtraError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415  only for models on the hub
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415  only for models on the hub
    except ImportError as error:
        raise MissingExtraError("hub", f"the model {repository}") from error
    patterns = [*_SMALL_FILES, *(_WEIGHTS if with_weights else ())]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PolicyError(
            f"the model {repository} cannot be had from the hub: {said}",
            hint="Check the id's spelling, fetch it where there is a network (hf download), or name a folder.",
        ) from error

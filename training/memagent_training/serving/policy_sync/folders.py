"""Inspects a policy's folder before it is loaded into a server, without loading its weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from memagent_graph.policies.model_info import hash_weights
from memagent_training.job.base_model import read_text_config
from memagent_training.job.training_output import ADAPTER_FOLDER
from memagent_training.training_errors import TrainingError

_ADAPTER_CONFIG: Final = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """A folder that a training run wrote, with whole weights, adapters, or both."""

    path: Path
    has_weights: bool
    adapter: Path | None

    @classmethod
    def inspect(cls, path: Path) -> PolicyFolder:
        """Return what a folder has. Adapters may be in the folder itself or in its subfolder for them.

        Raises:
            TrainingError: the folder has neither weights nor adapters.
        """
        folders = (path, path / ADAPTER_FOLDER)
        adapter = next((folder for folder in folders if (folder / _ADAPTER_CONFIG).is_file()), None)
        has_weights = (path / "config.json").is_file() and bool(list(path.glob("*.safetensors"))) and adapter != path
        if not has_weights and adapter is None:
            raise TrainingError(
                f"{path} has no policy: neither config.json with *.safetensors nor {_ADAPTER_CONFIG}",
                hint="Give the folder that a training run wrote (its --out).",
            )
        return cls(path.resolve(), has_weights, None if adapter is None else adapter.resolve())

    @property
    def adapter_base(self) -> str:
        """The folder or hub id of the weights that the adapters belong to."""
        assert self.adapter is not None  # noqa: S101  callers check this
        path = self.adapter / _ADAPTER_CONFIG
        try:
            settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, ValueError, RecursionError) as error:
            raise TrainingError(f"{path} cannot be read: {error}", hint="Save the adapter again.") from error
        return str(settings.get("base_model_name_or_path") or "")

    def make_adapter_name(self, version: str) -> str:
        """Return the name under which a server holds the adapters of a version.

        It includes a hash of their content: vLLM's prefix cache uses names, and would confuse these with other adapters
        of the same name, even after those were unloaded.
        """
        assert self.adapter is not None  # noqa: S101  callers check this
        content = (self.adapter / _ADAPTER_CONFIG).read_bytes() + hash_weights(self.adapter).encode()
        return f"{version}-{hashlib.sha256(content).hexdigest()[:8]}"


def has_tied_embeddings(folder: Path) -> bool:
    """Return whether the output head is the input embedding."""
    return bool(getattr(read_text_config(folder), "tie_word_embeddings", False))

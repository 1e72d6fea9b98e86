"""Checks a policy's folder before it is sent to a server: its content, and whether it fits the served model.

No weights are loaded: names and shapes are in the headers of safetensors files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from memagent_graph.policies.model_info import weights_version
from memagent_training.job.training_output import ADAPTER_FOLDER
from memagent_training.serving.policy_sync.served import SyncError
from memagent_training.training_errors import TrainingError

_ADAPTER_CONFIG: Final = "adapter_config.json"
_ADAPTER_PREFIX: Final = "base_model.model."
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_IRRELEVANT: Final = frozenset({
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "attention_dropout", "pretraining_tp", "pad_token_id", "bos_token_id", "eos_token_id",
})  # fmt: skip
"""Configuration that may differ between two versions of a policy: none of it changes answers.

Training adds the tokenizer's special tokens if there were none."""
Shapes: TypeAlias = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """The result of a training: whole weights, adapters, or both."""

    path: Path
    has_weights: bool
    adapter: Path | None

    @classmethod
    def find(cls, path: Path) -> PolicyFolder:
        """Inspect a folder. Adapters are in it, or in a training's subfolder for them.

        Raises:
            TrainingError: it has neither weights nor adapters.
        """
        places = (path, path / ADAPTER_FOLDER)
        adapter = next((each for each in places if (each / _ADAPTER_CONFIG).is_file()), None)
        has_weights = (path / "config.json").is_file() and bool(list(path.glob("*.safetensors"))) and adapter != path
        if not has_weights and adapter is None:
            raise TrainingError(
                f"{path} has no policy: neither config.json with *.safetensors nor {_ADAPTER_CONFIG}",
                hint="Name the folder of a training (--out).",
            )
        return cls(path.resolve(), has_weights, None if adapter is None else adapter.resolve())

    @property
    def adapter_settings(self) -> dict[str, Any]:
        """The adapters' configuration."""
        assert self.adapter is not None  # noqa: S101  asked for adapters only
        path = self.adapter / _ADAPTER_CONFIG
        try:
            settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, ValueError, RecursionError) as error:
            raise TrainingError(f"{path} cannot be read: {error}", hint="Was it written to its end?") from error
        if settings.get("peft_type") != "LORA":
            raise SyncError(
                f"the adapters in {self.adapter} are {settings.get('peft_type')}, and vLLM loads LoRA only",
                hint="Train LoRA adapters, or serve the merged weights.",
            )
        return settings

    @property
    def adapter_base(self) -> str:
        """The folder or hub id of the weights that the adapters belong to."""
        return str(self.adapter_settings.get("base_model_name_or_path") or "")

    def adapter_name(self, version: str) -> str:
        """Return a server's name for the adapters of a version.

        It also has a hash of their content: the prefix cache uses names, and would confuse other adapters of the same
        name with these even after they were unloaded.
        """
        assert self.adapter is not None  # noqa: S101  asked for adapters only
        content = (self.adapter / _ADAPTER_CONFIG).read_bytes() + weights_version(self.adapter).encode()
        return f"{version}-{hashlib.sha256(content).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Likeness:
    """What all versions of a policy have in common."""

    folder: Path
    """The version that it was read from; it does not have to be kept."""
    config: dict[str, Any]
    shapes: Shapes

    @classmethod
    def of(cls, folder: Path) -> Likeness:
        """Return the shape of a folder with whole weights."""
        config = _config(folder).to_dict().items()
        said = {key: value for key, value in config if value is not None and key not in _IRRELEVANT}
        return cls(folder, said, _shapes(folder))


def vocabulary_and_window(folder: Path) -> tuple[int, int | None]:
    """Return the shape of a policy with whole weights, from its configuration."""
    config = _config(folder)
    return int(config.vocab_size), getattr(config, "max_position_embeddings", None)


def has_tied_embeddings(folder: Path) -> bool:
    """Whether the output head is the input embedding."""
    return bool(getattr(_config(folder), "tie_word_embeddings", False))


def require_alike(new: Likeness, served: Likeness) -> None:
    """Refuse whole weights of another model than the one that is served.

    Raises:
        TrainingError: configurations, tensor names or shapes differ; the message says which.
    """
    differing = _differences(new.config, served.config)
    if served.shapes and not differing:  # without safetensors there is nothing to compare
        differing = _differences(new.shapes, served.shapes)
    if differing:
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise TrainingError(
            f"{new.folder} is another model than the served one, {served.folder}: {'; '.join(differing[:3])}{more}",
            hint="Sync versions of the served model only; start another server for another model.",
        )


def require_servable(folder: Path) -> None:
    """Refuse a folder that a server cannot start with.

    Raises:
        SyncError: there is no tokenizer next to the weights.
    """
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise SyncError(
            f"{folder} has no tokenizer", hint="Copy the base model's (training_output.complete_policy does)."
        )


def require_same_base(adapters: PolicyFolder, served: Path | None, like: Likeness | None) -> None:
    """Refuse adapters of other weights than those that are served. vLLM accepts them.

    Args:
        adapters: the new ones.
        served: the served weights' folder, if known.
        like: the served model, if known.

    Raises:
        SyncError: their base model is another version or has other shapes; the message says which.
    """
    hint = "Serve the weights that the adapters were trained on, or sync merged weights."
    named = adapters.adapter_base
    theirs, ours = (weights_version(Path(each)) if each else "" for each in (named, served))
    if theirs and ours and theirs != ours:
        raise SyncError(
            f"wrong base model: the adapters are of {named} ({theirs}), and {served} ({ours}) is served", hint=hint
        )
    if like is not None:
        _require_fitting(adapters, like.shapes, hint)


def _require_fitting(adapters: PolicyFolder, base: Shapes, hint: str) -> None:
    assert adapters.adapter is not None  # noqa: S101  asked for adapters only
    is_transposed = bool(adapters.adapter_settings.get("fan_in_fan_out"))
    found = 0
    for name, shape in sorted(_shapes(adapters.adapter).items()):
        module, _, half = name.removeprefix(_ADAPTER_PREFIX).partition(".lora_")
        weight = base.get(f"{module}.weight")
        if half not in {"A.weight", "B.weight"} or weight is None or len(weight) != 2:
            continue
        found += 1
        outputs, inputs = reversed(weight) if is_transposed else weight
        width, wanted = (shape[1], inputs) if half.startswith("A") else (shape[0], outputs)
        if width != wanted:
            raise SyncError(
                f"wrong base model: {name} is made for {width} features, and {module} has {wanted}", hint=hint
            )
    if not found:
        raise SyncError(f"wrong base model: it has none of the modules that {adapters.adapter} adapts", hint=hint)


def _differences(new: Mapping[str, object], old: Mapping[str, object]) -> list[str]:
    different = [f"it lacks {name}" for name in sorted(old.keys() - new.keys())]
    different += [f"it has {name}" for name in sorted(new.keys() - old.keys())]
    common = sorted(new.keys() & old.keys())
    return different + [f"{name} is {new[name]!r}, not {old[name]!r}" for name in common if new[name] != old[name]]


def _shapes(folder: Path) -> Shapes:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  optional

    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"{file} cannot be read: {error}", hint="Was it written to its end?") from error
    return shapes


def _config(folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415  optional
    from transformers import AutoConfig  # noqa: PLC0415  slow to import

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise TrainingError(f"{folder / 'config.json'} cannot be understood: {error}", hint="Check it.") from error

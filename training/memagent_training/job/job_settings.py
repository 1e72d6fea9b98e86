"""Settings of a training job: a preset, what the user changes, and what depends on the machine.

A preset is a published recipe: a YAML file with settings of `MultiConvDAPOConfig` by name, each with its source. It is
given as the name of a preset that comes with the package, or as the path of such a file.
"""

from __future__ import annotations

import importlib.util
import json
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final

import torch
import yaml
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from memagent_graph.plain_text import did_you_mean
from memagent_training.algorithm.planner import Layout
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.training_errors import TrainingError

_PACKAGE_FOLDER = Path(__file__).parents[1]
_PRESET_FOLDER = next(
    folder for folder in (_PACKAGE_FOLDER / "configs", _PACKAGE_FOLDER.parent / "configs") if folder.is_dir()
)
"""Inside the installed package, or next to it in a checkout."""
_PRESET_HINT = "Write settings as 'name: value' lines."
_TYPE_NAMES: Final[dict[Any, str]] = {
    bool: "true or false", int: "a whole number", float: "a number", dict: "a JSON object", list: "a list",
    NoneType: "none",
}  # fmt: skip
_ALTERNATIVES: Final = {
    "output_dir": "name the folder with --out",
    "resume_from_checkpoint": "continue with --resume, which uses the newest complete checkpoint",
}
"""Settings that the job determines, each with the option to use instead."""
_TRACKER_PACKAGES: Final = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
}
"""The packages of trackers that are not named like their package; a tracker needs one of them."""

DECISIVE_SETTINGS: Final = (
    "learning_rate", "muon_learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay",
    "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "mixed_precision", "seed",
    "model_init_kwargs", "epsilon", "epsilon_high", "delta", "beta", "entropy_coef", "importance_sampling_level",
    "temperature", "groups_per_step", "baseline", "divide_by_std", "advantage_epsilon",
    "credit",
    "overlong_max_length", "overlong_cache_length", "drop_zero_variance", "mask_truncated_completions",
    "loss_weights", "old_logprobs", "importance_cap", "logged_after_temperature", "skip_certain",
    "kl_clamp", "disable_dropout", "cast_lm_head_to_fp32", "router_aux_loss_coef",
)  # fmt: skip
"""Settings that determine the resulting weights. The others only affect how and how long weights are computed, and what
is reported."""


def list_presets() -> list[str]:
    """Return the names of the presets that come with the package."""
    return sorted(path.stem for path in _PRESET_FOLDER.glob("*.yaml"))


def load_preset(name: str | Path, **changes: Any) -> MultiConvDAPOConfig:
    """Return the settings of a preset.

    Args:
        name: the name of a preset that comes with the package, or a file's path.
        changes: settings that replace the preset's, with `output_dir`, which no preset has.

    Raises:
        TrainingError: there is no such preset, the file is not a mapping, or a setting is unknown.
    """
    settings = {**read_preset(name), **changes}
    known_names = MultiConvDAPOConfig.list_setting_names()
    for setting in settings:
        if setting not in known_names:
            has_no_effect = setting in MultiConvDAPOConfig.__dataclass_fields__
            problem = f"{setting} has no effect here" if has_no_effect else f"There is no setting {setting!r}"
            raise TrainingError(
                problem, hint=did_you_mean(setting, known_names) or f"Choose one of: {', '.join(known_names)}."
            )
    return MultiConvDAPOConfig(
        **{name: parse_value(name, value) if isinstance(value, str) else value for name, value in settings.items()}
    )


def parse_value(setting: str, text: str) -> Any:
    """Return a setting's value, parsed as JSON or YAML and by its declared type: for YAML, 1e-6 is text.

    Raises:
        TrainingError: the text is not a value of that type.
    """
    allowed_types = _list_plain_types(_load_type_hints().get(setting, str))
    # For `report_to`, "none" is a text.
    if NoneType in allowed_types and text.lower() in {"none", "null", ""} and setting != "report_to":
        return None
    value: Any = text
    for parse in (yaml.safe_load, float, json.loads) if float in allowed_types else (yaml.safe_load, json.loads):
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            value = parse(text)
    if type(value) is int and int not in allowed_types and float in allowed_types:
        return float(value)
    if type(value) in allowed_types - {str}:
        return value
    is_broken_json = text[:1] in {"{", "["} and allowed_types & {dict, list}
    if allowed_types - _TYPE_NAMES.keys() and not is_broken_json:  # text, or an enum of transformers
        return text
    type_names = " or ".join(
        type_name for setting_type, type_name in _TYPE_NAMES.items() if setting_type in allowed_types
    )
    raise TrainingError(f"{setting} must be {type_names}, got {text!r}", hint="Change it with --set, or in the preset.")


@cache
def _load_type_hints() -> dict[str, Any]:
    return typing.get_type_hints(MultiConvDAPOConfig)


def _list_plain_types(hint: Any) -> frozenset[Any]:
    """Return the plain types that a declared type allows."""
    origin = typing.get_origin(hint)
    if origin in {typing.Union, UnionType}:
        return frozenset().union(*map(_list_plain_types, typing.get_args(hint)))
    return frozenset({origin or hint})


def read_preset(name: str | Path) -> Mapping[str, Any]:
    """Return the preset's settings by name, as in its file.

    Raises:
        TrainingError: there is no such preset, or the file is not a mapping.
    """
    path = _PRESET_FOLDER / f"{name}.yaml" if str(name) in list_presets() else Path(name)
    try:
        settings = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise TrainingError(
            f"there is no preset {str(name)!r}", hint=f"Choose {' or '.join(list_presets())}, or pass a file's path."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TrainingError(f"{name} is not valid YAML: {error}", hint=_PRESET_HINT) from error
    if not isinstance(settings, dict):
        raise TrainingError(f"{name} is not a mapping of settings", hint=_PRESET_HINT)
    return settings


def rate_depends_on_length(config: MultiConvDAPOConfig) -> bool:
    """Return whether the learning rate of a step depends on the number of steps: not if it is constant after a warm-up.

    A warm-up below 1 is a fraction of all steps.
    """
    scheduler = config.lr_scheduler_type
    is_constant = str(getattr(scheduler, "value", scheduler)).startswith("constant")
    return not is_constant or 0 < config.warmup_steps < 1


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Return settings by name from NAME=VALUE texts.

    Unknown names pass; `load_preset` refuses them and suggests similar ones.

    Raises:
        TrainingError: there is no "=", the value has the wrong type, or the job determines it.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip()
        if not equals or not name:
            raise TrainingError(f"{pair!r} is not a setting", hint="Write NAME=VALUE, as in groups_per_step=4.")
        if name in _ALTERNATIVES:
            raise TrainingError(f"{name} cannot be set this way", hint=f"Instead, {_ALTERNATIVES[name]}.")
        settings[name] = parse_value(name, text.strip())
    return settings


def make_config(preset: str | Path, settings: Mapping[str, Any], out: Path) -> MultiConvDAPOConfig:
    """Return the settings of a preset with changes, and with the settings that depend on the machine.

    Without an accelerator, `use_cpu` is set: otherwise processes that were launched together do not find each other.
    TRL's default, bfloat16, is turned off where it is not supported. On CUDA with flash attention, rows are packed.

    Raises:
        TrainingError: an unknown preset or setting, or an invalid value.
    """
    machine_settings: dict[str, Any] = {} if torch.accelerator.is_available() else {"use_cpu": True}
    if {**machine_settings, **settings}.get("use_cpu") or not is_torch_bf16_gpu_available():
        machine_settings["bf16"] = False
    all_settings = {**read_preset(preset), **machine_settings, **settings}
    has_kernels = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    changes = {**machine_settings, **settings}
    if has_kernels and all_settings.get("bf16", True) and "layout" not in all_settings:
        init_kwargs = {"attn_implementation": "flash_attention_2", **(all_settings.get("model_init_kwargs") or {})}
        changes |= {"layout": Layout.PACKED.value, "model_init_kwargs": init_kwargs}
    try:
        config = load_preset(preset, output_dir=str(out), **changes)
    except (ValueError, TypeError, ImportError) as error:  # errors of transformers and TRL
        reason = " ".join(str(error).split())
        raise TrainingError(
            f"these settings are not possible: {reason}",
            hint="Change them with --set NAME=VALUE, or in the preset's file.",
        ) from error
    for tracker in config.report_to or ():
        packages = _TRACKER_PACKAGES.get(tracker, (tracker,))
        if tracker != "all" and not any(map(importlib.util.find_spec, packages)):
            raise TrainingError(
                f"report_to is {tracker!r}, and {' or '.join(packages)} is not installed",
                hint=f"Install it (pip install {packages[0]}), or leave it out (--set report_to=none).",
            )
    return config


def select_decisive_settings(config: MultiConvDAPOConfig) -> dict[str, Any]:
    """Return the settings that determine the resulting weights, JSON-ready."""
    return {name: _make_json_value(getattr(config, name)) for name in DECISIVE_SETTINGS}


def _make_json_value(value: Any) -> Any:
    value = getattr(value, "value", value)  # an enum of transformers'
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)

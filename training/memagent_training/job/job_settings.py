"""Settings of a training job: a preset, what the user changes, and what depends on the machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from memagent_training.algorithm.planner import Layout
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.job.presets import load_preset, parse_value, read_preset
from memagent_training.training_errors import TrainingError

_INSTEAD: Final = {
    "output_dir": "name the folder with --out",
    "resume_from_checkpoint": "continue with --resume, which uses the newest complete checkpoint",
}
"""Settings that the job determines, and how."""
_TRACKER_PACKAGES: Final = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
}
"""Packages of which a tracker needs one, if they have other names than it has."""

DECISIVE: Final = (
    "learning_rate", "muon_learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay",
    "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "mixed_precision", "seed",
    "model_init_kwargs", "epsilon", "epsilon_high", "delta", "beta", "entropy_coef", "importance_sampling_level",
    "temperature", "groups_per_step", "baseline", "divide_by_std", "advantage_epsilon",
    "credit",
    "overlong_max_length", "overlong_cache_length", "drop_zero_variance", "mask_truncated_completions",
    "loss_weights", "old_logprobs", "importance_cap", "logged_after_temperature", "skip_certain",
    "kl_clamp", "disable_dropout", "cast_lm_head_to_fp32", "router_aux_loss_coef",
)  # fmt: skip
"""Settings that determine the resulting weights. The others only affect how they are computed, how long, and what is
reported."""


def rate_depends_on_length(config: MultiConvDAPOConfig) -> bool:
    """Whether the learning rate of a step depends on the number of steps: not if it is constant after a warm-up.

    A warm-up below 1 is a share of all steps.
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
        if name in _INSTEAD:
            raise TrainingError(f"{name} cannot be set so", hint=f"Instead, {_INSTEAD[name]}.")
        settings[name] = parse_value(name, text.strip())
    return settings


def make_config(preset: str | Path, settings: Mapping[str, Any], out: Path) -> MultiConvDAPOConfig:
    """Return the settings of a preset with changes, and those that depend on the machine.

    Without an accelerator, processes that were launched together find each other only if they are set to use CPUs; and
    TRL's default, bfloat16, does not suit every machine. On CUDA with flash attention, sequences are packed for it.

    Raises:
        TrainingError: an unknown preset or setting, or an invalid value.
    """
    machine: dict[str, Any] = {} if torch.accelerator.is_available() else {"use_cpu": True}
    if {**machine, **settings}.get("use_cpu") or not is_torch_bf16_gpu_available():
        machine["bf16"] = False
    chosen = {**read_preset(preset), **machine, **settings}
    has_kernels = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    changes = {**machine, **settings}
    if has_kernels and chosen.get("bf16", True) and "layout" not in chosen:
        loading = {"attn_implementation": "flash_attention_2", **(chosen.get("model_init_kwargs") or {})}
        changes |= {"layout": Layout.PACKED.value, "model_init_kwargs": loading}
    try:
        config = load_preset(preset, output_dir=str(out), **changes)
    except (ValueError, TypeError, ImportError) as error:  # errors of transformers and TRL
        reason = " ".join(str(error).split())
        raise TrainingError(
            f"these settings are not possible: {reason}",
            hint="Change them with --set NAME=VALUE, or in the preset's file.",
        ) from error
    for tracker in config.report_to or ():
        _require_tracker(tracker)
    return config


def _require_tracker(name: str) -> None:
    """Refuse a tracker that is not installed, before a model is loaded."""
    packages = _TRACKER_PACKAGES.get(name, (name,))
    if name != "all" and not any(map(importlib.util.find_spec, packages)):
        raise TrainingError(
            f"report_to is {name!r}, and {' or '.join(packages)} is not installed",
            hint=f"Install it (pip install {packages[0]}), or leave it out (--set report_to=none).",
        )


def decisive(config: MultiConvDAPOConfig) -> dict[str, Any]:
    """Return the settings that determine the resulting weights, JSON-ready."""
    return {name: _plain(getattr(config, name)) for name in DECISIVE}


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)  # an enum of transformers'
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)

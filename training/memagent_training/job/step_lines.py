"""Prints one line for each optimizer step, instead of TRL's dictionary of all metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from transformers import PrinterCallback, Trainer
from transformers.trainer_callback import ProgressCallback

_METRICS: Final = (
    ("loss", "loss", ".3g"),
    ("gradient norm", "grad_norm", ".3g"),
    ("entropy", "entropy", ".3g"),
    ("sampler's difference", "sampling/sampling_logp_difference/mean", ".2g"),
    ("KL", "kl", ".3g"),
    ("tokens/s", "train/tokens_per_second", ",.0f"),
)
"""A metric's label, the trainer's name for it, and the format of its value."""


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return a step's main metrics as text. Trackers (`report_to`) get all metrics."""
    values = ((label, metrics.get(name), spec) for label, name, spec in _METRICS)
    return ", ".join(f"{label} {value:{spec}}" for label, value, spec in values if value is not None)


class StepLines(PrinterCallback):
    """Prints a line for each logged step, and nothing for the totals at the end."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print a step's line."""
        if state.is_world_process_zero and logs and "loss" in logs:
            print(_format_line(state, logs), flush=True)


class StepBar(ProgressCallback):
    """Shows a progress bar of the steps, with their lines above it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print a step's line."""
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.write(_format_line(state, logs))


def show_step_lines(trainer: Trainer) -> None:
    """Replace the callbacks with which a trainer prints its steps."""
    for old_callback, new_callback in ((PrinterCallback, StepLines), (ProgressCallback, StepBar)):
        if trainer.pop_callback(old_callback) is not None:  # in notebooks, another callback shows a table
            trainer.add_callback(new_callback)


def _format_line(state: Any, metrics: Mapping[str, float]) -> str:
    return f"step {state.global_step} of {state.max_steps}: {format_metrics(metrics)}"

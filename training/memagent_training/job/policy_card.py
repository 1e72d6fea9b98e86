"""The README.md of a trained policy: what it was made from, on what, and what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from memagent_training.job.base_model import BaseModel

README: Final = "README.md"


def write_card(out: Path, base: BaseModel, facts: Mapping[str, str], history: Sequence[Mapping[str, Any]]) -> None:
    """Write the card of a policy.

    Args:
        out: its folder.
        base: what it was trained from; a license is taken from its own card.
        facts: what else determined it, by name: runs, reward, preset, steps.
        history: the trainer's log; the rewards of its first and last step are in the card.
    """
    header: dict[str, Any] = {"library_name": "transformers", "tags": ["memagent", "multi-conv-dapo"]}
    if base.source == base.name and "/" in base.name and not Path(base.name).exists():
        header["base_model"] = base.name
    if (license_name := _license(base.folder / README)) is not None:
        header["license"] = license_name
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    rows = {"base": f"{base.name} ({base.version or 'weights on the hub'})", **facts}
    rows["license"] = license_name or "not stated by the base's card"
    if rewards:
        rows["mean reward of the first and the last step"] = f"{rewards[0]:.3f}, {rewards[-1]:.3f}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    out.joinpath(README).write_text(
        f"---\n{yaml.safe_dump(header, sort_keys=True)}---\n\n# {out.name}\n\n"
        "A policy that reads long documents chunk by chunk, trained with Multi-Conv DAPO (MemAgent, arXiv\n"
        "2507.02259). It is not a chat model: it answers the prompts of its profile, as in "
        f'`memagent read DOCUMENT --question "..." --model {out.name}`.\n\n| | |\n|---|---|\n{table}\n',
        "utf-8",
    )


def _license(card: Path) -> str | None:
    """Return the license that a card's header names; None without a card, or if it names none."""
    if not card.is_file():
        return None
    parts = card.read_text("utf-8", errors="replace").split("---\n", 2)
    try:
        header = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return str(header["license"]) if isinstance(header, dict) and header.get("license") else None

"""Published recipes as settings: YAML files with each value and its source.

A preset is the name of one that comes with the package, or the path of a file of the same form: settings of
`MultiConvDAPOConfig` by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from memagent_graph.plain_text import did_you_mean
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.training_errors import TrainingError

_HERE = Path(__file__).parents[1]
_FOLDER = next(folder for folder in (_HERE / "configs", _HERE.parent / "configs") if folder.is_dir())
"""Inside the installed package, or next to it in a checkout."""
_LINES = "Give settings as 'name: value' lines."


def preset_names() -> list[str]:
    """Return the presets that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_preset(name: str | Path, **changes: Any) -> MultiConvDAPOConfig:
    """Return the settings of a preset.

    Args:
        name: of a preset that comes with the package, or a file's path.
        changes: settings that replace the preset's; `output_dir` has no default there.

    Raises:
        TrainingError: there is no such preset, the file is not a mapping, or a setting is unknown.
    """
    settings = {**read_preset(name), **changes}
    known = MultiConvDAPOConfig.names()
    for setting in settings:
        if setting not in known:
            is_idle = setting in MultiConvDAPOConfig.__dataclass_fields__
            what = f"{setting} has no effect here" if is_idle else f"There is no setting {setting!r}"
            raise TrainingError(what, hint=did_you_mean(setting, known) or f"There are: {', '.join(known)}.")
    return MultiConvDAPOConfig(**{setting: _number(setting, value) for setting, value in settings.items()})


def _number(setting: str, value: Any) -> Any:
    """Return a number if one is meant: YAML reads 1e-6, without a point, as text."""
    kind = str(MultiConvDAPOConfig.__dataclass_fields__[setting].type)
    if not isinstance(value, str) or "float" not in kind or "str" in kind:
        return value
    try:
        return float(value)
    except ValueError as error:
        raise TrainingError(f"{setting} is {value!r}", hint="Give a number.") from error


def read_preset(name: str | Path) -> Mapping[str, Any]:
    """Return the preset's settings by name, as in its file.

    Raises:
        TrainingError: there is no such preset, or the file is not a mapping.
    """
    path = _FOLDER / f"{name}.yaml" if str(name) in preset_names() else Path(name)
    try:
        settings = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise TrainingError(
            f"There is no preset {str(name)!r}", hint=f"Choose {' or '.join(preset_names())}, or give a file's path."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TrainingError(f"{name} is not valid YAML: {error}", hint=_LINES) from error
    if not isinstance(settings, dict):
        raise TrainingError(f"{name} is not a mapping of settings", hint=_LINES)
    return settings

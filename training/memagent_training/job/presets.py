"""Published recipes as settings: YAML files with each value and its source.

A preset is the name of one that comes with the package, or the path of a file of the same form: settings of
`MultiConvDAPOConfig` by name.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final

import yaml

from memagent_graph.plain_text import did_you_mean
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.training_errors import TrainingError

_HERE = Path(__file__).parents[1]
_FOLDER = next(folder for folder in (_HERE / "configs", _HERE.parent / "configs") if folder.is_dir())
"""Inside the installed package, or next to it in a checkout."""
_LINES = "Give settings as 'name: value' lines."
_NONE_IS_A_VALUE: Final = frozenset({"report_to"})
_TYPE_NAMES: Final[dict[Any, str]] = {
    bool: "true or false", int: "a whole number", float: "a number", dict: "a JSON object", list: "a list",
    NoneType: "none",
}  # fmt: skip


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
    names = MultiConvDAPOConfig.names()
    for setting in settings:
        if setting not in names:
            is_idle = setting in MultiConvDAPOConfig.__dataclass_fields__
            problem = f"{setting} has no effect here" if is_idle else f"There is no setting {setting!r}"
            raise TrainingError(problem, hint=did_you_mean(setting, names) or f"There are: {', '.join(names)}.")
    return MultiConvDAPOConfig(
        **{name: parse_value(name, value) if isinstance(value, str) else value for name, value in settings.items()}
    )


def parse_value(setting: str, text: str) -> Any:
    """Return a setting's value from YAML, by its declared type: YAML reads 1e-6, without a point, as text.

    Raises:
        TrainingError: the text is not a value of that type.
    """
    types = _plain_types(_type_hints().get(setting, str))
    if NoneType in types and text.lower() in {"none", "null", ""} and setting not in _NONE_IS_A_VALUE:
        return None
    try:
        value = yaml.safe_load(text)
        if float in types and isinstance(value, str):
            value = float(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    if type(value) is int and int not in types and float in types:
        return float(value)
    if type(value) in types - {str}:
        return value
    is_broken_json = text[:1] in {"{", "["} and types & {dict, list}
    if types - _TYPE_NAMES.keys() and not is_broken_json:  # text, or an enum of transformers
        return text
    names = " or ".join(name for kind, name in _TYPE_NAMES.items() if kind in types)
    raise TrainingError(f"{setting} is {text!r}", hint=f"Give {names}.")


@cache
def _type_hints() -> dict[str, Any]:
    return typing.get_type_hints(MultiConvDAPOConfig)


def _plain_types(hint: Any) -> frozenset[Any]:
    """Return the plain types that a declared type allows."""
    origin = typing.get_origin(hint)
    if origin in {typing.Union, UnionType}:
        return frozenset().union(*map(_plain_types, typing.get_args(hint)))
    return frozenset({origin or hint})


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

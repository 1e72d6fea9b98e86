"""Loads a user's own code (tasks, rewards, strategies) by name: `module:Name` or `path/to/file.py:Name`.

The code runs only if the caller names it, never because a log, an export or a checkpoint names it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from memagent_graph.errors import MemAgentError
from memagent_graph.plain_text import did_you_mean

_NAME: Final = re.compile(r"(?P<source>.+):(?P<name>[A-Za-z_]\w*(?:\.\w+)*)")


def is_own_code_name(text: str) -> bool:
    """Return whether a text has the form of a name of a user's own code, and not of a built-in name."""
    return _NAME.fullmatch(text) is not None


def load_own_code(text: str, *, noun: str, error: type[MemAgentError], hint: str = "") -> Any:
    """Import a user's own code, and return the object with a name.

    Modules are searched in the current folder and on the Python path. A file is run again only if it has changed, so
    its classes can be pickled and compared.

    Args:
        text: `module:Name` or `path/to/file.py:Name`; a name may have dots.
        noun: a noun with its article, for messages, such as "a task".
        error: the class of the error to raise.
        hint: the remedy if there is no such name and no similar name.

    Raises:
        error: there is no such file, module or name, or the code raises an exception when it is imported or looked up.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise error(f"{text!r} does not name {noun}", hint="Write path/to/file.py:Name or module:Name.")
    source = match["source"]
    try:
        value: Any = _load_file(source, noun, error) if source.endswith(".py") else _load_module(source, noun, error)
        for attribute in match["name"].split("."):
            if not hasattr(value, attribute):
                names = [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]
                otherwise = hint or f"Name {noun} after the colon."
                suggestion = did_you_mean(attribute, names, otherwise, prefix=f"{source}:")
                raise error(f"{source} has no {attribute!r}", hint=suggestion)
            value = getattr(value, attribute)
    except MemAgentError:
        raise
    except Exception as cause:  # whatever a user's code raises when it is imported, or when it loads a name
        raise error(
            f"{text} cannot be loaded: {type(cause).__name__}: {cause}", hint="Correct it, or name other code."
        ) from cause
    return value


def _load_module(name: str, noun: str, error: type[MemAgentError]) -> ModuleType:
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:  # a console script has its own folder there instead
        sys.path.insert(0, current_folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if cause.name is None or not f"{name}.".startswith(f"{cause.name}."):
            raise  # another module, which this one imports
        raise error(
            f"there is no module {name!r} to load {noun} from",
            hint="Give the file instead, as path/to/file.py:Name, or make the module importable.",
        ) from cause


def _load_file(name: str, noun: str, error: type[MemAgentError]) -> ModuleType:
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise error(f"there is no file {name} to load {noun} from", hint="Check the path before the colon.")
    stat = path.stat()
    version = hashlib.sha256(f"{path}\0{stat.st_mtime_ns}\0{stat.st_size}".encode(errors="surrogateescape"))
    module_name = f"memagent_own_{version.hexdigest()[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module

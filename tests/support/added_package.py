"""A package with entry points, in the form in which an installer leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def add_package(folder: Path, name: str, code: str, entries: Mapping[str, Mapping[str, str]]) -> Path:
    """Write a module and its distribution's metadata.

    Args:
        folder: where to write them; the caller adds it to the Python path.
        name: the name of the module and of the distribution.
        code: the module's source.
        entries: by group, the objects of the entry points by name.
    """
    metadata = folder / f"{name}-1.2.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = [
        line
        for group, objects in entries.items()
        for line in (f"[{group}]", *(f"{entry} = {target}" for entry, target in objects.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder

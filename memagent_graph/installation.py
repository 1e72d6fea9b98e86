"""The command that installs an extra, which depends on how the package itself was installed."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit


def install_command(extra: str, package: str = "memagent-graph") -> str:
    """Return the command that installs an extra of a package from an index, or from the package's source (PEP 610)."""
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415  slow to import, and seldom needed

    try:
        origin = json.loads(distribution(package).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f'pip install {editable}".[{extra}]", in the folder that has the source of {package}'
    if version := origin.get("vcs_info"):
        return f'pip install "{package}[{extra}] @ {version["vcs"]}+{origin["url"]}"'
    if origin:
        return f'pip install "{unquote(PurePosixPath(urlsplit(origin["url"]).path).name)}[{extra}]"'
    return f'pip install "{package}[{extra}]"'

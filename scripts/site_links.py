"""Hooks of the documentation site: files of the repository that pages link to become part of the site.

Pages link to each other and to the repository's files by relative paths, which work in a checkout. In the site, a file
outside docs is below `repository/`, and a link to the README leads to the first page. A figure of layers is shown as
boxes: Mermaid's own program would be fetched from another host.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_CODE = re.compile(r"(?s)(```.*?```)")
_LAYER = re.compile(r"(?s)subgraph \w+\[\"(.*?)\"\](.*?)\n  end")
_FIRST_PAGE = PurePosixPath("README.md")
_PROJECT = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "memagent_graph/embedded/CARD.md",
    "memagent_graph/english/CARD.md",
)


def on_files(files: Any, config: Any) -> Any:
    """Add what the pages link to, and what that links to."""
    waiting = [PurePosixPath("docs") / file.src_uri for file in files.documentation_pages()]
    waiting += map(PurePosixPath, _PROJECT)
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.is_relative_to("docs"):
            files.append(File.generated(config, _in_site(path), abs_src_path=str(ROOT / path)))
        if path.suffix == ".md":
            targets = {target for target in _links(path) if (ROOT / target).is_file() and target != _FIRST_PAGE}
            waiting += targets - seen
            seen |= targets
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where their files are in the site."""
    uri = PurePosixPath(page.file.src_uri)
    path = uri.relative_to("repository") if uri.is_relative_to("repository") else PurePosixPath("docs") / uri

    def moved(match: re.Match[str]) -> str:
        if _is_elsewhere(match[1]):
            return match[0]
        target = _resolved(path, match[1])
        anchor = "" if target == _FIRST_PAGE else match[2] or ""
        return os.path.relpath(_in_site(target), uri.parent) + anchor

    parts = _CODE.split(markdown)
    return "".join(_shown(part) if part.startswith("```") else _LINK.sub(moved, part) for part in parts)


def _shown(code: str) -> str:
    """A block of code; boxes in place of a figure of layers."""
    layers = _LAYER.findall(code) if code.startswith("```mermaid") else []
    if not layers:
        return code
    rows = [f"| {title} | {' '.join(re.findall(r'[A-Za-z_]+', names))} |" for title, names in layers]
    return "\n".join(["| layer | imports only from the layers below it |", "|---|---|", *rows])


def _links(path: PurePosixPath) -> set[PurePosixPath]:
    text = _CODE.sub("", (ROOT / path).read_text("utf-8"))
    return {_resolved(path, match[1]) for match in _LINK.finditer(text) if not _is_elsewhere(match[1])}


def _is_elsewhere(target: str) -> bool:
    return target.startswith(("http:", "https:", "mailto:"))


def _resolved(page: PurePosixPath, target: str) -> PurePosixPath:
    return PurePosixPath(os.path.normpath(page.parent / target))


def _in_site(path: PurePosixPath) -> str:
    if path == _FIRST_PAGE:
        return "index.md"
    return str(path.relative_to("docs")) if path.is_relative_to("docs") else f"repository/{path}"

"""Hooks of the documentation site that add the files of the repository to which pages link.

Pages link to each other and to the repository's files by relative paths, which work in a checkout. In the site, a file
outside docs is below `repository/`, and a link to the README leads to the first page. A Mermaid figure of layers
becomes a table, because the site would have to load Mermaid from another host.
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
_PROJECT_PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "memagent_graph/embedded/CARD.md",
    "memagent_graph/english/CARD.md",
)


def on_files(files: Any, config: Any) -> Any:
    """Add the files that pages link to, directly or through other added files, and return all files."""
    queue = [PurePosixPath("docs") / file.src_uri for file in files.documentation_pages()]
    queue += map(PurePosixPath, _PROJECT_PAGES)
    known_paths = set(queue)
    while queue:
        path = queue.pop()
        if not path.is_relative_to("docs"):
            files.append(File.generated(config, _find_site_path(path), abs_src_path=str(ROOT / path)))
        if path.suffix == ".md":
            targets = {target for target in _find_links(path) if (ROOT / target).is_file() and target != _FIRST_PAGE}
            queue += targets - known_paths
            known_paths |= targets
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text with its links changed to the paths of the site."""
    uri = PurePosixPath(page.file.src_uri)
    path = uri.relative_to("repository") if uri.is_relative_to("repository") else PurePosixPath("docs") / uri

    def move_link(match: re.Match[str]) -> str:
        if _is_external(match[1]):
            return match[0]
        target = _resolve_link(path, match[1])
        anchor = "" if target == _FIRST_PAGE else match[2] or ""
        return os.path.relpath(_find_site_path(target), uri.parent) + anchor

    parts = _CODE.split(markdown)
    return "".join(_render_code(part) if part.startswith("```") else _LINK.sub(move_link, part) for part in parts)


def _render_code(code: str) -> str:
    """Return a block of code, or a table of the layers if it is a figure of layers."""
    layers = _LAYER.findall(code) if code.startswith("```mermaid") else []
    if not layers:
        return code
    rows = [f"| {title} | {' '.join(re.findall(r'[A-Za-z_]+', names))} |" for title, names in layers]
    return "\n".join(["| layer | imports only from the layers below it |", "|---|---|", *rows])


def _find_links(path: PurePosixPath) -> set[PurePosixPath]:
    """Return the files that a page links to, except in code."""
    text = _CODE.sub("", (ROOT / path).read_text("utf-8"))
    return {_resolve_link(path, match[1]) for match in _LINK.finditer(text) if not _is_external(match[1])}


def _is_external(target: str) -> bool:
    return target.startswith(("http:", "https:", "mailto:"))


def _resolve_link(page: PurePosixPath, target: str) -> PurePosixPath:
    return PurePosixPath(os.path.normpath(page.parent / target))


def _find_site_path(path: PurePosixPath) -> str:
    if path == _FIRST_PAGE:
        return "index.md"
    return str(path.relative_to("docs")) if path.is_relative_to("docs") else f"repository/{path}"

"""Draws the structure of the code from its imports, as Mermaid figures and tables in CONTRIBUTING.md.

    python scripts/draw_structure.py

The first figure has the packages, the others the parts of one: the modules and packages directly below it. Imports
inside functions, or only for type checkers, count too, as dashed arrows. Arrows that follow from others are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "memagent_graph": ROOT / "memagent_graph",
    "langchain_memagent": ROOT / "integrations/langchain_memagent",
    "memagent_converters": ROOT / "integrations/memagent_converters",
    "memagent_corpus": ROOT / "integrations/memagent_corpus",
    "memagent_mcp": ROOT / "integrations/memagent_mcp",
    "memagent_report": ROOT / "integrations/memagent_report",
    "memagent_serve": ROOT / "integrations/memagent_serve",
    "memagent_evaluation": ROOT / "training/memagent_evaluation",
    "memagent_training": ROOT / "training/memagent_training",
    "recipes": ROOT / "training/recipes",
}
PAGE = ROOT / "CONTRIBUTING.md"
_BEGIN, _END = "<!-- {}: drawn by scripts/draw_structure.py -->", "<!-- end of {} -->"
_DRAWN = ("memagent_graph", "memagent_training")
"""The packages whose parts are drawn, too."""
Graph = dict[str, dict[str, bool]]
"""What each node imports; the value is whether at least one of these imports runs when the module is loaded."""


def modules() -> dict[str, Path]:
    """Every module and package by its dotted name, except a package's `__main__`, which only starts it."""
    paths = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in paths.items() if not name.endswith(".__main__")}


def module_graph() -> Graph:
    """What each module imports from the others. In `from package import name`, the name is a module or is in one."""
    files = modules()
    graph: Graph = {name: {} for name in files}
    for name, path in files.items():
        for imported, at_once in _imports(syntax_tree(path), at_once=True):
            target = imported if imported in files else imported.rpartition(".")[0]
            if target in files and target != name:
                graph[name][target] = graph[name].get(target, False) or at_once
    return graph


@cache
def syntax_tree(path: Path) -> ast.Module:
    """The parsed text of a file, which is read once."""
    return ast.parse(path.read_text("utf-8"))


def _imports(node: ast.AST, *, at_once: bool) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, at_once) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((f"{node.module}.{alias.name}", at_once) for alias in node.names)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
        isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ):
        at_once = False
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, at_once=at_once)


def rooms(graph: Graph, within: str = "") -> Graph:
    """The graph of the packages, or of the parts of one package."""

    def room_of(module: str) -> str | None:
        package, *parts = module.split(".")
        if within:
            return f"{package}.{parts[0]}" if package == within and parts else None
        return package

    found: Graph = {room: {} for module in graph if (room := room_of(module))}
    for module, imported in graph.items():
        for target, at_once in imported.items():
            here, there = room_of(module), room_of(target)
            if here and there and here != there:
                found[here][there] = found[here].get(there, False) or at_once
    return found


def below(graph: Graph, room: str) -> set[str]:
    """All direct and indirect imports of a part; they include itself if it is in a cycle."""
    found: set[str] = set()
    ahead = list(graph[room])
    while ahead:
        if (each := ahead.pop()) not in found:
            found.add(each)
            ahead += graph[each]
    return found


def circles(graph: Graph) -> list[list[str]]:
    """The sets of nodes that import each other, each once."""
    under = {room: below(graph, room) for room in graph}
    found = (tuple(sorted(node for node in under[room] if room in under[node])) for room in sorted(graph))
    return [list(circle) for circle in dict.fromkeys(found) if circle]


def floors(graph: Graph) -> dict[str, int]:
    """The layer of each part: 0 for those that import none; parts of one cycle share one."""
    under = {room: below(graph, room) for room in graph}
    found: dict[str, int] = {}
    for room in sorted(graph, key=lambda node: len(under[node] - {node})):
        lower = [found[node] for node in under[room] if room not in under[node]]
        found[room] = max(lower, default=-1) + 1
    return found


def short(room: str) -> str:
    """A part's short name."""
    return room.rpartition(".")[2]


def figure(graph: Graph) -> str:
    """A graph as a Mermaid figure, with a box for each layer from the highest to the lowest."""
    under, level = {room: below(graph, room) for room in graph}, floors(graph)
    order = sorted(graph, key=lambda room: (-level[room], room))
    lines = ["```mermaid", "flowchart TD"]
    for floor in sorted(set(level.values()), reverse=True):
        here = "; ".join(short(room) for room in order if level[room] == floor)
        lines += [f'  subgraph layer{floor}["layer {floor}"]', f"    {here}", "  end"]
    for room in order:
        for arrow, is_loaded_at_once in (("-->", True), ("-.->", False)):
            targets = [
                short(target)
                for target, at_once in sorted(graph[room].items())
                if at_once is is_loaded_at_once
                and not any(
                    target in under[other] and other not in under[target] for other in graph[room].keys() - {target}
                )
            ]
            lines += [f"  {short(room)} {arrow} {' & '.join(targets)}"] if targets else []
    return "\n".join([*lines, "```"])


def table(graph: Graph, files: Mapping[str, Path]) -> str:
    """A graph as a table, from the highest layer to the lowest; a part's purpose is the first line of its docstring."""
    level = floors(graph)
    lines = ["| layer | part | purpose | imports |", "| ---: | --- | --- | --- |"]
    for room in sorted(graph, key=lambda room: (-level[room], room)):
        purpose = (ast.get_docstring(ast.parse(files[room].read_text("utf-8"))) or "").partition("\n")[0]
        imported = ", ".join(f"`{short(target)}`" for target in sorted(graph[room]))
        lines.append(f"| {level[room]} | `{short(room)}` | {purpose.replace('|', '/')} | {imported} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with up-to-date figures."""
    graph, files = module_graph(), modules()
    parts = [
        f"### Within `{package}`\n\n{figure(inner)}\n\n{table(inner, files)}"
        for package in _DRAWN
        for inner in [rooms(graph, package)]
    ]
    packages = rooms(graph)
    for name, content in (
        ("packages", figure(packages)),
        ("parts", "\n\n".join([table(packages, files), *parts])),
    ):
        begin, end = _BEGIN.format(name), _END.format(name)
        before, after = text.partition(begin)[0], text.partition(end)[2]
        text = f"{before}{begin}\n\n{content}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")

"""Draw the structure of the code from its imports, as Mermaid figures and tables in CONTRIBUTING.md.

    python scripts/draw_structure.py

The first figure shows the packages. The other figures show the parts of one package each: the modules and packages
directly in it. Imports inside functions or only for type checkers are dashed arrows. Arrows that follow from others are
omitted.
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
_DETAILED_PACKAGES = ("memagent_graph", "memagent_training")
"""The packages with a figure of their parts."""
Graph = dict[str, dict[str, bool]]
"""The nodes that each node imports; the value is whether one of these imports runs when the module is loaded."""


def find_modules() -> dict[str, Path]:
    """Return the files of all modules and packages by dotted name, except those named `__main__`."""
    paths = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in paths.items() if not name.endswith(".__main__")}


def build_module_graph() -> Graph:
    """Return the graph of the modules; in `from package import name`, the name is a module or is defined in one."""
    files = find_modules()
    graph: Graph = {name: {} for name in files}
    for name, path in files.items():
        for imported_name, at_once in _find_imports(parse_file(path), at_once=True):
            target = imported_name if imported_name in files else imported_name.rpartition(".")[0]
            if target in files and target != name:
                graph[name][target] = graph[name].get(target, False) or at_once
    return graph


@cache
def parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file; a file is parsed only once."""
    return ast.parse(path.read_text("utf-8"))


def _find_imports(node: ast.AST, *, at_once: bool) -> Iterator[tuple[str, bool]]:
    """Yield the imported names below a syntax node, and whether each import runs when the module is loaded."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, at_once) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((f"{node.module}.{alias.name}", at_once) for alias in node.names)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
        isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ):
        at_once = False
    for child in ast.iter_child_nodes(node):
        yield from _find_imports(child, at_once=at_once)


def group_modules(graph: Graph, within: str = "") -> Graph:
    """Return the graph of the packages, or of the parts of the package `within`."""

    def find_node(module: str) -> str | None:
        package, *parts = module.split(".")
        if within:
            return f"{package}.{parts[0]}" if package == within and parts else None
        return package

    nodes: Graph = {node: {} for module in graph if (node := find_node(module))}
    for module, targets in graph.items():
        for target, at_once in targets.items():
            node, target_node = find_node(module), find_node(target)
            if node and target_node and node != target_node:
                nodes[node][target_node] = nodes[node].get(target_node, False) or at_once
    return nodes


def find_dependencies(graph: Graph, node: str) -> set[str]:
    """Return all direct and indirect imports of a node, which include the node itself if it is in a cycle."""
    dependencies: set[str] = set()
    queue = list(graph[node])
    while queue:
        if (target := queue.pop()) not in dependencies:
            dependencies.add(target)
            queue += graph[target]
    return dependencies


def find_cycles(graph: Graph) -> list[list[str]]:
    """Return the sets of nodes that import each other."""
    dependencies = {node: find_dependencies(graph, node) for node in graph}
    cycles = (
        tuple(sorted(target for target in dependencies[node] if node in dependencies[target])) for node in sorted(graph)
    )
    return [list(cycle) for cycle in dict.fromkeys(cycles) if cycle]


def compute_layers(graph: Graph) -> dict[str, int]:
    """Return the layer of each node: 0 for nodes without imports; the nodes of a cycle have the same layer."""
    dependencies = {node: find_dependencies(graph, node) for node in graph}
    layers: dict[str, int] = {}
    for node in sorted(graph, key=lambda node: len(dependencies[node] - {node})):
        lower = [layers[target] for target in dependencies[node] if node not in dependencies[target]]
        layers[node] = max(lower, default=-1) + 1
    return layers


def shorten_name(node: str) -> str:
    """Return the last part of a dotted name."""
    return node.rpartition(".")[2]


def draw_figure(graph: Graph) -> str:
    """Return a graph as a Mermaid figure, with a box for each layer from the highest to the lowest."""
    dependencies, layers = {node: find_dependencies(graph, node) for node in graph}, compute_layers(graph)
    order = sorted(graph, key=lambda node: (-layers[node], node))
    lines = ["```mermaid", "flowchart TD"]
    for layer in sorted(set(layers.values()), reverse=True):
        names = "; ".join(shorten_name(node) for node in order if layers[node] == layer)
        lines += [f'  subgraph layer{layer}["layer {layer}"]', f"    {names}", "  end"]
    for node in order:
        for arrow, is_loaded_at_once in (("-->", True), ("-.->", False)):
            targets = [
                shorten_name(target)
                for target, at_once in sorted(graph[node].items())
                if at_once is is_loaded_at_once
                and not any(
                    target in dependencies[other] and other not in dependencies[target]
                    for other in graph[node].keys() - {target}
                )
            ]
            lines += [f"  {shorten_name(node)} {arrow} {' & '.join(targets)}"] if targets else []
    return "\n".join([*lines, "```"])


def format_table(graph: Graph, files: Mapping[str, Path]) -> str:
    """Return a graph as a table, from the highest layer to the lowest.

    The purpose of a node is the first line of its docstring.
    """
    layers = compute_layers(graph)
    lines = ["| layer | part | purpose | imports |", "| ---: | --- | --- | --- |"]
    for node in sorted(graph, key=lambda node: (-layers[node], node)):
        purpose = (ast.get_docstring(parse_file(files[node])) or "").partition("\n")[0]
        imports = ", ".join(f"`{shorten_name(target)}`" for target in sorted(graph[node]))
        lines.append(f"| {layers[node]} | `{shorten_name(node)}` | {purpose.replace('|', '/')} | {imports} |")
    return "\n".join(lines)


def render_page(text: str) -> str:
    """Return the text of the page with up-to-date figures and tables."""
    graph, files = build_module_graph(), find_modules()
    parts = [
        f"### Within `{package}`\n\n{draw_figure(inner)}\n\n{format_table(inner, files)}"
        for package in _DETAILED_PACKAGES
        for inner in [group_modules(graph, package)]
    ]
    packages = group_modules(graph)
    for name, content in (
        ("packages", draw_figure(packages)),
        ("parts", "\n\n".join([format_table(packages, files), *parts])),
    ):
        start_mark, end_mark = _BEGIN.format(name), _END.format(name)
        text_before, text_after = text.partition(start_mark)[0], text.partition(end_mark)[2]
        text = f"{text_before}{start_mark}\n\n{content}\n\n{end_mark}{text_after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text("utf-8")), "utf-8")

"""The structure of the code: packages and modules import downwards only, and names are unique."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import draw_structure
import pytest
from draw_structure import (
    PAGE,
    ROOT,
    Graph,
    build_module_graph,
    compute_layers,
    find_cycles,
    find_modules,
    group_modules,
    parse_file,
)

LAYERS = (
    {"memagent_graph"},
    {
        "langchain_memagent", "memagent_converters", "memagent_corpus", "memagent_mcp", "memagent_report",
        "memagent_serve", "memagent_evaluation",
    },
    {"memagent_training"},
    {"recipes"},
)  # fmt: skip
"""From the lowest to the highest; no package imports a higher one or one beside it."""


@pytest.fixture(scope="module")
def graph() -> Graph:
    return build_module_graph()


def test_figures_match_the_imports() -> None:
    text = PAGE.read_text("utf-8")
    assert draw_structure.render_page(text) == text, "run scripts/draw_structure.py"


def test_modules_have_no_import_cycle(graph: Graph) -> None:
    assert find_cycles(graph) == []


@pytest.mark.parametrize("within", ["", "memagent_graph", "memagent_training"])
def test_no_parts_import_each_other(graph: Graph, within: str) -> None:
    assert find_cycles(group_modules(graph, within)) == []


def test_nothing_is_imported_from_above_or_beside(graph: Graph) -> None:
    level = {package: number for number, packages in enumerate(LAYERS) for package in packages}
    upward = [
        (module, target)
        for module, imported in graph.items()
        for target in imported
        if (package := module.partition(".")[0]) != (target_package := target.partition(".")[0])
        and level[target_package] >= level[package]
    ]
    assert upward == []


def test_at_most_ten_packages() -> None:
    assert len(draw_structure.PACKAGES) <= 10


def test_no_two_modules_have_the_same_name() -> None:
    paths = defaultdict(list)
    for path in find_modules().values():
        if path.name != "__init__.py":
            paths[path.stem].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in paths.items() if len(places) > 1} == {}


def test_code_and_tests_stay_below_their_ceilings() -> None:
    """Before you add code, look for code to remove."""
    assert _count_lines(find_modules().values()) <= 62_000
    assert _count_lines((ROOT / "tests").rglob("*.py")) <= 43_000


_VAGUE_NAMES = frozenset({"each", "found", "asked", "told", "given"})


@pytest.mark.parametrize("folder", ["memagent_graph", "integrations", "training", "tests", "benchmarks", "scripts"])
def test_value_names_are_nouns(folder: str) -> None:
    """`each`, `found` and their like say what happened to a value, not what it is."""
    names = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(parse_file(path))
        if (isinstance(node, ast.arg) and node.arg in _VAGUE_NAMES)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _VAGUE_NAMES)
    ]
    assert names == []


def _count_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(set)
    for module, path in find_modules().items():
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(module)
    assert {name: sorted(at) for name, at in places.items() if len(at) > 1} == {}


def test_every_package_of_the_distribution_is_marked_as_typed() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]
    packages = [ROOT / package for package in targets["wheel"]["packages"]]
    assert {package.name for package in packages} == set(draw_structure.PACKAGES) - {"recipes"}
    assert [package.name for package in packages if not (package / "py.typed").is_file()] == []


def test_imports_in_functions_and_for_type_checkers_are_seen_and_told_apart() -> None:
    source = """
import a.b
from c import d
if TYPE_CHECKING:
    from e import f
def g():
    from h import i
"""
    imports = list(draw_structure._find_imports(ast.parse(source), at_once=True))
    assert imports == [("a.b", True), ("c.d", True), ("e.f", False), ("h.i", False)]


def test_the_nodes_of_a_cycle_share_a_layer_and_are_named_once() -> None:
    graph: Graph = {"a": {"b": True}, "b": {"c": True}, "c": {"b": False, "d": True}, "d": {}}
    assert find_cycles(graph) == [["b", "c"]]
    assert compute_layers(graph) == {"a": 2, "b": 1, "c": 1, "d": 0}

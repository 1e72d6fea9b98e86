"""Count the mutants of the code that the tests kill: `python scripts/count_mutants.py FOLDER`.

A mutant is a copy of the code with one small mistake: another comparison, operator, number or condition, a missing
call, or a function that returns None. `MUTANT_COUNT` of them are drawn at random, with a fixed seed, from
`MUTATED_FOLDERS`. FOLDER must not exist at the first call. It gets a copy of the code and tests, the coverage of each
test, and a line for each mutant, so that the same call continues a stopped count. `--workers 2` tests two mutants at a
time.

A mutant is tested by at most `MAX_TESTS` test functions that execute its line, first those that execute the fewest
other lines, and is killed if one of them fails. Tests that fail without a mutant are left out. This needs a POSIX
system and `pip install coverage pytest-cov`. Measuring the coverage takes twice as long as the tests, and a mutant some
seconds.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

MUTATED_FOLDERS: Final = (
    "memagent_graph/reading",
    "memagent_graph/run_log",
    "memagent_graph/policies",
    "training/memagent_training/algorithm",
)
COPIED_PATHS: Final = (
    *(
        "memagent_graph",
        "integrations",
        "training",
        "tests",
        "scripts",
        "examples",
        "benchmarks",
        "docs",
        "constraints",
    ),
    *("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "mkdocs.yml", "Dockerfile"),
)
MUTANT_COUNT: Final = 300
SEED: Final = 1
MAX_TESTS: Final = 40
_TIMEOUT_SECONDS: Final = 120
"""The time after which a mutant's tests count as failed."""
_COMPARISONS: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_OPERATORS: Final[dict[type[ast.operator], str]] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
}  # fmt: skip
_SLOW_IMPORTS: Final = (
    "torch", "transformers", "trl", "peft", "langgraph.graph", "langchain.agents", "langgraph.checkpoint.sqlite.aio",
    "aiohttp", "httpx2", "pydantic", "tiktoken", "tokenizers", "pyarrow.parquet", "scipy.stats", "hypothesis", "mcp",
    "starlette.testclient", "uvicorn", "typer", "safetensors.torch", "bm25s", "openai", "pytest_asyncio",
)  # fmt: skip
"""Packages that a worker imports once; the tests of each mutant then run in a forked process."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A replacement in a file: the bytes from `start` to `end`, which are `old`, become `new`."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str


def find_mutants(root: Path, file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file whose code is still valid Python."""
    source = file.read_bytes()
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))

    def find_span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return line_starts[node.lineno - 1] + node.col_offset, line_starts[node.end_lineno - 1] + node.end_col_offset

    def get_code(node: ast.expr | ast.stmt) -> str:
        start, end = find_span(node)
        return source[start:end].decode()

    tree = ast.parse(source)
    ignored = {id(inner) for node in ast.walk(tree) for part in _iter_ignored_parts(node) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        for target, new in _iter_replacements(node, get_code):
            start, end = find_span(target)
            try:
                compile(source[:start] + new.encode() + source[end:], file, "exec")
            except SyntaxError:
                continue
            yield Mutant(str(file.relative_to(root)), target.lineno, start, end, get_code(target), new)


def _iter_ignored_parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that are types or texts for people."""
    for name in ("annotation", "returns"):
        part = getattr(node, name, None)
        if part is not None:
            yield part
    if isinstance(node, ast.JoinedStr | ast.Raise):
        yield node


def _iter_replacements(node: ast.AST, get_code: object) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the possible mistakes at a node: the node to replace, and the code of its replacement."""
    assert callable(get_code)
    match node:
        case ast.Compare(ops=[operator], comparators=[right]) if type(operator) in _COMPARISONS:
            yield node, f"({get_code(node.left)}) {_COMPARISONS[type(operator)]} ({get_code(right)})"
        case ast.BoolOp():
            operator_name = " or " if isinstance(node.op, ast.And) else " and "
            yield node, f"({operator_name.join(f'({get_code(value)})' for value in node.values)})"
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"bool({get_code(node.operand)})"
        case ast.BinOp() if type(node.op) in _OPERATORS and not isinstance(node.left, ast.JoinedStr):
            yield node, f"(({get_code(node.left)}) {_OPERATORS[type(node.op)]} ({get_code(node.right)}))"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, f"({value} + 1)"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield node, "return None"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield node, "pass"
    if isinstance(node, ast.If | ast.IfExp):
        yield node.test, f"(False and ({get_code(node.test)}))"


class TestsByLine:
    """The test functions that execute a line, from the data that coverage wrote."""

    def __init__(self, folder: Path) -> None:
        log = (folder / "coverage.log").read_text("utf-8")
        self._failed_tests = set(re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*?\])?(?: - .*)?$", log, re.MULTILINE))
        self._tree = folder / "tree"
        self._data = sqlite3.connect(f"file:{folder / '.coverage'}?mode=ro", uri=True)
        self._context_sizes = dict(
            self._data.execute("SELECT context_id, SUM(LENGTH(numbits)) FROM line_bits GROUP BY context_id")
        )

    def choose(self, file: str, line: int) -> list[str]:
        """Return at most `MAX_TESTS` tests that execute a line, first those that execute the fewest lines."""
        numbits_to_nums = importlib.import_module("coverage.numbits").numbits_to_nums
        rows = self._data.execute(
            "SELECT context.id, context.context, numbits FROM line_bits JOIN context ON context.id = context_id "
            "JOIN file ON file.id = file_id WHERE file.path = ?",
            (str(self._tree / file),),
        )
        size_by_test: Counter[str] = Counter()
        for context, name, numbits in rows:
            test = name.partition("|")[0].partition("[")[0]
            if test and test not in self._failed_tests and line in numbits_to_nums(numbits):
                size_by_test[test] = max(size_by_test[test], self._context_sizes[context])
        return sorted(size_by_test, key=size_by_test.__getitem__)[:MAX_TESTS]


def use_tree(tree: Path) -> None:
    """Import the packages from a copy, here and in the programs that are started."""
    paths = [str(tree / part) for part in ("", "training", "integrations")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def measure_coverage(folder: Path) -> None:
    """Run all tests of the copy, and record the lines that each test executes."""
    tree = folder / "tree"
    command = [sys.executable, "-m", "pytest", "-rfE", "-p", "pytest_cov", "-n", "2", "--dist", "worksteal"]
    command += [*(f"--cov={folder_name}" for folder_name in MUTATED_FOLDERS), "--cov-context=test", "--cov-report="]
    environment = {**os.environ, "COVERAGE_FILE": str(folder / ".coverage")}
    with (folder / "coverage.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)


def run_tests(tree: Path, tests: list[str]) -> bool | None:
    """Return whether tests pass in a forked process; None if they cannot be run."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(tree)
        exit_code = 1
        try:
            with tempfile.TemporaryFile() as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                exit_code = int(importlib.import_module("pytest").main(["-x", "-p", "no:cacheprovider", *tests]))
        finally:
            os._exit(exit_code)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    exit_code = 1
    while time.monotonic() < deadline:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            exit_code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    else:
        if not ended_pid:
            os.waitpid(pid, 0)
    return None if exit_code in (4, 5) else exit_code == 0


def run_worker(folder: Path, mutants: list[Mutant], worker: int, workers: int) -> None:
    """Test all mutants of a worker, and write a line for each."""
    results_file = folder / f"results-{worker}.jsonl"
    result_lines = [line for path in folder.glob("results-*.jsonl") for line in path.read_text("utf-8").splitlines()]
    finished_indices = {json.loads(line)["index"] for line in result_lines}
    tests_by_line = TestsByLine(folder)
    tree = folder / f"tree-{worker}"
    if not tree.exists():
        shutil.copytree(folder / "tree", tree, symlinks=True)
    use_tree(tree)
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    for index, mutant in enumerate(mutants):
        if index % workers != worker or index in finished_indices:
            continue
        path, tests = tree / mutant.file, tests_by_line.choose(mutant.file, mutant.line)
        source = (folder / "tree" / mutant.file).read_bytes()
        path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
        os.utime(path, (index, index))  # otherwise Python may use the compiled file of another mutant
        passes = run_tests(tree, tests) if tests else True
        path.write_bytes(source)
        result = "not run" if passes is None else "survived" if passes else "killed"
        with results_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"index": index, "result": result, "tests": len(tests), **asdict(mutant)}) + "\n")


def main() -> None:
    """Count, and print the share of killed mutants and those that survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    root = Path(__file__).parents[1]
    if not folder.exists():
        for name in COPIED_PATHS:
            source = root / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            copy(source, folder / "tree" / name)
    tree = folder / "tree"
    use_tree(tree)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not (folder / ".coverage").exists():
        measure_coverage(folder)
    files = [file for mutated_folder in MUTATED_FOLDERS for file in sorted((tree / mutated_folder).rglob("*.py"))]
    mutants = [mutant for file in files for mutant in find_mutants(tree, file)]
    random.Random(SEED).shuffle(mutants)
    mutants = mutants[:MUTANT_COUNT]
    worker_pids = []
    for worker in range(arguments.workers):
        pid = os.fork()
        if pid == 0:
            run_worker(folder, mutants, worker, arguments.workers)
            os._exit(0)
        worker_pids.append(pid)
    for pid in worker_pids:
        os.waitpid(pid, 0)
    results = [
        json.loads(line) for path in folder.glob("results-*.jsonl") for line in path.read_text("utf-8").splitlines()
    ]
    for row in results:
        if row["result"] == "survived":
            change = f"{row['old'][:60]!r} -> {row['new'][:60]!r}"
            print(f"survived: {row['file']}:{row['line']}  {change}  ({row['tests']} tests)")
    counts = Counter(row["result"] for row in results)
    print(
        f"{counts['killed']} of {len(results)} killed: {', '.join(f'{n} {name}' for name, n in counts.most_common())}"
    )


if __name__ == "__main__":
    main()

"""Loading the user's own code by file or module and name."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from memagent_graph.errors import EvaluationError, MemAgentError
from memagent_graph.own_code import is_own_code_name, load_own_code

JUDGE_MODULE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Judge:
    strictness: int = 3

    @staticmethod
    def of_nobody():
        return Judge(0)
"""


def load_judge(text: str, **options: Any) -> Any:
    return load_own_code(text, **{"noun": "a judge", "error": EvaluationError, **options})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_judges.py").write_text(JUDGE_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_judges", raising=False)
    return tmp_path


@pytest.mark.parametrize("source", ["own_judges.py", "{folder}/own_judges.py", "~/own_judges.py", "own_judges"])
def test_code_is_loaded_by_file_or_from_a_module_of_the_current_folder(folder, source) -> None:
    source = source.format(folder=folder)
    assert load_judge(f"{source}:Judge")().strictness == 3
    assert load_judge(f"{source}:Judge.of_nobody")().strictness == 0


def test_a_file_is_run_again_only_if_it_changed_and_its_objects_can_be_pickled(folder) -> None:
    judge_class = load_judge("own_judges.py:Judge")
    assert load_judge(f"{folder}/own_judges.py:Judge") is judge_class
    assert pickle.loads(pickle.dumps(judge_class(7))) == judge_class(7)
    (folder / "own_judges.py").write_text(JUDGE_MODULE.replace("= 3", "= 44"))
    assert load_judge("own_judges.py:Judge")().strictness == 44
    assert pickle.loads(pickle.dumps(judge_class(7))) == judge_class(7), "objects of the old class can still be pickled"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("own_judges.py:Jugde", "own_judges.py has no 'Jugde'", "Did you mean own_judges.py:Judge?"),
        ("own_judges.py:Judge.of_nobdy", "has no 'of_nobdy'", "of_nobody"),
        ("own_judges.py:Qqqq", "has no 'Qqqq'", "Name a judge after the colon"),
        ("elsewhere.py:Judge", "there is no file elsewhere.py to load a judge from", "Check the path"),
        ("no_such_module:Judge", "there is no module 'no_such_module' to load a judge from", "path/to/file.py:Name"),
        ("Judge", "'Judge' does not name a judge", "module:Name"),
        ("own_judges.py:", "does not name a judge", "module:Name"),
    ],
)
def test_the_error_for_missing_code_has_a_hint(folder, text, message, hint) -> None:
    with pytest.raises(EvaluationError) as error:
        load_judge(text)
    assert message in error.value.message and hint in str(error.value.hint)


def test_the_callers_error_and_hint_are_used(folder) -> None:
    class JudgeError(MemAgentError):
        pass

    with pytest.raises(JudgeError, match="Name a class that judges"):
        load_judge("own_judges.py:Qqqq", error=JudgeError, hint="Name a class that judges.")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def judge(:", "SyntaxError"),
        ("import not_installed_here", "ModuleNotFoundError: No module named 'not_installed_here'"),
        ("def __getattr__(name): import not_installed_here", "ModuleNotFoundError: No module named"),
    ],
)
@pytest.mark.parametrize("source", ["own_broken.py", "own_broken"])
def test_a_failed_import_is_an_error_and_can_be_repeated_after_a_correction(
    folder, monkeypatch, code, message, source
) -> None:
    (folder / "own_broken.py").write_text(code)
    with pytest.raises(EvaluationError, match=r"own_broken.*:judge cannot be loaded") as error:
        load_judge(f"{source}:judge")
    assert message in error.value.message
    (folder / "own_broken.py").write_text("judge = 'corrected'")
    monkeypatch.delitem(sys.modules, "own_broken", raising=False)
    assert load_judge(f"{source}:judge") == "corrected"
    sys.modules.pop("own_broken", None)


def test_names_of_own_code_are_recognised() -> None:
    assert all(map(is_own_code_name, ["a.py:B", "a.b:C", "a.b:C.d", rf"C:{os.sep}a.py:B"]))
    assert not any(map(is_own_code_name, ["a", "a:", ":a", "a:1", "a.py", "exact match", "a:b c"]))

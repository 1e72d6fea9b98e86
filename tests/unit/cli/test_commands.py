"""Commands of this package and of other packages: how they are made and loaded, their help and their options."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import typer
from support.added_package import add_package
from support.command_line import memagent
from support.programs import parse_answers
from typer.testing import CliRunner

from memagent_graph.cli import app
from memagent_graph.cli.commands import add_command
from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.cli.options import OPTION_GROUPS
from memagent_graph.entry_points import COMMANDS, POLICIES
from memagent_graph.errors import PolicyError, make_install_command
from memagent_graph.reader import MemAgent
from memagent_graph.run_log import RunLog
from memagent_graph.settings import ReadSettings
from memagent_graph.storage.private_files import get_default_run_log_path

ROOT = Path(__file__).parents[3]
BUILT_IN = ["read", "resume", "corpus", "doctor", "demo", "show", "runs", "reward", "export", "import", "eval",
            "eval-report", "report", "serve", "mcp", "policy"]  # fmt: skip


@cache
def load_commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in (*BUILT_IN, "train")}


def list_options(name: str) -> set[str]:
    return {option for parameter in load_commands()[name].params for option in parameter.opts}


# Making commands


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    loud: Annotated[bool, typer.Option("--loud", help="Shout.")] = False
    times: Annotated[int, typer.Option(min=1)] = 1


@dataclass(frozen=True, kw_only=True)
class Greeting(SharedOptions):
    """Greet somebody."""

    greetings: ClassVar[list[Greeting]] = []
    name: Annotated[str, typer.Argument(help="Who.")]
    times: Annotated[int, typer.Option(min=1, help="How often.")] = 2

    def run(self) -> None:
        self.greetings.append(self)


def test_a_command_is_a_frozen_dataclass_that_is_run() -> None:
    typer_app = typer.Typer()
    add_command(typer_app, "greet", Greeting)
    invoke = CliRunner().invoke
    assert invoke(typer_app, ["Ada", "--loud"]).exit_code == 0
    assert Greeting.greetings == [Greeting(name="Ada", loud=True, times=2)]
    with pytest.raises(FrozenInstanceError):
        Greeting.greetings[0].times = 3  # type: ignore[misc]
    help_text = invoke(typer_app, ["--help"]).output
    assert "Greet somebody." in help_text and "How often." in help_text
    assert help_text.index("--times") < help_text.index("--loud"), "options of the command come before shared ones"
    assert invoke(typer_app, []).exit_code == ExitCode.USAGE
    assert invoke(typer_app, ["Ada", "--times", "0"]).exit_code == ExitCode.USAGE


# Finding commands


def test_help_names_every_command() -> None:
    text = memagent("--help").stdout
    assert sorted(re.findall(r"^│ ([a-z][a-z-]*) ", text, re.M)) == sorted([*BUILT_IN, "train", "rl"])
    assert "--install-completion" in text


def test_the_error_for_a_misspelt_command_suggests_the_right_one() -> None:
    assert "Did you mean 'resume'" in memagent("resum", code=ExitCode.USAGE).stderr


COMMAND_MODULE = """'Greet people by their names.'

from dataclasses import dataclass
from typing import Annotated
import typer

@dataclass(frozen=True)
class Greet:
    "Greet somebody."
    name: Annotated[str, typer.Argument()]

    def run(self):
        typer.echo(f"Hello {self.name}")

class Undecorated:
    count: "a number"

def __getattr__(name):
    if name == "Broken":
        raise RuntimeError("out of order")
    raise AttributeError(name)
"""


@pytest.fixture
def command_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    attributes = {"greet": "Greet", "broken": "Broken", "empty": "Undecorated", "absent": "absent", "read": "Broken"}
    entry_points = {name: f"commands_of_mine:{attribute}" for name, attribute in attributes.items()}
    folder = add_package(
        tmp_path / "site",
        "commands_of_mine",
        COMMAND_MODULE,
        {COMMANDS: {**entry_points, "gone": "no_such_module:Gone", "lacking": "no_such_module:Lacking [colours]"}},
    )
    monkeypatch.syspath_prepend(folder)
    return folder


def test_a_package_adds_a_command(command_package) -> None:
    assert "Greet people by their names." in memagent("--help").stdout
    assert "commands_of_mine" not in sys.modules, "the list of commands does not import it"
    assert "Greet somebody." in memagent("greet", "--help").stdout
    assert memagent("greet", "Ada").stdout == "Hello Ada\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "RuntimeError: out of order"),
        ("empty", "SyntaxError"),
        ("absent", "AttributeError"),
        ("gone", "No module named 'no_such_module'"),
    ],
)
def test_a_command_that_cannot_be_loaded_is_an_error_and_other_commands_work(command_package, name, message) -> None:
    for arguments in ([], ["some", "--option", "1"], ["--help"]):
        error_text = memagent(name, *arguments, code=ExitCode.SETTINGS).stderr
        assert f"the command '{name}' of the package commands_of_mine 1.2 fails" in error_text and message in error_text
        assert "what to do: Update or remove the package commands_of_mine 1.2" in error_text
    assert "read" in memagent("--help").stdout
    assert "--question" in memagent("read", "--help").stdout


@pytest.mark.parametrize(("command", "package"), [("serve", "prometheus_client"), ("mcp", "mcp")])
def test_the_error_of_a_command_without_its_extra_says_how_to_install_it(command, package, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith((f"memagent_{command}", f"{package}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert make_install_command(command) in memagent(command, code=ExitCode.SETTINGS).stderr


def test_the_error_names_the_extra_of_another_package(command_package) -> None:
    assert 'pip install "commands_of_mine[colours]"' in memagent("lacking", code=ExitCode.SETTINGS).stderr


def test_entry_points_are_not_listed_for_a_built_in_command(monkeypatch) -> None:
    def fail(group: str) -> Any:
        raise AssertionError(group)

    monkeypatch.setattr("memagent_graph.entry_points.list_entry_points", fail)
    memagent("read", "--help")


# The help


def test_a_long_help_has_groups_after_the_common_options() -> None:
    help_text = memagent("read", "--help").stdout
    assert all(f"─ {group} ─" in help_text for group in ("Policy and server", "Sampling", "Limits", "Output"))
    assert "─ Load ─" not in help_text, "only memagent serve has this group"
    titles = [f"─ {name} ─" for name in ("Arguments", "Options", *OPTION_GROUPS)]
    positions = [help_text.index(title) for title in titles if title in help_text]
    assert positions == sorted(positions)
    common_options = help_text[: help_text.index("─ Policy and server ─")]
    assert all(option in common_options for option in ("--question", "--model", "--base-url", "--strategy"))
    assert "--retries" not in common_options
    assert "─ Sampling ─" not in memagent("demo", "--help").stdout, "a short help needs no groups"


def test_every_option_in_a_group_is_an_option_of_some_command() -> None:
    parameters = {parameter.name for command in load_commands().values() for parameter in command.params}
    assert not {name for names in OPTION_GROUPS.values() for name in names} - parameters


def test_the_settings_explain_what_the_embedded_policy_can_do() -> None:
    for settings in (ReadSettings(model="embedded"), ReadSettings(policy="embedded")):
        assert "understands nothing else" in settings.resolve().policy_reason
    assert "understands" not in ReadSettings(model="m", base_url="http://server/v1").resolve().policy_reason


# Imports


def test_help_imports_no_heavy_package() -> None:
    program = (
        "import sys; from memagent_graph.cli import app; [app(standalone_mode=False, args=[*name, '--help']) for name "
        "in ([], ['read'], ['eval'], ['mcp'])]; heavy = {'torch', 'transformers', 'trl', 'langgraph', 'langchain_core',"
        " 'openai', 'tiktoken', 'httpx', 'mcp'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--help") >= 4


# Policies and strategies by name


def test_every_command_with_a_model_has_policy_and_strategy() -> None:
    model_commands = {name for name in BUILT_IN if "--model" in list_options(name)} - {"runs", "export"}
    assert model_commands == {"read", "resume", "corpus", "doctor", "demo", "eval", "report", "serve", "mcp"}
    assert all("--policy" in list_options(name) for name in model_commands)
    assert all("--strategy" in list_options(name) for name in model_commands)


class ReaderMadeError(PolicyError):
    """Raised when a reader would be made."""


@pytest.fixture
def all_settings(monkeypatch: pytest.MonkeyPatch) -> list[ReadSettings]:
    """The settings with which readers would be made."""
    all_settings: list[ReadSettings] = []

    def make_reader(self: MemAgent, *, settings: ReadSettings, **options: Any) -> None:
        all_settings.append(settings)
        raise ReaderMadeError("made")

    monkeypatch.setattr(MemAgent, "__init__", make_reader)
    return all_settings


READ_OPTIONS = {
    "temperature": 0.5, "top_p": 0.9, "seed": 3, "on_truncated": "retry", "on_empty": "accept", "on_refused": "retry",
    "on_invented": "keep_previous", "concurrency": 2, "retries": 1, "logprobs": True, "replace_undecodable": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "command_options"),
    [
        (["read", "{file}", "-q", "x"], READ_OPTIONS),
        (["eval", "niah_single_1", "--out", "{file}.out"], {}),
        (["mcp"], {}),
        (["doctor"], {}),
    ],
)
def test_reader_options_are_passed_to_the_settings(all_settings, tmp_path, command, command_options) -> None:
    file = tmp_path / "book.txt"
    file.write_text("text")
    options = command_options | {
        "policy": "mine", "model": "m", "base_url": "http://server/v1", "tokenizer": "t", "profile": "p",
        "strategy": "own.py:Gate", "layout": "section_first", "answer_format": "plain", "update_template": "u",
        "answer_template": "a", "empty_memory": "none", "context_window": 900, "question_tokens": 6,
        "memory_tokens": 7, "chunk_tokens": 5, "answer_tokens": 8, "boundary": "sentence", "timeout": 11.0,
    }  # fmt: skip
    arguments = []
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [value])
    memagent(*(argument.format(file=file) for argument in command), *arguments, code=ExitCode.POLICY)
    [settings] = all_settings
    assert {name: getattr(settings, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ReadSettings(policy="mine", strategy="gated", seed=5)),
        (["--strategy", "refine"], ReadSettings(policy="mine", strategy="refine", seed=5)),
        (["--model", "embedded"], ReadSettings(model="embedded", strategy="gated", seed=5)),
        (["--policy", "other"], ReadSettings(policy="other", strategy="gated", seed=5)),
        (["--base-url", "http://server/v1"], ReadSettings(base_url="http://server/v1", strategy="gated", seed=5)),
        (
            ["--timeout", 9, "--concurrency", 3, "--unsupported", "seed"],
            ReadSettings(policy="mine", strategy="gated", seed=5, timeout=9.0, concurrency=3, unsupported="seed"),
        ),
    ],
)
def test_a_run_is_resumed_with_the_logged_policy_and_strategy_by_default(all_settings, options, expected) -> None:
    log = RunLog(get_default_run_log_path())
    document = {"key": "sha256:" + "0" * 64, "name": "book.txt", "size": 10, "media_type": "text/plain"}
    settings = ReadSettings(policy="mine", strategy="gated", seed=5)
    log.wait(log.begin("r", "?", document, settings.for_log()))
    log.close()
    memagent("resume", "r", *options, code=ExitCode.POLICY)
    assert all_settings == [expected]


POLICY_MODULE = """
import sys
sys.path.insert(0, {tests!r})
from memagent_graph import ScriptedPolicy
from support.scripts import read_perfectly

def make(request):
    return ScriptedPolicy(read_perfectly)
"""


def test_a_run_with_a_policy_of_another_package_is_resumed_from_its_log(
    command_package, book, options, tmp_path, monkeypatch
) -> None:
    module_text = POLICY_MODULE.format(tests=str(ROOT / "tests"))
    entry_points = {POLICIES: {"perfect": "perfect_policy:make"}}
    site_folder = add_package(tmp_path / "more", "perfect_policy", module_text, entry_points)
    monkeypatch.syspath_prepend(site_folder)
    read_arguments = ("read", book, "-q", "What is the key of harbor?", *options[2:])
    memagent(*read_arguments, "--policy", "perfect", "--run-id", "r", "--max-chunks", 2, code=ExitCode.STOPPED)
    assert parse_answers(memagent("resume", "r").stdout) == ["4711"]
    error_text = memagent(*read_arguments, "--policy", "perfekt", code=ExitCode.POLICY).stderr
    assert "there is no policy 'perfekt'" in error_text and "Did you mean perfect?" in error_text

"""Output on the terminal: control characters of texts are not printed; statuses, errors and progress."""

import io

import rich.console

from memagent_graph import MemAgent
from memagent_graph.cli import console
from memagent_graph.cli.console import Console, ProgressDisplay
from memagent_graph.errors import MemAgentError, PolicyError
from memagent_graph.plain_text import make_one_line, make_printable
from memagent_graph.policies.scripted import ScriptedPolicy

CONTROLS = "\x1b[2J\x1b]0;title\x07\u202ecba\x9b31m"


def test_control_characters_of_answers_and_questions_are_not_printed(capsys, tmp_path) -> None:
    policy = ScriptedPolicy(lambda prompt: f"\\boxed{{blue{CONTROLS}[red]}}")
    with MemAgent(policy, tokenizer="embedded", store=tmp_path, run_log=False) as reader:
        results = reader.read("The sea.", questions=[f"What?{CONTROLS}", "Where?"])
    Console().print_results(results)
    output, error_output = capsys.readouterr()
    assert "blue" in output
    assert "[red]" in output
    assert "What?" in output
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(output + error_output)


def test_control_characters_of_errors_and_hints_are_not_printed(capsys) -> None:
    console = Console()
    console.resume_command = f"memagent resume {CONTROLS}"
    console.report_error(PolicyError(f"the server said {CONTROLS}", hint=f"Try {CONTROLS}", run_id="r"))
    output, error_output = capsys.readouterr()
    assert "the server said" in error_output
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(output + error_output)


def test_line_breaks_and_tabs_are_kept_in_texts_but_not_in_lines() -> None:
    assert make_printable("א\u200f\r\nb\tc\x1b\ufffe\uffff") == "א\u200f\nb\tc\ufffd\ufffd\ufffd"
    assert make_one_line("\u200ca\nb\tc\x1b", 5) == "\u200ca b…"


def test_a_status_is_shown_only_on_a_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Console().show_status("loading the policy"):
        pass
    assert "loading the policy" in capsys.readouterr().err
    with Console(quiet=True).show_status("loading the policy"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("FORCE_COLOR")
    with Console().show_status("loading the policy"):
        pass
    assert capsys.readouterr().err == ""


def test_errors_name_settings_as_in_python() -> None:
    error = MemAgentError(
        "it does not fit", hint="Lower --chunk-tokens (--context-window), or `memagent x --out y`, or --no-log."
    )
    assert (
        str(error) == "it does not fit. Lower chunk_tokens (context_window), or `memagent x --out y`, or run_log=False."
    )


def test_progress_without_a_terminal_is_lines_or_nothing_if_quiet(monkeypatch) -> None:
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", 0.0)
    for is_quiet, expected_lines in ((False, "reading: 1,000, 2 failed [sic]\nreading: 1,001 of 3,000\n"), (True, "")):
        output = io.StringIO()
        with ProgressDisplay("reading", quiet=is_quiet, console=rich.console.Console(file=output)) as display:
            display.update(1_000, "2 failed [sic]")
            display.update(1_001, total=3_000)
        assert output.getvalue() == expected_lines

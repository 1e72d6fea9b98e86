"""What a document, a policy or a server wrote reaches the terminal as text, and steers nothing there."""

import io

import rich.console

from memagent_graph import MemAgent
from memagent_graph.cli import progress
from memagent_graph.cli.console import Console
from memagent_graph.cli.progress import ProgressDisplay
from memagent_graph.errors import MemAgentError, PolicyError
from memagent_graph.plain_text import make_one_line, make_printable
from memagent_graph.policies.scripted import ScriptedPolicy

STEERING = "\x1b[2J\x1b]0;title\x07\u202ecba\x9b31m"


def test_answers_and_questions_cannot_steer_the_terminal(capsys, tmp_path) -> None:
    policy = ScriptedPolicy(lambda prompt: f"\\boxed{{blue{STEERING}[red]}}")
    with MemAgent(policy, tokenizer="embedded", store=tmp_path, run_log=False) as reader:
        results = reader.read("The sea.", questions=[f"What?{STEERING}", "Where?"])
    Console().print_results(results)
    out, err = capsys.readouterr()
    assert "blue" in out
    assert "[red]" in out
    assert "What?" in out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out + err)


def test_errors_and_hints_cannot_steer_the_terminal(capsys) -> None:
    console = Console()
    console.resume_command = f"memagent resume {STEERING}"
    console.report_error(PolicyError(f"the server said {STEERING}", hint=f"Try {STEERING}", run_id="r"), 4)
    out, err = capsys.readouterr()
    assert "the server said" in err
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out + err)


def test_lines_and_tabs_stay_in_texts_and_go_from_lines() -> None:
    assert make_printable("a\r\nb\tc\x1b") == "a\nb\tc\ufffd"
    assert make_one_line("a\nb\tc\x1b", 4) == "a b…"


def test_work_is_shown_on_a_terminal_alone(monkeypatch, capsys) -> None:
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


def test_errors_name_the_readers_settings_as_python_does() -> None:
    error = MemAgentError(
        "it does not fit", hint="Lower --chunk-tokens (--context-window), or `memagent x --out y`, or --no-log."
    )
    assert (
        str(error) == "it does not fit. Lower chunk_tokens (context_window), or `memagent x --out y`, or run_log=False."
    )


def test_without_a_terminal_progress_is_lines_and_nothing_where_it_is_to_be_quiet(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    for quiet, lines in ((False, "reading: 1,000, 2 failed [sic]\nreading: 1,001 of 3,000\n"), (True, "")):
        output = io.StringIO()
        with ProgressDisplay("reading", quiet=quiet, console=rich.console.Console(file=output)) as display:
            display.update(1_000, "2 failed [sic]")
            display.update(1_001, total=3_000)
        assert output.getvalue() == lines

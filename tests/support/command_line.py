"""The command line inside the test's process, which is faster than the processes of `programs`."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from memagent_graph.cli import app


def memagent(*arguments: object, code: int = 0) -> Result:
    """Run `memagent` with these arguments, and check its exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), (result.output, result.exception)
    assert "Traceback" not in result.output
    assert result.exit_code == code, result.output
    return result

"""`memagent doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import typer

from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.cli.options import JSONOption, ReaderOptions, print_json

if TYPE_CHECKING:
    from memagent_graph.cli.policy_checks import PolicyCheck

_STATUS_COLORS: Final = {"ok": "green", "note": "yellow", "failed": "red"}


@dataclass(frozen=True, kw_only=True)
class Doctor(ReaderOptions):
    """Check a policy and its server: the model, the context window, the budget, token ids and the tokenizer."""

    examples: ClassVar = (
        "memagent doctor",
        "memagent doctor --base-url http://localhost:8000/v1",
    )
    timeout: float = 60.0
    retries: int = 0
    as_json: JSONOption = False

    def run(self) -> None:
        """Check the policy, and print each result as soon as it is known."""
        import asyncio

        from memagent_graph.cli.console import Console, escape
        from memagent_graph.cli.policy_checks import CheckStatus, check_policy
        from memagent_graph.reader import MemAgent

        console = Console(as_json=self.as_json)

        async def collect_checks() -> list[PolicyCheck]:
            with console.show_status("loading the policy"):
                reader = MemAgent(settings=self.make_settings(), run_log=False)
            async with reader:
                checks = []
                async for check in check_policy(reader):
                    checks.append(check)
                    if not self.as_json:
                        line = f"[bold]{check.subject}[/]: {escape(check.detail)}"
                        console.out.print(f"[{_STATUS_COLORS[check.status]}]{check.status:>6}[/]  {line}")
                        if check.remedy and check.status != "ok":
                            console.out.print(f"        {escape(check.remedy)}")
                return checks

        checks = asyncio.run(collect_checks())
        if self.as_json:
            print_json({"checks": [asdict(check) for check in checks]})
        if any(check.status is CheckStatus.FAILED for check in checks):
            raise typer.Exit(ExitCode.POLICY)

"""Read a believable document with the policy that is installed, and show how its memory grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from memagent_graph.cli.exit_codes import report_failures
from memagent_graph.cli.options import JSONOption
from memagent_graph.cli.output import print_json
from memagent_graph.events import UpdateRule
from memagent_graph.plain_text import in_one_line, quantity

if TYPE_CHECKING:
    from memagent_evaluation.demo_document import DemoDocument
    from memagent_graph.cli.console import Console
    from memagent_graph.reader import MemAgent
    from memagent_graph.reading.state import ReaderContext
    from memagent_graph.results import ReadResult
    from memagent_graph.trace import MemoryUpdate


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Read the minutes of a harbour committee from beginning to end, and answer four questions about them.

    The minutes are made up, and another seed makes others. Each change of the memory is shown, and each answer with
    the sentences it was read in. The embedded policy finds numbers alone: its document is Python's language reference
    with numbers hidden in it.
    """

    examples: ClassVar = (
        "memagent demo",
        "memagent demo --tokens 40000 --seed 1",
        "memagent demo --strategy overwrite",
    )
    tokens: Annotated[int, typer.Option(min=5_000, help="Smallest length of the document, in tokens.")] = 20_000
    seed: Annotated[int, typer.Option(help="Seed of the document and its questions.")] = 0
    policy: str | None = None
    model: str | None = None
    base_url: Annotated[
        str | None, typer.Option(help="A server's API; without it, the model runs in this process.")
    ] = None
    profile: str | None = None
    strategy: str | None = None
    on_invented: UpdateRule | None = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        import asyncio  # noqa: PLC0415
        import time  # noqa: PLC0415
        from tempfile import TemporaryDirectory  # noqa: PLC0415

        from memagent_evaluation.demo_document import make_demo_document, make_number_document  # noqa: PLC0415
        from memagent_graph.cli.console import Console  # noqa: PLC0415
        from memagent_graph.documents import Document  # noqa: PLC0415
        from memagent_graph.reader import MemAgent  # noqa: PLC0415
        from memagent_graph.settings import ReadSettings  # noqa: PLC0415

        console = Console(as_json=self.as_json)

        async def run(settings: ReadSettings, folder: Path) -> None:
            with console.show_status("loading the policy"):
                loaded = MemAgent(settings=settings, store=folder, run_log=False)
            async with loaded as reader:
                context = await reader.aprepare()
                count = context.tokenizer.count
                if "embedded" in {settings.policy_name, settings.profile}:
                    document = make_number_document(context.tokenizer, tokens=self.tokens, seed=self.seed)
                else:
                    document = make_demo_document(self.tokens, self.seed, count)
                reference = reader.store.add(Document.from_text(document.text, name="demo"))
                if not self.as_json:
                    console.out.print(
                        f"A document of {count(document.text):,} tokens, {_describe_reading(reader, context)}:\n\n"
                        f"[dim]{_take_beginning(document.text)}[/]\n"
                    )
                begin = time.monotonic()
                results = await console.follow_questions(
                    lambda show: reader.aread(
                        reference,
                        questions=[question.question for question in document.questions],
                        on_update=lambda question, update: _show_update(question, update, console, show),
                    )
                )
                seconds = time.monotonic() - begin
                if self.as_json:
                    _print_as_json(document, results, seconds)
                else:
                    _print(document, results, seconds, console, nothing=context.prompts.empty_memory)

        with report_failures(console), TemporaryDirectory() as folder:
            settings = ReadSettings(
                policy=self.policy,
                model=self.model,
                base_url=self.base_url,
                profile=self.profile,
                strategy=self.strategy,
                on_invented=self.on_invented,
            ).resolve()
            console.print_policy(settings.policy_reason)
            asyncio.run(run(settings, Path(folder)))


def _take_beginning(text: str) -> str:
    """Return the first lines of the document."""
    from memagent_graph.cli.console import escape  # noqa: PLC0415

    return "\n".join(escape(in_one_line(line, 100)) for line in text.split("\n")[:8]) + "\n..."


def _show_update(
    question: str, update: MemoryUpdate, console: Console, show: Callable[[str, MemoryUpdate], None]
) -> None:
    """Print the memory for a question when it changes."""
    from memagent_graph.cli.console import escape  # noqa: PLC0415

    show(question, update)
    if update.changed and not console.as_json:
        console.out.print(
            f"[dim]chunk {update.chunk_number}[/]  {escape(question)}\n"
            f"          {escape(in_one_line(update.memory, 300))}"
        )


def _describe_reading(reader: MemAgent, context: ReaderContext) -> str:
    """How the document is read, for the sentence about it."""
    from memagent_graph.strategies.excerpts import Excerpt  # noqa: PLC0415

    if isinstance(reader.strategy, Excerpt):
        return f"of which {context.policy.name} is shown parts ({reader.strategy.name})"
    return f"read by {context.policy.name} {context.budget.chunk_tokens} tokens at a time"


def _print_as_json(document: DemoDocument, results: Sequence[ReadResult], seconds: float) -> None:
    values = [
        {
            **result.to_dict(),
            "expected": question.answer,
            "depth": question.depth,
            "right": question.is_right(result.answer),
        }
        for result, question in zip(results, document.questions, strict=True)
    ]
    print_json({"results": values, "seconds": seconds})


def _print(
    document: DemoDocument, results: Sequence[ReadResult], seconds: float, console: Console, *, nothing: str
) -> None:
    """Print questions, answers, timelines, sources and cost; `nothing` is the empty memory."""
    from rich.table import Table  # noqa: PLC0415

    from memagent_graph.cli.console import escape  # noqa: PLC0415

    right = 0
    for result, question in zip(results, document.questions, strict=True):
        ok = question.is_right(result.answer)
        right += ok
        table = Table.grid(padding=(0, 2))
        table.add_row("[bold]question[/]", escape(question.question))
        table.add_row("stated", f"{escape(question.sentence)} [dim](at {question.depth:.0%})[/]")
        verdict = "[green]right[/]" if ok else f"[red]wrong, it is {escape(question.answer)}[/]"
        table.add_row("answer", f"{escape(str(result.answer))}  {verdict}")
        if result.chunks_read:
            table.add_row("memory", escape(_draw_timeline(result.updates, result.chunks_read)))
        else:
            table.add_row("shown", f"{result.trace.tokens_shown:,} tokens in {quantity(result.usage.turns, 'turn')}")
        for source in result.evidence[:2] if result.memory != nothing else ():
            quote = " ".join(source.quote.split())
            place = f"chunk {source.chunk_index + 1}" if result.chunks_read else f"character {source.start_char:,}"
            table.add_row("source", f"{escape(quote)} [dim]({place})[/]")
        console.out.print()
        console.out.print(table)
    prompt, completion, turns = (
        sum(getattr(result.usage, name) for result in results)
        for name in ("prompt_tokens", "completion_tokens", "turns")
    )
    console.out.print(
        f"\n{right} of {len(results)} right. {prompt:,} tokens in and {completion:,} out, in {turns} turns and "
        f"{seconds:.1f} s."
    )


def _draw_timeline(updates: Sequence[MemoryUpdate], chunks: int, width: int = 48) -> str:
    """Return the memory over the document: a dot where it is unchanged, a bar where it changed; then these chunks."""
    changes = [
        update.chunk_index
        for update in updates
        if update.changed and update.chunk_index is not None and not update.branch
    ]
    cells = ["·"] * width
    for chunk in changes:
        cells[min(width - 1, chunk * width // max(chunks, 1))] = "█"
    return f"{''.join(cells)}  changed in {', '.join(f'chunk {chunk + 1}' for chunk in changes[-8:]) or 'no chunk'}"

"""Read a realistic document with the installed policy, and show how its memory grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from memagent_graph.cli.options import JSONOption, print_json
from memagent_graph.events import UpdateRule
from memagent_graph.plain_text import format_count, make_one_line

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

    The minutes are generated; another seed makes other ones. Every change of the memory is shown, and every answer
    with the sentences that support it. The embedded policy finds only numbers: its document is Python's language
    reference with numbers hidden in it.
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
        from memagent_graph.cli.console import Console, escape  # noqa: PLC0415
        from memagent_graph.documents import Document  # noqa: PLC0415
        from memagent_graph.reader import MemAgent  # noqa: PLC0415
        from memagent_graph.settings import ReadSettings  # noqa: PLC0415

        console = Console(as_json=self.as_json)

        async def run_demo(settings: ReadSettings, folder: Path) -> None:
            with console.show_status("loading the policy"):
                agent = MemAgent(settings=settings, store=folder, run_log=False)
            async with agent as reader:
                context = await reader.aprepare()
                count_tokens = context.tokenizer.count
                if "embedded" in {settings.policy_name, settings.profile}:
                    document = make_number_document(context.tokenizer, tokens=self.tokens, seed=self.seed)
                else:
                    document = make_demo_document(self.tokens, self.seed, count_tokens)
                reference = reader.store.add(Document.from_text(document.text, name="demo"))
                if not self.as_json:
                    beginning = "\n".join(make_one_line(line, 100) for line in document.text.split("\n")[:8])
                    console.out.print(
                        f"A document of {count_tokens(document.text):,} tokens, {_describe_reading(reader, context)}:"
                        f"\n\n[dim]{escape(beginning)}\n...[/]\n"
                    )
                start_time = time.monotonic()
                results = await console.follow_questions(
                    lambda show: reader.aread(
                        reference,
                        questions=[question.question for question in document.questions],
                        on_update=lambda question, update: _show_update(question, update, console, show),
                    )
                )
                seconds = time.monotonic() - start_time
                if self.as_json:
                    _print_as_json(document, results, seconds)
                else:
                    _print_results(document, results, seconds, console, empty_memory=context.prompts.empty_memory)

        with TemporaryDirectory() as folder:
            settings = ReadSettings(
                policy=self.policy,
                model=self.model,
                base_url=self.base_url,
                profile=self.profile,
                strategy=self.strategy,
                on_invented=self.on_invented,
            ).resolve()
            console.print_note(settings.policy_reason)
            asyncio.run(run_demo(settings, Path(folder)))


def _show_update(
    question: str, update: MemoryUpdate, console: Console, show: Callable[[str, MemoryUpdate], None]
) -> None:
    """Print the memory for a question when it changes."""
    from memagent_graph.cli.console import escape  # noqa: PLC0415

    show(question, update)
    if update.changed and not console.as_json:
        console.out.print(
            f"[dim]chunk {update.chunk_number}[/]  {escape(question)}\n"
            f"          {escape(make_one_line(update.memory, 300))}"
        )


def _describe_reading(reader: MemAgent, context: ReaderContext) -> str:
    """Return how the document is read, for the line about its length."""
    from memagent_graph.strategies.excerpts import Excerpt  # noqa: PLC0415

    if isinstance(reader.strategy, Excerpt):
        return f"of which {context.policy.name} is shown parts ({reader.strategy.name})"
    return f"read by {context.policy.name} {context.budget.chunk_tokens} tokens at a time"


def _print_as_json(document: DemoDocument, results: Sequence[ReadResult], seconds: float) -> None:
    rows = [
        {
            **result.to_dict(),
            "expected": question.answer,
            "depth": question.depth,
            "right": question.is_right(result.answer),
        }
        for result, question in zip(results, document.questions, strict=True)
    ]
    print_json({"results": rows, "seconds": seconds})


def _print_results(
    document: DemoDocument, results: Sequence[ReadResult], seconds: float, console: Console, *, empty_memory: str
) -> None:
    """Print questions, answers, timelines, sources and costs; an empty memory has no sources."""
    from rich.table import Table  # noqa: PLC0415

    from memagent_graph.cli.console import escape  # noqa: PLC0415

    right_count = 0
    for result, question in zip(results, document.questions, strict=True):
        is_right = question.is_right(result.answer)
        right_count += is_right
        table = Table.grid(padding=(0, 2))
        table.add_row("[bold]question[/]", escape(question.question))
        table.add_row("stated", f"{escape(question.sentence)} [dim](at {question.depth:.0%})[/]")
        verdict = "[green]right[/]" if is_right else f"[red]wrong, it is {escape(question.answer)}[/]"
        table.add_row("answer", f"{escape(str(result.answer))}  {verdict}")
        if result.chunks_read:
            table.add_row("memory", escape(_draw_timeline(result.updates, result.chunks_read)))
        else:
            table.add_row(
                "shown", f"{result.trace.tokens_shown:,} tokens in {format_count(result.usage.turns, 'turn')}"
            )
        for source in result.evidence[:2] if result.memory != empty_memory else ():
            quote = " ".join(source.quote.split())
            location = f"chunk {source.chunk_index + 1}" if result.chunks_read else f"character {source.start_char:,}"
            table.add_row("source", f"{escape(quote)} [dim]({location})[/]")
        console.out.print()
        console.out.print(table)
    prompt_tokens, completion_tokens, turns = (
        sum(getattr(result.usage, name) for result in results)
        for name in ("prompt_tokens", "completion_tokens", "turns")
    )
    console.out.print(
        f"\n{right_count} of {len(results)} right. {prompt_tokens:,} tokens in and {completion_tokens:,} out, in "
        f"{turns} turns and {seconds:.1f} s."
    )


def _draw_timeline(updates: Sequence[MemoryUpdate], chunk_count: int, width: int = 48) -> str:
    """Return a line over the document's chunks, with a bar where the memory changed, and the last of these chunks."""
    changed_chunks = [
        update.chunk_index
        for update in updates
        if update.changed and update.chunk_index is not None and not update.branch
    ]
    cells = ["·"] * width
    for chunk in changed_chunks:
        cells[min(width - 1, chunk * width // max(chunk_count, 1))] = "█"
    return (
        f"{''.join(cells)}  changed in {', '.join(f'chunk {chunk + 1}' for chunk in changed_chunks[-8:]) or 'no chunk'}"
    )

"""Map-reduce: what each chunk contributes, asked side by side, and one answer from all of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Final, TypeVar

from memagent_graph.documents.chunking import Chunk
from memagent_graph.errors import BudgetError
from memagent_graph.evaluation.baselines.asking import Asking
from memagent_graph.evaluation.baselines.baseline import Baseline
from memagent_graph.evaluation.baselines.dialogues import Dialogue
from memagent_graph.evaluation.baselines.excerpts import fitting_chunks, room
from memagent_graph.evaluation.systems import Attempt

_LIST_TOKENS: Final = 4
"""What a finding's place in a list takes."""

T = TypeVar("T")
R = TypeVar("R")


class MapReduce(Baseline):
    """Every chunk is read without knowing of the others, so a document takes hardly longer than its slowest chunks.

    Chunks are as long as the reader's where the window has room for that. Contributions that do not fit one call are
    merged in groups, in the document's order, until they do.
    """

    name: Final = "map_reduce"

    async def answer(self, asking: Asking, dialogue: Dialogue) -> Attempt:
        """Ask once per chunk, then for the answer."""
        space = room(dialogue.contribution_needs, self._settings.context_window)
        longest = _longest_finding(dialogue)
        tokens = number = 0

        async def counted() -> AsyncIterator[Chunk]:
            nonlocal tokens, number
            async for chunk in fitting_chunks(asking, dialogue.prompts, min(space, asking.budget.chunk_tokens)):
                tokens, number = tokens + chunk.tokens, number + 1
                yield chunk

        async def contribution(chunk: Chunk) -> str | None:
            return await dialogue.contribution(chunk.text, chunk.index)

        found = await self._side_by_side(counted(), contribution)
        findings, levels = await self._merged(asking, dialogue, [each for each in found if each is not None], longest)
        outcome = await dialogue.conclude(findings)
        details = f"{number:,} chunks", f"merged {levels} times" if levels else ""
        return asking.attempt(outcome.reply, tokens, *details, chunks=number, memory=outcome.memory)

    async def _merged(
        self, asking: Asking, dialogue: Dialogue, findings: Sequence[str], longest: int
    ) -> tuple[list[str], int]:
        """Findings that one call can conclude from, and how often all were merged for that.

        Each is cut to `longest` tokens, so any two can be merged: every round leaves at most half, rounded up.
        """
        for rounds in count():
            findings = [asking.first_tokens(dialogue.prompts.neutralise(each), longest) for each in findings]
            sizes = [min(longest, asking.tokenizer.count(each)) + _LIST_TOKENS for each in findings]
            if sum(sizes) <= dialogue.conclude_room:
                return findings, rounds
            groups = _groups(findings, sizes, dialogue.merge_room)
            merged = await self._side_by_side(_each(groups), dialogue.merge)
            findings = [each for each in merged if each is not None]
        raise AssertionError("unreachable")

    async def _side_by_side(self, items: AsyncIterator[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
        """What `work` makes of each item, in order, with a bounded number at work. The first failure ends all."""
        results: dict[int, R] = {}
        taking, numbers = asyncio.Lock(), count()

        async def worker() -> None:
            while True:
                async with taking:
                    try:
                        item, number = await anext(items), next(numbers)
                    except StopAsyncIteration:
                        return
                results[number] = await work(item)

        workers = [asyncio.create_task(worker()) for _ in range(self._settings.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for each in workers:
                each.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [results[number] for number in sorted(results)]


def _longest_finding(dialogue: Dialogue) -> int:
    """The tokens that a finding may have, so that any two can be merged, and one concluded from."""
    longest = min(dialogue.conclude_room, dialogue.merge_room // 2) - _LIST_TOKENS
    if longest < 1:
        raise BudgetError(
            f"the window has no room to combine what two chunks contribute ({max(0, dialogue.merge_room):,} tokens)",
            hint="Serve the model with a larger window, or lower the answer's tokens.",
        )
    return longest


def _groups(findings: Sequence[str], sizes: Sequence[int], room: int) -> list[list[str]]:
    """Neighbours together, as many as there is room for."""
    groups: list[list[str]] = []
    filled = room
    for finding, size in zip(findings, sizes, strict=True):
        if filled + size > room:
            groups.append([])
            filled = 0
        groups[-1].append(finding)
        filled += size
    return groups


async def _each(items: Sequence[T]) -> AsyncIterator[T]:
    for item in items:
        yield item

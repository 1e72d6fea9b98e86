"""Measure the cost of the run log: chunks per second with and without a log, and bytes per token on disk.

With 128 documents in flight, a local server answers every request after 250 ms with 800 token ids and log-probs.
Readers with and without a log alternate and get the same replies, so that their ratio is the cost of the log alone.
Bytes per token are measured on a file with real token ids of English, log-probs with all their digits, and texts.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from benchmarks.chunking import load_large_tokenizer
from benchmarks.figures import Figure
from benchmarks.slow_server import run_slow_server
from benchmarks.text import generate_documents, make_prose
from benchmarks.throughput import CHUNK_TOKENS, CHUNKS, DELAY_MS, DOCUMENTS, make_pass, make_reader, take_turns
from memagent_graph import Document, DocumentRef, DocumentStore, RunLog
from memagent_graph.run_log import Conversation, Outcome
from memagent_graph.trace import Span, Writes

_CONVERSATION_COUNT = 400
_PROMPT_TOKENS = 1500


async def _compare_readers(url: str, folder: Path) -> tuple[float, float, float]:
    """Compare readers with and without a log.

    Returns:
        the ratio of their rates, with to without, and the processor milliseconds per chunk without and with a log.
    """
    store = DocumentStore(folder / "documents")
    references = [store.add(Document.from_text(text)) for text in generate_documents(CHUNK_TOKENS * CHUNKS, DOCUMENTS)]
    log = RunLog(folder / "runs.sqlite")
    plain_reader = make_reader(url, store, logprobs=True)
    logging_reader = make_reader(url, store, logprobs=True, run_log=log)
    await make_pass(plain_reader, references)()
    comparison = await take_turns(make_pass(plain_reader, references), make_pass(logging_reader, references))
    for reader in (logging_reader, plain_reader):
        await reader.aclose()
    log.close()
    return comparison


def _measure_bytes_per_token(completion_tokens: int) -> float:
    """Return the bytes per token of a log of conversations with `_PROMPT_TOKENS` prompt tokens.

    Args:
        completion_tokens: the number of completion tokens of each conversation.
    """
    tokenizer = load_large_tokenizer()
    text = make_prose(2_000_000)
    ids = tokenizer._backend.encode(text[:4_000_000], add_special_tokens=False).ids
    rng = random.Random(1)
    reference = DocumentRef(key="sha256:" + "0" * 64, name="prose.txt", media_type="text/plain", size=len(text))
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(Path(folder) / "runs.sqlite")
        log.begin("run", "What is said of it?", reference, {})
        pending_rows = []
        for position in range(_CONVERSATION_COUNT):
            start = rng.randrange(len(ids) - _PROMPT_TOKENS - completion_tokens)
            prompt = ids[start : start + _PROMPT_TOKENS]
            completion = ids[start + _PROMPT_TOKENS : start + _PROMPT_TOKENS + completion_tokens]
            pending_rows.append(
                log.record(
                    Conversation(
                        run_id="run",
                        position=position,
                        node="update_memory",
                        branch="",
                        role="update",
                        slot=position,
                        writes=Writes.MEMORY,
                        call_id=str(position),
                        attempt=0,
                        outcome=Outcome.ACCEPTED,
                        began=0.0,
                        seconds=0.25,
                        policy="policy",
                        policy_version="1",
                        tokenizer=tokenizer.fingerprint,
                        template="template",
                        sampling={},
                        prompt_tokens=len(prompt),
                        completion_tokens=len(completion),
                        cached_tokens=0,
                        finish_reason="stop",
                        text=text[: 4 * len(completion)],
                        prompt_token_ids=prompt,
                        token_ids=completion,
                        logprobs=[-rng.expovariate(2.0) for _ in completion],
                        parents=(str(position - 1),) if position else (),
                        reads=(Span(position, 0, 4000, 0, 4000, 1000),),
                    )
                )
            )
        for future in pending_rows:
            log.wait(future)
        log.close()
        return log.size_bytes / (_CONVERSATION_COUNT * (_PROMPT_TOKENS + completion_tokens))


def measure() -> list[Figure]:
    """Return the figures on the log's time and disk space."""
    with run_slow_server(DELAY_MS, 800) as url, tempfile.TemporaryDirectory() as folder:
        ratio, plain_ms, logged_ms = asyncio.run(_compare_readers(url, Path(folder)))
    short_reply_bytes, long_reply_bytes = _measure_bytes_per_token(100), _measure_bytes_per_token(800)
    return [
        Figure.at_least(f"chunks/s, logged : not logged, {DOCUMENTS} documents, 800 log-probs", ratio, "x", 0.9),
        Figure("processor time per chunk, logged", logged_ms, "ms"),
        Figure("processor time per chunk, not logged", plain_ms, "ms"),
        Figure.at_most(f"run log, {_PROMPT_TOKENS} tokens in and 100 out, per token", short_reply_bytes, "bytes", 4),
        Figure.at_most(f"run log, {_PROMPT_TOKENS} tokens in and 800 out, per token", long_reply_bytes, "bytes", 4),
    ]

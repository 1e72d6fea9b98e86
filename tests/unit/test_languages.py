"""A fact in each of many languages: found, kept under `keep_previous`, its evidence located, through every door."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.corpus_world import rows_in
from support.fake_server import FakeServer
from support.languages import FACTS, document, reply_to
from support.programs import run_program
from support.serving import served

from memagent_graph import Budget, MemAgent, ScriptedPolicy
from memagent_graph.events import EventKind, count_events
from memagent_graph.retriever import cut_passages, rank_by_words

BUDGET = Budget(chunk_tokens=900, memory_tokens=200, question_tokens=150, answer_tokens=60, context_window=4000)


@pytest.mark.parametrize("language", FACTS)
def test_a_fact_is_found_kept_and_located(language: str, make_reader: Callable[..., MemAgent]) -> None:
    fact, text = FACTS[language], document(FACTS[language])
    reader = make_reader(ScriptedPolicy(reply_to), on_invented="keep_previous", boundary="sentence", budget=BUDGET)
    result = reader.read(text, fact.question)
    assert (result.answer, EventKind.INVENTED in count_events(result.events)) == (fact.answer, False)
    where = text.index(fact.sentence)
    (quote, *_) = result.evidence
    assert quote.quote == text[quote.start_char : quote.end_char]
    assert where <= quote.start_char < quote.end_char <= where + len(fact.sentence)
    parts = [text[start:end] for start, end in cut_passages(text, 200)]
    assert fact.sentence.strip() in parts[rank_by_words(parts, fact.question)[0]]


@pytest.mark.parametrize("language", FACTS)
def test_what_the_text_does_not_say_is_not_kept(language: str, make_reader: Callable[..., MemAgent]) -> None:
    others = [other.memory for name, other in FACTS.items() if other.script != FACTS[language].script]
    reader = make_reader(
        ScriptedPolicy(lambda prompt: others[len(prompt) % len(others)]), on_invented="keep_previous", budget=BUDGET
    )
    result = reader.read(document(FACTS[language]), FACTS[language].question)
    assert count_events(result.events)[EventKind.INVENTED] == result.chunks_read
    assert result.memory == ""


@pytest.fixture
def upstream() -> Iterator[FakeServer]:
    with FakeServer(lambda body, number: reply_to(body["messages"][-1]["content"]), window=4000) as server:
        yield server


def test_serve_answers_in_every_language(upstream: FakeServer, tmp_path: Path) -> None:
    options: dict[str, Any] = {"budget": BUDGET, "on_invented": "keep_previous", "boundary": "sentence"}
    with (
        served(upstream.base_url, tmp_path, reader=options) as server,
        openai.OpenAI(base_url=server.api, api_key="any", max_retries=0) as client,
    ):
        for language, fact in FACTS.items():
            content = f"{document(fact)}\n\n{fact.question}"
            reply = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": content}])
            assert fact.answer in (reply.choices[0].message.content or ""), language


def test_a_corpus_is_answered_in_every_language(upstream: FakeServer, tmp_path: Path) -> None:
    table = tmp_path / "documents.jsonl"
    rows = ({"text": document(fact)} for fact in FACTS.values())
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    command = ["corpus", table, "-q", "Who has the key?", "--out", tmp_path / "out", "--base-url", upstream.base_url]
    options = "--model fake --tokenizer embedded --boundary sentence --chunk-tokens 900 --memory-tokens 200"
    done = run_program(
        [sys.executable, "-m", "memagent_graph", *map(str, command), *options.split(), "--on-invented=keep_previous"],
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    answers = {int(row["document"].partition("#")[2]): row["answer"] for row in rows_in(tmp_path / "out")}
    assert answers == {number: fact.answer for number, fact in enumerate(FACTS.values())}

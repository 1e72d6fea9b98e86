"""A fact in each of many languages is found, survives the rule `keep_previous`, and is located as evidence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.languages import FACTS, make_text, reply_to

from memagent_graph import Budget, MemAgent, ScriptedPolicy
from memagent_graph.events import EventKind, count_events
from memagent_graph.retriever import cut_passages, rank_by_bm25

BUDGET = Budget(chunk_tokens=900, memory_tokens=200, question_tokens=150, answer_tokens=60, context_window=4000)


@pytest.mark.parametrize("language", FACTS)
def test_a_fact_is_found_kept_and_located(language: str, make_reader: Callable[..., MemAgent]) -> None:
    fact, text = FACTS[language], make_text(FACTS[language])
    reader = make_reader(ScriptedPolicy(reply_to), on_invented="keep_previous", boundary="sentence", budget=BUDGET)
    result = reader.read(text, fact.question)
    assert (result.answer, EventKind.INVENTED in count_events(result.events)) == (fact.answer, False)
    fact_start = text.index(fact.sentence)
    (quote, *_) = result.evidence
    assert quote.quote == text[quote.start_char : quote.end_char]
    assert fact_start <= quote.start_char < quote.end_char <= fact_start + len(fact.sentence)
    passages = [text[start:end] for start, end in cut_passages(text, 200)]
    assert fact.sentence.strip() in passages[rank_by_bm25(passages, fact.question)[0]]


@pytest.mark.parametrize("language", FACTS)
def test_memories_in_another_script_are_not_kept(language: str, make_reader: Callable[..., MemAgent]) -> None:
    memories = [fact.memory for name, fact in FACTS.items() if fact.script != FACTS[language].script]
    reader = make_reader(
        ScriptedPolicy(lambda prompt: memories[len(prompt) % len(memories)]), on_invented="keep_previous", budget=BUDGET
    )
    result = reader.read(make_text(FACTS[language]), FACTS[language].question)
    assert count_events(result.events)[EventKind.INVENTED] == result.chunks_read
    assert result.memory == ""

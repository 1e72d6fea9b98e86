"""Every system on the policy that comes with the package, in its own wording: real weights, one short document."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest

from memagent_evaluation.result_table import QuestionOutcome
from memagent_evaluation.systems import load_system, system_names
from memagent_evaluation.tasks.haystacks import reference_topics
from memagent_graph import Document, LocalPolicy, MemAgent
from memagent_graph.errors import StrategyError

FACT = "The access code of the quiet falcon is 48213."
QUESTION = "What is the access code of the quiet falcon?"


@pytest.fixture(scope="module")
def policy():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LocalPolicy.embedded()
    torch.set_num_threads(threads)


WITHOUT_WORDS = ("gated", "reread", "recall")
READERS = tuple(name for name in system_names() if name not in (*WITHOUT_WORDS, "no_document"))


async def test_a_strategy_that_it_has_no_words_for_is_refused_before_anything_is_read(policy, tmp_path) -> None:
    reader = MemAgent(policy, strategy=WITHOUT_WORDS[0], store=tmp_path, run_log=False)
    with pytest.raises(StrategyError, match=r"no prompt for the role .* Use a policy that follows instructions"):
        await reader.aread(FACT, QUESTION)


async def attempts(policy, tmp_path, text: str):
    reader = MemAgent(policy, store=tmp_path, run_log=False)
    assert (await reader.aprepare()).own_words_only
    document = reader.store.add(Document.of(text))
    systems = [load_system(name, reader) for name in READERS]
    made = await asyncio.gather(
        *(system.attempt(document, QUESTION, answer_tokens=48, run_id=system.name) for system in systems)
    )
    return dict(zip(READERS, made, strict=True))


def prose(paragraphs: int) -> list[str]:
    return [paragraph[:300].rsplit(". ", 1)[0] + "." for paragraph in islice(reference_topics(), paragraphs)]


async def test_each_finds_a_fact_in_a_document_that_fits(policy, tmp_path) -> None:
    text = " ".join([*prose(3), FACT, *prose(5)[3:]])
    made = await attempts(policy, tmp_path, text)
    assert {name: attempt.answer for name, attempt in made.items()} == dict.fromkeys(READERS, "48213")
    assert all(attempt.usage.flops for attempt in made.values())


async def test_those_that_look_for_it_find_it_beyond_the_window(policy, tmp_path) -> None:
    made = await attempts(policy, tmp_path, " ".join([*prose(12), FACT, *prose(24)[12:]]))
    assert made["full_context"].outcome is QuestionOutcome.DOES_NOT_FIT
    for name in ("memagent", "retrieval", "refine", "map_reduce", "parallel", "segments"):
        assert made[name].answer == "48213", name
    assert made["middle_truncation"].answer != "48213"

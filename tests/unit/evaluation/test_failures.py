"""Where a wrong answer's facts were lost, told from the memories alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support import traces
from support.evaluation import KeyTask
from support.scripts import read_perfectly
from support.traces import make_answer, make_call, make_fan_out, make_spans, make_trace

from memagent_evaluation.failures import Loss, NeedleLoss, analyse, read_logged_run
from memagent_evaluation.samples import Needle, Sample
from memagent_graph import ScriptedPolicy
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import Trace

NEEDLE = Needle("The key is 4711.", "4711", 0.5)


def sample(*needles: Needle) -> Sample:
    return Sample(KeyTask(), 100, 0, "What?", tuple(needle.gold for needle in needles), lambda: iter(["text"]), needles)


def view(
    *memories: str, chunks: Sequence[str] = (), answer: str | None = "no idea", cut: int | None = None, **changes: Any
) -> RunView:
    events = {} if cut is None else {cut: ReadEvent(EventKind.TRUNCATED, cut, "cut off")}
    trace = make_trace(memories, chunks or ["x"] * len(memories), events=events)
    return traces.make_view(**{"trace": trace, "answer": answer, **changes})


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (view("nothing", "nothing"), (Loss.NEVER_WRITTEN, None)),
        (view("nothing", "key 4711", "other"), (Loss.OVERWRITTEN, 2)),
        (view("4711", "gone", "4711", "gone"), (Loss.OVERWRITTEN, 3)),
        (view("4711", "other", cut=1), (Loss.CUT_BY_CAP, 1)),
        (view("4711", "other", cut=0), (Loss.OVERWRITTEN, 1)),
        (view("nothing", "4711"), (Loss.IN_MEMORY, None)),
        (view("4711", answer="it is 4711 or 12"), (Loss.ANSWERED, None)),
        (view("4711", answer=None, stop_reason="no_answer"), (Loss.IN_MEMORY, None)),
        (view("4711", stop_reason="max_chunks"), (Loss.NOT_APPLICABLE, None)),
        (view("4711", stop_reason="does_not_fit"), (Loss.NOT_APPLICABLE, None)),
        (view("4711", stop_reason=None), (Loss.NOT_APPLICABLE, None)),
        (view(), (Loss.NOT_APPLICABLE, None)),
        (view("14711", "47110"), (Loss.NEVER_WRITTEN, None)),
    ],
)
def test_each_kind_of_loss_is_told_with_its_chunk(run, expected) -> None:
    assert analyse(sample(NEEDLE), run) == (NeedleLoss(NEEDLE, *expected),)


REFUSAL = ReadEvent(EventKind.INVENTED, 0, "'zebra' stands nowhere", UpdateRule.KEEP_PREVIOUS)
REFUSED = make_trace(["a short", "story"], ["x", "x"], events={0: REFUSAL})


@pytest.mark.parametrize(
    ("run", "loss"),
    [
        (view("a long", "story"), Loss.CUT_BY_CAP),
        (view("a short", "story", trace=REFUSED), Loss.NOT_TAKEN),
    ],
    ids=["beyond the budget", "refused by a rule"],
)
def test_a_fact_that_was_written_and_is_in_no_memory_was_not_forgotten(run, loss) -> None:
    losses = analyse(sample(NEEDLE), run, {"0": "a long story of 4711", "1": "story"})
    assert losses == (NeedleLoss(NEEDLE, loss, 0),)


CHUNKS = ["So far nothing. ", "The key is 4711. And more. ", "And the rest of it."]
SPLIT = ["So far nothing. The key is", " 4711. And more. ", "And the rest of it."]


def read_view(chunks: list[str], *, cut: int | None = None, depth: float = 0.3) -> tuple[Sample, RunView]:
    """A question and a read that never wrote the fact, with the texts that it read."""
    needle = Needle("The key is 4711.", "4711", depth)
    run = view(*["nothing"] * 3, chunks=chunks, cut=cut, chunk_text=lambda update: chunks[update.chunk_index])
    return sample(needle), run


LONG = Needle("The key is 47112305.", "47112305", 0.5)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (view("x", "4711 2305"), (Loss.REFORMATTED, 1)),
        (view("47112305", "4711 2305 kg"), (Loss.REFORMATTED, 1)),
        (view("47112305", answer="(4711) 2305"), (Loss.REFORMATTED, None)),
        (view("x", "4711 2305", "gone"), (Loss.OVERWRITTEN, 2)),
        (view("4711 2305", "47112305"), (Loss.IN_MEMORY, None)),
        (view("x", "14711 23059"), (Loss.NEVER_WRITTEN, None)),
    ],
    ids=["never exact", "changed later", "changed in the answer", "then lost", "exact again", "another number"],
)
def test_a_value_whose_form_was_changed_was_not_lost(run, expected) -> None:
    assert analyse(sample(LONG), run) == (NeedleLoss(LONG, *expected),)


def test_every_needle_is_told_by_itself() -> None:
    needles = NEEDLE, Needle("x", "12", 0.1), Needle("y", "99", 0.9)
    losses = analyse(sample(*needles), view("12", "12 4711", "4711", answer="4711"))
    assert [loss.loss for loss in losses] == [Loss.ANSWERED, Loss.OVERWRITTEN, Loss.NEVER_WRITTEN]
    assert analyse(sample(), view("x")) == ()


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("chunks", "cut", "expected"),
    [
        (CHUNKS, 1, (Loss.CUT_BY_CAP, 1)),
        (CHUNKS, 0, (Loss.NEVER_WRITTEN, None)),
        (CHUNKS, None, (Loss.NEVER_WRITTEN, None)),
        (SPLIT, None, (Loss.CUT_BY_CHUNK, 0)),
        (SPLIT, 1, (Loss.CUT_BY_CHUNK, 0)),
        (["a", "b", "c"], 1, (Loss.NEVER_WRITTEN, None)),
    ],
    ids=["budget ended at its chunk", "at another", "not at all", "chunk ended in it", "and budget", "not there"],
)
def test_a_fact_that_no_memory_held_is_looked_for_in_the_chunks(chunks, cut, expected, depth) -> None:
    question, run = read_view(chunks, cut=cut, depth=depth)
    (result,) = analyse(question, run)
    assert (result.loss, result.chunk_index) == expected


@pytest.mark.parametrize(("chunks", "loss"), [(["a", "b", "c"], Loss.NOT_READ), (CHUNKS, Loss.NEVER_WRITTEN)])
def test_a_fact_after_an_early_stop_was_not_read(chunks, loss) -> None:
    question, run = read_view(chunks)
    (result,) = analyse(question, replace(run, stop_reason="enough"))
    assert result.loss is loss


def test_of_a_needle_that_is_a_paragraph_the_sentence_with_the_answer_counts() -> None:
    question, run = read_view(["The town is old and has a wall, as one reads. ", "The key is 4711. ", "It is lost."])
    paragraph = "The town is old and has a wall, as one reads. The key is 4711."
    (result,) = analyse(replace(question, needles=(Needle(paragraph, "4711", 0.0),)), run)
    assert result.loss is Loss.NEVER_WRITTEN


@pytest.mark.parametrize(
    ("memories", "merged", "expected"),
    [
        ([["x", "x"], ["4711", "4711"]], "4711", (Loss.IN_MEMORY, None)),
        ([["x", "x"], ["4711", "4711"]], "x", (Loss.OVERWRITTEN, None)),
        ([["x", "x"], ["4711", "y"]], "x", (Loss.OVERWRITTEN, 3)),
        ([["4711", "4711"], ["4711", "y"]], "4711 x", (Loss.IN_MEMORY, None)),
        ([["x", "x"], ["y", "y"]], "4711", (Loss.IN_MEMORY, None)),
        ([["x", "x"], ["y", "y"]], "z", (Loss.NEVER_WRITTEN, None)),
    ],
    ids=["kept", "lost at the merge", "lost on its branch", "kept by the other", "written by the merge", "never"],
)
def test_a_fact_is_held_if_any_branch_on_the_way_to_the_answer_holds_it(memories, merged, expected) -> None:
    trace = make_fan_out(memories, merged, ["a", "b", "c", "d"])
    assert analyse(sample(NEEDLE), view("x", trace=trace)) == (NeedleLoss(NEEDLE, *expected),)


def test_a_branch_that_does_not_lead_to_the_answer_does_not_count() -> None:
    first, second = make_spans(["a", "b"])
    calls = make_call("l", "x", reads=first, branch="l"), make_call("r", "4711", reads=second, branch="r")
    trace = Trace((*calls, make_answer("l")))
    assert analyse(sample(NEEDLE), view("x", trace=trace)) == (NeedleLoss(NEEDLE, Loss.NEVER_WRITTEN),)


def verbose(prompt: str) -> str:
    """Writes so much before the fact that the budget ends before it."""
    reply = read_perfectly(prompt)
    return reply if "<section>" not in prompt else "so much to tell " * 60 + reply


async def test_a_real_read_is_told_from_its_log(make_reader, log, store) -> None:
    fact = "The key of harbor is 4711."
    text = " ".join([fact, *(f"word{number} and then" for number in range(600))])
    result = await make_reader(ScriptedPolicy(verbose), run_log=log).aread(text, "What is the key of harbor?")
    question = Sample(KeyTask(), 600, 0, result.question, ("4711",), lambda: iter([text]), (Needle(fact, "4711", 0.0),))
    run, completions = read_logged_run(log, result.run_id, store)
    assert analyse(question, run, completions) == (NeedleLoss(question.needles[0], Loss.CUT_BY_CAP, 0),)
    assert "4711" not in run.updates[0].memory

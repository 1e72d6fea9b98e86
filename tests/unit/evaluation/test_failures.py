"""Where the facts of a wrong answer were lost, determined from the memories of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support import traces
from support.evaluation import KeyTask
from support.scripts import read_perfectly
from support.traces import make_answer, make_call, make_fan_out, make_spans, make_trace

from memagent_evaluation.failures import Loss, NeedleLoss, find_losses, read_logged_run
from memagent_evaluation.samples import Needle, Sample
from memagent_graph import ScriptedPolicy
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import Trace

NEEDLE = Needle("The key is 4711.", "4711", 0.5)


def make_sample(*needles: Needle) -> Sample:
    return Sample(KeyTask(), 100, 0, "What?", tuple(needle.gold for needle in needles), lambda: iter(["text"]), needles)


def make_run(
    *memories: str, chunks: Sequence[str] = (), answer: str | None = "no idea", cut: int | None = None, **changes: Any
) -> RunView:
    events = {} if cut is None else {cut: ReadEvent(EventKind.TRUNCATED, cut, "cut off")}
    trace = make_trace(memories, chunks or ["x"] * len(memories), events=events)
    return traces.make_view(**{"trace": trace, "answer": answer, **changes})


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (make_run("nothing", "nothing"), (Loss.NEVER_WRITTEN, None)),
        (make_run("nothing", "key 4711", "other"), (Loss.OVERWRITTEN, 2)),
        (make_run("4711", "gone", "4711", "gone"), (Loss.OVERWRITTEN, 3)),
        (make_run("4711", "other", cut=1), (Loss.CUT_BY_CAP, 1)),
        (make_run("4711", "other", cut=0), (Loss.OVERWRITTEN, 1)),
        (make_run("nothing", "4711"), (Loss.IN_MEMORY, None)),
        (make_run("4711", answer="it is 4711 or 12"), (Loss.ANSWERED, None)),
        (make_run("4711", answer=None, stop_reason="no_answer"), (Loss.IN_MEMORY, None)),
        (make_run("4711", stop_reason="max_chunks"), (Loss.NOT_APPLICABLE, None)),
        (make_run("4711", stop_reason="does_not_fit"), (Loss.NOT_APPLICABLE, None)),
        (make_run("4711", stop_reason=None), (Loss.NOT_APPLICABLE, None)),
        (make_run(), (Loss.NOT_APPLICABLE, None)),
        (make_run("14711", "47110"), (Loss.NEVER_WRITTEN, None)),
    ],
)
def test_each_kind_of_loss_is_found_with_its_chunk(run, expected) -> None:
    assert find_losses(make_sample(NEEDLE), run) == (NeedleLoss(*expected),)


REFUSAL_EVENT = ReadEvent(EventKind.INVENTED, 0, "'zebra' stands nowhere", UpdateRule.KEEP_PREVIOUS)
REFUSED_TRACE = make_trace(["a short", "story"], ["x", "x"], events={0: REFUSAL_EVENT})


@pytest.mark.parametrize(
    ("run", "loss"),
    [
        (make_run("a long", "story"), Loss.CUT_BY_CAP),
        (make_run("a short", "story", trace=REFUSED_TRACE), Loss.NOT_TAKEN),
    ],
    ids=["beyond the budget", "refused by a rule"],
)
def test_fact_in_a_completion_but_in_no_memory_was_cut_or_refused(run, loss) -> None:
    losses = find_losses(make_sample(NEEDLE), run, {"0": "a long story of 4711", "1": "story"})
    assert losses == (NeedleLoss(loss, 0),)


CHUNKS = ["So far nothing. ", "The key is 4711. And more. ", "And the rest of it."]
SPLIT_CHUNKS = ["So far nothing. The key is", " 4711. And more. ", "And the rest of it."]


def read_without_writing(chunks: list[str], *, cut: int | None = None, depth: float = 0.3) -> tuple[Sample, RunView]:
    """Return a sample, and a run that read these chunks and never wrote the fact."""
    needle = Needle("The key is 4711.", "4711", depth)
    run = make_run(*["nothing"] * 3, chunks=chunks, cut=cut, span_text=lambda update: chunks[update.chunk_index])
    return make_sample(needle), run


LONG_NEEDLE = Needle("The key is 47112305.", "47112305", 0.5)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (make_run("x", "4711 2305"), (Loss.REFORMATTED, 1)),
        (make_run("47112305", "4711 2305 kg"), (Loss.REFORMATTED, 1)),
        (make_run("47112305", answer="(4711) 2305"), (Loss.REFORMATTED, None)),
        (make_run("x", "4711 2305", "gone"), (Loss.OVERWRITTEN, 2)),
        (make_run("4711 2305", "47112305"), (Loss.IN_MEMORY, None)),
        (make_run("x", "14711 23059"), (Loss.NEVER_WRITTEN, None)),
    ],
    ids=["never exact", "changed later", "changed in the answer", "then lost", "exact again", "another number"],
)
def test_value_written_in_another_format_is_reformatted_not_lost(run, expected) -> None:
    assert find_losses(make_sample(LONG_NEEDLE), run) == (NeedleLoss(*expected),)


def test_each_needle_has_its_own_loss() -> None:
    needles = NEEDLE, Needle("x", "12", 0.1), Needle("y", "99", 0.9)
    losses = find_losses(make_sample(*needles), make_run("12", "12 4711", "4711", answer="4711"))
    assert [loss.loss for loss in losses] == [Loss.ANSWERED, Loss.OVERWRITTEN, Loss.NEVER_WRITTEN]
    assert find_losses(make_sample(), make_run("x")) == ()


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("chunks", "cut", "expected"),
    [
        (CHUNKS, 1, (Loss.CUT_BY_CAP, 1)),
        (CHUNKS, 0, (Loss.NEVER_WRITTEN, None)),
        (CHUNKS, None, (Loss.NEVER_WRITTEN, None)),
        (SPLIT_CHUNKS, None, (Loss.CUT_BY_CHUNK, 0)),
        (SPLIT_CHUNKS, 1, (Loss.CUT_BY_CHUNK, 0)),
        (["a", "b", "c"], 1, (Loss.NEVER_WRITTEN, None)),
    ],
    ids=["budget ended at its chunk", "at another", "not at all", "chunk ended in it", "and budget", "not there"],
)
def test_fact_in_no_memory_is_searched_for_in_the_chunks(chunks, cut, expected, depth) -> None:
    sample, run = read_without_writing(chunks, cut=cut, depth=depth)
    (needle_loss,) = find_losses(sample, run)
    assert (needle_loss.loss, needle_loss.chunk_index) == expected


@pytest.mark.parametrize(("chunks", "loss"), [(["a", "b", "c"], Loss.NOT_READ), (CHUNKS, Loss.NEVER_WRITTEN)])
def test_fact_after_an_early_stop_was_not_read(chunks, loss) -> None:
    sample, run = read_without_writing(chunks)
    (needle_loss,) = find_losses(sample, replace(run, stop_reason="enough"))
    assert needle_loss.loss is loss


def test_only_the_answer_sentence_of_a_paragraph_needle_counts() -> None:
    chunks = ["The town is old and has a wall, as one reads. ", "The key is 4711. ", "It is lost."]
    sample, run = read_without_writing(chunks)
    paragraph = "The town is old and has a wall, as one reads. The key is 4711."
    (needle_loss,) = find_losses(replace(sample, needles=(Needle(paragraph, "4711", 0.0),)), run)
    assert needle_loss.loss is Loss.NEVER_WRITTEN


@pytest.mark.parametrize(
    ("memories", "merged_memory", "expected"),
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
def test_fact_is_held_if_any_branch_that_leads_to_the_answer_holds_it(memories, merged_memory, expected) -> None:
    trace = make_fan_out(memories, merged_memory, ["a", "b", "c", "d"])
    assert find_losses(make_sample(NEEDLE), make_run("x", trace=trace)) == (NeedleLoss(*expected),)


def test_branch_that_does_not_lead_to_the_answer_is_ignored() -> None:
    left_span, right_span = make_spans(["a", "b"])
    calls = make_call("l", "x", reads=left_span, branch="l"), make_call("r", "4711", reads=right_span, branch="r")
    trace = Trace((*calls, make_answer("l")))
    assert find_losses(make_sample(NEEDLE), make_run("x", trace=trace)) == (NeedleLoss(Loss.NEVER_WRITTEN),)


def reply_with_fact_last(prompt: str) -> str:
    """Write so much before the fact that the memory budget cuts it off."""
    reply = read_perfectly(prompt)
    return reply if "<section>" not in prompt else "so much to tell " * 60 + reply


async def test_loss_is_determined_from_the_log_of_a_real_run(make_reader, log, store) -> None:
    fact = "The key of harbor is 4711."
    text = " ".join([fact, *(f"word{number} and then" for number in range(600))])
    reader = make_reader(ScriptedPolicy(reply_with_fact_last), run_log=log)
    result = await reader.aread(text, "What is the key of harbor?")
    sample = Sample(KeyTask(), 600, 0, result.question, ("4711",), lambda: iter([text]), (Needle(fact, "4711", 0.0),))
    run, completions = read_logged_run(log, result.run_id, store)
    assert find_losses(sample, run, completions) == (NeedleLoss(Loss.CUT_BY_CAP, 0),)
    assert "4711" not in run.trace.updates[0].memory

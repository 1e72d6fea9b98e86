"""Where reads stop beside the evidence: on lines, on lines that end early, and on branches side by side."""

from __future__ import annotations

from support.traces import answered, fan_out, line, spans, step

from memagent_evaluation.attempt_rows import EarlyStop, stop_of, tokens_read
from memagent_evaluation.samples import Needle
from memagent_graph.calls import Span, Writes
from memagent_graph.trace import Trace

CHUNKS = ("aaaa ", "bkey ", "cccc ", "dddd ")
CHARACTERS = 20
KEY = Needle("key", "key", 6 / CHARACTERS)


def read(count: int) -> Trace:
    return line(["m"] * count, CHUNKS[:count], answer=answered(str(count - 1)))


def test_a_whole_read_reads_on_behind_the_evidence_and_saves_nothing() -> None:
    assert stop_of(read(4), [KEY], CHARACTERS) == EarlyStop(False, 20)


def test_a_read_that_stops_with_the_evidence_saves_all_that_can_be_saved() -> None:
    assert stop_of(read(2), [KEY], CHARACTERS) == EarlyStop(False, 0)


def test_a_read_that_stops_before_the_last_evidence_is_premature_and_reads_nothing_over() -> None:
    last = Needle("ddd", "d", 15 / CHARACTERS)
    assert stop_of(read(2), [KEY, last], CHARACTERS) == EarlyStop(True, 0)


def test_evidence_that_a_chunk_s_end_cuts_has_been_read_once_both_chunks_have() -> None:
    cut = Needle("y cc", "cc", 8 / CHARACTERS)
    assert stop_of(read(2), [cut], CHARACTERS).premature
    assert stop_of(read(3), [cut], CHARACTERS) == EarlyStop(False, 0)


def test_branches_side_by_side_count_by_what_they_read_and_take_the_turns_of_the_longest() -> None:
    trace = fan_out([["m"] * 3, ["n"]], "both", CHUNKS)
    assert stop_of(trace, [KEY], CHARACTERS) == EarlyStop(False, 20)
    assert trace.turns == 5, "three chunks, the merge, the answer"


def test_what_is_read_again_is_over_read() -> None:
    first = read(4)
    again = step("again", "m", "3", reads=spans(CHUNKS)[1], branch="1")
    trace = Trace((*first.steps, again))
    assert tokens_read(trace) == 50
    assert stop_of(trace, [KEY], CHARACTERS).over_read_tokens == 30


def test_a_decision_takes_a_turn_though_no_prompt_holds_it() -> None:
    one, two = spans(CHUNKS[:2])
    probe = step("probe", "?", "0", role="probe", writes=Writes.DECISION)
    assert Trace((step("0", "m", reads=one), probe, step("1", "m", "0", reads=two))).turns == 3
    assert read(4).turns == 5
    assert Trace().turns == 0


def test_where_no_evidence_is_known_nothing_is_said() -> None:
    assert stop_of(read(4), [], CHARACTERS) is None


def test_a_part_of_a_chunk_that_is_looked_up_again_is_over_read_and_no_chunk_of_its_own() -> None:
    first = read(2)
    part = Span(1, 6, 9, 6, 9, 7)
    trace = Trace((*first.steps, step("again", "m", "1", reads=part)))
    assert stop_of(trace, [KEY], CHARACTERS) == EarlyStop(False, 7)

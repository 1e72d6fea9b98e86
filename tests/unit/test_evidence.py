"""Provenance: the origin of each line of memory, its quotes in the document, and the support of an answer."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces import make_call, make_fan_out, make_spans
from support.traces import make_trace as make_line_trace

from memagent_graph import ScriptedPolicy
from memagent_graph.documents import SourceMark
from memagent_graph.events import EventKind, ReadEvent
from memagent_graph.provenance.evidence import (
    Provenance,
    find_provenance,
    find_quoted_chunks,
    find_supporting_lines,
    split_by_support,
    split_memory,
)
from memagent_graph.provenance.overlap import MAX_QUOTES, TokenizedText, find_quotes
from memagent_graph.provenance.places import Places
from memagent_graph.trace import MemoryUpdate, Trace

WORDS = st.sampled_from(
    ["the", "keeper", "Keeper", "1743", "of", "灯", "塔", "是", "安", "ß", "SS", ".", "! ", "\n", "-", "İ"]
)
TEXTS = st.lists(WORDS | st.text(max_size=3), max_size=40).map(" ".join) | st.lists(WORDS, max_size=30).map("".join)


def make_edited_trace(memories: Sequence[str], chunks: Sequence[str], edited_chunks: Sequence[int] = ()) -> Trace:
    events = {index: ReadEvent(EventKind.MEMORY_EDITED, index, "") for index in edited_chunks}
    return make_line_trace(memories, chunks, events=events)


def find_origins(memories: Sequence[str], chunks: Sequence[str] = (), edited_chunks: Sequence[int] = ()) -> Provenance:
    texts = chunks or [""] * len(memories)
    return find_provenance(make_edited_trace(memories, texts, edited_chunks), lambda update: texts[update.chunk_index])


@given(TEXTS, TEXTS, st.integers(0, 1000))
def test_quotes_are_within_their_chunk_for_any_text(line: str, chunk: str, start: int) -> None:
    spans = find_quotes(line, chunk, start)
    assert len(spans) <= MAX_QUOTES
    assert all(start <= quote_start < quote_end <= start + len(chunk) for quote_start, quote_end in spans)
    assert spans == sorted(spans, key=lambda span: span[0] - span[1])


@settings(max_examples=50)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6))
def test_every_quote_is_the_documents_text_at_its_span(steps: list[tuple[str, str]]) -> None:
    memories, chunks = zip(*steps, strict=True)
    document = "".join(chunks)
    trace = make_edited_trace(memories, chunks)
    result = find_provenance(trace, lambda update: chunks[update.chunk_index], Places([SourceMark(0, "page 1")]))
    assert [line.line for line in result.lines] == split_memory(memories[-1])
    for quote in result.evidence:
        assert quote.quote == document[quote.start_char : quote.end_char]
        assert quote.line == result.lines[quote.line_index].line
        update = trace.updates[quote.chunk_index]
        assert update.start_char <= quote.start_char < quote.end_char <= update.end_char
        assert 0 < quote.coverage <= 1


@given(TEXTS, TEXTS)
def test_the_pieces_of_a_line_are_the_line_for_any_text(answer: str, line: str) -> None:
    assert "".join(piece for piece, _ in split_by_support(TokenizedText(answer), line)) == line


@pytest.mark.parametrize(
    ("other_sentence", "line"),
    [
        ("Pell sold the key to Josef. ", "Josef sold the key to Pell"),
        ("Anna paid Bert; Bert did not pay Anna. ", "Bert paid Anna"),
        ("It is 24 months in Norway and 12 in Leeds. ", "It is 12 months in Norway and 24 in Leeds"),
        ("里子は塩の倉庫で古い帳簿を見つけた。里子と源造は黙っていた。", "源造は塩の倉庫で古い帳簿を見つけた"),
    ],
)
def test_the_quote_has_the_word_order_of_the_line(other_sentence: str, line: str) -> None:
    chunk = f"{other_sentence}{'The rain fell on the dike. ' * 9}{line}. The rain fell."
    assert [chunk[start:end] for start, end in find_quotes(line, chunk)] == [line]


@pytest.mark.parametrize(
    ("line", "text", "quotes"),
    [
        pytest.param("the lamp at cape may", "The LAMP, at Cape\nMay, lit.", ["The LAMP, at Cape\nMay"], id="own case"),
        pytest.param(
            "Ilse built it", "Ilse, who was rich, built it.", ["Ilse, who was rich, built it"], id="a few words apart"
        ),
        pytest.param("it was of the", "it was of the", [], id="function words alone"),
        ("May", "It may rain. Vera was born in May, they say.", ["May"]),
        ("in May", "May we come in? Vera was born\nin May.", ["in May"]),
        ("Will", "She will ask Will tomorrow.", ["Will"]),
        ("May", "May we come in? We may.", []),
        ("may", "Vera was born in May.", []),
        ("No", "No, there is no need.", []),
        ("lit: 1743", "In 1743 they came.", ["1743"]),
        ("灯塔是安娜建造", "他说东京的灯塔是安娜建造的。", ["灯塔是安娜建造"]),
        pytest.param("灯塔是", "他说东京的灯塔是安娜建造的。", [], id="three characters without spaces"),
    ],
)
def test_quotes_have_the_wording_of_the_text(line: str, text: str, quotes: list[str]) -> None:
    assert [text[start:end] for start, end in find_quotes(line, text)] == quotes


ILSE, MARTA, JONAS = "Ilse built the lighthouse", "Marta sold the granary", "Jonas keeps the ferry"


@pytest.mark.parametrize(
    ("memories", "origins", "lost"),
    [
        pytest.param([ILSE, ILSE, f"{ILSE} in 1743"], [(0, (2,))], [], id="a rewording keeps its origin"),
        pytest.param([ILSE, f"- {ILSE}."], [(0, ())], [], id="other punctuation is no rewording"),
        pytest.param(
            ["The code of Anna is 17", "The code of Anna is 17\nThe code of Anna is 18"], [(0, ()), (1, ())], [],
            id="a similar fact beside a kept one is new",
        ),
        pytest.param([MARTA, MARTA, JONAS], [(2, ())], [(MARTA, 0, 2)], id="lost at the chunk that dropped it"),
        pytest.param([f"{ILSE}\n{MARTA}", f"{ILSE}; {MARTA}"], [(0, (1,))], [], id="a merged line is not lost"),
        pytest.param([MARTA, JONAS, MARTA], [(2, ())], [(JONAS, 1, 2)], id="a line that is written again is not lost"),
        *(([nothing, JONAS], [(1, ())], []) for nothing in ("(empty)", "none", "Not stated.")),
    ],
)  # fmt: skip
def test_lines_have_an_origin_and_lines_that_no_later_memory_has_are_lost(memories, origins, lost) -> None:
    result = find_origins(memories)
    assert [(line.update, line.reworded) for line in result.lines] == origins
    assert [(line.line, line.update, line.gone) for line in result.lost] == lost


def test_quotes_come_from_the_chunks_that_added_the_words() -> None:
    chunks = ["Here Ilse Thornbury built the lighthouse. ", "Nothing of note. ", "It was lit in 1743 for the king. "]
    line = "Ilse Thornbury built the lighthouse"
    result = find_origins([line, line, f"{line}, lit in 1743"], chunks)
    assert [(quote.chunk_index, quote.quote) for quote in result.evidence] == [(0, line), (2, "lit in 1743")]
    assert {quote.coverage for quote in result.evidence} == {1.0}


def test_a_word_of_several_merged_lines_comes_from_the_newest_of_them() -> None:
    lines = ["ax bx cx", "ax bx dx", "ex fx gx hx"]
    for step in (1, -1):
        memories = ["\n".join(lines[: index + 1][::step]) for index in range(3)]
        result = find_origins([*memories, "ax bx dx ex fx gx hx"], [lines[0], "", lines[2], ""])
        assert {quote.chunk_index for quote in result.evidence} == {2}


def test_without_the_document_there_are_origins_but_no_quotes() -> None:
    result = find_provenance(make_edited_trace(["Ilse built it"], ["gone"]), lambda _: None)
    assert [line.update for line in result.lines] == [0]
    assert result.evidence == ()


def test_lines_that_a_person_wrote_are_marked_as_edited_unless_the_chunk_has_them() -> None:
    memories = ["Ilse built it", "Ilse built it\nPer Lindqvist is the keeper"]
    assert [line.edited for line in find_origins(memories, ["a", "b"], edited_chunks=[1]).lines] == [False, True]
    provenance = find_origins(memories, ["a", "Now Per Lindqvist is the keeper here."], edited_chunks=[1])
    assert [line.edited for line in provenance.lines] == [False, False]


def test_each_sentence_of_a_paragraph_is_a_line() -> None:
    sentence = "The lighthouse at Cape Verity was built by Dr. Ilse Thornbury."
    lines = ["# Notes", sentence, "It was lit in 1743. 灯塔很高。", "安娜建造。"]
    assert split_memory(f"# Notes\n\n---\n{sentence} It was lit in 1743. 灯塔很高。安娜建造。") == lines


def test_the_answers_words_are_found_in_memory() -> None:
    answer_words = TokenizedText("Ilse Thornbury")
    pieces = split_by_support(answer_words, "The lighthouse was built by Ilse Thornbury in 1743")
    assert pieces == [("The lighthouse was built by ", False), ("Ilse Thornbury", True), (" in 1743", False)]
    assert split_by_support(answer_words, "nothing here") == [("nothing here", False)]


def test_only_chunks_that_added_final_words_are_loaded() -> None:
    lines = [f"fact {index} of keeper{index}" for index in range(30)]
    memories, chunks, read_indices = [], [], []
    for index in range(100):
        lines[index % 30] = f"fact {index} of keeper{index} and place{index} in year {1000 + index}"
        memories.append("\n".join(lines))
        chunks.append(f"words of no use here, and {lines[index % 30]}")

    def get_chunk(update: MemoryUpdate) -> str:
        read_indices.append(update.chunk_index)
        return chunks[update.chunk_index]

    result = find_provenance(make_edited_trace(memories, chunks), get_chunk)
    assert sorted(read_indices) == list(range(70, 100))
    assert all(line.coverage == 1 for line in result.lines)


def test_provenance_takes_memory_in_proportion_to_the_memories() -> None:
    reworded, lost = "ax bx cx dx ex fx gx hx i{0} j{0}", "ax bx cx dx i{1} j{1} k{0} l{0} m{0} n{0}"
    trace = make_edited_trace([f"{reworded}\n{lost}".format(n, n - 1) for n in range(1000)], ["x"] * 1000)
    tracemalloc.start()
    provenance = find_provenance(trace, lambda _: None)
    assert len(find_quoted_chunks(trace, lambda _: None)) == 1000
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()
    assert len(provenance.lines[0].reworded) == len(provenance.lost) == 999


def test_lines_of_a_merge_have_their_origin_in_the_branches() -> None:
    chunks = ["Here Ilse Thornbury built the lighthouse. ", "It was lit in 1743 for the king. ", "Per ran the ferry. "]
    trace = make_fan_out(
        [["Ilse Thornbury built the lighthouse"], ["It was lit in 1743"], ["Per ran the ferry"]],
        "Ilse Thornbury built the lighthouse\nlit in 1743\nEnough is said of the rest",
        chunks,
    )
    result = find_provenance(trace, lambda update: chunks[update.chunk_index])
    assert [(line.update, line.reworded) for line in result.lines] == [(0, ()), (1, (3,)), (3, ())]
    assert [(quote.branch, quote.chunk_index, quote.update) for quote in result.evidence] == [("0", 0, 0), ("1", 1, 1)]
    for quote in result.evidence:
        assert quote.quote == "".join(chunks)[quote.start_char : quote.end_char]
    assert [(lost.line, lost.update, lost.gone) for lost in result.lost] == [("Per ran the ferry", 2, 3)]


def test_a_line_dropped_by_one_branch_and_kept_by_another_is_not_lost() -> None:
    first_span, second_span, third_span = make_spans(["a", "b", "c"])
    trunk_call = make_call("t", "Marta sold the granary\nPer ran the ferry", reads=first_span)
    dropping_call = make_call("l", "Jonas keeps bees", "t", reads=second_span, branch="l")
    keeping_call = make_call("r", "Marta sold the granary in 1716", "t", reads=third_span, branch="r")
    merge_call = make_call("m", "Marta sold the granary in 1716; Jonas keeps bees", "l", "r", role="merge")
    result = find_provenance(Trace((trunk_call, dropping_call, keeping_call, merge_call)), lambda _: None)
    assert [lost.line for lost in result.lost] == ["Per ran the ferry"]
    assert [line.update for line in result.lines] == [0]
    same_call = make_call("t2", dropping_call.text, "t", reads=third_span)
    unchanged_trace = Trace((trunk_call, dropping_call, same_call, make_call("m", same_call.text, "l", "t2")))
    assert [line.update for line in find_provenance(unchanged_trace, lambda _: None).lines] == [2], "not the branch's"


def test_an_answer_of_one_word_is_quoted_with_its_sentence(make_reader) -> None:
    text = "It was dark. The key of harbor is 4711, as all know.\n\nnext part. No, 4711 was not meant. The end."
    reader = make_reader(ScriptedPolicy(lambda _: "\\boxed{4711}"), strategy="retrieval:chunks=1")
    (quote,) = reader.read(text, "What is the key of harbor?").evidence
    assert quote.quote == text[quote.start_char : quote.end_char] == "The key of harbor is 4711, as all know."


BIRDS = ["The plover lays four eggs.", "The heron eats fish.", "The plover eats crabs.", "Eggs are laid in May."]


@pytest.mark.parametrize(
    ("answer", "question", "lines"),
    [
        ("crabs", "What does the plover eat?", {2}),
        ("Crabs, and fish", "What do they eat?", {1, 2}),
        ("eggs", "What does the plover lay?", {0}),
        ("Yes", "Does the heron eat fish?", {1}),
        ("not stated", "What does the plover eat?", set()),
        ("seven", "How old is it?", set()),
    ],
)
def test_an_answer_is_supported_by_the_lines_that_have_its_words(answer, question, lines) -> None:
    assert find_supporting_lines(answer, question, BIRDS) == lines

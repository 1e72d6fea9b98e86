from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.traces import make_answer, make_call, make_fan_out, make_spans, make_trace, make_view
from unit.reports.test_report_exports import Page

from memagent_graph.documents import SourceMark
from memagent_graph.errors import RunError
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.provenance.places import Places
from memagent_graph.run_log import Reward
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page, write_page
from memagent_graph.timeline.terminal import render_timeline
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import Trace, Writes

CHUNKS = [
    "Marta Okonjo sold the granary in 1716. ",
    "Nothing of note came to pass. ",
    "Nor in the year after that one. ",
    "Ilse Thornbury built the lighthouse, lit in 1743. ",
    "[bold]The harbour[/bold] froze. ",
]
GRANARY = "Marta Okonjo sold the granary in 1716."
LIGHTHOUSE = "Ilse Thornbury built the lighthouse."
MEMORIES = [GRANARY, GRANARY, GRANARY, LIGHTHOUSE, LIGHTHOUSE]
EVENT = ReadEvent(EventKind.TRUNCATED, 4, "cut at 60 tokens", UpdateRule.ACCEPT)
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'><svg/onload=alert(1)> & $data "
    "\u2028\ud800\x00 \x1b]0;title\x07\x1b[2J\x9b31m\u202e[link=http://x]y[/link][/nosuch]"
)


def make_run(memories: list[str] = MEMORIES, chunks: list[str] = CHUNKS, **changes: Any) -> RunView:
    parents = [str(len(memories) - 1)] if memories else []
    values = {
        "trace": make_trace(memories, chunks, events={4: EVENT}, answer=make_answer(*parents)),
        "rewards": (Reward("r", "exact", 1.0, "judge", 0.0),),
        "places": Places([SourceMark(0, "page 1"), SourceMark(100, "page 2")]),
        "span_text": lambda update: chunks[update.chunk_index],
    }
    return make_view(**{**values, **changes})


def print_text(renderable: Any, *, color: bool = False, width: int = 100) -> str:
    output = StringIO()
    color_system = "truecolor" if color else None
    Console(file=output, width=width, force_terminal=color, color_system=color_system).print(renderable)
    return output.getvalue()


def load_page_data(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])


def rebuild_memories(steps: list[dict[str, Any]]) -> list[str]:
    """Rebuild the memories as page.js does, from differences to the memories before them, in UTF-16 units."""
    memories: list[str] = []
    for step in steps:
        memory = "\n".join(filter(None, (memories[source] for source in step["from"])))
        if "diff" in step:
            previous, position, new = memory.encode("utf-16-le", "surrogatepass"), 0, b""
            for change in step["diff"]:
                if isinstance(change, str):
                    new += change.encode("utf-16-le", "surrogatepass")
                else:
                    new += previous[position : position + 2 * change] if change > 0 else b""
                    position += 2 * abs(change)
            memory = new.decode("utf-16-le", "surrogatepass")
        memories.append(memory)
    return memories


def test_steps_have_their_changes_and_totals_are_sums() -> None:
    timeline = build_timeline(make_run())
    assert [step.changed for step in timeline.steps] == [True, False, False, True, False]
    assert (timeline.steps[0].inserted_words, timeline.steps[0].deleted_words) == (7, 0)
    assert [step.section for step in timeline.steps] == ["page 1", "page 1", "page 1", "page 2", "page 2"]
    assert (timeline.chunks, timeline.changes, timeline.prompt_tokens, timeline.completion_tokens) == (5, 2, 550, 105)
    assert (timeline.seconds, timeline.events) == (3.5, {EventKind.TRUNCATED: 1})
    assert timeline.view.trace.final_memory == LIGHTHOUSE


def test_the_terminal_shows_changes_sources_and_losses_and_folds_unchanged_chunks() -> None:
    text = print_text(render_timeline(build_timeline(make_run())))
    assert "chunks 2-3: unchanged" in text and "truncated, accept: cut at 60 tokens" in text
    assert "“Ilse Thornbury built the lighthouse”  chunk 4, characters 101-136, page 2" in text
    assert "“Marta Okonjo sold the granary in 1716.”  chunks 1 to 4" in text
    assert "550 tokens in, 105 out" in text and "exact 1 (judge)" in text


def test_without_color_changes_are_in_brackets() -> None:
    timeline = build_timeline(make_run(["lit in 1743", "lit in 1744"], ["a", "b"]))
    assert "lit in [-1743-]{+1744+}" in print_text(render_timeline(timeline))
    assert "[-1743-]" not in print_text(render_timeline(timeline), color=True)


def test_changes_and_quotes_in_scripts_without_spaces_keep_their_context() -> None:
    text = "灯塔是由工程师建造的" * 60
    view = make_run([f"{text}1743。{text}", f"{text}1744。{text}"], [f"{text}\n1743。\n{text}", "b"])
    assert "建造的[-1743-]{+1744+}。灯塔是" in print_text(render_timeline(build_timeline(view)), width=9999)
    quote = replace(view.provenance.evidence[0], start_char=601, end_char=606)
    assert [context.strip() for context in view.get_quote_context(quote, 101)] == [text[:100]] * 2


@pytest.mark.parametrize("renderer", [render_timeline, render_page])
@pytest.mark.parametrize(
    "view",
    [
        make_run([], [], answer=None, raw_answer=None, stop_reason=None),
        make_run(["", "", ""], ["a", "b", "c"], answer=""),
        make_run(span_text=lambda _: None),
    ],
    ids=["no chunk read", "empty memories", "document gone"],
)
def test_a_run_without_memories_or_document_is_rendered(renderer: Any, view: RunView) -> None:
    output = renderer(build_timeline(view))
    assert output if isinstance(output, str) else print_text(output)


@settings(max_examples=25)
@given(st.lists(st.text(max_size=30) | st.just("ein \U0001f600 Wort"), max_size=6))
def test_the_page_contains_every_memory_as_differences(memories: list[str]) -> None:
    page = render_page(build_timeline(make_run(memories, [""] * len(memories))))
    assert rebuild_memories(load_page_data(page)["steps"]) == memories


def test_the_page_is_one_file_that_loads_nothing_else() -> None:
    page = render_page(build_timeline(make_run()))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy[1]
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "innerHTML" not in page


def test_hostile_texts_add_no_element_to_a_page_and_no_control_character_to_the_terminal() -> None:
    text, span = f"{HOSTILE} keeper", make_spans(["a"])[0]
    steps = (
        make_call("0", text, reads=span, branch=HOSTILE, role=HOSTILE, events=(replace(EVENT, detail=HOSTILE),)),
        make_call("1", text, reads=span, branch="1"),
        make_call("2", text, "0", "1", role=HOSTILE),
    )
    rewards, sections = (Reward("r", HOSTILE, 1.0, HOSTILE, 0.0),), [SourceMark(0, HOSTILE)]
    names = dict.fromkeys(("run_id", "question", "model", "strategy", "answer"), HOSTILE)
    view = make_run(trace=Trace(steps), span_text=lambda _: text, rewards=rewards, places=Places(sections), **names)
    timeline = build_timeline(replace(view, raw_answer="x" + HOSTILE))
    harmless_page = render_page(build_timeline(make_run(["a keeper"], ["a keeper"], answer="a keeper")))
    page = render_page(timeline)
    expected, actual = ([tag for tag, _ in Page(text).tags] for text in (harmless_page, page))
    assert set(actual) == set(expected)
    assert actual.count("script") == expected.count("script")
    assert not any({"onerror", "onload"} & attributes.keys() for _, attributes in Page(page).tags)
    page.encode()
    data = load_page_data(page)
    assert data["question"] == HOSTILE
    assert all(re.fullmatch(r"[\w%.~-]+", step["anchor"]) for step in data["steps"])
    for renderable in (render_timeline(timeline), render_timeline(timeline, chunk=1)):
        output = print_text(renderable)
        assert not set(output) & set("\x00\x1b\x07\x9b\u202e\u2066")
        assert "[/nosuch]" in output


BRANCHED_CHUNKS = [*CHUNKS[:3], "Nothing again. ", *CHUNKS[3:]]
BRANCHED = make_run(
    trace=make_fan_out(
        [[GRANARY, GRANARY], ["Nor the year.", "Nor the year."], [LIGHTHOUSE, LIGHTHOUSE]],
        f"{GRANARY}\n{LIGHTHOUSE}",
        BRANCHED_CHUNKS,
        answer="Ilse Thornbury",
    ),
    strategy="segments",
    span_text=lambda update: BRANCHED_CHUNKS[update.chunk_index],
)


def test_parallel_branches_are_shown_one_after_the_other_and_then_their_merge() -> None:
    timeline = build_timeline(BRANCHED)
    assert [step.name for step in timeline.steps] == [
        *(f"chunk {chunk + 1}, branch {chunk // 2}" for chunk in range(6)),
        "merge of branches 0, 1, 2",
    ]
    merge = timeline.steps[-1]
    assert merge.sources == (1, 3, 5)
    assert merge.previous == f"{GRANARY}\nNor the year.\n{LIGHTHOUSE}"
    assert [step.previous for step in timeline.steps[:6:2]] == ["", "", ""]
    assert (timeline.chunks, timeline.changes, timeline.prompt_tokens, timeline.completion_tokens) == (6, 4, 750, 145)
    assert timeline.branches == ["", "0", "1", "2"]
    assert timeline.view.trace.final_memory == f"{GRANARY}\n{LIGHTHOUSE}"


def test_the_terminal_shows_a_run_with_branches() -> None:
    text = print_text(render_timeline(build_timeline(BRANCHED)))
    assert re.search(r"strategy +segments", text)
    assert "6 chunks, 4 changed the memory, on 3 branches" in text
    assert "chunk 2, branch 0: unchanged" in text
    assert "merge of branches 0, 1, 2  +0 -3 words" in text
    assert "“Ilse Thornbury built the lighthouse”  chunk 5, branch 2, characters" in text
    assert "“Nor the year.”  chunk 3, branch 1 to merge of branches 0, 1, 2" in text


def test_unchanged_chunks_of_different_branches_are_not_folded_together() -> None:
    trace = make_fan_out([["a", "a", "a"], ["b", "b", "b"]], "a\nb", ["x"] * 6)
    text = print_text(render_timeline(build_timeline(make_run(trace=trace, span_text=lambda _: None))))
    assert "chunks 2-3, branch 0: unchanged" in text and "chunks 5-6, branch 1: unchanged" in text
    assert "merge of branches 0, 1  unchanged" in text


def test_the_page_has_memories_and_anchors_of_all_branches() -> None:
    timeline = build_timeline(BRANCHED)
    data = load_page_data(render_page(timeline))
    assert data["branches"] == ["", "0", "1", "2"]
    assert rebuild_memories(data["steps"]) == [step.update.memory for step in timeline.steps]
    assert [step["anchor"] for step in data["steps"]] == [
        *(f"chunk-{chunk + 1}-{chunk // 2}" for chunk in range(6)),
        "merge",
    ]
    assert (data["steps"][-1]["from"], data["lines"][1]["at"]) == ([1, 3, 5], 4)
    assert data["lost"] == [{"text": "Nor the year.", "at": 2, "gone": 6}]


def make_gated_trace() -> Trace:
    """Return a trace with a gate at each chunk, which keeps the memory at chunk 2. Then chunk 1 is read again."""
    spans = make_spans(["a", "b", "c"])
    make_gate = partial(make_call, role="gate", writes=Writes.DECISION, tokens=(10, 1))
    return Trace(
        (
            make_gate("g0", "update", reads=spans[0]),
            make_call("u0", "Ilse", "g0", reads=spans[0]),
            make_gate("g1", "keep", "u0", reads=spans[1]),
            make_gate("g2", "update", "g1", reads=spans[2]),
            make_call("u2", "Ilse built it", "g2", reads=spans[2]),
            make_gate("exit", "read on", "u2"),
            make_call("reread", "Ilse built it in 1743", "u2", reads=spans[0], role="reread"),
            make_answer("reread"),
        )
    )


def test_a_gates_decision_and_update_are_one_step_of_the_timeline() -> None:
    timeline = build_timeline(make_run(trace=make_gated_trace(), span_text=lambda _: None))
    assert [(step.name, step.state, step.previous) for step in timeline.steps] == [
        ("chunk 1", "unchanged", ""),
        ("chunk 2", "kept", "Ilse"),
        ("chunk 3", "unchanged", "Ilse"),
        ("chunk 1 (read again)", "unchanged", "Ilse built it"),
    ]
    assert timeline.steps[2].update.prompt_tokens == 110
    assert timeline.prompt_tokens == 3 * 100 + 4 * 10 + 50
    text = print_text(render_timeline(timeline))
    assert "chunk 2: kept" in text
    assert "chunk 1 (read again)  +3 -1 words" in text
    assert "chunk 1, reworded at 3, 1 (read again); no verbatim quote" in text
    anchors = [step["anchor"] for step in load_page_data(render_page(timeline))["steps"]]
    assert anchors == ["chunk-1", "chunk-2", "chunk-3", "step-4"]


def test_the_view_of_a_chunk_shows_every_reading_of_it() -> None:
    timeline = build_timeline(make_run(trace=make_gated_trace(), span_text=lambda _: "its text"))
    text = print_text(render_timeline(timeline, chunk=1))
    assert (text.count("Memory before"), text.count("its text")) == (2, 1) and "Ilse built it in 1743" in text


def test_branches_are_compared_with_the_memory_that_they_forked_from() -> None:
    first_span, second_span = make_spans(["a", "b"])
    trace = Trace(
        (
            make_call("t", "Ilse", reads=first_span),
            make_call("l", "Ilse built it", "t", reads=second_span, branch="left"),
            make_call("r", "Per", "t", reads=second_span, branch="right"),
            make_call("m", "Ilse built it", "l", "r", role="merge"),
        )
    )
    timeline = build_timeline(make_run(trace=trace, span_text=lambda _: None))
    assert [(step.name, step.previous) for step in timeline.steps] == [
        ("chunk 1", ""),
        ("chunk 2, branch left", "Ilse"),
        ("chunk 2, branch right", "Ilse"),
        ("merge of branches left, right", "Ilse built it\nPer"),
    ]
    assert [line.line for line in timeline.view.provenance.lost] == ["Per"]
    assert rebuild_memories(load_page_data(render_page(timeline))["steps"]) == [
        step.update.memory for step in timeline.steps
    ]


PAGE = render_page(build_timeline(make_run()))


def test_an_older_page_is_replaced_but_other_files_only_by_force(tmp_path) -> None:
    page, notes, folder = tmp_path / "run.html", tmp_path / "notes.html", tmp_path / "folder"
    write_page(PAGE + "first", page)
    write_page(PAGE + "second", page)
    assert page.read_text() == PAGE + "second"
    assert page.stat().st_mode & 0o077 == 0
    notes.write_text("my notes")
    with pytest.raises(RunError, match="this command did not write it"):
        write_page(PAGE, notes)
    assert notes.read_text() == "my notes"
    write_page(PAGE, notes, force=True)
    assert notes.read_text() == PAGE
    folder.mkdir()
    with pytest.raises(RunError, match="is not a file"):
        write_page(PAGE, folder, force=True)
    with pytest.raises(RunError, match="cannot be written: No such file"):
        write_page(PAGE, tmp_path / "missing" / "run.html")
    assert {path.name for path in tmp_path.iterdir()} == {"run.html", "notes.html", "folder"}


@pytest.mark.parametrize("is_page", [False, True])
def test_a_link_is_never_followed(tmp_path, is_page) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text(PAGE + "target" if is_page else "precious")
    original_text = target.read_text()
    link.symlink_to(target)
    with pytest.raises(RunError, match="is a link"):
        write_page(PAGE, link)
    write_page(PAGE, link, force=True)
    assert not link.is_symlink()
    assert link.read_text() == PAGE
    assert target.read_text() == original_text

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
from support.traces import make_answer, make_fan_out, make_spans, make_trace, make_view
from support.traces import make_call as asked
from unit.reports.test_report_exports import Page

from memagent_graph.calls import Writes
from memagent_graph.documents import SourceMark
from memagent_graph.errors import RunError
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.run_log import Reward
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_notebook, render_page, write_page
from memagent_graph.timeline.terminal import render_timeline
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import Trace

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
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'><svg/onload=alert(1)> & {{data}} "
    "\u2028\ud800\x00 \x1b]0;title\x07\x1b[2J\x9b31m\u202e[link=http://x]y[/link][/nosuch]"
)


def run(memories: list[str] = MEMORIES, chunks: list[str] = CHUNKS, **changes: Any) -> RunView:
    last = [str(len(memories) - 1)] if memories else []
    values = {
        "trace": make_trace(memories, chunks, events={4: EVENT}, answer=make_answer(*last)),
        "rewards": (Reward("r", "exact", 1.0, "judge", 0.0),),
        "sections": [SourceMark(0, "page 1"), SourceMark(100, "page 2")],
        "chunk_text": lambda update: chunks[update.chunk_index],
    }
    return make_view(**{**values, **changes})


def print_text(renderable: Any, *, color: bool = False, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width, force_terminal=color, color_system="truecolor" if color else None).print(renderable)
    return out.getvalue()


def page_data(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])


def rebuild(steps: list[dict[str, Any]]) -> list[str]:
    """What page.js does: memories from differences to what they came from, in UTF-16 units."""
    memories: list[str] = []
    for step in steps:
        memory = "\n".join(filter(None, (memories[source] for source in step["from"]))).encode(
            "utf-16-le", "surrogatepass"
        )
        if "diff" in step:
            at, new = 0, b""
            for part in step["diff"]:
                if isinstance(part, str):
                    new += part.encode("utf-16-le", "surrogatepass")
                else:
                    new += memory[at : at + 2 * part] if part > 0 else b""
                    at += 2 * abs(part)
            memory = new
        memories.append(memory.decode("utf-16-le", "surrogatepass"))
    return memories


def test_steps_say_what_changed_and_totals_add_up() -> None:
    timeline = build_timeline(run())
    assert [step.changed for step in timeline.steps] == [True, False, False, True, False]
    assert (timeline.steps[0].inserted_words, timeline.steps[0].deleted_words) == (7, 0)
    assert [step.section for step in timeline.steps] == ["page 1", "page 1", "page 1", "page 2", "page 2"]
    totals = timeline.totals
    assert (totals.chunks, totals.changes, totals.prompt_tokens, totals.completion_tokens) == (5, 2, 550, 105)
    assert (totals.seconds, totals.events) == (3.5, {EventKind.TRUNCATED: 1})
    assert timeline.memory == LIGHTHOUSE


def test_the_terminal_shows_answer_changes_sources_and_losses_and_folds_what_is_dull() -> None:
    text = print_text(render_timeline(build_timeline(run())))
    assert "chunks 2-3: unchanged" in text
    assert "truncated, accept: cut at 60 tokens" in text
    assert "“Ilse Thornbury built the lighthouse”  chunk 4, characters 101-136, page 2" in text
    assert "“Marta Okonjo sold the granary in 1716.”  chunks 1 to 4" in text
    assert "550 tokens in, 105 out" in text
    assert "exact 1 (judge)" in text


def test_a_difference_is_told_by_brackets_where_there_is_no_color() -> None:
    timeline = build_timeline(run(["lit in 1743", "lit in 1744"], ["a", "b"]))
    assert "lit in [-1743-]{+1744+}" in print_text(render_timeline(timeline))
    assert "[-1743-]" not in print_text(render_timeline(timeline), color=True)


@pytest.mark.parametrize("renderer", [render_timeline, render_page, render_notebook])
@pytest.mark.parametrize(
    "view",
    [
        run([], [], answer=None, raw_answer=None, stop_reason=None),
        run(["", "", ""], ["a", "b", "c"], answer=""),
        run(chunk_text=lambda _: None),
    ],
    ids=["nothing read", "empty memories", "text gone"],
)
def test_a_run_with_little_to_show_is_drawn(renderer: Any, view: RunView) -> None:
    drawing = renderer(build_timeline(view))
    assert drawing if isinstance(drawing, str) else print_text(drawing)


@settings(max_examples=25)
@given(st.lists(st.text(max_size=30) | st.just("ein \U0001f600 Wort"), max_size=6))
def test_the_page_holds_every_memory_as_differences(memories: list[str]) -> None:
    page = render_page(build_timeline(run(memories, [""] * len(memories))))
    assert rebuild(page_data(page)["steps"]) == memories


def test_the_page_is_one_file_that_can_load_and_run_nothing_else() -> None:
    page = render_page(build_timeline(run()))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "innerHTML" not in page


def test_hostile_texts_and_names_add_no_element_to_the_page_or_the_fragment_and_do_not_steer_the_terminal() -> None:
    text, span = f"{HOSTILE} keeper", make_spans(["a"])[0]
    steps = (
        asked("0", text, reads=span, branch=HOSTILE, role=HOSTILE, events=(replace(EVENT, detail=HOSTILE),)),
        asked("1", text, reads=span, branch="1"),
        asked("2", text, "0", "1", role=HOSTILE),
    )
    rewards, sections = (Reward("r", HOSTILE, 1.0, HOSTILE, 0.0),), [SourceMark(0, HOSTILE)]
    names = dict.fromkeys(("run_id", "question", "model", "strategy", "answer"), HOSTILE)
    view = run(trace=Trace(steps), chunk_text=lambda _: text, rewards=rewards, sections=sections, **names)
    timeline = build_timeline(replace(view, raw_answer="x" + HOSTILE))
    for renderer in (render_page, render_notebook):
        plain = renderer(build_timeline(run(["a keeper"], ["a keeper"], answer="a keeper")))
        drawing = renderer(timeline)
        expected, actual = ([tag for tag, _ in Page(text).tags] for text in (plain, drawing))
        assert set(actual) == set(expected)
        assert actual.count("script") == expected.count("script")
        assert not any({"onerror", "onload"} & attributes.keys() for _, attributes in Page(drawing).tags)
        drawing.encode()
    data = page_data(render_page(timeline))
    assert data["question"] == HOSTILE
    assert all(re.fullmatch(r"[\w%.~-]+", step["anchor"]) for step in data["steps"])
    for renderable in (render_timeline(timeline), render_timeline(timeline, chunk=1)):
        drawing = print_text(renderable)
        assert not set(drawing) & set("\x00\x1b\x07\x9b\u202e\u2066")
        assert "[/nosuch]" in drawing


def test_a_notebook_shows_the_page_in_a_frame_that_reaches_nothing_around_it() -> None:
    timeline = build_timeline(run())
    [(tag, attributes)] = Page(render_notebook(timeline)).tags
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert attributes["srcdoc"] == render_page(timeline)


PARTS = [*CHUNKS[:3], "Nothing again. ", *CHUNKS[3:]]
BRANCHED = run(
    trace=make_fan_out(
        [[GRANARY, GRANARY], ["Nor the year.", "Nor the year."], [LIGHTHOUSE, LIGHTHOUSE]],
        f"{GRANARY}\n{LIGHTHOUSE}",
        PARTS,
        answer="Ilse Thornbury",
    ),
    strategy="segments",
    chunk_text=lambda update: PARTS[update.chunk_index],
    sections=(),
)


def test_parallel_branches_are_shown_in_turn_and_then_their_merge() -> None:
    timeline = build_timeline(BRANCHED)
    assert [step.name for step in timeline.steps] == [
        *(f"chunk {chunk + 1}, branch {chunk // 2}" for chunk in range(6)),
        "merge of branches 0, 1, 2",
    ]
    merge = timeline.steps[-1]
    assert merge.sources == (1, 3, 5)
    assert merge.previous == f"{GRANARY}\nNor the year.\n{LIGHTHOUSE}"
    assert [step.previous for step in timeline.steps[:6:2]] == ["", "", ""]
    totals = timeline.totals
    assert (totals.chunks, totals.changes, totals.prompt_tokens, totals.completion_tokens) == (6, 4, 750, 145)
    assert timeline.branches == ["", "0", "1", "2"]
    assert timeline.memory == f"{GRANARY}\n{LIGHTHOUSE}"


def test_a_run_with_branches_is_drawn_on_the_terminal() -> None:
    text = print_text(render_timeline(build_timeline(BRANCHED)))
    assert re.search(r"strategy +segments", text)
    assert "6 chunks, 4 changed the memory, on 3 branches" in text
    assert "chunk 2, branch 0: unchanged" in text
    assert "merge of branches 0, 1, 2  +0 -3 words" in text
    assert "“Ilse Thornbury built the lighthouse”  chunk 5, branch 2, characters" in text
    assert "“Nor the year.”  chunk 3, branch 1 to merge of branches 0, 1, 2" in text


def test_a_dull_stretch_does_not_reach_over_branches() -> None:
    trace = make_fan_out([["a", "a", "a"], ["b", "b", "b"]], "a\nb", ["x"] * 6)
    text = print_text(render_timeline(build_timeline(run(trace=trace, chunk_text=lambda _: None, sections=()))))
    assert "chunks 2-3, branch 0: unchanged" in text
    assert "chunks 5-6, branch 1: unchanged" in text
    assert "merge of branches 0, 1  unchanged" in text


def test_the_page_holds_the_memories_of_branches_and_links_to_each() -> None:
    timeline = build_timeline(BRANCHED)
    data = page_data(render_page(timeline))
    assert data["branches"] == ["", "0", "1", "2"]
    assert rebuild(data["steps"]) == [step.update.memory for step in timeline.steps]
    assert [step["anchor"] for step in data["steps"]] == [
        *(f"chunk-{chunk + 1}-{chunk // 2}" for chunk in range(6)),
        "merge",
    ]
    assert data["steps"][-1]["from"] == [1, 3, 5]
    assert data["lines"][1]["at"] == 4
    assert data["lost"] == [{"text": "Nor the year.", "at": 2, "gone": 6}]


def gated() -> Trace:
    """Return a trace with a gate at each chunk, which keeps the memory at chunk 2. Then chunk 1 is read again."""
    first, second, third = make_spans(["a", "b", "c"])
    ask = partial(asked, role="gate", writes=Writes.DECISION, tokens=(10, 1))
    return Trace(
        (
            ask("g0", "update", reads=first),
            asked("u0", "Ilse", "g0", reads=first),
            ask("g1", "keep", "u0", reads=second),
            ask("g2", "update", "g1", reads=third),
            asked("u2", "Ilse built it", "g2", reads=third),
            ask("exit", "read on", "u2"),
            asked("again", "Ilse built it in 1743", "u2", reads=first, role="reread"),
            make_answer("again"),
        )
    )


def test_a_gates_decision_and_update_are_one_step_of_the_timeline() -> None:
    timeline = build_timeline(run(trace=gated(), chunk_text=lambda _: None, sections=()))
    assert [(step.name, step.was_kept, step.previous) for step in timeline.steps] == [
        ("chunk 1", False, ""),
        ("chunk 2", True, "Ilse"),
        ("chunk 3", False, "Ilse"),
        ("chunk 1 (read again)", False, "Ilse built it"),
    ]
    assert timeline.steps[2].update.prompt_tokens == 110
    assert timeline.totals.prompt_tokens == 3 * 100 + 4 * 10 + 50
    text = print_text(render_timeline(timeline))
    assert "chunk 2: kept" in text
    assert "chunk 1 (read again)  +3 -1 words" in text
    assert "chunk 1, reworded at 3, 1 (read again); no verbatim quote" in text
    anchors = [step["anchor"] for step in page_data(render_page(timeline))["steps"]]
    assert anchors == ["chunk-1", "chunk-2", "chunk-3", "step-4"]


def test_every_reading_of_a_chunk_is_shown_when_it_is_asked_for() -> None:
    text = print_text(render_timeline(build_timeline(run(trace=gated(), chunk_text=lambda _: "its text")), chunk=1))
    assert text.count("Memory before") == 2
    assert text.count("its text") == 1
    assert "Ilse built it in 1743" in text


def test_a_fork_of_the_trunk_shows_each_branch_against_the_memory_it_left_from() -> None:
    first, second = make_spans(["a", "b"])
    trace = Trace(
        (
            asked("t", "Ilse", reads=first),
            asked("l", "Ilse built it", "t", reads=second, branch="left"),
            asked("r", "Per", "t", reads=second, branch="right"),
            asked("m", "Ilse built it", "l", "r", role="merge"),
        )
    )
    timeline = build_timeline(run(trace=trace, chunk_text=lambda _: None, sections=()))
    assert [(step.name, step.previous) for step in timeline.steps] == [
        ("chunk 1", ""),
        ("chunk 2, branch left", "Ilse"),
        ("chunk 2, branch right", "Ilse"),
        ("merge of branches left, right", "Ilse built it\nPer"),
    ]
    assert [line.line for line in timeline.provenance.lost] == ["Per"]
    assert rebuild(page_data(render_page(timeline))["steps"]) == [step.update.memory for step in timeline.steps]


# A page replaces an older page; anything else only if that is asked for

PAGE = render_page(build_timeline(run()))


def test_an_older_page_is_replaced_and_other_files_only_by_force(tmp_path) -> None:
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
        write_page(PAGE, tmp_path / "nowhere" / "run.html")
    assert {path.name for path in tmp_path.iterdir()} == {"run.html", "notes.html", "folder"}


@pytest.mark.parametrize("to_a_page", [False, True])
def test_a_link_is_never_followed(tmp_path, to_a_page) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text(PAGE + "target" if to_a_page else "precious")
    before = target.read_text()
    link.symlink_to(target)
    with pytest.raises(RunError, match="is a link"):
        write_page(PAGE, link)
    write_page(PAGE, link, force=True)
    assert not link.is_symlink()
    assert link.read_text() == PAGE
    assert target.read_text() == before

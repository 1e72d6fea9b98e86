"""A headless Chromium, and pages to open in it. Without Chromium these tests are skipped."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.traces import make_answer, make_fan_out, make_spans, make_trace, make_view

from memagent_graph.documents import SourceMark
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.run_log import Reward
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import Trace

CHUNKS = 700
ANSWER_AT, FACTS_PER_CHUNK = 210, 190
MEMORY_LINES = 30
QUESTION = "Who built the lighthouse at Cape Verity, and in which year was it lit for the first time?"
HOSTILE = (
    "</script><script>window.attacked=1</script><img src=x onerror=window.attacked=1>"
    "\"'><svg/onload=window.attacked=1><!-- {{data}} [link](javascript:window.attacked=1) \u2028 \u0000 \ud800 "
)

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1360,900",
)
_PEOPLE = ("Anselm Varga", "Ilse Thornbury", "Marta Okonjo", "Per Lindqvist", "Dina Feld", "Tomas Hale", "Ruth Amadi")
_PLACES = ("Cape Verity", "the Long Quay", "Port Ansgar", "the salt works", "Hollow Mill", "the north battery")
_THINGS = ("old lantern", "granary", "chapel roof", "signal tower", "west bridge", "ferry house", "tannery")


def _fact(generator: random.Random) -> str:
    person, place, thing = map(generator.choice, (_PEOPLE, _PLACES, _THINGS))
    year = generator.randrange(1650, 1890)
    return f"{person} of {place} was named keeper of the {thing} in {year}, as the parish register records."


def long_run() -> RunView:
    """A run of many chunks whose memory holds about 1000 tokens and changes at most of them."""
    generator = random.Random(1)
    facts = [[_fact(generator) for _ in range(FACTS_PER_CHUNK)] for _ in range(CHUNKS)]
    facts[ANSWER_AT].insert(
        9, "The lighthouse at Cape Verity was built by Ilse Thornbury and lit for the first time in 1743."
    )
    texts = [" ".join(chunk) for chunk in facts]
    memory: list[str] = [""] * MEMORY_LINES
    memories: list[str] = []
    events: dict[int, ReadEvent] = {}
    for chunk, of_chunk in enumerate(facts):
        if generator.random() < 0.7:
            memory[generator.randrange(1, MEMORY_LINES)] = f"- {generator.choice(of_chunk)}"
        if chunk == ANSWER_AT:
            memory[0] = "- The lighthouse at Cape Verity was built by Ilse Thornbury; lit for the first time in 1743."
        if generator.random() < 0.03:
            events[chunk] = ReadEvent(EventKind.TRUNCATED, chunk, "cut at 1,024 tokens", UpdateRule.ACCEPT)
        memories.append("\n".join(filter(None, memory)))
    seconds = [1.4 + generator.random() for _ in facts]
    marks = [SourceMark(index * 40_000, f"page {index + 1}") for index in range(CHUNKS // 2)]
    trace = make_trace(memories, texts, events=events, tokens=(6132, 988), seconds=seconds)
    answer = "Ilse Thornbury built it; it was lit for the first time in 1743."
    return make_view(
        trace,
        run_id="20251104-harbour",
        question=QUESTION,
        document={"key": "sha256:" + "0" * 64, "name": "harbour-annals.pdf", "size": 14_000_000, "media_type": ""},
        model="Qwen/Qwen2.5-7B-Instruct",
        answer=answer,
        raw_answer=f"From memory: \\boxed{{{answer}}}",
        began=1_762_240_000.0,
        rewards=(Reward("r", "exact", 1.0, "judge", 1_762_250_000.0),),
        sections=marks,
        chunk_text=lambda update: texts[update.chunk_index],
    )


def hostile_run() -> RunView:
    """A run in which everything that others wrote tries to run a script."""
    text = f"{HOSTILE} the lighthouse keeper {HOSTILE}"
    events = dict.fromkeys(range(3), ReadEvent(EventKind.REFUSED, 0, HOSTILE))
    memories = [f"{HOSTILE} lighthouse keeper {index}" for index in range(3)]
    trace = make_trace(memories, [text] * 3, events=events, answer=make_answer("2", events=(events[0],)))
    names = dict.fromkeys(("run_id", "question", "model", "strategy", "stop_reason"), HOSTILE)
    return make_view(
        trace,
        **names,
        document={"key": "sha256:" + "0" * 64, "name": HOSTILE, "size": 1, "media_type": HOSTILE},
        answer=f"{HOSTILE} keeper",
        raw_answer=f"raw {HOSTILE}",
        rewards=(Reward("r", HOSTILE, 1.0, HOSTILE, 0.0),),
        sections=[SourceMark(0, HOSTILE)],
        chunk_text=lambda _: text,
    )


def branched_run() -> RunView:
    """A run that read three parts of a document side by side, eight chunks each, and merged what it had written."""
    chunks = [f"In the {number}th year the {_THINGS[number % 7]} was sold. " for number in range(24)]
    memories = [
        [f"the {_THINGS[(lane * 8 + number // 4 * 4) % 7]} was sold" for number in range(8)] for lane in range(3)
    ]
    merged = "\n".join(lane[-1] for lane in memories[:2])
    trace = make_fan_out(memories, merged, chunks)
    texts = {"question": "What was sold?", "answer": "the tannery"}
    return make_view(trace, strategy="segments", chunk_text=lambda update: chunks[update.chunk_index], **texts)


def excerpt_run() -> RunView:
    """A run that showed an excerpt made of attacks instead of reading chunks."""
    text = f"{HOSTILE} The lighthouse keeper was Ilse Thornbury. {HOSTILE}"
    (span,) = make_spans([text])
    shown = replace(make_answer(text="Ilse Thornbury"), reads=(span,), slot=-1)
    return make_view(Trace((shown,)), strategy="retrieval", question=HOSTILE, span_text=lambda _: text)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium under its driver, with the console and the network recorded."""
    from selenium import webdriver

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        missing = "needs Chromium and its driver: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(missing, pytrace=False)  # a CI run that silently skips would prove nothing
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of the runs above, by kind."""
    views = {"long": long_run(), "hostile": hostile_run(), "branched": branched_run(), "excerpt": excerpt_run()}
    paths = {kind: tmp_path_factory.mktemp("page") / f"{kind}.html" for kind in views}
    for kind, run in views.items():
        paths[kind].write_text(render_page(build_timeline(run)), encoding="utf-8")
    return paths


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Callable[..., Any]:
    """Open a page afresh at a fragment. What the browser complained of before is gone."""

    def open_at(fragment: str = "", *, page: str = "long") -> Any:
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(pages[page].as_uri() + fragment)
        return browser

    return open_at

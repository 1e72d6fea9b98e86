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
from memagent_graph.provenance.places import Places
from memagent_graph.run_log import Reward
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import Trace

CHUNKS = 700
ANSWER_CHUNK, FACTS_PER_CHUNK = 210, 190
MEMORY_LINES = 30
QUESTION = "Who built the lighthouse at Cape Verity, and in which year was it lit for the first time?"
HOSTILE = (
    "</script><script>window.attacked=1</script><img src=x onerror=window.attacked=1>"
    "\"'><svg/onload=window.attacked=1><!-- $data [link](javascript:window.attacked=1) \u2028 \u0000 \ud800 "
)

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1360,900",
)  # fmt: skip
_PEOPLE = ("Anselm Varga", "Ilse Thornbury", "Marta Okonjo", "Per Lindqvist", "Dina Feld", "Tomas Hale", "Ruth Amadi")
_PLACES = ("Cape Verity", "the Long Quay", "Port Ansgar", "the salt works", "Hollow Mill", "the north battery")
_THINGS = ("old lantern", "granary", "chapel roof", "signal tower", "west bridge", "ferry house", "tannery")


def _make_fact(rng: random.Random) -> str:
    person, place, thing = map(rng.choice, (_PEOPLE, _PLACES, _THINGS))
    year = rng.randrange(1650, 1890)
    return f"{person} of {place} was named keeper of the {thing} in {year}, as the parish register records."


def make_long_run() -> RunView:
    """Return a run of many chunks, most of which change its memory of about 1000 tokens."""
    rng = random.Random(1)
    facts_by_chunk = [[_make_fact(rng) for _ in range(FACTS_PER_CHUNK)] for _ in range(CHUNKS)]
    facts_by_chunk[ANSWER_CHUNK].insert(
        9, "The lighthouse at Cape Verity was built by Ilse Thornbury and lit for the first time in 1743."
    )
    texts = [" ".join(facts) for facts in facts_by_chunk]
    memory: list[str] = [""] * MEMORY_LINES
    memories: list[str] = []
    events: dict[int, ReadEvent] = {}
    for chunk, facts in enumerate(facts_by_chunk):
        if rng.random() < 0.7:
            memory[rng.randrange(1, MEMORY_LINES)] = f"- {rng.choice(facts)}"
        if chunk == ANSWER_CHUNK:
            memory[0] = "- The lighthouse at Cape Verity was built by Ilse Thornbury; lit for the first time in 1743."
        if rng.random() < 0.03:
            events[chunk] = ReadEvent(EventKind.TRUNCATED, chunk, "cut at 1,024 tokens", UpdateRule.ACCEPT)
        memories.append("\n".join(filter(None, memory)))
    seconds = [1.4 + rng.random() for _ in texts]
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
        places=Places(marks),
        span_text=lambda update: texts[update.chunk_index],
    )


def make_hostile_run() -> RunView:
    """Return a run in which every text tries to run a script."""
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
        places=Places([SourceMark(0, HOSTILE)]),
        span_text=lambda _: text,
    )


def make_branched_run() -> RunView:
    """Return a run with three parallel branches of eight chunks each, and their merge."""
    chunks = [f"In the {number}th year the {_THINGS[number % 7]} was sold. " for number in range(24)]
    memories = [
        [f"the {_THINGS[(branch * 8 + number // 4 * 4) % 7]} was sold" for number in range(8)] for branch in range(3)
    ]
    merged = "\n".join(branch_memories[-1] for branch_memories in memories[:2])
    trace = make_fan_out(memories, merged, chunks)
    texts = {"question": "What was sold?", "answer": "the tannery"}
    return make_view(trace, strategy="segments", span_text=lambda update: chunks[update.chunk_index], **texts)


def make_excerpt_run() -> RunView:
    """Return a run that answered from an excerpt full of attacks."""
    text = f"{HOSTILE} The lighthouse keeper was Ilse Thornbury. {HOSTILE}"
    (span,) = make_spans([text])
    answer = replace(make_answer(text="Ilse Thornbury"), reads=(span,), slot=-1)
    return make_view(Trace((answer,)), strategy="retrieval", question=HOSTILE, span_text=lambda _: text)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium with its driver, which records the console and the network."""
    from selenium import webdriver

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        reason = "needs Chromium and its driver: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)  # a CI run without these tests would prove nothing
        pytest.skip(reason)
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
    """The files of the pages of the runs above, by name."""
    makers = {"long": make_long_run, "hostile": make_hostile_run, "branched": make_branched_run}
    paths: dict[str, Path] = {}
    for name, make_run in (makers | {"excerpt": make_excerpt_run}).items():
        paths[name] = tmp_path_factory.mktemp("page") / f"{name}.html"
        paths[name].write_text(render_page(build_timeline(make_run())), encoding="utf-8")
    return paths


@pytest.fixture
def open_page(browser: Any, pages: dict[str, Path]) -> Callable[..., Any]:
    """Opens a page at a fragment, with an empty console log."""

    def open_at(fragment: str = "", *, page: str = "long") -> Any:
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(pages[page].as_uri() + fragment)
        return browser

    return open_at

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
from support.traces import answered, fan_out, line, spans, view

from memagent_graph.documents import SourceMark
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.run_log import Reward
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import Trace

CHUNKS = 700
CHUNK_CHARACTERS = 20_000
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
_DEEDS = (
    "paid for the repair of the {} after the flood of {}",
    "was named keeper of the {} in {}, against the council's advice",
    "sold the {} to the harbour company for {} crowns",
    "wrote in a letter that the {} had stood empty since {}",
)
_THINGS = ("old lantern", "granary", "chapel roof", "signal tower", "west bridge", "ferry house", "tannery")


def _fact(generator: random.Random) -> str:
    deed = generator.choice(_DEEDS).format(generator.choice(_THINGS), generator.randrange(1650, 1890))
    return f"{generator.choice(_PEOPLE)} of {generator.choice(_PLACES)} {deed}, as the parish register records."


def long_run(*, chunks: int = CHUNKS, lines: int = MEMORY_LINES, seed: int = 1) -> RunView:
    """A run of many chunks whose memory holds about 1000 tokens and changes at most of them."""
    generator = random.Random(seed)
    texts: list[str] = []
    for _ in range(chunks):
        sentences: list[str] = []
        while sum(map(len, sentences)) < CHUNK_CHARACTERS:
            sentences.append(_fact(generator))
        texts.append(" ".join(sentences))
    answer_at = chunks * 3 // 10
    built = "The lighthouse at Cape Verity was built by Ilse Thornbury and lit for the first time in 1743."
    middle = texts[answer_at].index(". ", CHUNK_CHARACTERS // 2) + 2
    texts[answer_at] = (texts[answer_at][:middle] + built + " " + texts[answer_at][middle:])[: len(texts[answer_at])]
    memory: list[str] = []
    memories: list[str] = []
    events: dict[int, ReadEvent] = {}
    seconds: list[float] = []
    for chunk, text in enumerate(texts):
        if generator.random() < 0.7:
            for _ in range(generator.randrange(1, 3)):
                facts = text.split(". ")
                fact = f"- {generator.choice(facts[:60])}."
                if len(memory) < lines:
                    memory.append(fact)
                else:
                    memory[generator.randrange(1, lines)] = fact
            if chunk > 20:
                number = generator.randrange(lines // 6, lines // 2)
                memory[number] = memory[number].replace("as the parish register records", "so the register says")
        if chunk == answer_at:
            memory[0] = "- The lighthouse at Cape Verity was built by Ilse Thornbury; lit for the first time in 1743."
        if generator.random() < 0.03:
            events[chunk] = ReadEvent(EventKind.TRUNCATED, chunk, "cut at 1,024 tokens", UpdateRule.ACCEPT)
        memories.append("\n".join(memory))
        seconds.append(1.4 + generator.random())
    marks = [SourceMark(index * 40_000, f"page {index + 1}") for index in range(chunks // 2)]
    trace = line(memories, texts, events=events, tokens=(6132, 988), seconds=seconds)
    answer = "Ilse Thornbury built it; it was lit for the first time in 1743."
    return view(
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
    event = ReadEvent(EventKind.REFUSED, 0, HOSTILE)
    memories = [f"{HOSTILE} lighthouse keeper {index}" for index in range(3)]
    trace = line(memories, [text] * 3, events=dict.fromkeys(range(3), event), answer=answered("2", events=(event,)))
    names = dict.fromkeys(("run_id", "question", "model", "strategy", "stop_reason"), HOSTILE)
    return view(
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
    trace = fan_out(memories, merged, chunks)
    texts = {"question": "What was sold?", "answer": "the tannery"}
    return view(trace, strategy="segments", chunk_text=lambda update: chunks[update.chunk_index], **texts)


def excerpt_run() -> RunView:
    """A run that showed an excerpt made of attacks instead of reading chunks."""
    text = f"{HOSTILE} The lighthouse keeper was Ilse Thornbury. {HOSTILE}"
    (span,) = spans([text])
    shown = replace(answered(text="Ilse Thornbury"), reads=(span,), slot=-1)
    return view(Trace((shown,)), strategy="retrieval", question=HOSTILE, span_text=lambda _: text)


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

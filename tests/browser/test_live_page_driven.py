"""The live page in a real browser: `pytest tests/browser`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from support.fake_server import FakeServer
from support.scripts import extract, make_document, read_perfectly
from support.serving import Server, serve

from memagent_serve.ledger import Entry

_REASON = "needs selenium: pip install selenium"
By = pytest.importorskip("selenium.webdriver.common.by", reason=_REASON).By
Keys = pytest.importorskip("selenium.webdriver.common.keys", reason=_REASON).Keys
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui", reason=_REASON).WebDriverWait

LONG = make_document({0.1: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=1500)
QUESTION = "What is the key of harbor?"
PAYLOADS = (
    "<script>attacked=1</script>", "</script><script>attacked=1</script>", "<img src=x onerror=attacked=1>",
    "<svg/onload=attacked=1>", "<svg><script>attacked=1</script></svg>", "<iframe srcdoc='<script>parent.attacked=1'>",
    "<iframe src=javascript:parent.attacked=1>", "<body onload=attacked=1>", "<details open ontoggle=attacked=1>x",
    "<input autofocus onfocus=attacked=1>", "<a href=javascript:attacked=1 autofocus>x</a>",
    "[x](javascript:attacked=1)", "<video><source onerror=attacked=1></video>", "<audio src onerror=attacked=1>",
    "<object data=javascript:attacked=1>", "<embed src=javascript:attacked=1>", "<base href=//evil.example/>",
    "<meta http-equiv=refresh content=0;url=/evil>", "<style onload=attacked=1></style>",
    "<template><img src=x onerror=attacked=1></template>",
    "\" autofocus onfocus=attacked=1 x=\"", "' onmouseover=attacked=1 x='", "--><img src=x onerror=attacked=1><!--",
    "</textarea><img src=x onerror=attacked=1>", "</title><svg onload=attacked=1>",
    "<math><mi xlink:href=javascript:attacked=1>x", "&lt;img src=x onerror=attacked=1&gt;",
)  # fmt: skip


@pytest.fixture
def upstream() -> Iterator[FakeServer]:
    with FakeServer(delay=0.15, window=1000) as server:
        yield server


@pytest.fixture
def server(upstream: FakeServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server, whose reader has the options that a test may name."""
    options = {"max_reads": 20, "max_reads_per_key": 64, "reader": getattr(request, "param", None)}
    with serve(upstream.base_url, tmp_path, page=True, **options) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page, signed in by the link of the start-up message."""
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(f"{server.url}/#token={server.sessions.token}")
    until(browser, "!document.getElementById('view-home').hidden")
    yield browser
    browser.get("about:blank")


def reply_by(upstream: FakeServer, script: Callable[[str], str]) -> None:
    """Let the policy write from now on what a script makes of each prompt."""
    upstream.respond = lambda body, number: script(body["messages"][-1]["content"])


def until(browser: Any, script: str, *arguments: Any, seconds: float = 30) -> Any:
    wait = WebDriverWait(browser, seconds, poll_frequency=0.05)
    return wait.until(lambda driver: driver.execute_script(f"return {script}", *arguments))


def drop(browser: Any, name: str, text: str) -> None:
    """Let a file fall onto the page, as a person does."""
    browser.execute_script(
        "const data = new DataTransfer(); data.items.add(new File([arguments[1]], arguments[0]));"
        "document.getElementById('drop').dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true}))",
        name,
        text,
    )
    until(browser, "[...document.querySelectorAll('#files li')].some(item => item.textContent.includes('KiB of text'))")


def begin(browser: Any, *questions: str) -> None:
    browser.find_element(By.ID, "questions").send_keys(Keys.SHIFT + Keys.NULL, "\n".join(questions))
    browser.find_element(By.ID, "begin").click()


def state(browser: Any) -> str:
    return str(browser.find_element(By.ID, "read-state").text)


def wait_for_state(browser: Any, text: str) -> None:
    until(browser, "document.getElementById('read-state').textContent.includes(arguments[0])", text)


def memory(browser: Any) -> list[str]:
    return list(
        browser.execute_script("return [...document.querySelectorAll('.branch .line p')].map(p => p.textContent)")
    )


def button(browser: Any, label: str) -> Any:
    return next(
        element for element in browser.find_elements(By.TAG_NAME, "button") if element.accessible_name.startswith(label)
    )


def start(browser: Any) -> None:
    """Begin to read, and wait until memory holds the first fact."""
    drop(browser, "annals.txt", LONG)
    begin(browser, QUESTION)
    until(browser, "document.querySelector('#branches')?.textContent.includes('harbor 4711')")


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def test_drop_ask_watch_answer_and_look_at_the_source(page: Any) -> None:
    start(page)
    assert state(page).startswith("reading")
    steps = len(page.find_elements(By.CSS_SELECTOR, "#steps > li"))
    until(page, "document.querySelectorAll('#steps > li').length > arguments[0]", steps)
    until(page, "!document.getElementById('answer-box').hidden")
    assert page.find_element(By.ID, "read-answer").text == "4711"
    link = "document.querySelector('#source-lines .quotes a')"
    until(page, f"{link} !== null")
    page.execute_script(f"{link}.click()")
    assert "harbor is 4711" in until(page, "document.querySelector('#passage mark')?.textContent")
    assert page.execute_script("return document.activeElement.tagName") == "MARK"
    page.back()
    until(page, "!document.getElementById('answer-box').hidden")
    page.find_element(By.ID, "thumb-up").click()
    until(page, "document.getElementById('thumb-up').getAttribute('aria-pressed') === 'true'")
    page.find_element(By.ID, "run-page").click()
    until(page, "performance.getEntriesByName('timeline-ready').length")
    assert "thumbs 1" in page.find_element(By.ID, "facts").text
    next(element for element in page.find_elements(By.CSS_SELECTOR, ".line-text") if "harbor" in element.text).click()
    page.find_element(By.CSS_SELECTOR, ".passage.current a").click()
    assert "harbor is 4711" in until(page, "document.querySelector('#passage mark')?.textContent")
    assert complaints(page) == []


def test_pause_edit_and_continue(page: Any, upstream: FakeServer, server: Server) -> None:
    start(page)
    page.find_element(By.ID, "pause").click()
    wait_for_state(page, "paused")
    held = memory(page)
    button(page, "Edit: harbor").click()
    box = page.switch_to.active_element
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(Keys.NULL, "harbor 99", Keys.CONTROL, Keys.ENTER)
    until(page, "document.querySelector('#branches').textContent.includes('harbor 99')")
    assert memory(page) == [line.replace("4711", "99") for line in held]
    button(page, "Delete: nothing yet").click()
    until(page, "!document.querySelector('#branches').textContent.includes('nothing yet')")
    reply_by(
        upstream, lambda prompt: f"{extract(prompt, 'memory')}\nread on" if "<section>" in prompt else "\\boxed{99}"
    )
    page.find_element(By.ID, "continue").click()
    until(page, "document.querySelector('#branches').textContent.includes('read on')")
    assert memory(page)[0] == "harbor 99"
    assert "edited by a person" in page.find_element(By.ID, "read-run").text
    assert complaints(page) == []


def test_ask_now_answers_from_the_memory_as_it_stands(page: Any) -> None:
    start(page)
    page.find_element(By.ID, "ask-now").click()
    page.find_element(By.CSS_SELECTOR, "#now button.primary").click()
    assert until(page, "document.querySelector('#answers li')?.textContent").endswith("4711")
    assert state(page).startswith("reading")
    page.find_element(By.ID, "stop").click()
    wait_for_state(page, "cancelled")


@pytest.mark.parametrize("server", [{"strategy": "segments:count=3"}], indirect=True)
def test_branches_stand_side_by_side(page: Any, upstream: FakeServer) -> None:
    reply_by(
        upstream,
        lambda prompt: (
            read_perfectly(prompt) if "<section>" in prompt else "\\boxed{4711}" if "4711" in prompt else "unknown"
        ),
    )
    drop(page, "annals.txt", LONG)
    begin(page, QUESTION)
    until(page, "document.querySelectorAll('.branch').length >= 3")
    tops = page.execute_script(
        "return [...document.querySelectorAll('.branch')].slice(0, 2).map(item => item.getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1]
    until(page, "!document.getElementById('answer-box').hidden")
    assert page.find_element(By.ID, "read-answer").text == "4711"


def test_five_thousand_reads_are_listed_and_searched(page: Any, server: Server) -> None:
    for number in range(5000):
        entry = Entry(f"run-{number}", "local", f"r{number}", f"Question {number}?", "book.txt", float(number))
        server.resources.ledger.begin(entry)
    page.refresh()
    until(page, "document.getElementById('found').textContent === '5,000 reads'")
    assert len(page.find_elements(By.CSS_SELECTOR, "#reads li")) == 50
    page.execute_script("document.getElementById('more').click()")
    until(page, "document.querySelectorAll('#reads li').length === 100")
    page.find_element(By.TAG_NAME, "body").send_keys("/")
    page.switch_to.active_element.send_keys("question 123?")
    until(page, "document.getElementById('found').textContent === '1 read'")
    assert page.find_element(By.CSS_SELECTOR, "#reads a").text == "Question 123?"


def test_the_keyboard_alone_is_enough(page: Any) -> None:
    """From the start of the page by Tab, Enter and the page's own keys; nothing is clicked."""

    def tab_to(name: str) -> Any:
        for _ in range(40):
            active = page.switch_to.active_element
            if active.get_attribute("id") == name:
                return active
            active.send_keys(Keys.TAB)
        raise AssertionError(f"Tab does not lead to {name}")

    page.execute_script("document.activeElement.blur()")
    page.execute_script("document.querySelector('details').open = false")
    tab_to("choose")
    page.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    tab_to("paste").send_keys(LONG[:3000])
    tab_to("add-paste").send_keys(Keys.ENTER)
    until(page, "document.querySelector('#files li')?.textContent.includes('KiB of text')")
    assert page.switch_to.active_element.get_attribute("id") == "questions"
    page.switch_to.active_element.send_keys(QUESTION, Keys.CONTROL, Keys.ENTER)
    until(page, "document.querySelectorAll('#steps > li').length > 1")
    page.find_element(By.TAG_NAME, "body").send_keys("p")
    wait_for_state(page, "paused")
    tab_to("continue")
    page.find_element(By.TAG_NAME, "body").send_keys("p")
    until(page, "!document.getElementById('answer-box').hidden")
    page.find_element(By.TAG_NAME, "body").send_keys("n")
    assert page.switch_to.active_element.get_attribute("id") == "now-question"
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert page.find_element(By.ID, "now").get_attribute("open") is None


def test_every_control_has_a_name_and_every_picture_of_state_words(page: Any) -> None:
    start(page)
    page.find_element(By.ID, "pause").click()
    wait_for_state(page, "paused")
    for view in ("read", "home"):
        if view == "home":
            page.find_element(By.CSS_SELECTOR, ".home").click()
            until(page, "document.querySelectorAll('#reads li').length")
        shown = page.find_elements(By.CSS_SELECTOR, "button, input, textarea, a, progress")
        nameless = [
            item.get_attribute("outerHTML") for item in shown if item.is_displayed() and not item.accessible_name
        ]
        assert nameless == []
    assert page.execute_script("return document.querySelectorAll('main h1').length") >= 1


@pytest.mark.parametrize("width", [360, 1360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window_by_day_and_night(page: Any, width: int, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 780, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    try:
        fits = "document.documentElement.scrollWidth <= innerWidth"
        assert page.execute_script(f"return {fits}")
        drop(page, f"{'long-name-' * 12}.txt", LONG)
        begin(page, QUESTION)
        until(page, "document.querySelectorAll('#steps > li').length > 2")
        assert page.execute_script(f"return {fits}")
        shades = page.execute_script(
            "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
        )
        back, ink = (sum(map(int, re.findall(r"\d+", shade)[:3])) for shade in shades)
        assert (back < ink) == (scheme == "dark")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_no_payload_runs_in_a_name_document_question_memory_or_answer(page: Any, upstream: FakeServer) -> None:
    payloads = cycle(PAYLOADS)
    reply_by(
        upstream,
        lambda prompt: "\n".join(islice(payloads, 3)) if "<section>" in prompt else f"\\boxed{{{next(payloads)}}}",
    )
    drop(page, f"{PAYLOADS[2]}.txt", "\n".join(PAYLOADS * 3))
    page.execute_script("document.getElementById('questions').value = arguments[0]", "\n".join(PAYLOADS))
    page.find_element(By.ID, "begin").click()
    count = len(PAYLOADS)
    until(page, "document.querySelectorAll('#reads .state-running').length > 10")
    until(page, "document.querySelectorAll('#reads .state-finished').length === arguments[0]", count, seconds=90)
    listed = page.find_element(By.ID, "reads").text
    assert [payload for payload in PAYLOADS if payload not in listed] == []
    for number in range(count):
        # A single script call, because the page replaces the list items while it updates.
        page.execute_script("document.querySelectorAll('#reads li a')[arguments[0]].click()", number)
        until(page, "!document.getElementById('answer-box').hidden")
        assert page.execute_script("return window.attacked") is None
        assert (
            page.execute_script("return document.querySelectorAll('#view-read :is(img, iframe, object)').length") == 0
        )
        if number < 3:  # an answer before the end, and the run page
            page.find_element(By.ID, "ask-now").click()
            page.find_element(By.CSS_SELECTOR, "#now button.primary").click()
            until(page, "document.querySelectorAll('#answers li').length")
            page.find_element(By.ID, "run-page").click()
            until(page, "performance.getEntriesByName('timeline-ready').length")
            assert page.execute_script("return window.attacked") is None
            page.back()
            until(page, "!document.getElementById('answer-box').hidden")
        page.find_element(By.CSS_SELECTOR, ".home").click()
        until(page, "document.querySelectorAll('#reads li').length === arguments[0]", count)
    assert page.execute_script("return document.querySelectorAll('img, svg, iframe, object').length") == 0
    assert page.execute_script("return document.scripts.length") == 1
    assert complaints(page) == []


def test_nothing_is_fetched_from_elsewhere_and_markup_that_came_in_runs_nothing(page: Any, server: Server) -> None:
    page.get_log("performance")
    page.refresh()
    until(page, "!document.getElementById('view-home').hidden")
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in urls if not url.startswith((server.url, "data:"))] == []
    assert not any(server.sessions.token in url for url in urls)
    page.execute_script(
        "document.getElementById('notice').innerHTML = '<img src=x onerror=window.attacked=1>'"
        " + '<iframe srcdoc=\"<script>parent.attacked=1</script>\"></iframe>'"
    )
    page.execute_async_script("setTimeout(arguments[0], 300)")
    assert page.execute_script("return window.attacked") is None
    page.get_log("browser")


def test_without_the_token_one_is_asked_to_sign_in(browser: Any, server: Server) -> None:
    browser.get("about:blank")
    browser.get(f"{server.url}/#token=wrong")
    until(browser, "!document.getElementById('view-sign-in').hidden")
    until(browser, "!document.getElementById('notice').hidden")
    browser.find_element(By.ID, "token").send_keys(server.sessions.token, Keys.ENTER)
    until(browser, "!document.getElementById('view-home').hidden")
    assert "token" not in browser.current_url
    browser.find_element(By.ID, "sign-out").click()
    until(browser, "!document.getElementById('view-sign-in').hidden")
    browser.refresh()
    until(browser, "!document.getElementById('view-sign-in').hidden")
    browser.get_log("browser")

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

LONG_TEXT = make_document({0.1: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=1500)
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
    """The server; a test can set options of its reader."""
    options = {"max_reads": 20, "max_reads_per_key": 64, "reader": getattr(request, "param", None)}
    with serve(upstream.base_url, tmp_path, page=True, **options) as server:
        yield server


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page, signed in with the link from the server's output."""
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(f"{server.url}/#token={server.sessions.token}")
    wait_until(browser, "!document.getElementById('view-home').hidden")
    yield browser
    browser.get("about:blank")


def set_script(upstream: FakeServer, script: Callable[[str], str]) -> None:
    """Make the policy server reply with a script from now on."""
    upstream.respond = lambda body, number: script(body["messages"][-1]["content"])


def wait_until(browser: Any, script: str, *arguments: Any, seconds: float = 30) -> Any:
    wait = WebDriverWait(browser, seconds, poll_frequency=0.05)
    return wait.until(lambda driver: driver.execute_script(f"return {script}", *arguments))


def drop_file(browser: Any, name: str, text: str) -> None:
    """Drop a file onto the page."""
    browser.execute_script(
        "const data = new DataTransfer(); data.items.add(new File([arguments[1]], arguments[0]));"
        "document.getElementById('drop').dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true}))",
        name,
        text,
    )
    wait_until(
        browser, "[...document.querySelectorAll('#files li')].some(item => item.textContent.includes('KiB of text'))"
    )


def submit_questions(browser: Any, *questions: str) -> None:
    browser.find_element(By.ID, "questions").send_keys(Keys.SHIFT + Keys.NULL, "\n".join(questions))
    browser.find_element(By.ID, "begin").click()


def get_state(browser: Any) -> str:
    return str(browser.find_element(By.ID, "read-state").text)


def wait_for_state(browser: Any, text: str) -> None:
    wait_until(browser, "document.getElementById('read-state').textContent.includes(arguments[0])", text)


def read_memory(browser: Any) -> list[str]:
    return list(
        browser.execute_script("return [...document.querySelectorAll('.branch .line p')].map(p => p.textContent)")
    )


def find_button(browser: Any, label: str) -> Any:
    return next(
        element for element in browser.find_elements(By.TAG_NAME, "button") if element.accessible_name.startswith(label)
    )


def start_read(browser: Any) -> None:
    """Start a read, and wait until its memory has the first fact."""
    drop_file(browser, "annals.txt", LONG_TEXT)
    submit_questions(browser, QUESTION)
    wait_until(browser, "document.querySelector('#branches')?.textContent.includes('harbor 4711')")


def get_console_messages(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def test_a_dropped_file_is_read_and_the_answer_links_to_its_source(page: Any) -> None:
    start_read(page)
    assert get_state(page).startswith("reading")
    steps = len(page.find_elements(By.CSS_SELECTOR, "#steps > li"))
    wait_until(page, "document.querySelectorAll('#steps > li').length > arguments[0]", steps)
    wait_until(page, "!document.getElementById('answer-box').hidden")
    assert page.find_element(By.ID, "read-answer").text == "4711"
    link = "document.querySelector('#source-lines .quotes a')"
    wait_until(page, f"{link} !== null")
    page.execute_script(f"{link}.click()")
    assert "harbor is 4711" in wait_until(page, "document.querySelector('#passage mark')?.textContent")
    assert page.execute_script("return document.activeElement.tagName") == "MARK"
    page.back()
    wait_until(page, "!document.getElementById('answer-box').hidden")
    page.find_element(By.ID, "thumb-up").click()
    wait_until(page, "document.getElementById('thumb-up').getAttribute('aria-pressed') === 'true'")
    page.find_element(By.ID, "run-page").click()
    wait_until(page, "performance.getEntriesByName('timeline-ready').length")
    assert "thumbs 1" in page.find_element(By.ID, "facts").text
    next(element for element in page.find_elements(By.CSS_SELECTOR, ".line-text") if "harbor" in element.text).click()
    page.find_element(By.CSS_SELECTOR, ".passage.current a").click()
    assert "harbor is 4711" in wait_until(page, "document.querySelector('#passage mark')?.textContent")
    assert get_console_messages(page) == []


def test_a_paused_read_can_be_edited_and_continued(page: Any, upstream: FakeServer, server: Server) -> None:
    start_read(page)
    page.find_element(By.ID, "pause").click()
    wait_for_state(page, "paused")
    original_lines = read_memory(page)
    find_button(page, "Edit: harbor").click()
    box = page.switch_to.active_element
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(Keys.NULL, "harbor 99", Keys.CONTROL, Keys.ENTER)
    wait_until(page, "document.querySelector('#branches').textContent.includes('harbor 99')")
    assert read_memory(page) == [line.replace("4711", "99") for line in original_lines]
    find_button(page, "Delete: nothing yet").click()
    wait_until(page, "!document.querySelector('#branches').textContent.includes('nothing yet')")
    extend = "{}\nread on".format
    set_script(upstream, lambda prompt: extend(extract(prompt, "memory")) if "<section>" in prompt else "\\boxed{99}")
    page.find_element(By.ID, "continue").click()
    wait_until(page, "document.querySelector('#branches').textContent.includes('read on')")
    assert read_memory(page)[0] == "harbor 99"
    assert "edited by a person" in page.find_element(By.ID, "read-run").text
    assert get_console_messages(page) == []


def test_ask_now_answers_from_the_current_memory(page: Any) -> None:
    start_read(page)
    page.find_element(By.ID, "ask-now").click()
    page.find_element(By.CSS_SELECTOR, "#now button.primary").click()
    assert wait_until(page, "document.querySelector('#answers li')?.textContent").endswith("4711")
    assert get_state(page).startswith("reading")
    page.find_element(By.ID, "stop").click()
    wait_for_state(page, "cancelled")


@pytest.mark.parametrize("server", [{"strategy": "segments:count=3"}], indirect=True)
def test_branches_are_shown_side_by_side(page: Any, upstream: FakeServer) -> None:
    def script(prompt: str) -> str:
        if "<section>" in prompt:
            return read_perfectly(prompt)
        return "\\boxed{4711}" if "4711" in prompt else "unknown"

    set_script(upstream, script)
    drop_file(page, "annals.txt", LONG_TEXT)
    submit_questions(page, QUESTION)
    wait_until(page, "document.querySelectorAll('.branch').length >= 3")
    tops = page.execute_script(
        "return [...document.querySelectorAll('.branch')].slice(0, 2).map(item => item.getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1]
    wait_until(page, "!document.getElementById('answer-box').hidden")
    assert page.find_element(By.ID, "read-answer").text == "4711"


def test_five_thousand_reads_are_listed_and_searched(page: Any, server: Server) -> None:
    for number in range(5000):
        entry = Entry(f"run-{number}", "local", f"r{number}", f"Question {number}?", "book.txt", float(number))
        server.resources.ledger.begin(entry)
    page.refresh()
    wait_until(page, "document.getElementById('found').textContent === '5,000 reads'")
    assert len(page.find_elements(By.CSS_SELECTOR, "#reads li")) == 50
    page.execute_script("document.getElementById('more').click()")
    wait_until(page, "document.querySelectorAll('#reads li').length === 100")
    page.find_element(By.TAG_NAME, "body").send_keys("/")
    page.switch_to.active_element.send_keys("question 123?")
    wait_until(page, "document.getElementById('found').textContent === '1 read'")
    assert page.find_element(By.CSS_SELECTOR, "#reads a").text == "Question 123?"


def test_the_page_can_be_used_by_keyboard_alone(page: Any) -> None:
    """With Tab, Enter and the shortcuts of the page."""

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
    tab_to("paste").send_keys(LONG_TEXT[:3000])
    tab_to("add-paste").send_keys(Keys.ENTER)
    wait_until(page, "document.querySelector('#files li')?.textContent.includes('KiB of text')")
    assert page.switch_to.active_element.get_attribute("id") == "questions"
    page.switch_to.active_element.send_keys(QUESTION, Keys.CONTROL, Keys.ENTER)
    wait_until(page, "document.querySelectorAll('#steps > li').length > 1")
    page.find_element(By.TAG_NAME, "body").send_keys("p")
    wait_for_state(page, "paused")
    tab_to("continue")
    page.find_element(By.TAG_NAME, "body").send_keys("p")
    wait_until(page, "!document.getElementById('answer-box').hidden")
    page.find_element(By.TAG_NAME, "body").send_keys("n")
    assert page.switch_to.active_element.get_attribute("id") == "now-question"
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert page.find_element(By.ID, "now").get_attribute("open") is None


def test_every_control_has_an_accessible_name(page: Any) -> None:
    start_read(page)
    page.find_element(By.ID, "pause").click()
    wait_for_state(page, "paused")
    for view in ("read", "home"):
        if view == "home":
            page.find_element(By.CSS_SELECTOR, ".home").click()
            wait_until(page, "document.querySelectorAll('#reads li').length")
        controls = page.find_elements(By.CSS_SELECTOR, "button, input, textarea, a, progress")
        visible = [control for control in controls if control.is_displayed()]
        assert [control.get_attribute("outerHTML") for control in visible if not control.accessible_name] == []
    assert page.execute_script("return document.querySelectorAll('main h1').length") >= 1


@pytest.mark.parametrize("width", [360, 1360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_window_in_light_and_dark_mode(page: Any, width: int, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 780, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    try:
        fits = "document.documentElement.scrollWidth <= innerWidth"
        assert page.execute_script(f"return {fits}")
        drop_file(page, f"{'long-name-' * 12}.txt", LONG_TEXT)
        submit_questions(page, QUESTION)
        wait_until(page, "document.querySelectorAll('#steps > li').length > 2")
        assert page.execute_script(f"return {fits}")
        colors = page.execute_script(
            "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
        )
        background, text = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
        assert (background < text) == (scheme == "dark")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_script_payloads_in_texts_and_names_are_not_executed(page: Any, upstream: FakeServer) -> None:
    payloads = cycle(PAYLOADS)
    set_script(
        upstream,
        lambda prompt: "\n".join(islice(payloads, 3)) if "<section>" in prompt else f"\\boxed{{{next(payloads)}}}",
    )
    drop_file(page, f"{PAYLOADS[2]}.txt", "\n".join(PAYLOADS * 3))
    page.execute_script("document.getElementById('questions').value = arguments[0]", "\n".join(PAYLOADS))
    page.find_element(By.ID, "begin").click()
    payload_count = len(PAYLOADS)
    wait_until(page, "document.querySelectorAll('#reads .state-running').length > 10")
    wait_until(
        page, "document.querySelectorAll('#reads .state-finished').length === arguments[0]", payload_count, seconds=90
    )
    read_list = page.find_element(By.ID, "reads").text
    assert [payload for payload in PAYLOADS if payload not in read_list] == []
    for index in range(payload_count):
        # A single script call, because the page replaces the list items while it updates.
        page.execute_script("document.querySelectorAll('#reads li a')[arguments[0]].click()", index)
        wait_until(page, "!document.getElementById('answer-box').hidden")
        assert page.execute_script("return window.attacked") is None
        element_count = "return document.querySelectorAll('#view-read :is(img, iframe, object)').length"
        assert page.execute_script(element_count) == 0
        if index < 3:  # also an answer before the end, and the run page
            page.find_element(By.ID, "ask-now").click()
            page.find_element(By.CSS_SELECTOR, "#now button.primary").click()
            wait_until(page, "document.querySelectorAll('#answers li').length")
            page.find_element(By.ID, "run-page").click()
            wait_until(page, "performance.getEntriesByName('timeline-ready').length")
            assert page.execute_script("return window.attacked") is None
            page.back()
            wait_until(page, "!document.getElementById('answer-box').hidden")
        page.find_element(By.CSS_SELECTOR, ".home").click()
        wait_until(page, "document.querySelectorAll('#reads li').length === arguments[0]", payload_count)
    assert page.execute_script("return document.querySelectorAll('img, svg, iframe, object').length") == 0
    assert page.execute_script("return document.scripts.length") == 1
    assert get_console_messages(page) == []


def test_the_page_fetches_only_from_its_server_and_injected_markup_runs_no_script(page: Any, server: Server) -> None:
    page.get_log("performance")
    page.refresh()
    wait_until(page, "!document.getElementById('view-home').hidden")
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


def test_without_the_token_the_page_asks_to_sign_in(browser: Any, server: Server) -> None:
    browser.get("about:blank")
    browser.get(f"{server.url}/#token=wrong")
    wait_until(browser, "!document.getElementById('view-sign-in').hidden")
    wait_until(browser, "!document.getElementById('notice').hidden")
    browser.find_element(By.ID, "token").send_keys(server.sessions.token, Keys.ENTER)
    wait_until(browser, "!document.getElementById('view-home').hidden")
    assert "token" not in browser.current_url
    browser.find_element(By.ID, "sign-out").click()
    wait_until(browser, "!document.getElementById('view-sign-in').hidden")
    browser.refresh()
    wait_until(browser, "!document.getElementById('view-sign-in').hidden")
    browser.get_log("browser")

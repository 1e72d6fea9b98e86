"""The timeline page in a real browser: `pytest tests/browser`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_REASON = "needs selenium: pip install selenium"
By = pytest.importorskip("selenium.webdriver.common.by", reason=_REASON).By
Keys = pytest.importorskip("selenium.webdriver.common.keys", reason=_REASON).Keys
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui", reason=_REASON).WebDriverWait

LIGHTHOUSE_CHUNK = 211
OpenPage = Callable[..., Any]


def wait_until(browser: Any, script: str, *arguments: Any) -> Any:
    return WebDriverWait(browser, 5).until(lambda driver: driver.execute_script(f"return {script}", *arguments))


def press(browser: Any, *keys: str) -> None:
    browser.find_element(By.TAG_NAME, "body").send_keys(*keys)


def get_current_step(browser: Any) -> str | None:
    return browser.execute_script("return document.querySelector('.step.current')?.id ?? null")


def is_below_the_bar(browser: Any, chunk: int) -> bool:
    """Return whether the first line of a chunk is visible."""
    return bool(
        browser.execute_script(
            "const top = document.getElementById(arguments[0]).getBoundingClientRect().top;"
            "return top >= document.getElementById('bar').getBoundingClientRect().bottom - 1 && top < innerHeight - 50",
            f"chunk-{chunk}",
        )
    )


def search(browser: Any, text: str) -> str:
    browser.find_element(By.ID, "query").send_keys(text)
    return str(wait_until(browser, "document.getElementById('hits').textContent"))


def list_changed_chunks(browser: Any) -> list[int]:
    return list(
        browser.execute_script(
            "return JSON.parse(document.getElementById('data').textContent).steps.filter(s => s.diff).map(s => s.chunk)"
        )
    )


def read_memory(browser: Any, step: str) -> str:
    """Return the memory that a step shows, without deleted words."""
    return str(
        browser.execute_script(
            "const body = document.querySelector(arguments[0]).cloneNode(true);"
            "body.querySelectorAll('del, .more').forEach(node => node.remove()); return body.textContent.trimEnd()",
            f"#{step} .body",
        )
    )


def test_a_page_of_700_chunks_is_under_5_mb_and_opens_within_2_seconds(
    open_page: OpenPage, pages: dict[str, Path]
) -> None:
    size = pages["long"].stat().st_size
    assert size < 5_000_000
    browser = open_page()
    ready_ms = wait_until(browser, "performance.getEntriesByName('timeline-ready')[0]?.startTime")
    painted_ms = wait_until(browser, "performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    print(f"{size:,} bytes, ready after {ready_ms:.0f} ms, painted after {painted_ms:.0f} ms")
    assert max(ready_ms, painted_ms) < 2000


def test_the_page_requests_nothing_and_logs_no_error(open_page: OpenPage, pages: dict[str, Path]) -> None:
    browser = open_page()
    browser.get_log("performance")
    browser.refresh()
    wait_until(browser, "performance.getEntriesByName('timeline-ready').length")
    search(browser, "lighthouse")
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if not url.startswith("data:")] == [pages["long"].as_uri()]
    assert browser.get_log("browser") == []


def test_search_counts_the_matches_and_goes_to_the_next(open_page: OpenPage) -> None:
    browser = open_page()
    assert search(browser, "Cape Verity was built").startswith("1 place, in memory at 490 chunks")
    browser.find_element(By.ID, "query").send_keys(Keys.ENTER)
    assert get_current_step(browser) == f"chunk-{LIGHTHOUSE_CHUNK}"
    assert is_below_the_bar(browser, LIGHTHOUSE_CHUNK)
    assert browser.execute_script("return CSS.highlights.get('found').size") > 0
    assert browser.find_element(By.ID, "hits").text.startswith("1 of 1")


def test_search_finds_answer_and_events_and_wraps_around(open_page: OpenPage) -> None:
    browser = open_page()
    assert search(browser, "ilse thornbury built it").startswith("1 place")
    press(browser, Keys.ESCAPE)
    matches = int(search(browser, "truncated").split()[0])
    assert matches == browser.execute_script(
        "return JSON.parse(document.getElementById('data').textContent).steps.filter(s => s.events).length"
    )
    query = browser.find_element(By.ID, "query")
    query.send_keys(Keys.SHIFT, Keys.ENTER)
    assert browser.find_element(By.ID, "hits").text.startswith(f"{matches} of {matches}")
    last_step = get_current_step(browser)
    query.send_keys(Keys.NULL, Keys.ENTER)
    assert browser.find_element(By.ID, "hits").text.startswith(f"1 of {matches}")
    assert get_current_step(browser) != last_step
    query.send_keys("nowhere")
    assert browser.find_element(By.ID, "hits").text == "not found"


@pytest.mark.parametrize("chunk", [1, 350, 700])
def test_a_link_opens_at_its_chunk(open_page: OpenPage, chunk: int) -> None:
    browser = open_page(f"#chunk-{chunk}")
    assert get_current_step(browser) == f"chunk-{chunk}"
    assert is_below_the_bar(browser, chunk)


def test_the_go_dialog_jumps_to_a_chunk(open_page: OpenPage) -> None:
    browser = open_page()
    press(browser, "g")
    browser.switch_to.active_element.send_keys("512", Keys.ENTER)
    wait_until(browser, "document.querySelector('.step.current')?.id === 'chunk-512'")
    assert is_below_the_bar(browser, 512)
    assert browser.current_url.endswith("#chunk-512")
    browser.back()
    assert not browser.current_url.endswith("#chunk-512")


def test_a_memory_line_marks_the_answers_words_and_links_to_its_quote(open_page: OpenPage) -> None:
    browser = open_page()
    supporting_words = [mark.text for mark in browser.find_elements(By.CSS_SELECTOR, ".line:first-child .supports")]
    assert {"Ilse Thornbury", "lit for the first time in 1743"} <= set(supporting_words)
    browser.find_element(By.CSS_SELECTOR, ".line-text").click()
    assert get_current_step(browser) == f"chunk-{LIGHTHOUSE_CHUNK}"
    quote = browser.find_element(By.CSS_SELECTOR, ".passage.current mark")
    assert quote.text == "The lighthouse at Cape Verity was built by Ilse Thornbury and lit for the first time in 1743"
    assert wait_until(
        browser,
        "(box => box.bottom <= innerHeight && box.top >= document.getElementById('bar').getBoundingClientRect().bottom)"
        "(arguments[0].getBoundingClientRect())",
        quote,
    )
    assert browser.find_element(By.CSS_SELECTOR, ".line.current").text.startswith("- The lighthouse")


def test_keys_go_from_change_to_change(open_page: OpenPage) -> None:
    browser = open_page()
    chunks = list_changed_chunks(browser)
    for chunk in chunks[:4]:
        press(browser, "j")
        assert get_current_step(browser) == f"chunk-{chunk}"
        assert is_below_the_bar(browser, chunk)
    press(browser, "k")
    assert get_current_step(browser) == f"chunk-{chunks[2]}"


def test_slash_focuses_the_search_and_the_question_mark_opens_help(open_page: OpenPage) -> None:
    browser = open_page()
    press(browser, "/")
    assert browser.switch_to.active_element.get_attribute("id") == "query"
    browser.switch_to.active_element.send_keys("j", Keys.ESCAPE)
    assert get_current_step(browser) is None
    press(browser, "?")
    assert browser.find_element(By.ID, "help").is_displayed()


def test_filters_show_changed_chunks_or_those_with_events(open_page: OpenPage) -> None:
    browser = open_page()
    step_count = "document.querySelectorAll('.step').length"
    browser.find_element(By.CSS_SELECTOR, "[data-filter=changed]").click()
    assert browser.execute_script(f"return {step_count}") == len(list_changed_chunks(browser))
    press(browser, "e")
    assert browser.execute_script(f"return {step_count} === document.querySelectorAll('.step .events').length")
    assert browser.find_element(By.CSS_SELECTOR, "[data-filter=events]").get_attribute("aria-pressed") == "true"
    press(browser, "a")
    browser.execute_script("document.querySelectorAll('.fold button').forEach(button => button.click())")
    assert browser.execute_script(f"return {step_count}") == 700


def test_the_strip_is_a_slider_for_mouse_and_keys(open_page: OpenPage) -> None:
    browser = open_page()
    strip = browser.find_element(By.ID, "strip")
    strip.send_keys(Keys.END)
    assert (get_current_step(browser), strip.get_attribute("aria-valuenow")) == ("chunk-700", "699")
    assert strip.get_attribute("aria-valuetext").startswith("Chunk 700")
    strip.click()
    chunk = int(str(get_current_step(browser)).removeprefix("chunk-"))
    assert abs(chunk - 350) < 5


def test_a_step_shows_the_memory_after_it(open_page: OpenPage) -> None:
    from conftest import make_long_run

    browser = open_page("#chunk-600")
    chunk = next(chunk for chunk in list_changed_chunks(browser) if chunk >= 600)
    press(browser, "j") if chunk > 600 else None
    for button in browser.find_elements(By.CSS_SELECTOR, f"#chunk-{chunk} .more"):
        button.click()
    assert read_memory(browser, f"chunk-{chunk}") == make_long_run().trace.updates[chunk - 1].memory


def test_each_branch_has_a_lane_and_the_merge_links_to_the_branches(open_page: OpenPage) -> None:
    browser = open_page("#chunk-9-1", page="branched")
    assert get_current_step(browser) == "chunk-9-1"
    browser.execute_script("location.hash = 'merge'")
    assert wait_until(browser, "document.querySelector('.step.current')?.id === 'merge'")
    sources = browser.find_elements(By.CSS_SELECTOR, "#merge .joined a")
    assert [source.text for source in sources] == ["chunk 8, branch 0", "chunk 16, branch 1", "chunk 24, branch 2"]
    sources[1].click()
    assert get_current_step(browser) == "chunk-16-1"
    strip = browser.find_element(By.ID, "strip")
    height = strip.size["height"]
    for lane, branch in enumerate(["0", "1", "2"], start=1):
        browser.execute_script(
            "const box = arguments[0].getBoundingClientRect();"
            "const at = {clientX: box.left + 2, clientY: box.top + arguments[1]};"
            "arguments[0].dispatchEvent(new MouseEvent('click', at))",
            strip,
            (lane + 0.5) * height / 4,
        )
        assert str(get_current_step(browser)).endswith(f"-{branch}")
    assert browser.get_log("browser") == []


def test_a_single_branch_can_be_selected_if_there_are_branches(open_page: OpenPage) -> None:
    from conftest import make_branched_run

    assert not open_page().find_element(By.ID, "branch").is_displayed()
    browser = open_page(page="branched")
    select = browser.find_element(By.ID, "branch")
    next(element for element in select.find_elements(By.TAG_NAME, "option") if element.text == "Branch 1").click()
    browser.execute_script("document.querySelectorAll('.fold button').forEach(button => button.click())")
    ids = browser.execute_script("return [...document.querySelectorAll('.step')].map(step => step.id)")
    assert ids == [f"chunk-{chunk}-1" for chunk in range(9, 17)]
    browser.execute_script(
        "document.getElementById('chunk-13-1').scrollIntoView()"
    )  # a step is rendered once it is visible
    memory = WebDriverWait(browser, 20).until(lambda _: read_memory(browser, "chunk-13-1"))
    assert memory == next(update.memory for update in make_branched_run().trace.updates if update.chunk_index == 12)


def test_an_excerpt_is_shown_below_the_answer_without_an_empty_timeline(open_page: OpenPage) -> None:
    browser = open_page(page="excerpt")
    passage = browser.find_element(By.CSS_SELECTOR, "#excerpt .passage")
    assert passage.is_displayed()
    contains = "return document.querySelector('#excerpt mark').textContent.includes(arguments[0])"
    assert browser.execute_script(contains, "The lighthouse keeper was Ilse Thornbury.")
    assert browser.execute_script("return window.attacked") is None
    assert not browser.find_element(By.ID, "bar").is_displayed()
    assert not browser.find_element(By.TAG_NAME, "main").is_displayed()
    assert browser.get_log("browser") == [], "scripts run, or something fails"


def test_hostile_text_runs_no_script(open_page: OpenPage) -> None:
    browser = open_page(page="hostile")
    press(browser, "j")
    press(browser, "j")
    browser.find_element(By.CSS_SELECTOR, ".line-text").click()
    search(browser, "onerror")
    assert browser.execute_script("return window.attacked") is None
    assert browser.execute_script("return document.querySelectorAll('img, svg, iframe, object').length") == 0
    assert browser.execute_script("return document.scripts.length") == 2
    assert browser.execute_script(
        "return document.getElementById('question').textContent.includes('<script>window.attacked=1</script>')"
    )
    assert browser.get_log("browser") == []


def test_injected_markup_runs_no_script(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    """The content security policy stops scripts in markup that was added to the file."""
    page = (
        pages["hostile"]
        .read_text(encoding="utf-8")
        .replace("<noscript>", "<img src=x onerror='window.attacked=1'><script>window.attacked=1</script><noscript>", 1)
    )
    (tmp_path / "broken.html").write_text(page, encoding="utf-8")
    browser.get((tmp_path / "broken.html").as_uri())
    wait_until(browser, "performance.getEntriesByName('timeline-ready').length")
    assert browser.execute_script("return window.attacked") is None
    browser.get_log("browser")


@pytest.mark.parametrize("width", [390, 1360])
def test_the_page_is_not_wider_than_the_window(open_page: OpenPage, width: int) -> None:
    browser = open_page()
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

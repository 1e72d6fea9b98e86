"""PDF, DOCX and HTML files are converted in a separate process, which has limits and ends with the read."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from email.message import EmailMessage

import pytest
from support.document_files import make_docx, make_pdf
from support.made_documents import make_word

from memagent_converters.html_to_markdown import render_markdown
from memagent_graph.concurrency.background import Cancellation
from memagent_graph.documents import Document, conversion
from memagent_graph.errors import DocumentError, MissingExtraError, make_install_command
from memagent_graph.policies.scripted import ScriptedPolicy
from memagent_graph.reader import MemAgent

_linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces this limit")


SLOW_FILES = {
    "a.docx": make_word('<w:p><w:pPr><w:pStyle w:val="ListParagraph"/></w:pPr><w:r><w:t>a</w:t></w:r></w:p>' * 300_000),
    "a.html": b"<table><tr><td>" + b"<p>word</p>" * 300_000,
}


@pytest.mark.parametrize("name", SLOW_FILES)
def test_a_conversion_that_takes_too_long_is_an_error_that_names_the_setting(name, store, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CONVERSION_SECONDS", "0.5")
    with pytest.raises(DocumentError, match=r"a\.\w+ takes more than 0\.5 seconds.*MEMAGENT_CONVERSION_SECONDS=2"):
        store.add(Document.from_bytes(SLOW_FILES[name], name=name))
    assert not [*store.root.glob(".incoming-*")]


@pytest.mark.parametrize("opening_tags", ["<table><tr><td>", "<blockquote>", "<ul><li>", "<pre>", "<b>"])
def test_deeply_nested_pages_keep_their_text_without_growing(opening_tags: str) -> None:
    leaves = [f"w{number}" for number in range(1000)]
    text = render_markdown("".join(opening_tags + leaf for leaf in leaves))
    assert not [leaf for leaf in leaves if leaf not in text]
    assert len(text) < 1_000_000


@pytest.mark.parametrize("name", SLOW_FILES)
def test_a_conversion_that_takes_too_much_memory_is_an_error_that_names_the_setting(name, store, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CONVERSION_MEMORY_MB", "120")
    with pytest.raises(DocumentError, match=r"more( memory)? than (the )?120 MB.*MEMAGENT_CONVERSION_MEMORY_MB"):
        store.add(Document.from_bytes(SLOW_FILES[name], name=name))


def test_a_conversion_to_too_much_text_is_an_error_and_its_limit_must_be_a_number(store, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CONVERSION_TEXT_MB", "0.01")
    page = Document.from_bytes(b"<p>" + b"word " * 4000, name="a.html")
    with pytest.raises(DocumentError, match=r"more than 0\.01 MB of text.*MEMAGENT_CONVERSION_TEXT_MB=0\.04"):
        store.add(page)
    monkeypatch.delenv("MEMAGENT_CONVERSION_TEXT_MB")
    assert store.add(page)["size"] > 10_000
    monkeypatch.setenv("MEMAGENT_CONVERSION_TEXT_MB", "much")
    with pytest.raises(DocumentError, match=r"_TEXT_MB must be a finite number above 0, got 'much'.*such as 500"):
        store.add(page)


_PRINT_PEAK_MEMORY = """
import io, sys
from memagent_converters.pdf_files import convert
from memagent_graph.converters import SourceFile
for _ in convert(SourceFile("a.pdf", "pdf", sys.stdin.buffer, "", {})):
    pass
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@_linux_only
def test_memory_does_not_grow_with_the_number_of_pages(tmp_path):
    peak_kb = []
    for page_count in (50, 500):
        (tmp_path / "a.pdf").write_bytes(make_pdf(*[f"{i}) Tj (" + "word) Tj (" * 300 for i in range(page_count)]))
        with (tmp_path / "a.pdf").open("rb") as file:
            peak_kb.append(int(subprocess.check_output([sys.executable, "-c", _PRINT_PEAK_MEMORY], stdin=file)))
    assert peak_kb[1] < 1.3 * peak_kb[0]


def test_plain_text_starts_no_process(store, monkeypatch):
    monkeypatch.setattr(conversion.subprocess, "Popen", lambda *_, **options: pytest.fail("a process was started"))
    store.add(Document.from_bytes(b"plain", name="a.txt"))
    store.add(Document.from_text("plain, too"))


def test_cancelling_a_read_kills_its_conversion(tmp_path, monkeypatch):
    conversion_started = threading.Event()
    processes = []
    original_watch = Cancellation.watch

    def record_process(self, end):
        processes.append(end.__self__)
        conversion_started.set()
        return original_watch(self, end)

    monkeypatch.setattr(Cancellation, "watch", record_process)

    async def cancel_read():
        reader = MemAgent(
            ScriptedPolicy(lambda *_: "x"), tokenizer="embedded", store=tmp_path / "documents", run_log=False
        )
        source = Document.from_bytes(SLOW_FILES["a.docx"], name="a.docx")
        read_task = asyncio.ensure_future(reader.aread(source, "Who?"))
        await asyncio.to_thread(conversion_started.wait, 60)
        read_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read_task

    asyncio.run(cancel_read())
    assert [process.wait(60) for process in processes] == [-9 if os.name == "posix" else 1]


def test_a_conversion_cancelled_before_its_start_does_not_run(store):
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(DocumentError, match=r"conversion of a\.html was cancelled"):
        store.add(Document.from_bytes(SLOW_FILES["a.html"], name="a.html"), cancellation=cancellation)


def test_a_converter_that_crashes_or_writes_no_valid_result_is_an_error(tmp_path, store, monkeypatch):
    program = tmp_path / "program.py"
    monkeypatch.setattr(conversion.conversion_program, "__file__", str(program))
    page = Document.from_bytes(b"<p>x", name="a.html")
    for program_text in (
        "import os; os.abort()", "print('[1, 2')", "print('[1]')", "print('[null, null, -1]')", "print('[' * 60_000)",
        "print('[null, null, 99]'); print('a')", "print('[null, null, 1]'); print('é')", "print('{\"what\": 1}')", "",
    ):  # fmt: skip
        program.write_text(program_text)
        with pytest.raises(DocumentError, match=r"HTML file a\.html failed \(exit code"):
            store.add(page)


@pytest.mark.parametrize(
    ("module", "name", "data"),
    [("pypdfium2", "a.pdf", make_pdf("x")), ("selectolax", "a.docx", make_docx("x")),
     ("selectolax", "a.html", b"<p>x</p>"), ("striprtf", "a.rtf", b"{\\rtf1 x}")],
)  # fmt: skip
def test_the_error_for_a_missing_converter_names_the_extra(module, name, data, tmp_path, store, monkeypatch):
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('', name={module!r})")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match=re.escape(make_install_command("files"))):
        store.add(Document.from_bytes(data, name=name))


def test_file_names_with_lone_surrogates_reach_the_conversion_process(store):
    name = "naïve 日本\udc80.html"
    reference = store.add(Document.from_bytes("<p>Grüße, 日本</p>".encode(), name=name))
    assert store.read(reference, 0, reference["size"]) == "Grüße, 日本\n"


def _nest_messages(depth: int, name: str = "a") -> bytes:
    """Return a message with `depth` messages nested in it as attachments of one another."""
    message_bytes = b"From: a@example.org\nSubject: x\n\ninnermost"
    for _ in range(depth):
        message = EmailMessage()
        message["From"] = "a@example.org"
        message.set_content("around")
        message.add_attachment(message_bytes, maintype="application", subtype="octet-stream", filename=f"{name}.eml")
        message_bytes = message.as_bytes()
    return message_bytes


def test_nested_files_are_read_up_to_a_depth_and_deeper_ones_are_omissions(store):
    reference = store.add(Document.from_bytes(_nest_messages(12), name="a.eml"))
    assert "innermost" not in store.read(reference, 0, reference["size"])
    assert "nested too deeply" in reference["omissions"][0]["places"]
    assert store.add(Document.from_bytes(_nest_messages(12, name="a" * 70_000), name="a.eml"))["omissions"]
    shallow = store.add(Document.from_bytes(_nest_messages(5, name="a" * 70_000), name="a.eml"))
    assert "innermost" in store.read(shallow, 0, shallow["size"])


async def test_conversions_do_not_occupy_the_default_threads() -> None:
    released = threading.Event()
    conversions = [asyncio.create_task(conversion.run_in_thread(lambda _: released.wait())) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 20) == "done"
    finally:
        released.set()
    assert all(await asyncio.gather(*conversions))

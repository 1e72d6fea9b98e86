"""Conversion of PDF, DOCX and HTML: in a process of its own, within bounds, and ended with the read."""

import asyncio
import io
import os
import subprocess
import sys
import threading
import zipfile
from email.message import EmailMessage

import pytest
from support.document_files import docx, pdf
from support.made_documents import opened, sheets, slides, tc, word, zipped

from memagent_converters.html_to_markdown import render_markdown
from memagent_graph.concurrency.background import Cancellation
from memagent_graph.documents import Document, DocumentStore, conversion
from memagent_graph.documents.sources import MEDIA_TYPES
from memagent_graph.errors import DocumentError
from memagent_graph.policies.scripted import ScriptedPolicy
from memagent_graph.reader import MemAgent

_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the operating system holds this bound on Linux")


def bomb(paragraphs: int) -> bytes:
    """A DOCX file whose conversion takes long: a small archive with very many paragraphs, each in a list."""
    small = zipfile.ZipFile(io.BytesIO(docx("x")))
    item = '<w:p><w:pPr><w:pStyle w:val="ListParagraph"/></w:pPr><w:r><w:t>a</w:t></w:r></w:p>'
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in small.namelist():
            text = small.read(name).decode()
            archive.writestr(name, text.replace("<w:body>", "<w:body>" + item * paragraphs))
    return file.getvalue()


def many_pages(count: int) -> bytes:
    """A PDF that claims a page very many times."""
    data = pdf("A page.")
    return data.replace(b"/Kids [4 0 R]", b"/Kids [" + b"4 0 R " * count + b"]").replace(
        b"/Count 1", f"/Count {count}".encode()
    )


HOSTILE = {
    "a.docx": bomb(300_000),
    "a.pdf": many_pages(200_000),
    "a.html": b"<table><tr><td>" + b"<p>word</p>" * 300_000,
}


@pytest.fixture
def children(monkeypatch):
    """The processes that were started."""
    started = []
    popen = subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(conversion.subprocess, "Popen", start)
    return started


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_whose_conversion_takes_long_is_given_up_with_the_remedy(name, tmp_path, children, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CONVERSION_SECONDS", "0.5")
    store = DocumentStore(tmp_path)
    with pytest.raises(DocumentError, match=r"a\.\w+ takes more than 0\.5 seconds.*MEMAGENT_CONVERSION_SECONDS=2"):
        store.add(Document.from_bytes(HOSTILE[name], name=name))
    assert [child.returncode is not None for child in children] == [True]
    assert not [*tmp_path.glob(".incoming-*")]


@_LINUX
@pytest.mark.parametrize("tags", ["<table><tr><td>", "<blockquote>", "<ul><li>", "<pre>", "<b>"])
def test_what_is_nested_without_end_keeps_its_text_and_grows_no_further(tags: str) -> None:
    words = [f"w{number}" for number in range(1000)]
    text = render_markdown("".join(tags + word for word in words))
    assert not [word for word in words if word not in text]
    assert len(text) < 1_000_000


def test_a_line_break_in_preformatted_text_is_one() -> None:
    assert render_markdown("<pre>a<br>b</pre>") == "```\na\nb\n```"


@pytest.mark.parametrize("name", ["a.docx", "a.html"])
def test_a_file_whose_conversion_takes_much_memory_is_given_up_with_the_remedy(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CONVERSION_MEMORY_MB", "120")
    store = DocumentStore(tmp_path)
    with pytest.raises(DocumentError, match=r"more( memory)? than (the )?120 MB.*MEMAGENT_CONVERSION_MEMORY_MB"):
        store.add(Document.from_bytes(HOSTILE[name], name=name))


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.html", b"<p>" + b"word " * 4000), ("a.docx", docx("word " * 4000)), ("a.pdf", pdf(*["some text"] * 2000))],
)
def test_a_file_that_gives_much_text_is_given_up_with_the_remedy(name, data, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CONVERSION_TEXT_MB", "0.01")
    store = DocumentStore(tmp_path)
    with pytest.raises(DocumentError, match=r"more than 0\.01 MB of text.*MEMAGENT_CONVERSION_TEXT_MB=0\.04"):
        store.add(Document.from_bytes(data, name=name))
    monkeypatch.delenv("MEMAGENT_CONVERSION_TEXT_MB")
    assert store.add(Document.from_bytes(data, name=name))["size"] > 10_000


_PEAK = """
import io, sys
from memagent_converters.pdf_files import convert
from memagent_graph.converters import SourceFile
for _ in convert(SourceFile("a.pdf", "pdf", sys.stdin.buffer, "", {})):
    pass
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@_LINUX
def test_ten_times_the_pages_take_no_more_memory(tmp_path):
    peaks = []
    for pages in (50, 500):
        (tmp_path / "a.pdf").write_bytes(pdf(*[f"{page}) Tj (" + "word) Tj (" * 300 for page in range(pages)]))
        with (tmp_path / "a.pdf").open("rb") as file:
            peaks.append(int(subprocess.check_output([sys.executable, "-c", _PEAK], stdin=file)))
    assert peaks[1] < 1.3 * peaks[0]


def test_bounds_come_from_the_environment_for_every_store(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CONVERSION_TEXT_MB", "0.01")
    with pytest.raises(DocumentError, match="MB of text"):
        DocumentStore(tmp_path).add(Document.from_bytes(b"<p>" + b"word " * 4000, name="a.html"))
    monkeypatch.setenv("MEMAGENT_CONVERSION_TEXT_MB", "much")
    with pytest.raises(
        DocumentError, match=r"MEMAGENT_CONVERSION_TEXT_MB must be a number above 0, got 'much'.*such as 500"
    ):
        DocumentStore(tmp_path).add(Document.from_bytes(b"<p>x", name="a.html"))


def test_plain_text_starts_no_process(tmp_path, children):
    DocumentStore(tmp_path).add(Document.from_bytes(b"plain", name="a.txt"))
    DocumentStore(tmp_path).add(Document.from_text("plain, too"))
    assert children == []


def test_a_read_that_is_cancelled_ends_its_conversion(tmp_path, monkeypatch):
    started = threading.Event()
    processes = []
    watch = Cancellation.watch

    def noted(self, end):
        processes.append(end.__self__)
        started.set()
        return watch(self, end)

    monkeypatch.setattr(Cancellation, "watch", noted)

    async def main():
        reader = MemAgent(
            ScriptedPolicy(lambda *_: "x"), tokenizer="embedded", store=tmp_path / "documents", run_log=False
        )
        source = Document.from_bytes(HOSTILE["a.docx"], name="a.docx")
        read = asyncio.ensure_future(reader.aread(source, "Who?"))
        await asyncio.to_thread(started.wait, 60)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read

    asyncio.run(main())
    assert [process.wait(60) for process in processes] == [-9 if os.name == "posix" else 1]


def test_what_was_cancelled_before_its_conversion_began_is_not_converted(tmp_path):
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(DocumentError, match=r"conversion of a\.html was cancelled"):
        DocumentStore(tmp_path).add(Document.from_bytes(HOSTILE["a.html"], name="a.html"), cancellation=cancellation)


def test_a_converter_that_crashes_or_prints_is_told_from_one_that_ended(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    monkeypatch.setattr(conversion.conversion_program, "__file__", str(program))
    store = DocumentStore(tmp_path / "store")
    page = Document.from_bytes(b"<p>x", name="a.html")
    for source in (
        "import os; os.abort()",
        "print('[1, 2')",
        "print('[null, null, 99]'); print('short')",
        "print('[1]')",
        "",
    ):
        program.write_text(source)
        with pytest.raises(DocumentError, match=r"HTML file a\.html failed \(exit code"):
            store.add(page)


def test_names_and_lone_surrogates_cross_the_process_border(tmp_path):
    name = "naïve 日本\udc80.html"
    ref = DocumentStore(tmp_path).add(Document.from_bytes("<p>Grüße, 日本</p>".encode(), name=name))
    assert DocumentStore(tmp_path).read(ref, 0, ref["size"]) == "Grüße, 日本\n"


def _filed(depth: int) -> bytes:
    """A message with a message attached, which has one attached, and so on."""
    data = b"From: a@example.org\nSubject: x\n\ninmost"
    for _ in range(depth):
        message = EmailMessage()
        message["From"] = "a@example.org"
        message.set_content("around")
        message.add_attachment(data, maintype="application", subtype="octet-stream", filename="a.eml")
        data = message.as_bytes()
    return data


def _repeated(rows: int, columns: int) -> bytes:
    """A spreadsheet that claims one cell very many times."""
    cell = f'<table:table-cell table:number-columns-repeated="{columns}"><text:p>a</text:p></table:table-cell>'
    row = f'<table:table-row table:number-rows-repeated="{rows}">{cell}</table:table-row>'
    return opened("spreadsheet", f'<table:table table:name="S">{row}</table:table>')


def _book(text: str) -> bytes:
    """A book of one chapter."""
    items, spine = '<manifest><item id="c" href="c.xhtml"/></manifest>', '<itemref idref="c"/>'
    return zipped(
        {
            "mimetype": MEDIA_TYPES["epub"],
            "META-INF/container.xml": '<container><rootfile full-path="p.opf"/></container>',
            "p.opf": f"<package>{items}<spine>{spine}</spine></package>",
            "c.xhtml": text,
        }
    )


_ENTITIES = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><x>&b;</x>'


_LARGE = "needs more than 800 MB|takes more than 1 seconds"
"""One of the bounds, which a quick and a busy machine reach in different order."""


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("entities.odt", zipped({"mimetype": MEDIA_TYPES["odt"], "content.xml": _ENTITIES}), "declares XML entities"),
        ("nested.eml", b"Content-Type: message/rfc822\n\n" * 3000 + b"From: a\n\nx", "nested too deeply"),
        ("repeated.ods", _repeated(1_048_576, 16_384), _LARGE),
        ("deep.docx", word("<w:sdt>" * 20_000 + "</w:sdt>" * 20_000), "nested too deeply"),
        ("deep.pptx", slides("<p:grpSp>" * 20_000 + "</p:grpSp>" * 20_000), "nested too deeply"),
        ("deep.html", b"<math>" + b"<mfrac>" * 20_000 + b"x", "nested too deeply"),
        ("zipped.epub", _book("<p>" + "a " * 100_000_000), _LARGE),
        ("cells.xlsx", sheets("<row>" + "<c/>" * 1_000_000 + "</row>"), _LARGE),
        ("messages.mbox", b"From a@b Thu Jan  1 00:00:00 1970\nSubject: b\n\nx\n\n" * 400_000, _LARGE),
    ],
)
def test_small_files_that_claim_much_are_refused(name, data, error, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CONVERSION_SECONDS", "1" if error is _LARGE else "20")
    monkeypatch.setenv("MEMAGENT_CONVERSION_MEMORY_MB", "800")
    store = DocumentStore(tmp_path)
    with pytest.raises(DocumentError, match=error):
        store.add(Document.from_bytes(data, name=name))


_FAR = '<row r="{0}"><c r="{1}{0}" t="inlineStr"><is><t>a</t></is></c></row>'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("wide.docx", word("<w:tbl><w:tr>" + tc("a", '<w:gridSpan w:val="1000000000"/>') * 50 + "</w:tr></w:tbl>")),
        ("wide.html", b"<table>" + b"<tr><td rowspan=65534 colspan=1000>a" * 100),
        ("deep.rtf", rb"{\rtf1 " + b"{" * 20_000 + b"a" + b"}" * 20_001),
        ("far.xlsx", sheets(_FAR.format(1, "A") + _FAR.format(1_048_576, "XFD"))),
    ],
)
def test_small_files_that_claim_much_space_have_little_text(name, data, tmp_path):
    ref = DocumentStore(tmp_path).add(Document.from_bytes(data, name=name))
    assert 0 < ref["size"] < 1_000_000


@_LINUX
@pytest.mark.parametrize("data", [b"<div>" * 100_000, b"<p " + b" ".join(b"a%d" % n for n in range(60_000)) + b">x"])
def test_a_page_whose_parsing_takes_a_time_that_its_size_does_not_explain_is_refused(data, tmp_path):
    with pytest.raises(DocumentError, match=r"a\.html takes far more time"):
        DocumentStore(tmp_path).add(Document.from_bytes(data, name="a.html"))


def test_files_in_files_are_read_to_a_depth_and_the_rest_is_told(tmp_path):
    store = DocumentStore(tmp_path)
    ref = store.add(Document.from_bytes(_filed(12), name="a.eml"))
    assert "inmost" not in store.read(ref, 0, ref["size"])
    assert "nested too deeply" in ref["omissions"][0]["places"]
    shallow = store.add(Document.from_bytes(_filed(5), name="a.eml"))
    assert "inmost" in store.read(shallow, 0, shallow["size"])


async def test_what_is_short_does_not_wait_for_conversions() -> None:
    end = threading.Event()
    conversions = [asyncio.create_task(conversion.run_in_thread(lambda _: end.wait())) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 20) == "done"
    finally:
        end.set()
    assert all(await asyncio.gather(*conversions))

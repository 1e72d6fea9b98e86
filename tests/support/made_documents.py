"""Small documents of every kind, made by code: each with the facts in its text and the omissions to report.

Each has one fact that is easily lost: an exponent, a spanned cell, the value of a form, a page that is an image.
"""

from __future__ import annotations

import base64
import datetime
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import EmailMessage
from typing import Any

import openpyxl
from openpyxl.comments import Comment

from support.document_files import format_pdf_line, make_docx, make_pdf, make_raw_pdf, make_zip

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
_NAMESPACES = (
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships" '
    'xmlns:w14="http://schemas.microsoft.com/office/word/2010/wordml" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape" '
    'xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing" '
    'xmlns:c="http://schemas.openxmlformats.org/drawingml/2006/chart"'
)
_RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{}</Relationships>'.format
)
Texts = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A document, and the expected result of its conversion."""

    name: str
    """The file name; the part before the dot names what is special in the file."""
    data: bytes
    facts: Texts
    """What the text must contain."""
    lost: Texts = ()
    """What the text must not contain."""
    omissions: Texts = ()
    """How each omission starts, with its count: "1 pages that are images (page 2)"."""
    headings: Texts = ()
    """The names of the headings below their parents' names; () if they do not matter."""
    error: str = ""
    """A part of the error message, if the file must be refused."""


def make_word(body: str, **parts: str | bytes) -> bytes:
    """Return a Word file with this body; other parts by name, with "__" for "." and "___" for "/"."""
    extra_parts = {name.replace("___", "/").replace("__", "."): content for name, content in parts.items()}
    members: dict[str, str | bytes] = dict(_read_members(make_docx("x")))
    members["word/document.xml"] = f"<w:document {W} {_NAMESPACES}><w:body>{body}</w:body></w:document>"
    relations = "".join(
        f'<Relationship Id="r{number}" Type="{_RELATION}/{name.partition(".")[0].rstrip("0123456789")}" Target="{name}"/>'
        for number, name in enumerate(extra_parts)
    )
    members["word/_rels/document.xml.rels"] = _RELATIONS(relations + _make_link("x"))
    members |= {f"word/{name}": content for name, content in extra_parts.items()}
    return make_zip(members)


def _make_link(page: str) -> str:
    return f'<Relationship Id="link" Type="{_RELATION}/hyperlink" Target="https://example.org/{page}" TargetMode="External"/>'


def _read_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            yield name, archive.read(name)


def _number_members(data: bytes) -> bytes:
    """Return an Office file whose members have other names than usual, as in word/document2.xml."""
    members = {name.replace(".xml", "2.xml"): text.replace(b'.xml"', b'2.xml"') for name, text in _read_members(data)}
    return make_zip({name.replace("]2", "]"): text for name, text in members.items()})


def p(text: str, properties: str = "") -> str:
    """Return a paragraph, the element w:p of Word."""
    return f"<w:p>{f'<w:pPr>{properties}</w:pPr>' if properties else ''}{r(text)}</w:p>"


def r(text: str, properties: str = "") -> str:
    """Return a run of text, the element w:r of Word."""
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def _link(text: str) -> str:
    return f'<w:p><w:hyperlink w:id="link">{r(text)}</w:hyperlink></w:p>'


def tc(text: str, properties: str = "") -> str:
    """Return a table cell, the element w:tc of Word."""
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{p(text)}</w:tc>"


def _number(level: int, number: int = 1) -> str:
    return f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>'


def _define_numbering(*levels: tuple[str, str], more: str = "") -> str:
    definition = "".join(
        f'<w:lvl w:ilvl="{level}"><w:start w:val="1"/><w:numFmt w:val="{style}"/><w:lvlText w:val="{text}"/></w:lvl>'
        for level, (style, text) in enumerate(levels)
    )
    return (
        f'<w:numbering {W}><w:abstractNum w:abstractNumId="0"><w:styleLink w:val="L"/>{definition}</w:abstractNum>'
        '<w:abstractNum w:abstractNumId="1"><w:numStyleLink w:val="L"/></w:abstractNum>'
        f'<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>{more}</w:numbering>'
    )


_STYLES = (
    f'<w:styles {W}><w:style w:type="paragraph" w:styleId="H1"><w:name w:val="heading 1"/><w:pPr>{_number(0)}</w:pPr>'
    f'</w:style><w:style w:type="paragraph" w:styleId="H2"><w:name w:val="heading 2"/><w:basedOn w:val="H1"/><w:pPr>'
    '<w:numPr><w:ilvl w:val="1"/></w:numPr></w:pPr></w:style></w:styles>'
)
_FRACTION = (
    "<m:r><m:t>E=</m:t></m:r><m:f><m:num><m:r><m:t>a+b</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r></m:den></m:f>"
)


def _mr(text: str) -> str:
    return f"<m:r><m:t>{text}</m:t></m:r>"


def _make_note(kind: str, text: str) -> str:
    return f'<w:{kind}s {W}><w:{kind} w:id="1" w:author="Ada">{_link(text)}</w:{kind}></w:{kind}s>'


def _word_files() -> Iterator[Case]:
    levels = (("decimal", "%1."), ("decimal", "%1.%2"))
    numbering = _define_numbering(*levels)
    scripts = f"<w:p>{r('3 × 10')}{r('6', SUPER)}{r(' units, x')}{r('-3', SUPER)}{r(', a')}{r('12', SUB)}</w:p>"
    yield Case("cut.docx", make_docx("x")[:-40], (), error="cut.docx is a damaged DOCX file")
    letter = "Dear reader,\n\nnaïve café & 日本語\n"
    yield Case("letter.docx", make_docx("Dear reader,", "naïve café &amp; 日本語"), (letter,))
    yield Case("deep.docx", make_word("<w:sdt>" * 20_000 + "</w:sdt>" * 20_000), (), error="nested too deeply")
    huge = tc("a", '<w:gridSpan w:val="1000000000"/>') * 50
    yield Case("wide.docx", make_word(f"<w:tbl><w:tr>{huge}</w:tr></w:tbl>"), ("a",))
    yield Case("scripts.docx", make_word(scripts), ("10^6 units, x^-3, a_12",))
    row = "<w:tr>{}</w:tr>".format
    table = "<w:tbl>{}</w:tbl>".format
    header_row = row(tc("Region") + tc("Product") + tc("Units"))
    first_row = row(tc("EU", '<w:vMerge w:val="restart"/>') + tc("Hat") + tc("12"))
    second_row = row(tc("", "<w:vMerge/>") + tc("Hub") + tc("7"))
    wide_row = row(tc("Both", '<w:gridSpan w:val="2"/>') + tc("1|9", '<w:gridSpan w:val="²"/>'))
    spans = ("| EU | Hub | 7 |", "| Both | Both | 1\\|9 |")
    yield Case("spans.docx", make_word(table(header_row + first_row + second_row + wide_row)), spans)
    script = f"<m:sSup><m:e>{_mr('mc')}</m:e><m:sup>{_mr('2')}</m:sup></m:sSup>"
    root = f"<m:rad><m:deg/><m:e>{_mr('x')}</m:e></m:rad>"
    total = f'<m:nary><m:naryPr><m:chr m:val="∑"/></m:naryPr><m:sub>{_mr("i=1")}</m:sub><m:sup>{_mr("n")}</m:sup><m:e>{_mr("i")}</m:e></m:nary>'
    formula = f"<w:p>{r('The mass is ')}<m:oMath>{_FRACTION}{script}{root}{total}</m:oMath>{r(' kg.')}</w:p>"
    yield Case("formula.docx", make_word(formula), ("The mass is E=(a+b)/2mc^2√(x)∑_(i=1)^n i kg.",))
    headings = (
        p("Scope", '<w:pStyle w:val="H1"/>') + p("Terms", '<w:pStyle w:val="H1"/>') + p("Law", '<w:pStyle w:val="H2"/>')
    )
    yield Case(
        "headings.docx", make_word(headings, styles__xml=_STYLES, numbering__xml=numbering),
        ("# 1. Scope", "# 2. Terms", "## 2.1 Law"), headings=("1. Scope", "2. Terms", "2. Terms > 2.1 Law"),
    )  # fmt: skip
    items = (
        p("one", _number(0)) + p("inner", _number(1)) + p("two", _number(0)) + p("Between.") + p("three", _number(0))
    )
    yield Case("list.docx", make_word(items, numbering__xml=numbering), ("1. one", "1.1 inner", "2. two", "3. three"))
    linked = '<w:num w:numId="3"><w:abstractNumId w:val="1"/></w:num>'
    roman = _define_numbering(("upperRoman", "Article %1"), ("lowerLetter", "(%2)"), more=linked)
    articles = p("A", _number(0)) + p("B", _number(0)) + p("c", _number(1)) + p("D", _number(0, 3))
    yield Case("letters.docx", make_word(articles, numbering__xml=roman), ("Article II B", "(a) c", "Article I D"))
    restart = '<w:num w:numId="2"><w:abstractNumId w:val="0"/><w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride></w:num>'
    restarted = _define_numbering(*levels, more=restart)
    items = p("one", _number(0)) + p("seven", _number(0, 2))
    yield Case("restart.docx", make_word(items, numbering__xml=restarted), ("7. seven",))
    bullets = _define_numbering(("bullet", "·"))
    yield Case("bullets.docx", make_word(p("dot", _number(0)), numbering__xml=bullets), ("- dot",))
    box = '<w:sdt><w:sdtPr><w14:checkbox><w14:checked w14:val="{}"/></w14:checkbox></w:sdtPr><w:sdtContent><w:r><w:sym w:font="Segoe" w:char="2610"/></w:r></w:sdtContent></w:sdt>'
    field = '<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:checkBox>{}</w:checkBox></w:ffData></w:fldChar></w:r>'
    unset = '<w:default w:val="0"/>'
    choice = '<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:ddList><w:result w:val="1"/><w:listEntry w:val="red"/><w:listEntry w:val="umbra"/></w:ddList></w:ffData></w:fldChar></w:r>'
    fields = make_word(
        f"<w:p>{box.format(1)}{r(' Yes ')}{box.format(0)}{r(' No')}</w:p><w:p>{field.format('<w:checked/>')}"
        f"{r(' Yes ')}{field.format(unset)}{r(' Never')}</w:p><w:p>{r('Colour: ')}{choice}</w:p>"
    )
    yield Case("fields.docx", fields, ("☒ Yes ☐ No", "☒ Yes ☐ Never", "Colour: umbra"), ("red",))
    header, footer = f"<w:hdr {W}>{p('Contract 4711')}</w:hdr>", f"<w:ftr {W}>{_link('Draft of May')}</w:ftr>"
    links = {f"_rels___{part}__xml__rels": _RELATIONS(_make_link(part)) for part in ("footer1", "footnotes")}
    body = make_word(p("Body."), header1__xml=header, footer1__xml=footer, **links)
    yield Case("header.docx", body, ("Contract 4711", "[Draft of May](https://example.org/footer1)"))
    commented = f'<w:p>{r("Body")}<w:r><w:commentReference w:id="1"/></w:r></w:p>'
    noted = f'<w:p>{r("In 1987")}<w:r><w:rPr>{SUPER}</w:rPr><w:footnoteReference w:id="1"/></w:r></w:p>'
    notes = {"comments__xml": _make_note("comment", "It is 42."), "footnotes__xml": _make_note("footnote", "See Ames.")}
    facts = ("Body[^c1]", "[^c1]: Ada: It is 42.", "In 1987[^1]", "[^1]: [See Ames.](https://example.org/footnotes)")
    annotated = make_word(commented + noted, **notes, **links)
    yield Case("notes.docx", annotated, facts, ("19871",))
    yield Case("numbered.docx", _number_members(annotated), facts)
    text_box = "<wps:wsp><wps:txbx><w:txbxContent>{}</w:txbxContent></wps:txbx></wps:wsp>".format
    drawing = f"<w:drawing>{text_box(p('One'))}{text_box(p('Two'))}</w:drawing>"
    shape = f"<w:r><mc:AlternateContent><mc:Choice>{drawing}</mc:Choice></mc:AlternateContent></w:r>"
    yield Case("textbox.docx", make_word(f"<w:p>{r('Body.')}{shape}</w:p>"), ("Body.", "One", "Two"))
    symbol = '<w:r><w:sym w:font="Symbol" w:char="F062"/></w:r>'
    open_box = '<w:r><w:sym w:font="Segoe UI Symbol" w:char="25FB"/></w:r>'
    ticked = r("\uf0fe", '<w:rFonts w:ascii="Wingdings"/>')
    runs = make_word(
        f"<w:p>{r('It is ')}<w:ins>{r('42')}</w:ins><w:del><w:r><w:delText>41</w:delText></w:r></w:del></w:p>"
        "<w:p><w:r><w:t>Alex</w:t><w:softHyphen/><w:t>androva</w:t></w:r>"
        f"<w:r><w:ruby><w:rt>{r('ひがし')}</w:rt><w:rubyBase>{r('東')}</w:rubyBase></w:ruby></w:r></w:p>"
        f'<w:p><w:hyperlink r:id="link">{r("here")}</w:hyperlink></w:p>'
        f"<w:p>{symbol}{r(' = 2 ')}{ticked}{r(' Yes')}{symbol.replace('F062', 'zz')}{open_box}</w:p>"
    )
    facts = ("It is 42", "Alexandrova東(ひがし)", "[here](https://example.org/x)", "β = 2 ☑ Yes◻")
    yield Case("runs.docx", runs, facts, ("41",), omissions=("1 symbols",))
    chart = "<w:r><w:drawing><c:chart/></w:drawing></w:r>"
    diagram = "<w:r><w:drawing><wp:docPr/><dgm:relIds xmlns:dgm='d'/></w:drawing></w:r>"
    drawn = make_word(f"<w:p>{r('Sales:')}{chart}{r('Plan:')}{diagram * 2}</w:p>")
    yield Case("drawn.docx", drawn, ("Sales:", "Plan:"), omissions=("1 charts", "2 diagrams"))
    picture = "<w:r><w:drawing><wp:docPr {}/><a:blip xmlns:a='a'/>{}</w:drawing></w:r>".format
    shown = picture("", "") + picture("descr='A map'", "") + picture("", "<adec:decorative xmlns:adec='d' val='1'/>")
    shown += "<w:r><w:pict><v:shape xmlns:v='v'><v:imagedata/></v:shape></w:pict></w:r>"
    described = make_word(f"<w:p>{shown}</w:p>")
    yield Case("pictures.docx", described, ("![A map]",), omissions=("2 pictures without a description",))
    inside = {"embeddings___inner__docx": make_docx("The inner fact"), "embeddings___data__bin": b"\0\1"}
    losses = ("1 files in it that were not read (data.bin",)
    yield Case("inside.docx", make_word(p("Outer."), **inside), ("Outer.", "The inner fact"), omissions=losses)
    watermark = "<w:r><w:pict><v:shape xmlns:v='v'><v:textpath string='DRAFT'/></v:shape></w:pict></w:r>"
    header = f"<w:hdr {W}><w:p>{watermark}</w:p></w:hdr>"
    yield Case("watermark.docx", make_word(p("Body."), header1__xml=header), ("DRAFT",))


SUPER = '<w:vertAlign w:val="superscript"/>'
SUB = '<w:vertAlign w:val="subscript"/>'


def _html_files() -> Iterator[Case]:
    def page(name: str, body: str, *facts: str, **more: Texts) -> Case:
        return Case(f"{name}.html", body.encode(), facts, **more)

    raised = "<p>3 × 10<sup>6</sup>, x<sup>−3</sup>, y<sup>n+1</sup> H<sub>2</sub>O of the 1<sup>st</sup> of May"
    yield page("scripts", raised, "3 × 10^6, x^−3, y^(n+1) H_2O of the 1st of May")
    yield page("mark", "<p>in 1987<sup><a href='#n1'>2</a></sup>", "1987[^2]", lost=("19872",))
    table = "<table><tr><th>Region<th>Product<th>Units<tr>{}</table>".format
    spans = table("<td rowspan=2>EU<td>Hat<td>12<tr><td>Hub<td>7<tr><td colspan=2>Both<td>| 9")
    yield page("spans", spans, "| EU | Hub | 7 |", "| Both | Both | \\| 9 |")
    yield page("wide", table("<td colspan=999999999>a<tr><td rowspan=999999999>b<td>c"), "| b | c |")
    yield page("numbers", "<ol start=4><li>four<li value=9>nine<li>ten</ol>", "4. four", "9. nine", "10. ten")
    yield page("letters", "<ol type=a><li>x<li>y</ol><ul><li>one<li>two</ul>", "b. y", "- one\n- two")
    yield page("value", "<input value='umbrella'><input type=hidden value=secret>", "umbrella", lost=("secret",))
    boxes = "<input type=checkbox checked>Yes <input type=checkbox>No <textarea>four\nlines</textarea>"
    yield page("boxes", boxes, "☒ Yes", "☐ No", "four\nlines")
    yield page("choice", "<select><option>red<option selected>umbra</select>", "umbra", lost=("red",))
    yield page("math", "<math><mfrac><mn>1</mn><msup><mi>x</mi><mn>2</mn></msup></mfrac></math>", "1/(x^2)")
    yield page("ruby", "<ruby>東<rp>(</rp><rt>とう</rt><rp>)</rp></ruby>", "東(とう)")
    yield page("struck", "<p>It is <del>41</del> 42, Alex&shy;androva", "~~41~~ 42, Alexandrova")
    yield page("deep", "<div>" * 3000 + "innermost", "innermost")
    yield page("cells", "<table>" + "<tr><td rowspan=65534 colspan=1000>a" * 100, "a")
    yield Case("stack.html", b"<math>" + b"<mfrac>" * 20_000 + b"x", (), error="nested too deeply")
    yield Case("empty.html", b"<html><script>x</script></html>", (), error="empty.html holds no text")
    yield page("pre", "<pre>a<br>b</pre>", "```\na\nb\n```")
    yield page("odd", "<p>before</p><![ if x><p>after</p>", "before\n\nafter\n")
    head = "<!doctype html><html><head><title>A title</title><style>p {}</style><script>var hidden = 1;</script></head>"
    plain = "One **bold** word, 2 * 3 and snake_case."
    body = "<body><p>One <b>bold</b> word, 2 * 3 and snake_case.<!-- comment -->"
    yield page("whole", head + body, "A title", plain, lost=("hidden", "comment", "{}", "<"))
    yield page(
        "headings",
        "Before.<h1>A <i>fine</i> report</h1>a<h2>Costs</h2>b<h4>Of <a href='#'>it</a></h4><table><tr><td><h2>No</h2><td>c<tr>"
        "<td>d<td>e</table><ul><li><h3>Last</h3>f</ul>",
        "### Last",
        headings=(
            "A fine report", "A fine report > Costs", "A fine report > Costs > Of it", "A fine report > Costs > Last",
        ),
    )  # fmt: skip
    style = "<style>p{margin:0}.c2{color:red;vertical-align:super} span.c3{vertical-align:sub}</style>"
    note = "<sup><a href='#ftnt1'>[1]</a></sup>"
    yield page("gdocs", f"{style}<p>10<span class='c1 c2'>6</span>, x<span style='vertical-align: super'>6</span>, CO<span class=c3>2</span> in 1987{note}",
        "10^6, x^6", "CO_2", "1987[^1]")  # fmt: skip
    yield page("backwards", "<ol reversed><li>c<li>b</ol><ol reversed start=9><li>nine</ol>", "2. c", "1. b", "9. nine")
    yield page(
        "katex", "<span class=katex><math><mi>E</mi></math><span class=katex-html>E</span></span>.", "E.", lost=("EE",)
    )
    yield page("area", "<map><area alt='Region A'></map>", "Region A")
    yield page("folded", "<details><summary>More</summary><p>A fact</details>Super<wbr>man", "A fact", "Superman")
    shown = "<img src=a><img src=b alt=''><img src=c width=1><img src=d alt='A map'><iframe src=e></iframe><iframe width=0></iframe>"
    yield page(
        "shown", f"{shown}<object data=f>no</object><embed src=g><video src=h></video><svg><title>Logo</title></svg>",
        "![A map]", "Logo",
        omissions=("1 pictures without a description", "1 frames", "2 embedded objects", "1 audio and video"),
    )  # fmt: skip
    yield page("wordless", "<p>One.</p><img src=a>", "One.", omissions=("1 pictures without a description",))
    yield page("layout", "<table><tr><td><table><tr><td>a<td>b<tr><td>1<td>2</table></table>", "| 1 | 2 |")


def _draw_rows(*rows: str | tuple[str, ...], at: tuple[int, ...] = (60, 320)) -> str:
    """Return the PDF operators of lines below each other; the strings of a tuple go into columns at `at`."""
    return " ".join(
        f"BT /F1 11 Tf {x} {740 - 14 * number} Td ({text}) Tj ET"
        for number, row in enumerate(rows)
        for x, text in zip(at, [row] if isinstance(row, str) else row, strict=False)
    )


_SCAN = "q 612 0 0 792 0 0 cm /I Do Q"


def _pdf_files() -> Iterator[Case]:
    line = format_pdf_line

    def pdf(name: str, pages: list[str], *facts: str, lost: Texts = (), omissions: Texts = (), **more: str) -> Case:
        return Case(f"{name}.pdf", make_raw_pdf(pages, **more), facts, lost, omissions)

    yield pdf("text", [line("The fact.")], "The fact.")
    yield Case("blank.pdf", make_pdf("", ""), (), error="blank.pdf holds no text")
    yield Case("broken.pdf", b"%PDF-1.4\nbroken", (), error="cannot be opened")
    yield Case("plain.pdf", b"plain text", (), error="plain.pdf is a damaged PDF file, or not one")
    pageless = make_pdf("One.", "Two.").replace(b"/Kids [4 0 R 6 0 R]", b"/Kids [4 0 R 9 0 R]")
    yield Case("pageless.pdf", pageless, (), error="page 2 of the PDF file pageless.pdf cannot be read")
    pages = [line("Before."), _SCAN, line("After.")]
    yield pdf("mixed", pages, "Before.", "After.", omissions=("1 pages that are images (page 2)",))
    strips = " ".join(f"q 612 0 0 200 0 {200 * at} cm /I Do Q" for at in range(4))
    pages = [line("A long page of text. " * 9), _SCAN + line("Page 2"), strips + line("Page 3")]
    yield pdf("stamp", pages, "Page 2", "Page 3", omissions=("2 pages that are images (pages 2-3)",))
    refusal = "scan.pdf holds no text but white space; Not in the text: pages that are images (2: pages 1-2)"
    yield Case("scan.pdf", make_raw_pdf([_SCAN, _SCAN]), (), error=refusal)

    def form(name: str, field: str, *facts: str, lost: Texts = ()) -> Case:
        widget = f"60:<< /Type /Annot /Subtype /Widget /Rect [72 600 300 620] /P 4 0 R /T (Name) {field} >>"
        root = "/AcroForm << /Fields [60 0 R] /DR << /Font << /F1 3 0 R >> >> /DA (/F1 12 Tf) >>"
        return pdf(name, [line("Form.")], *facts, lost=lost, annotations="/Annots [60 0 R]", objects=widget, root=root)

    yield form("field", "/FT /Tx /V (umbrella)", "Name: umbrella")
    yield form("unicode", "/FT /Tx /V <FEFF00FC006D>", "Name: üm")
    yield form("listbox", "/FT /Ch /Opt [(red) (umbra)] /V (umbra) /I [1]", "Name: umbra", lost=("red",))
    appearance = "/AP << /N << /Yes 6 0 R /Off 6 0 R >> >>"
    yield form("checked", f"/FT /Btn /V /Yes /AS /Yes {appearance}", "☒ Name")
    yield form("unchecked", f"/FT /Btn /V /Off /AS /Off {appearance}", "☐ Name")

    def note(name: str, kind: str) -> Case:
        objects = f"60:<< /Type /Annot /Subtype /{kind} /Rect [72 600 300 620] /DA (/F1 12 Tf) /Contents (It is 42.) >>"
        return pdf(name, [line("Body.")], "Body.", "It is 42.", annotations="/Annots [60 0 R]", objects=objects)

    yield note("freetext", "FreeText")
    yield note("sticky", "Text")
    yield note("highlight", "Highlight")
    packet = '<xfa:datasets xmlns:xfa="http://www.xfa.org/schema/xfa-data/1.0/"><xfa:data><name>umbrella</name></xfa:data></xfa:datasets>'
    objects = f"61:<< /Length {len(packet)} >>\nstream\n{packet}\nendstream"
    root = "/NeedsRendering true /AcroForm << /Fields [] /XFA [(datasets) 61 0 R] >>"
    yield pdf("xfa", [line("Please wait...")], "name: umbrella", omissions=("1 XFA forms",), objects=objects, root=root)
    inner = "The attached fact."
    file = f"60:<< /Type /Filespec /F (note.txt) /UF (note.txt) /EF << /F 61 0 R >> >>\n\n61:<< /Type /EmbeddedFile /Length {len(inner)} >>\nstream\n{inner}\nendstream"
    root = "/Names << /EmbeddedFiles << /Names [(note.txt) 60 0 R] >> >>"
    yield pdf("attached", [line("Body.")], "Body.", inner, objects=file, root=root)
    clip = f"{file}\n\n62:<< /Type /Annot /Subtype /FileAttachment /Rect [72 600 90 620] /FS 60 0 R >>"
    yield pdf("clip", [line("Body.")] * 2, "Body.", inner, annotations="/Annots [62 0 R]", objects=clip)
    yield pdf("empty", [line("Body.")], "Body.", omissions=("1 attached files",), objects="60:<< /UF (x) >>", root=root)
    split = "BT /F1 12 Tf 14 TL 72 720 Td (Her name is Alex-) Tj T* (androva, she said.) Tj ET"
    yield pdf("hyphen", [split], "Alexandrova", lost=("\ufffe",))
    moved = "BT /F1 12 Tf 72 720 Td (It has 10) Tj /F1 7 Tf 5 Ts (6) Tj 0 Ts /F1 12 Tf ( kg of CO) Tj /F1 7 Tf -3 Ts (2) Tj 0 Ts /F2 12 Tf ( x) Tj /F2 7 Tf 5 Ts (2) Tj ET"
    letter = "60:<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 61 0 R >>\n\n61:<< /Length 43 >>\nstream\n1 beginbfchar <78> <D835DC65> endbfchar\nendstream"
    yield pdf("power", [moved], "10^6 kg of CO_2 𝑥^2", objects=letter, resources="/F2 60 0 R")
    yield pdf("sizes", ["BT /F1 20 Tf 72 720 Td (In 19) Tj /F1 9 Tf (87) Tj ET"], "In 1987")
    columns = [(72, 700, "One"), (72, 685, "two."), (320, 700, "Three"), (320, 685, "four.")]
    page = " ".join(f"BT /F1 9 Tf {x} {y} Td ({text}) Tj ET" for x, y, text in columns)
    yield pdf("columns", [page], "One\ntwo.\nThree\nfour.")
    prose = (
        ("The tower stands close to the sea", "Later it was sold to a merchant of"), ("and was built of grey stone that a", "grain, who kept it for nine years and"),
        ("ship brought from the north in the", "then gave it to the town. The key is"), ("spring of that year. Its first keep-", "umbrella. Nobody has used it since, or"),
        ("er was Marta, who had 10 bees and a", "so the people of the town say, who"), ("dog that slept on the stairs.", "are often wrong about such things."),
    )  # fmt: skip
    yield pdf(
        "rows_of_columns", [_draw_rows("A title over both of the columns, with no gap in it", *prose, "A line below both of the columns, which is as long as the one above, too")],
        "A title over both of the columns, with no gap in it\nThe tower", "that a\nship brought", "on the stairs.\nLater it", "The key is\numbrella.", "such things.\nA line below",
    )  # fmt: skip
    three = [
        ("lorem ipsum dolor ", "sit amet elit sed ", "do tempor ut labo "),
        ("magna aliqua enim ", "ad minim veniam q ", "nostrud exercitat "),
    ]
    page = _draw_rows(*three * 3, at=(50, 220, 400))
    yield pdf("three_columns", [page], "lorem ipsum dolor\nmagna aliqua enim\n" * 3 + "sit amet")
    cells = (
        ("Region of the tower", "Bees that it had in the year"), ("North and the islands", "Nine hundred and forty"),
        ("South without the sea", "A thousand and two"), ("East of the long river", "None that were counted"), ("West", "Seven"),
    )  # fmt: skip
    yield pdf("rows_of_a_table", [_draw_rows(*cells)], "South without the sea A thousand and two")
    unmapped = "60:<< /Type /Font /Subtype /Type3 /FontBBox [0 0 9 9] /FontMatrix [.1 0 0 .1 0 0] /CharProcs << >> /Encoding << /Differences [1 /g1 /g2 /g3] >> /FirstChar 1 /LastChar 3 /Widths [9 9 9] >>"
    drawn = "q 72 72 m " + " ".join(f"{80 + 9 * at} {100 + at * 37 % 90} l" for at in range(30)) + " S Q"
    framed = "q 30 30 550 730 re S 30 50 m 580 50 l S Q"  # the page has lines, and nothing that could be read
    glyphs = "BT /F2 12 Tf 72 720 Td (\x01\x02\x03\x01\x02\x03) Tj ET"
    losses = "1 pages whose glyphs have no characters (page 2)", "1 pages that are drawn, without characters (page 3)"
    pages = [line("Before."), glyphs, drawn, framed]
    yield pdf("drawn", pages, "Before.", lost=("\x01",), omissions=losses, objects=unmapped, resources="/F2 60 0 R")


def _make_mail(text: str, subject: str = "Umbra", **options: str) -> EmailMessage:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "ada@example.org", "bo@example.org", subject
    message.set_content(text, **options)
    return message


def _mail_files() -> Iterator[Case]:
    head = b"From: a@example.org\nSubject: =?utf-8?q?umb=C3=BC?=\nContent-Type: text/plain; charset=utf-8\n"
    bodies = {"quoted-printable": b"umb=\nrella =C3=BC\n", "base64": base64.b64encode("umbrella ü".encode())}
    for coding, body in bodies.items():
        data = head + f"Content-Transfer-Encoding: {coding}\n\n".encode() + body
        yield Case(f"{coding}.eml", data, ("umbrella ü", "Subject: umbü", "From: a@example.org"))
    (both := _make_mail("plain umbrella")).add_alternative("<p>html umbrella</p>", subtype="html")
    page = both.get_payload()[1]
    inline: dict[str, Any] = {"maintype": "image", "subtype": "gif", "disposition": "inline"}
    page.add_related(b"GIF89a", filename="logo.gif", **inline)
    page.add_attachment("lamp,412", filename="prices.csv")
    page.add_attachment(b"GIF89a", filename="map.gif", **inline)
    facts, omissions = ("plain umbrella", "lamp,412"), ("1 pictures (map.gif)",)
    yield Case("alternative.eml", both.as_bytes(), facts, ("html umbrella",), omissions)
    (outer := _make_mail("Look:", "Outer")).add_attachment(both)
    yield Case("forwarded.eml", outer.as_bytes(), ("Look:", *facts), omissions=omissions)
    attached = _make_mail("See the file.")
    files = {"a.docx": make_docx("The attached fact"), "a.txt": "Schlüssel".encode("cp1252"), "a.bin": b"\x00\x01"}
    files |= {"u.csv": "12;€".encode("utf-16"), "a.log": "größer".encode("cp1252"), "b.json": b"\xef\xbb\xbf[7]"}
    files |= {"b.htm": "<meta charset=windows-1251><p>Привет".encode("cp1251"), "no suffix": rb"{\rtf1 A {\b B}}"}
    attached.add_attachment(files["b.htm"].replace(b"<p>", b"<p>2"), "text", "html", filename="c.html")
    attached.add_attachment(files["no suffix"], "text", "rtf", filename="d.rtf")
    files["e.txt"] = "Маяк построил Иван, а ключ от него хранит Анна.".encode("cp1251")
    for name, content in files.items():
        attached.add_attachment(content, maintype="application", subtype="octet-stream", filename=name)
    facts = ("See the", "attached fact", "Schlüssel", "12;€", "größer", "\n[7]", "2Привет", "\nПривет", "A B", "Иван")
    yield Case("attached.eml", attached.as_bytes(), facts, ("rtf1",), ("1 files in it that were not read (a.bin",))
    japanese_mail = "From: a@example.org\nSubject: x\nContent-Type: text/plain; charset=iso-2022-jp\n\n東京タワー"
    yield Case("japanese.eml", japanese_mail.encode("iso2022_jp"), ("東京タワー",))
    box = b"From a@b Mon Jan  1 00:00:00 2024\nTo: <\nContent-Disposition: inline;name*0*\nSubject: one\n\nfirst\n\nFrom then to 2020\n\nFrom a@b Tue Jan  2 00:00:00 2024\nSubject: two\n\n>From here\n"
    yield Case("two.mbox", box, ("To: <\n", "From then", "Subject: two", "\nFrom here"), headings=("one", "two"))
    pictured = _make_mail("<p>See 10<sup>6</sup> <img src='cid:1'>", subtype="html")
    pictured.add_related(b"GIF89a", filename="map.gif", cid="<1>", **inline)
    yield Case("pictured.eml", pictured.as_bytes(), ("See 10^6",), omissions=("1 pictures (map.gif)",))
    stub = _make_mail("View this message in your browser.")
    stub.add_alternative("<p>The fact is umbrella. " + "And more. " * 30, subtype="html")
    stub.add_alternative("LOCATION:Room 7", subtype="calendar")
    yield Case("stub.eml", stub.as_bytes(), ("umbrella", "LOCATION:Room 7"), ("browser",))
    yield Case("nested.eml", b"Content-Type: message/rfc822\n\n" * 3000 + b"From: a\n\nx", (), error="nested too")
    report = b"From: x\nContent-Type: multipart/report; boundary=b\n\n--b\n\nIt failed.\n--b\nContent-Type: message/delivery-status\n\nReporting-MTA: x\n\nStatus: 5.1.1\n--b--\n"
    yield Case("bounced.eml", report, ("It failed.", "Reporting-MTA: x", "Status: 5.1.1"))
    related = b"From: x\nMIME-Version: 1.0\nContent-Type: multipart/related; boundary=b\n\n--b\nContent-Type: text/html\n\n<p>saved <b>page</b>\n--b\nContent-Type: text/css\n\np {}\n--b\nContent-Type: text/css; name=x\n\nq {}\n--b--\n"
    yield Case("saved.mhtml", related, ("saved **page**", "q {}"), ("p {}",))


def _a(text: str) -> str:
    return f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>"


def make_slides(*bodies: str, notes: str = "") -> bytes:
    """Return a presentation."""
    namespaces = f'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" {_NAMESPACES}'
    relation = '<Relationship Id="{0}" Type="' + _RELATION + '/{1}" Target="{2}"/>'
    numbers = range(1, len(bodies) + 1)
    parts: dict[str, str | bytes] = {
        "ppt/presentation.xml": f"<p:presentation {namespaces}><p:sldIdLst>"
        + "".join(f'<p:sldId id="{n}" r:id="r{n}"/>' for n in numbers)
        + "</p:sldIdLst></p:presentation>",
        "ppt/_rels/presentation.xml.rels": _RELATIONS(
            "".join(relation.format(f"r{n}", "slide", f"slides/s{n}.xml") for n in numbers)
        ),
    }
    for number, body in zip(numbers, bodies, strict=True):
        parts[f"ppt/slides/s{number}.xml"] = f"<p:sld {namespaces}><p:cSld><p:spTree>{body}</p:spTree></p:cSld></p:sld>"
    if notes:
        parts["ppt/slides/_rels/s1.xml.rels"] = _RELATIONS(relation.format("r1", "notesSlide", "../notes.xml"))
        parts["ppt/notes.xml"] = f"<p:notes {namespaces}><p:sp><p:txBody>{_a(notes)}</p:txBody></p:sp></p:notes>"
    return make_zip(parts)


def make_workbook(rows: str, **parts: str) -> bytes:
    """Return a workbook with one sheet, which has these parts."""
    namespace = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    content_type = "application/vnd.openxmlformats-officedocument.spreadsheetml."
    return make_zip(
        {
            "[Content_Types].xml": f'<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/xl/workbook.xml" ContentType="{content_type}sheet.main+xml"/><Override PartName="/xl/worksheets/sheet1.xml" ContentType="{content_type}worksheet+xml"/></Types>',
            "_rels/.rels": _RELATIONS(f'<Relationship Id="r1" Type="{_RELATION}/officeDocument" Target="xl/workbook.xml"/>'),
            "xl/workbook.xml": f'<workbook {namespace} xmlns:r="{_RELATION}"><sheets><sheet name="Sales" sheetId="1" r:id="r1"/></sheets></workbook>',
            "xl/_rels/workbook.xml.rels": _RELATIONS(f'<Relationship Id="r1" Type="{_RELATION}/worksheet" Target="worksheets/sheet1.xml"/>'),
            "xl/worksheets/sheet1.xml": f"<worksheet {namespace}><sheetData>{rows}</sheetData></worksheet>",
            "xl/worksheets/_rels/sheet1.xml.rels": _RELATIONS('<Relationship Type="x/package" Target="a.docx" TargetMode="External"/>' + "".join(map('<Relationship Id="{0}" Type="x/{0}" Target="/{0}"/>'.format, parts))),
            **parts,
        }
    )  # fmt: skip


def _make_cell(reference: str, text: str) -> str:
    return f'<c r="{reference}" t="inlineStr"><is><t>{text}</t></is></c>'


def _office_files() -> Iterator[Case]:
    shape = "<p:sp><p:nvSpPr><p:nvPr>{}</p:nvPr></p:nvSpPr><p:txBody>{}</p:txBody></p:sp>".format
    power = f'<a:p><a:r><a:t>10</a:t></a:r><a:r><a:rPr baseline="3e4"/><a:t>6</a:t></a:r><m:oMath>{_FRACTION}</m:oMath></a:p>'
    cell = "<a:tc {}><a:txBody>{}</a:txBody></a:tc>".format
    table = f"<a:tbl><a:tr>{cell('', _a('Region'))}{cell('', _a('Units'))}</a:tr><a:tr>{cell('', _a('EU'))}{cell('', _a('12'))}</a:tr></a:tbl>"
    picture = '<p:pic><p:nvPicPr><p:cNvPr id="1" descr="{}"/></p:nvPicPr></p:pic>'
    auto = "<a:p><a:pPr lvl='{}'><a:buAutoNum type='{}' startAt='{}'/></a:pPr><a:r><a:t>{}</a:t></a:r></a:p>".format
    items = auto(0, "arabicPeriod", 3, "three") + auto(1, "alphaLcPeriod", 1, "in") + auto(0, "arabicPeriod", 3, "four")
    deep = "<p:grpSp>" * 20_000 + "</p:grpSp>" * 20_000
    yield Case("deep.pptx", make_slides(deep), (), error="nested too deeply")
    yield Case(
        "slides.pptx", make_slides(
            shape('<p:ph type="title"/>', _a("Plan")) + shape("", power),
            f"<p:graphicFrame>{table}</p:graphicFrame>{picture.format('A map of Ames')}{picture.format('')}",
            shape('<p:ph type="ctrTitle"/>', _a("End")) + shape("", items),
            notes="Spoken fact",
        ),
        ("## Plan", "10^6E=(a+b)/2\n", "Spoken fact", "| EU | 12 |", "A map of Ames", "3. three\n  a. in\n4. four"),
        omissions=("1 pictures without a description (slide 2)",), headings=("Plan", "End"),
    )  # fmt: skip
    row = f'<row r="1">{_make_cell("A1", "Region")}{_make_cell("B1", "Units")}</row>'
    last_row = f'<row r="1048576">{_make_cell("A1048576", "Last")}<c r="XFD1048576"><v>7</v></c></row>'
    yield Case("sparse.xlsx", make_workbook(row + last_row), ("| Last |  | 7 |",))
    row += f'<row r="2">{_make_cell("A2", "EU")}<c r="B2"><f>3+4</f><v>7</v></c><c r="C2"><f>5+5</f></c></row>'
    comment = "<c><{0} ref='A1' {1}='1'><text>Checked by Ada</text></{0}></c>".format
    parts = {"comments": comment("comment", "uid"), "threadedComment": comment("threadedComment", "id"), "drawing": f"<d:d xmlns:d='d' xmlns:a='a' xmlns:c='c'><d:sp>{_a('Boxed')}</d:sp><d:pic/><c:chart/></d:d>"}  # fmt: skip
    relate = '<R><R Type="x/{0}" Target="{0}"/></R>'.format
    parts |= {"_rels/drawing.rels": relate("chart"), "_rels/chart.rels": relate("chartUserShapes")}
    parts["chartUserShapes"] = f"<d:d xmlns:d='d' xmlns:a='a'><d:sp>{_a('On a chart')}</d:sp></d:d>"
    omissions = ("1 formulas without a value (sheet Sales)",)
    yield Case("numbered.xlsx", _number_members(make_workbook(row)), ("| EU | 7 | =5+5 |",), omissions=omissions)
    yield Case("formula.xlsx", make_workbook(row, **parts), ("## Sales", "| EU | 7 | =5+5 |\n\n\n\nComment at A1: Checked by Ada\n\n\nBoxed\n\nOn a chart"),
        omissions=(*omissions, "1 pictures without a description (sheet Sales)", "1 charts (sheet Sales)"), headings=("Sales",))  # fmt: skip
    yield Case("excel.xlsx", _make_openpyxl_workbook(), (
        "| EU | 12.5% | 4 +-€/kg | 007 | $5 |", "| EU | 2024-05-01 | 123-45-6789 | 1234.5 € | -5 |", "Comment at A2: seen\n\n\n## Other", "| =1+1 | \\|a\\| \\| --- \\| |", "hidden fact", "On each page: Draft of R&D,",
    ), omissions=("1 formulas without a value (sheet Data)",))  # fmt: skip


def _make_openpyxl_workbook() -> bytes:
    """Return a workbook with number formats, merged cells, a comment and a hidden sheet."""
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Data"
    sheet.oddHeader.left.text, sheet.oddFooter.center.text = "Draft of R&&D, &D", "&P"
    for row in (["Region", "a", "b", "c", "d"], ["EU", 0.125, 4, 7, 5], [None, datetime.date(2024, 5, 1), 123456789, 1234.5, -5], ["=1+1", "|a|\n| --- |"]):  # fmt: skip
        sheet.append(row)
    for cell, number_format in {"B2": "0.0%", "C2": '#,##0 "+-€/kg"', "D2": "000", "E2": "[$$-409]#,##0", "C3": "000-00-0000", "D3": '#\\ ##0.00\\ "€"', "E3": "+0;-0"}.items():  # fmt: skip
        sheet[cell].number_format = number_format
    sheet.merge_cells("A2:A3")
    sheet["A2"].comment = Comment("seen", "Ada")
    book.create_sheet("Other")["A1"] = "hidden fact"
    book["Other"].sheet_state = "hidden"
    file = io.BytesIO()
    book.save(file)
    return file.getvalue()


_ODF = " ".join(
    f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
    for name in ("office", "text", "table", "style", "draw", "presentation", "svg")
)


def make_open_document(kind: str, body: str, styles: str = "", *, suffix: str = "") -> bytes:
    """Return an OpenDocument file."""
    return make_zip(
        {
            "mimetype": f"application/vnd.oasis.opendocument.{kind}{suffix}",
            "content.xml": f"<office:document-content {_ODF}><office:automatic-styles>{styles}</office:automatic-styles><office:body><office:{kind}>{body}</office:{kind}></office:body></office:document-content>",
        }
    )  # fmt: skip


def _open_files() -> Iterator[Case]:
    entities = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><x>&b;</x>'
    kind = "application/vnd.oasis.opendocument.text"
    yield Case("entities.odt", make_zip({"mimetype": kind, "content.xml": entities}), (), error="declares XML entities")
    raised = '<style:style style:name="T1"><style:text-properties style:text-position="super 58%"/></style:style>'
    numbered = '<text:list-style style:name="L"><text:list-level-style-number text:level="1" style:num-suffix="." style:num-format="1"/><text:list-level-style-number text:level="2" style:num-format="1" text:display-levels="2"/></text:list-style>'
    headings = "".join(map('<text:h text:outline-level="{0}">Terms {0}</text:h>'.format, (1, 2)))
    item = "<text:list-item><text:p>{}</text:p></text:list-item>".format
    nested = f'<text:list text:style-name="L">{item("one")}<text:list-item><text:p>two</text:p><text:list>{item("inner")}</text:list></text:list-item></text:list>'
    deeper = f"<text:list-item><text:list>{item('next')}</text:list></text:list-item>"
    law = '<text:list-header><text:p>Head</text:p></text:list-header><text:list-item><text:h text:outline-level="3">Law</text:h></text:list-item>'
    nested += f'<text:list text:style-name="L" text:continue-list="x">{deeper}{law}</text:list>'
    cell = "<table:table-cell{}><text:p>{}</text:p></table:table-cell>".format
    row = "<table:table-row>{}</table:table-row>".format
    spanned = cell(' table:number-rows-spanned="2"', "EU") + cell("", "12")
    table = f"<table:table>{row(cell('', 'Region') + cell('', 'Units'))}{row(spanned)}{row('<table:covered-table-cell/>' + cell('', '7'))}</table:table>"
    inner = f"<table:table><table:table-header-rows>{row(cell('', '1') * 2)}</table:table-header-rows>{row(cell('', '3') * 2)}</table:table>"
    outer = f"<table:table>{row(cell('', 'Outer'))}{row(f'<table:table-cell>{inner}</table:table-cell>')}</table:table>"
    shape = "<text:p>End.<draw:rect><svg:desc>A map</svg:desc><text:p>One</text:p><text:p>Two</text:p></draw:rect><text:ruby><text:ruby-base>東</text:ruby-base><text:ruby-text>ひがし</text:ruby-text></text:ruby></text:p>"
    facts = ("Outer\n\n| 1 | 1 |\n| --- | --- |\n| 3 | 3 |\n\nEnd.", "End.\n\n![A map]\n\nOne\n\nTwo\n\n東(ひがし)")
    yield Case("inside.odt", make_open_document("text", outer + shape, suffix="-template"), facts)
    power = '<text:p>10<text:span text:style-name="T1">6</text:span></text:p>'
    note = "<text:p>In 1987<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>See Ames.</text:p></text:note-body></text:note></text:p>"
    yield Case(
        "whole.odt", make_open_document("text", headings + power + nested + table + note, raised + numbered),
        ("## Terms 2", "10^6", "1. one", "2. two", "2.1 inner\n  2.2 next\n\nHead\n", "| EU | 7 |", "In 1987[^1: See Ames.]"),
        headings=("Terms 1", "Terms 1 > Terms 2", "Terms 1 > Terms 2 > 3. Law"),
    )  # fmt: skip
    notes = "<presentation:notes><draw:frame><draw:text-box><text:p>Spoken fact</text:p></draw:text-box></draw:frame></presentation:notes>"
    yield Case(
        "slide.odp",
        make_open_document(
            "presentation",
            "<draw:page><draw:frame presentation:class='title'><draw:text-box><text:p>Plan</text:p></draw:text-box></draw:frame>"
            "<draw:frame><draw:text-box><text:p>The fact.</text:p></draw:text-box></draw:frame><draw:frame><draw:image/></draw:frame>"
            f"<draw:frame><draw:image/><svg:desc>A map</svg:desc></draw:frame>{notes}</draw:page>",
        ),
        ("The fact.", "![A map]", "Notes:\n\nSpoken fact"),
        omissions=("1 pictures without a description",),
        headings=("Plan",),
    )  # fmt: skip
    values = "<table:table table:name='S'><table:table-row><table:table-cell office:value-type='date' office:date-value='2024-05-01'/><table:table-cell><text:p>z</text:p><office:annotation><text:p>seen</text:p></office:annotation></table:table-cell></table:table-row><table:shapes><draw:frame><draw:image/></draw:frame></table:shapes></table:table>"
    sheet = make_open_document("spreadsheet", values)
    yield Case("values.ods", sheet, ("2024-05-01", "z\n\n[Note: seen]"), omissions=("1 pictures without",))
    empty = '<table:table-row table:number-rows-repeated="1048575"><table:table-cell table:number-columns-repeated="16384"/></table:table-row>'
    spans, covered = ' table:number-rows-spanned="2"', "<table:covered-table-cell/>"
    merged = row(cell(spans, "EU") + f"<table:table-cell{spans}/>") + row(covered * 2)
    rows = f'<table:table table:name="Sales">{merged}{empty}{row(cell("", "US") + cell("", "3"))}{row(covered)}</table:table>'
    yield Case("rows.ods", make_open_document("spreadsheet", rows), ("## Sales", "| EU |  |\n| US | 3 |\n\n"))
    container = '<container><rootfiles><rootfile full-path="o/p.opf"/></rootfiles></container>'
    package = '<package><metadata><title>Umbra</title></metadata><manifest><item id="a" href="a%20b.xhtml"/><item id="c" href="c.xhtml"/></manifest><spine><itemref idref="c"/><itemref idref="a"/></spine></package>'
    book = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": container,
        "o/p.opf": package,
        "o/a b.xhtml": "<p>Second, 10<sup>6</sup>.</p>",
        "o/c.xhtml": "<p>First.</p>",
    }
    yield Case("order.epub", make_zip(book), ("Umbra", "First.\n\nSecond, 10^6."))
    chapters = {"o/c.xhtml": "<h1>One</h1><h2>Inside</h2>", "o/a b.xhtml": "<h1>Two</h1>"}
    yield Case("chapters.epub", make_zip(book | chapters), ("# Two",), headings=("One", "One > Inside", "Two"))
    chapter = "<?xml encoding='cp1251'?><p>Год 1987<a epub:type='noteref' href='#n'>2</a>.".encode("cp1251")
    noted = {"o/c.xhtml": chapter, "o/p.opf": "<!DOCTYPE package>" + package}
    yield Case("noted.epub", make_zip(book | noted), ("Год 1987[^2].",))
    drawn = package.replace('id="a"', 'id="a" media-type="image/png"')
    scan = {"o/c.xhtml": "<svg><image href='x'/></svg>", "o/p.opf": drawn}
    yield Case("scan.epub", make_zip(book | scan), (), ("Second",), ("2 pictures without a description (chapter",))
    incomplete_book = make_zip({name: text for name, text in book.items() if name != "o/c.xhtml"})
    yield Case("gap.epub", incomplete_book, ("Second",), omissions=("1 chapters that are missing (o/c.xhtml)",))
    locked = {
        "META-INF/encryption.xml": '<encryption><EncryptedData><EncryptionMethod Algorithm="aes"/></EncryptedData></encryption>'
    }
    yield Case("locked.epub", make_zip(book | locked), (), error="is encrypted")
    rich = rb"{\rtf1\ansi{\fonttbl{\f0 Arial;}}\f0 The fact is {\b umbrella}.\par \u252?m 10{\super 6} m, H{\sub 2}O}"
    yield Case("plain.rtf", rich, ("The fact is umbrella.", "üm 10^6 m, H_2O"), ("Arial",))
    yield Case(
        "noted.rtf", rb"{\rtf1\ansi In 1987{\super\chftn}{\footnote \pard{\super\chftn} See {\b Ames}.} it was 42{\deleted 41}{\header A head\par}. Seen{\shp{\*\shpinst{\sp{\sn a}{\sv 7}}}}{\*\annotation by Ada} twice{\shp{\*\shpinst\shpleft9{\sp{\sn a}{\sv 7}}{\shptxt Boxed\par}}{\shprslt fallback}}end}",
        ("In 1987[Note:  See Ames.] it was 42", "A head", "Seen[Note: by Ada] twice\nBoxed\n\nend"), ("41",),
    )  # fmt: skip
    yield Case("raw.rtf", "{\\rtf1\\ansi\\ansicpg1251 Маяк}".encode("cp1251"), ("Маяк",))
    yield Case("deep.rtf", rb"{\rtf1\ansi " + b"{" * 100_000 + b"innermost", ("innermost",))
    emoji = rb"{\rtf1\ansi 10{\up6 7} \u-10179?\u-8704?{\*\shppict{\pict 01}}{\nonshppict{\pict 01}} Body.{\shp{\*\shpinst{\sp{\sv {\pict 2}}}}{\shprslt\par{\pict 2}}}{\object{\*\objdata 0102}}}"
    yield Case("emoji.rtf", emoji, ("10^7 😀", "Body."), omissions=("1 embedded objects", "2 pictures"))


def _text_files() -> Iterator[Case]:
    yield Case("marked.md", b"# Title\n\n<p>as it *is*</p>\n", ("# Title\n\n<p>as it *is*</p>\n",))
    for charset in ("utf-8", "cp1252"):
        yield Case(f"{charset}.html", f'<meta charset="{charset}"><p>Über'.encode(charset), ("Über",))
    for charset in ("nonsense", "punycode", "idna", "unicode_escape", "utf-7", "utf-16", "base64"):
        text = "abc-zzzz9zzzz9 +AGE- \\u0041"  # no browser knows these charsets
        yield Case(f"{charset}.html", f'<meta charset="{charset}"><p>{text}'.encode(), (text,))
    yield Case("latin.html", b'<meta charset="iso-8859-1"><p>It\x92s \x80 5', ("It’s € 5",))
    yield Case("control.html", b'<meta charset="iso-8859-1"><p>a\x81b', ("a\x81b",))
    yield Case("xsjis.html", '<meta charset="x-sjis"><p>①東京'.encode("cp932"), ("①東京",))
    yield Case("korean.html", '<meta charset="euc-kr"><p>똠방각하'.encode("cp949"), ("똠방각하",))
    yield Case("chinese.html", '<meta charset="gb2312"><p>镕基 €'.encode("gb18030"), ("镕基 €",))
    declared = '<?xml version="1.0" encoding="windows-1251"?><p>Привет</p>'
    yield Case("declared.xhtml", declared.encode("cp1251"), ("Привет",))
    yield Case("mail.txt", "東京タワーは三百三十三メートル。".encode("iso2022_jp"), ("東京タワー",))
    yield Case("koi8.txt", "Ключ от маяка хранит Анна, и номер его 4711.".encode("koi8-r"), ("Ключ от маяка",))
    yield Case("hz.txt", "答案是雨伞。The answer.".encode("hz"), ("雨伞",))
    yield Case("kr.txt", "서울은 수도이다.".encode("iso2022_kr"), ("서울은",))
    yield Case("hebrew.txt", "שלום עולם, הקוד הוא 42".encode("cp1255"), ("שלום עולם",))
    pounds = "It cost £4,000 and then £5,000, £6,000, £7,000, £8,000, £9,000, £1, £2, £3."
    yield Case("pounds.txt", pounds.encode("cp1252"), ("£4,000",))


def make_documents() -> list[Case]:
    """Return all documents."""
    return [
        *_word_files(), *_html_files(), *_pdf_files(), *_mail_files(), *_office_files(), *_open_files(), *_text_files()
    ]  # fmt: skip

"""Renders the timeline as a self-contained HTML file: no network, no server, no other script.

Texts of documents and models are in JSON that cannot end its element, and the script shows them as text. The content
security policy allows the style sheet and the script by their hashes, and no other resource.
Memories are stored as differences, which the script resolves, so pages of long runs stay small.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote as quote_url

from memagent_graph.errors import RunError
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.provenance.word_diff import Change, DiffOp
from memagent_graph.storage.private_files import write_atomically
from memagent_graph.timeline.model import Step, Timeline, label_group

_CONTEXT_CHARS = 200
_MAX_QUOTE_CHARS = 2000
_MAX_LOST_LINES = 300
_GENERATOR_TAG = b'<meta name="generator" content="memagent-graph">'
_GENERATOR_TAG_BYTES = 1024
# Characters that could end the element, and code points that a UTF-8 file cannot contain.
_ESCAPED_IN_JSON = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def render_page(timeline: Timeline, *, document_link: str | None = None) -> str:
    """Return the page as text, to be written in UTF-8.

    Args:
        timeline: the run.
        document_link: the URL at which a server shows the document. Quotes link to it with `/START/END` (characters).
    """
    style, script = read_resource("page.css"), read_resource("page.js")
    question = timeline.view.question
    data = json.dumps(
        _make_payload(timeline, document_link), ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    return Template(read_resource("page.html")).substitute(
        policy=make_content_policy(style, script),
        title=format_page_title(question),
        question=escape_html(question),
        answer=escape_html(timeline.view.answer or "none"),
        memory=escape_html(timeline.view.trace.final_memory),
        style=style,
        script=script,
        data=_ESCAPED_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", data),
    )


def write_page(page: str, path: Path, *, force: bool = False) -> None:
    """Write a page atomically, as a file that only its owner can read. A link is not followed.

    Args:
        page: the page from `render_page`.
        path: the file. An existing page is replaced.
        force: whether to replace another file or a link, too.

    Raises:
        RunError: the path is something other than a page, or the file cannot be written.
    """
    try:
        if (obstacle := _find_obstacle(path, force=force)) is not None:
            raise RunError(
                f"{path} {obstacle}", hint="Choose another file with --html, or replace this one with --force."
            )
        write_atomically(path, page)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror}", hint="Choose another file with --html."
        ) from error


def _find_obstacle(path: Path, *, force: bool) -> str | None:
    if path.is_symlink():
        return None if force else "is a link"
    if path.exists() and not path.is_file():
        return "is not a file"
    if force or not path.exists():
        return None
    with path.open("rb") as file:
        is_page = _GENERATOR_TAG in file.read(_GENERATOR_TAG_BYTES)
    return None if is_page else "exists, and this command did not write it"


def _make_payload(timeline: Timeline, document_link: str | None) -> dict[str, Any]:
    view = timeline.view
    return {
        "question": view.question,
        "answer": view.answer,
        "rawAnswer": None if view.raw_answer == view.answer else view.raw_answer,
        "answerEvents": list(map(asdict, view.answer_events)),
        "facts": timeline.facts,
        "branches": timeline.branches,
        "share": round(timeline.read_fraction, 3),
        "steps": _pack_steps(timeline.steps),
        "folds": _find_folds(timeline),
        "lines": [
            {
                "parts": timeline.line_pieces[index],
                "at": timeline.step_index_by_update[line.update],
                "reworded": [timeline.step_index_by_update[update] for update in line.reworded],
                "edited": line.edited,
                "coverage": round(line.coverage, 3),
                "quotes": [_pack_quote(timeline, quote) for quote in timeline.list_quotes(index)],
            }
            for index, line in enumerate(timeline.view.provenance.lines)
        ],
        "excerpt": None if timeline.excerpt is None else [_pack_quote(timeline, quote) for quote in timeline.excerpt],
        "unquoted": timeline.no_quote_reason,
        "lost": [
            {
                "text": line.line,
                "at": timeline.step_index_by_update[line.update],
                "gone": timeline.step_index_by_update[line.gone],
            }
            for line in timeline.select_longest_lost_lines(_MAX_LOST_LINES)
        ],
        "lostTotal": len(timeline.view.provenance.lost),
        # Quotes link to the document on a server, or else to its PDF file on this machine.
        "documentLink": document_link,
        "pdf": None if document_link else timeline.view.places.link_prefix,
    }


def _find_folds(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the groups of steps that are not notable: index of the first step, index after the last step, label."""
    folds, index = [], 0
    for group in timeline.group_steps():
        if not group[0].is_notable:
            folds.append({"from": index, "to": index + len(group), "label": label_group(group)})
        index += len(group)
    return folds


def _pack_steps(steps: Sequence[Step]) -> list[dict[str, Any]]:
    anchors: set[str] = set()
    packed_steps: list[dict[str, Any]] = []
    for index, step in enumerate(steps):
        update = step.update
        anchor = "merge" if update.chunk_index is None else f"chunk-{update.chunk_number}"
        if update.branch:
            anchor += f"-{quote_url(update.branch, safe='', errors='replace')}"
        if anchor in anchors:
            anchor = f"step-{index + 1}"
        anchors.add(anchor)
        values: dict[str, Any] = {
            "anchor": anchor,
            "name": step.name,
            "from": step.sources,
            "branch": update.branch,
            "chunk": update.chunk_number,
            "tokens": (update.chunk_tokens, update.prompt_tokens, update.completion_tokens),
            "seconds": round(update.seconds, 3),
            "section": step.section,
            "notable": step.is_notable,
            "state": step.state,
        }
        if update.chunk_index is not None:
            values["span"] = (update.start_char, update.end_char)
        if step.changed:
            values |= {
                "diff": _pack_diff(step.diff),
                "words": (step.inserted_words, step.deleted_words),
                "density": round(step.changed_fraction, 3),
            }
        if update.events:
            values["events"] = list(map(asdict, update.events))
        packed_steps.append(values)
    return packed_steps


def _pack_diff(diff: Sequence[Change]) -> list[str | int]:
    """Return a difference for the script: UTF-16 units to keep (positive) or skip (negative), and texts to add."""
    signs = {DiffOp.EQUAL: 1, DiffOp.DELETE: -1}
    return [
        change.text
        if change.op is DiffOp.INSERT
        else signs[change.op] * (len(change.text) + sum(character > "\uffff" for character in change.text))
        for change in diff
    ]


def _pack_quote(timeline: Timeline, quote: Evidence) -> dict[str, Any]:
    before, after = timeline.view.get_quote_context(quote, _CONTEXT_CHARS)
    text = quote.quote
    if len(text) > _MAX_QUOTE_CHARS:
        text = f"{text[: _MAX_QUOTE_CHARS // 2]} … {text[-_MAX_QUOTE_CHARS // 2 :]}"
    return {
        **({"at": timeline.step_index_by_update[quote.update]} if quote.update >= 0 else {}),
        "span": (quote.start_char, quote.end_char),
        "section": quote.place,
        "page": quote.page,
        "before": before,
        "text": text,
        "after": after,
    }


_MAX_TITLE_CHARS = 80


def read_resource(name: str, package: str | None = None) -> str:
    """Return the text of a file in a package, by default in this package."""
    return files(package or __package__).joinpath(name).read_text(encoding="utf-8")


def make_content_policy(style: str, script: str | None = None) -> str:
    """Return a content security policy that allows only this style sheet and this script."""
    scripts = "" if script is None else f"script-src '{_make_hash_source(script)}'; "
    return (
        f"default-src 'none'; style-src '{_make_hash_source(style)}'; {scripts}"
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def escape_html(text: str) -> str:
    """Return a text escaped for HTML elements and attributes."""
    return html.escape(re.sub("[\ud800-\udfff\x00]", "\ufffd", text))


def format_page_title(text: str) -> str:
    """Return a text as the title of a page, shortened and escaped."""
    return escape_html(text if len(text) <= _MAX_TITLE_CHARS else text[: _MAX_TITLE_CHARS - 1] + "…")


def _make_hash_source(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

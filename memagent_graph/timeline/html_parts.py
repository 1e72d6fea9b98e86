"""Parts of self-contained HTML pages: escaping, placeholders, and a content security policy that names its hashes."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from importlib.resources import files

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_LONGEST_TITLE = 80


def filled(template: str, values: Mapping[str, str]) -> str:
    """Return the template with its placeholders replaced in one pass, so that no value is searched for placeholders."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def resource(name: str, package: str | None = None) -> str:
    """Return the text of a file next to a package's modules; of this package if none is named."""
    return files(package or __package__).joinpath(name).read_text(encoding="utf-8")


def content_policy(style: str, script: str | None = None) -> str:
    """Return a policy that allows this style sheet and this script, and nothing to be loaded or sent."""
    scripts = [] if script is None else [f"script-src '{_hash(script)}'"]
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            *scripts,
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def escaped(text: str) -> str:
    """Return a text as HTML, in an element or an attribute's value."""
    return html.escape(re.sub("[\ud800-\udfff\x00]", "\ufffd", text))


def page_title(text: str) -> str:
    """Return a text as the title of a page, shortened and escaped."""
    return escaped(text if len(text) <= _LONGEST_TITLE else text[: _LONGEST_TITLE - 1] + "…")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

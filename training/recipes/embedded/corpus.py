"""Makes the prose in which facts are planted: English text that any machine has, cleaned and split by file.

Sources are folders: Python sources (docstrings and comments), manual pages (without troff), POD, and plain, Markdown or
reStructuredText documents, gzipped or not. `pydoc_data/topics.py` is never read, because it is the evaluation's prose.

    python -m recipes.embedded.corpus --out corpus --documents /usr/share/doc --manual /usr/share/man
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import io
import random
import re
import sysconfig
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SEPARATOR = "\x00"
"""The separator of two documents in a corpus file."""

HELD_OUT_FRACTION = 0.05
"""The fraction of the files, chosen by a hash of the name, that is never trained on."""

MAX_CHARACTERS_PER_FILE = 120_000
"""The maximum number of characters from one file, so that no document dominates."""

PLAIN_SUFFIXES = {".txt", ".md", ".rst", ".pod", ""}
SKIPPED_PATHS = re.compile(
    r"changelog|topics\.py$|/test/|/tests/|/idlelib/|/site-packages/|/pydoc_data/", re.IGNORECASE
)

UNPRINTED_REQUESTS = frozenset({"de", "ie", "el", "if", "ds", "nr", "so", "TH", "tr", "rm", "ig", "hw", "ad", "nh"})
BREAK_REQUESTS = frozenset(["SH", "SS", "PP", "P", "LP", "TP", "IP", "Sh", "Ss", "Pp"])
ESCAPE_REPLACEMENTS = (
    (re.compile(r"\\f(\[[^\]]*\]|\(..|.)|\\s[-+]?\d|\\[&|^/,%:]|\\d|\\u"), ""),
    (re.compile(r"\\\((aq|cq|oq)"), "'"),
    (re.compile(r"\\\((lq|rq|dq)"), '"'),
    (re.compile(r"\\\(em|\\-"), "-"),
    (re.compile(r"\\\(..|\\\[[^\]]*\]|\\\*(\[[^\]]*\]|\(..|.)"), ""),
    (re.compile(r"\\e"), r"\\"),
    (re.compile(r"\\[ ~]"), " "),
)


def extract_python_prose(source: str) -> str:
    """Return the docstrings of a Python module, followed by its comments."""
    parts: list[str] = []
    try:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                parts.append(ast.get_docstring(node) or "")
        comments = [
            token.string.lstrip("#: ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT and len(token.string) > 30
        ]
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
        return ""
    parts.append("\n".join(comments))
    return "\n\n".join(part for part in parts if len(part) > 60)


def extract_manual_prose(source: str) -> str:
    """Return a manual page without its troff requests and escapes, roughly as a terminal shows it."""
    lines: list[str] = []
    for raw_line in source.splitlines():
        if raw_line.startswith(('.\\"', "'\\\"")):
            continue
        line = raw_line
        if raw_line.startswith((".", "'")):
            request, _, arguments = raw_line[1:].partition(" ")
            if request.strip() in UNPRINTED_REQUESTS:
                continue
            if request.strip() in BREAK_REQUESTS:
                lines.append("")
            line = arguments.replace('"', "")
            if not line:
                continue
        for pattern, replacement in ESCAPE_REPLACEMENTS:
            line = pattern.sub(replacement, line)
        lines.append(line)
    return "\n".join(lines)


def extract_pod_prose(source: str) -> str:
    """Return Plain Old Documentation without its commands and formatting codes."""
    text = re.sub(r"^=\w+ ?", "", source, flags=re.MULTILINE)
    return re.sub(r"\b[BCEFILSXZ]<+ ?([^<>]*?) ?>+", r"\1", text)


def read_text(path: Path) -> str | None:
    """Return the file's text, gunzipped if necessary; None if it is not UTF-8 text."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode("utf-8")
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    return None if SEPARATOR in text else text


def is_english(text: str) -> bool:
    """Return whether a text is probably English, by its fraction of common English words."""
    words = re.findall(r"[a-z]+", text.lower())
    if len(words) < 40:
        return False
    common_count = sum(word in {"the", "of", "and", "to", "a", "in", "is", "for", "or", "be"} for word in words)
    return common_count / len(words) > 0.08


def extract_prose(path: Path, kind: str) -> str:
    """Return the cleaned prose of one file of a source of this kind, or an empty string."""
    if SKIPPED_PATHS.search(path.as_posix()):
        return ""
    plain_path = Path(path.stem) if path.suffix == ".gz" else path
    if kind == "python" and plain_path.suffix != ".py":
        return ""
    if kind == "documents" and plain_path.suffix.lower() not in PLAIN_SUFFIXES:
        return ""
    text = read_text(path)
    if text is None:
        return ""
    if kind == "python":
        text = extract_python_prose(text)
    elif kind == "manual":
        text = extract_manual_prose(text)
    elif plain_path.suffix == ".pod":
        text = extract_pod_prose(text)
    text = re.sub(r"[ \t]{3,}", "  ", re.sub(r"\n\s*\n+", "\n\n", text)).strip()
    return text[:MAX_CHARACTERS_PER_FILE] if is_english(text) else ""


def list_source_files(folder: Path, kind: str) -> Iterator[Path]:
    """Yield the files of one source, in a stable order; manual pages of English sections only."""
    pattern = "man[1-9]*/*" if kind == "manual" else "**/*"
    yield from sorted(path for path in folder.glob(pattern) if path.is_file() and not path.is_symlink())


def is_held_out(path: Path) -> bool:
    """Return whether a file belongs to the evaluation's prose, by a hash of its name alone."""
    return int(hashlib.sha256(path.name.encode()).hexdigest()[:8], 16) / 2**32 < HELD_OUT_FRACTION


def write_corpus(sources: list[tuple[str, Path]], out: Path, max_characters: int) -> None:
    """Write `train.txt`, with at most `max_characters` characters per source, and `held_out.txt`; print their sizes."""
    out.mkdir(parents=True, exist_ok=True)
    texts: dict[bool, list[str]] = {False: [], True: []}
    seen_digests: set[str] = set()
    for kind, folder in sources:
        files = list(list_source_files(folder, kind))
        random.Random(0).shuffle(files)
        character_counts: Counter[bool] = Counter()
        for path in files:
            if character_counts[False] >= max_characters:
                break
            text = extract_prose(path, kind)
            digest = hashlib.sha256(text[:2000].encode()).hexdigest()
            if not text or digest in seen_digests:
                continue
            seen_digests.add(digest)
            texts[is_held_out(path)].append(text)
            character_counts[is_held_out(path)] += len(text)
        training_size, held_out_size = character_counts[False], character_counts[True]
        print(f"{kind:9} {folder}: {training_size:,} characters to train on, {held_out_size:,} held out", flush=True)
    for is_held_out_text, name in ((False, "train.txt"), (True, "held_out.txt")):
        random.Random(1).shuffle(texts[is_held_out_text])
        (out / name).write_text(SEPARATOR.join(texts[is_held_out_text]), encoding="utf-8")
        print(f"{name}: {len(texts[is_held_out_text]):,} documents")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--documents", type=Path, action="append", default=[])
    parser.add_argument("--manual", type=Path, action="append", default=[])
    parser.add_argument("--limit", type=int, default=8_000_000, help="characters per source")
    arguments = parser.parse_args()
    sources = [("python", arguments.python)]
    sources += [("documents", folder) for folder in arguments.documents]
    sources += [("manual", folder) for folder in arguments.manual]
    write_corpus(sources, arguments.out, arguments.limit)


if __name__ == "__main__":
    main()

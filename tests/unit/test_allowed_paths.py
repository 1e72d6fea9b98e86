from __future__ import annotations

import os
from pathlib import Path

import pytest

from memagent_graph import DocumentStore
from memagent_graph.documents.allowed_paths import AllowedRoots, resolve_below
from memagent_graph.errors import DocumentError, RefusedSourceError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
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
def test_files_below_a_root_are_found(tree: Path, path: str) -> None:
    roots = AllowedRoots([tree / "open"])
    assert roots.document(path.format(root=tree / "open")).content == (tree / "open" / "inner" / "book.txt").resolve()


OUTSIDE = ("../secret.txt", "inner/../../secret.txt", "way_out.txt", "way_up/secret.txt", "{root}/secret.txt")


@pytest.mark.parametrize(
    "path",
    [
        *OUTSIDE,
        "/etc/passwd",
        "~/.ssh/id_rsa",
        "absent.txt",
        "",
        "\0",
        "inner\0/book.txt",
        "file:///etc/passwd",
        "http://example.org/x",
        "x" * 100_000,
    ],
)
def test_a_path_that_leads_out_of_the_root_is_refused(tree: Path, path: str) -> None:
    with pytest.raises(RefusedSourceError) as refusal:
        AllowedRoots([tree / "open"]).document(path.format(root=tree))
    assert "a secret" not in str(refusal.value)
    assert "Name a file below open/." in str(refusal.value)
    assert str(tree) not in str(refusal.value).replace(path.format(root=tree), "")
    assert len(str(refusal.value)) < 1000


def test_a_missing_file_and_one_outside_are_not_told_apart(tree: Path) -> None:
    roots = AllowedRoots([tree / "open"])
    messages = []
    for path in ("../secret.txt", "../absent.txt"):
        with pytest.raises(RefusedSourceError) as refusal:
            roots.document(path)
        messages.append(str(refusal.value).replace(path, "X"))
    assert messages[0] == messages[1]


def test_a_folder_is_refused_with_the_names_of_what_may_be_read_in_it(tree: Path) -> None:
    roots = AllowedRoots([tree / "open"])
    with pytest.raises(RefusedSourceError) as refusal:
        roots.document(".")
    assert str(refusal.value) == "'.' is a folder, not a file. Read its files one by one; it contains inner/, same.txt."
    for number in range(30):
        (tree / "open" / "inner" / f"{number:02}.txt").write_text("a page")
    with pytest.raises(RefusedSourceError, match=r"contains 00.txt, 01.txt, .*, 19.txt and 11 more\.$"):
        roots.document("inner")
    (tree / "open" / "empty").mkdir()
    with pytest.raises(RefusedSourceError, match="nothing in it that may be read"):
        roots.document("empty")


def test_pipes_and_huge_files_are_refused(tree: Path) -> None:
    os.mkfifo(tree / "open" / "pipe")
    with (tree / "open" / "huge.txt").open("wb") as file:
        file.truncate(10 * 2**30)
    roots = AllowedRoots([tree / "open"])
    for path, words in (("pipe", "not a regular file"), ("huge.txt", "10,737,418,240")):
        with pytest.raises(RefusedSourceError, match=words):
            roots.document(path)


def test_without_roots_no_file_may_be_read(tree: Path) -> None:
    with pytest.raises(RefusedSourceError, match="pass the text itself"):
        AllowedRoots().document(str(tree / "secret.txt"))
    with pytest.raises(FileNotFoundError):
        AllowedRoots([tree / "absent"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *((path, "is outside") for path in OUTSIDE),
        ("way_up/open/pipe", "is not a regular file"),
        ("inner", "is not a regular file"),
        ("pipe", "is not a regular file"),
        ("/dev/zero", "is outside"),
        (" ", "is not a path"),
        ("inner\0/book.txt", "is not a path"),
        ("inner/book.txt/more", "cannot be resolved"),
        ("x" * 100_000, "cannot be resolved"),
    ],
)
def test_the_error_of_a_tables_path_says_why_it_is_refused(tree: Path, path: str, message: str) -> None:
    os.mkfifo(tree / "open" / "pipe")
    with pytest.raises(RefusedSourceError, match=message) as refusal:
        resolve_below(tree / "open", path.format(root=tree), hint="Correct it in the table.")
    assert str(refusal.value).endswith("Correct it in the table.")
    assert len(str(refusal.value)) < 1000


def test_a_table_names_regular_files_below_its_root(tree: Path) -> None:
    for path in ("inner/book.txt", "same.txt", "way_up/open/inner/book.txt", str(tree / "open" / "same.txt")):
        assert resolve_below(tree / "open", path, hint="") == (tree / "open" / "inner" / "book.txt").resolve()
    with pytest.raises(DocumentError, match=r"the file absent.txt does not exist"):
        resolve_below(tree / "open", "absent.txt", hint="")


def test_roots_are_narrowed_to_those_of_a_client(tree: Path) -> None:
    roots, inner = AllowedRoots([tree / "open"]), (tree / "open" / "inner").resolve()
    assert roots.within([inner]).roots == (inner,)
    assert roots.within([tree.resolve(), inner]).roots == (inner, roots.roots[0])
    assert roots.within([Path("/proc")]).roots == ()
    assert AllowedRoots().within([inner]).roots == ()


def test_a_root_may_be_one_file_which_its_name_leads_to(tree: Path) -> None:
    roots = AllowedRoots([tree / "secret.txt"])
    assert roots.document("secret.txt").content == (tree / "secret.txt").resolve()
    with pytest.raises(RefusedSourceError, match=r"Name secret\.txt\.$"):
        roots.document("open/inner/book.txt")


@pytest.mark.parametrize(("place", "other"), [("book.txt", "link"), (".", "link"), ("book.txt", "pipe")])
def test_a_link_or_pipe_that_replaces_a_file_is_not_read(tree: Path, tmp_path: Path, place: str, other: str) -> None:
    replaced, store = tree / "open" / "inner" / place, DocumentStore(tmp_path / "documents")
    document = AllowedRoots([tree / "open"]).document("inner/book.txt")
    assert store.add(document)["size"] == len("a book")
    replaced.rename(tree / "gone")
    (tree / "outside").mkdir()
    (tree / "outside" / "book.txt").write_text("a secret")
    os.mkfifo(replaced) if other == "pipe" else replaced.symlink_to(tree / "outside" / place)
    with pytest.raises(DocumentError, match=r"leads out of its folder now|is not a regular file") as error:
        store.add(document)
    assert str(tree) not in str(error.value)

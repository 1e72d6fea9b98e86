"""`memagent show` of runs that `memagent read` has logged."""

from __future__ import annotations

from support.command_line import memagent


def test_a_run_is_shown_with_its_quotes_also_on_a_narrow_terminal(read_book, monkeypatch) -> None:
    read_book("--run-id", "first")
    read_book("--run-id", "second", "--max-chunks", 3, code=5)
    assert "“" in memagent("show", "first").stdout  # a quote of the document
    assert "max_chunks" in memagent("show").stdout
    assert "has not read chunk 999" in memagent("show", "first", "--chunk", 999, code=6).stderr
    monkeypatch.setenv("COLUMNS", "24")
    output = memagent("show", "first").stdout
    assert max(map(len, output.splitlines())) <= 24
    assert "4711" in output


def test_a_page_replaces_another_file_only_with_force(read_book, tmp_path) -> None:
    page, notes = tmp_path / "run.html", tmp_path / "notes.html"
    notes.write_text("my notes")
    read_book("--run-id", "first")
    memagent("show", "first", "--html", page)
    assert page.read_text().startswith("<!doctype html>")
    result = memagent("show", "first", "--html", notes, code=6)
    assert "this command did not write it" in result.stderr
    assert "--force" in result.stderr
    memagent("show", "first", "--html", notes, "--force")
    assert notes.read_text() == page.read_text()


def test_texts_of_chunks_are_found_next_to_the_log(tmp_path, book, make_reader) -> None:
    """An evaluation stores FOLDER/runs.sqlite and FOLDER/documents."""
    folder = tmp_path / "folder"
    reader = make_reader(store=folder / "documents", run_log=folder / "runs.sqlite")
    run_id = reader.read(book, "What is the key of harbor?").run_id
    reader.close()
    arguments = ("show", run_id, "--log", folder / "runs.sqlite", "--chunk", 1)
    assert "word0 and then" in memagent(*arguments).stdout
    (folder / "documents").rename(tmp_path / "elsewhere")
    assert "word0 and then" not in memagent(*arguments).stdout

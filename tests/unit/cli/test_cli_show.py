"""`memagent show`, and runs that were logged by `memagent read`, as commands."""

from __future__ import annotations

from support.command_line import memagent


def test_a_run_is_shown_with_its_sources_however_narrow_the_terminal_is(read, monkeypatch) -> None:
    read("--run-id", "first")
    read("--run-id", "second", "--max-chunks", 3, code=5)
    assert "“" in memagent("show", "first").stdout  # a quote of the document
    assert "max_chunks" in memagent("show").stdout
    assert "has not read chunk 999" in memagent("show", "first", "--chunk", 999, code=6).stderr
    monkeypatch.setenv("COLUMNS", "24")
    narrow = memagent("show", "first").stdout
    assert max(map(len, narrow.splitlines())) <= 24
    assert "4711" in narrow


def test_a_page_is_written_and_does_not_take_the_place_of_another_file(read, tmp_path) -> None:
    page, notes = tmp_path / "run.html", tmp_path / "notes.html"
    notes.write_text("my notes")
    read("--run-id", "first")
    memagent("show", "first", "--html", page)
    assert page.read_text().startswith("<!doctype html>")
    refusal = memagent("show", "first", "--html", notes, code=6)
    assert "this command did not write it" in refusal.stderr
    assert "--force" in refusal.stderr
    memagent("show", "first", "--html", notes, "--force")
    assert notes.read_text() == page.read_text()


def test_texts_of_chunks_are_found_beside_the_log(tmp_path, book, make_reader) -> None:
    """As an evaluation keeps them: FOLDER/runs.sqlite and FOLDER/documents."""
    folder = tmp_path / "folder"
    reader = make_reader(store=folder / "documents", run_log=folder / "runs.sqlite")
    run_id = reader.read(book, "What is the key of harbor?").run_id
    reader.close()
    show = ("show", run_id, "--log", folder / "runs.sqlite", "--chunk", 1)
    assert "word0 and then" in memagent(*show).stdout
    (folder / "documents").rename(tmp_path / "elsewhere")
    assert "word0 and then" not in memagent(*show).stdout

"""A page takes the place of an older page, and of nothing else unless it is told to."""

import pytest
from test_timeline import run

from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page, write_page

PAGE = render_page(build_timeline(run()))


def test_an_older_page_is_replaced_and_other_files_only_by_force(tmp_path) -> None:
    page, notes, folder = tmp_path / "run.html", tmp_path / "notes.html", tmp_path / "folder"
    write_page(PAGE + "first", page)
    write_page(PAGE + "second", page)
    assert page.read_text() == PAGE + "second"
    assert page.stat().st_mode & 0o077 == 0
    notes.write_text("my notes")
    with pytest.raises(FileExistsError, match="not a page of this command's"):
        write_page(PAGE, notes)
    assert notes.read_text() == "my notes"
    write_page(PAGE, notes, force=True)
    assert notes.read_text() == PAGE
    folder.mkdir()
    with pytest.raises(FileExistsError, match="is not a file"):
        write_page(PAGE, folder, force=True)
    with pytest.raises(OSError, match="No such file"):
        write_page(PAGE, tmp_path / "nowhere" / "run.html")
    assert {path.name for path in tmp_path.iterdir()} == {"run.html", "notes.html", "folder"}


@pytest.mark.parametrize("to_a_page", [False, True])
def test_a_link_is_never_followed(tmp_path, to_a_page) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text(PAGE + "target" if to_a_page else "precious")
    before = target.read_text()
    link.symlink_to(target)
    with pytest.raises(FileExistsError, match="is a link"):
        write_page(PAGE, link)
    write_page(PAGE, link, force=True)
    assert not link.is_symlink()
    assert link.read_text() == PAGE
    assert target.read_text() == before

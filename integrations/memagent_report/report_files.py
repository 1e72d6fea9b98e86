"""Writes a report as files in a folder. Each file is written completely or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from memagent_graph.errors import RunError
from memagent_graph.storage.private_files import private_folder
from memagent_report.bibliography import bibtex
from memagent_report.checked_report import Report
from memagent_report.docx_export import docx_bytes
from memagent_report.export_safety import without_folders
from memagent_report.matrix_export import matrix_csv, matrix_parquet

_OWN_RECORD: Final = "report.json"
FORMATS: Final[Mapping[str, tuple[str, Callable[[Report], bytes]]]] = {
    "json": (_OWN_RECORD, lambda report: (json.dumps(report.to_dict(), ensure_ascii=True) + "\n").encode()),
    "md": ("report.md", lambda report: report.to_markdown().encode("utf-8", "replace")),
    "html": ("report.html", lambda report: report.to_html().encode("utf-8", "replace")),
    "docx": ("report.docx", docx_bytes),
    "csv": ("matrix.csv", matrix_csv),
    "parquet": ("matrix.parquet", matrix_parquet),
    "bib": ("references.bib", lambda report: bibtex(report).encode("utf-8", "replace")),
}
"""By format: the file name, and the function that returns the file's content."""


def write_report(report: Report, folder: Path, formats: Iterable[str], *, force: bool = False) -> list[Path]:
    """Write the files of a report, readable only by their owner.

    `report.json` is always written, and the bibliography only if it has an entry.

    Args:
        report: the report.
        folder: the folder; it is created if it does not exist.
        formats: keys of `FORMATS`.
        force: also replace files that do not belong to this report.

    Returns:
        The files that were written.

    Raises:
        RunError: a file with one of these names does not belong to this report, or the folder cannot be written.
        MissingExtraError: a format needs a package that is not installed; nothing was written.
    """
    chosen = dict.fromkeys(("json", *formats))
    contents = {FORMATS[each][0]: FORMATS[each][1](report) for each in chosen}
    if not contents.get("references.bib", b"x"):
        del contents["references.bib"]
    try:
        private_folder(folder)
        if not force:
            _require_own(report, folder, contents)
        return [_written(folder / name, content) for name, content in contents.items()]
    except OSError as error:
        raise RunError(
            f"the report cannot be written to {without_folders(str(folder))}: {error.strerror}",
            hint="Name another folder with --out.",
        ) from error


def _require_own(report: Report, folder: Path, names: Iterable[str]) -> None:
    there = [name for name in names if os.path.lexists(folder / name)]
    if not there:
        return
    try:
        is_own = json.loads((folder / _OWN_RECORD).read_text("utf-8"))["report_id"] == report.report_id
    except (OSError, ValueError, KeyError, TypeError):
        is_own = False
    if not is_own or any((folder / name).is_symlink() for name in there):
        raise RunError(
            f"{there[0]} already exists in {folder.name} and does not belong to this report",
            hint="Name another folder with --out, or replace it with --force.",
        )


def _written(path: Path, content: bytes) -> Path:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path

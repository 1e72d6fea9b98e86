"""A report as files in a folder, each written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from memagent_graph.errors import RunError
from memagent_graph.reports.bibliography import bibtex
from memagent_graph.reports.checked_report import Report
from memagent_graph.reports.docx_export import docx_bytes
from memagent_graph.reports.export_safety import without_folders
from memagent_graph.reports.matrix_export import matrix_csv, matrix_parquet
from memagent_graph.storage.private_files import private_folder

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
"""The name of the file, and what makes its content, by format."""


def write_report(report: Report, folder: Path, formats: Iterable[str], *, force: bool = False) -> list[Path]:
    """Write a report's files for their owner alone; `report.json` always, the bibliography only if it has an entry.

    Args:
        report: the report.
        folder: created if it does not exist. Files of another report are not replaced.
        formats: names in `FORMATS`.
        force: replace files of another report, or others with these names, too.

    Returns:
        The files that were written.

    Raises:
        RunError: there is something else in the folder with one of these names, or it cannot be written.
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
            f"{there[0]} is already in {folder.name}, and not of this report",
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

"""Plots: their contents, equal files for equal results, and no points without measurements."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from support.evaluation import make_failed_row, make_row, make_table

from memagent_evaluation.plots import compute_depth_grid, draw_accuracy, draw_all, make_file_stem
from memagent_evaluation.score_statistics import compute_wilson_interval
from memagent_graph.errors import EvaluationError, MissingExtraError

LENGTHS = (1024, 8192, 65536)
ROWS = [
    make_row(system, length, index, right=index % 3 > 0)
    for system in ("memagent", "refine")
    for length in LENGTHS
    for index in range(6)
]


def draw_figure(draw, rows):
    figure = Figure()
    draw(figure, rows, "tokens")
    (axes,) = figure.axes
    return figure, axes


def get_lines_by_label(axes) -> dict:
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


@pytest.fixture
def list_plot_names(monkeypatch, tmp_path) -> Callable[..., list[str]]:
    """Return the file names of the plots of rows, without the slow rendering."""
    monkeypatch.setattr("memagent_evaluation.plots._save", lambda figure, stem: stem.with_suffix(".png"))
    return lambda *rows: [path.name for path in draw_all(make_table(*rows), tmp_path)]


def test_plots_are_png_and_svg_and_equal_for_equal_results(tmp_path) -> None:
    first_folder, second_folder = tmp_path / "one", tmp_path / "other"
    for folder in (first_folder, second_folder):
        folder.mkdir()
        paths = draw_all(make_table(make_row()), folder)
    assert [path.name for path in paths] == ["accuracy.png", "depth_memagent.png"]
    for path in paths:
        png_bytes = path.read_bytes()
        assert png_bytes.startswith(b"\x89PNG")
        assert struct.unpack(">II", png_bytes[16:24]) == (1600, 880)
        assert path.with_suffix(".svg").read_text().startswith("<?xml")
    assert len(list(first_folder.iterdir())) == 2 * len(paths), "nothing else is left behind"
    for path in first_folder.iterdir():
        assert path.read_bytes() == (second_folder / path.name).read_bytes()
        assert b"dc:date" not in path.read_bytes()


OTHER_TASK_ROWS = [make_row(system, length, task="vt") for system in ("memagent", "refine") for length in LENGTHS]
OPTION_ROWS = [make_row(task=f"own:share={share}", length=length) for share, length in (("0.1", 1024), ("0.2", 4096))]
PASSAGES_ROW = make_row(task="hqa", unit="passages", length=50, needle_depths=(), needles_found=())


@pytest.mark.parametrize(
    ("rows", "accuracy_stems"),
    [
        (ROWS, ["accuracy"]),
        ([*ROWS, *OTHER_TASK_ROWS], ["accuracy", "accuracy_keys", "accuracy_vt"]),
        ([*ROWS, *OTHER_TASK_ROWS[:3]], ["accuracy_keys", "accuracy_vt"]),
        ([*ROWS, *OTHER_TASK_ROWS[::3]], ["accuracy_keys", "accuracy_vt"]),
        (OPTION_ROWS, [make_file_stem("accuracy", row.task) for row in OPTION_ROWS]),
        ([replace(row, scripted=True) for row in ROWS], []),
        ([make_row(), PASSAGES_ROW], ["accuracy_tokens", "accuracy_passages"]),
    ],
    ids=["one task", "several", "of one system", "at one length", "options", "a script", "units"],
)
def test_tasks_share_a_plot_only_if_all_systems_have_the_same_questions(list_plot_names, rows, accuracy_stems) -> None:
    """Otherwise the mean would depend on the choice of tasks. Tasks without needles have no depth map."""
    plot_names = list_plot_names(*rows)
    assert [name for name in plot_names if name.startswith("accuracy")] == [f"{stem}.png" for stem in accuracy_stems]
    systems_with_needles = dict.fromkeys(row.system for row in rows if row.needle_depths and not row.scripted)
    assert sum(name.startswith("depth_") for name in plot_names) == len(systems_with_needles)


def test_system_names_become_distinct_file_names(list_plot_names) -> None:
    plot_names = list_plot_names(*map(make_row, ("gated:stop=yes", "gated-stop=yes", "my/own.py:Way")))
    assert len({name for name in plot_names if name.startswith("depth_")}) == 3
    assert all(re.fullmatch(r"[\w+-]+\.png", name) for name in plot_names)


def test_accuracy_has_a_line_and_a_wilson_band_for_each_system_on_a_logarithmic_axis() -> None:
    _, axes = draw_figure(draw_accuracy, ROWS)
    lines = get_lines_by_label(axes)
    assert set(lines) == {"memagent", "refine"}
    assert list(lines["memagent"].get_ydata()) == pytest.approx([200 / 3] * 3)
    assert axes.get_xscale() == "log"
    assert [xticklabel.get_text() for xticklabel in axes.get_xticklabels()] == ["1K", "8K", "64K"]
    corners = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (corners.min(), corners.max()) == pytest.approx(
        (100 * compute_wilson_interval(4, 6).low, 100 * compute_wilson_interval(4, 6).high)
    )
    assert lines["memagent"].get_color() != lines["refine"].get_color()
    assert lines["memagent"].get_marker() != lines["refine"].get_marker()


def test_labels_of_close_lengths_are_rotated() -> None:
    lengths = (150, 200, 300, 9_600, 24_000, 150_000)
    _, axes = draw_figure(draw_accuracy, [make_row("memagent", length, 0) for length in lengths])
    assert list(axes.get_xticks()) == list(lengths)
    labels = axes.get_xticklabels()
    assert [label.get_text() for label in labels] == ["150", "200", "300", "9,600", "24,000", "150,000"]
    assert {label.get_rotation() for label in labels} == {40}


def test_length_at_which_nothing_fits_has_no_point() -> None:
    rows = [make_row("full_context", 1024), make_failed_row("full_context", 8192, outcome="does_not_fit")]
    rows += [make_failed_row("other", 1024, outcome="does_not_fit")]
    _, axes = draw_figure(draw_accuracy, rows)
    lines = get_lines_by_label(axes)
    assert len(lines["full_context"].get_xdata()) == 1
    assert len(lines["other\n(does not fit)"].get_xdata()) == 0


def test_depth_grid_groups_needles_by_tenth_of_the_document() -> None:
    rows = [
        make_row(needle_depths=(0.05, 0.95), needles_found=(True, False)),
        make_row(index=1, needle_depths=(0.0, 1.0), needles_found=(False, False)),
        make_failed_row(index=2, outcome="does_not_fit"),
        make_row(index=3, needle_depths=(), needles_found=()),
    ]
    assert compute_depth_grid(rows) == {(1024, 0): [True, False], (1024, 9): [False, False]}


def test_missing_folder_and_missing_matplotlib_are_errors(tmp_path, monkeypatch) -> None:
    with pytest.raises(EvaluationError, match="cannot be written"):
        draw_all(make_table(make_row()), tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(MissingExtraError, match="eval"):
        draw_all(make_table(make_row()), tmp_path)

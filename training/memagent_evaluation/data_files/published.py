"""Where data sets are published, and which of their files a folder has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memagent_graph.errors import EvaluationError
from memagent_graph.storage.paths import data_folder


@dataclass(frozen=True, slots=True)
class Published:
    """A data set and the names of its files."""

    what: str
    """Where its files are published, with their names."""
    patterns: tuple[str, ...]
    """Names of its files in a folder; the matches of the first pattern that has any."""


_ANY_ROWS: Final = ("*.jsonl", "*.parquet", "*.json", "*.csv", "*.tsv")
PUBLISHED: Final = {
    "hotpotqa": Published(
        "hotpot_dev_distractor_v1.json from HotpotQA's home page, or the dataset hotpot_qa on Hugging Face",
        ("hotpot_dev_distractor*.json", "hotpot_train*.json", "hotpot*.json", "hotpot*.jsonl", "hotpot*.parquet"),
    ),
    "squad": Published(
        "dev-v2.0.json from SQuAD's home page, or the dataset squad on Hugging Face",
        ("dev-v2*.json", "dev-v1*.json", "train-v2*.json", "train-v1*.json", "squad*.json*", "squad*.parquet"),
    ),
    "qa_files": Published("a file of your own: rows with question, document and answers", _ANY_ROWS),
    "memagent_files": Published(
        "hotpotqa_train_32k.parquet from the dataset BytedTsinghua-SIA/hotpotqa on Hugging Face",
        ("hotpotqa_train*.parquet", *_ANY_ROWS),
    ),
    "ruler_hqa_files": Published(
        "eval_50.json and its like from the dataset BytedTsinghua-SIA/hotpotqa on Hugging Face",
        ("eval_[0-9]*.json", "eval_[0-9]*.jsonl"),
    ),
}


def data_paths(name: str, path: Path | None, task: str | None = None) -> list[Path]:
    """Return the files of a data set: the path if it is a file or a dataset folder, otherwise those in the folder.

    A folder that several data sets share may have a subfolder for each, named like the task.

    Args:
        name: the data set, a key of `PUBLISHED`.
        path: where to look; `evaluation` in the data folder if None.
        task: the task that needs the data set, for messages.

    Raises:
        EvaluationError: there are no files; the message says where the file is published and how to pass it.
    """
    published, given_path = PUBLISHED[name], path
    path = path or data_folder() / "evaluation"
    if path.is_file() or any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return [path]
    remedy = f"{name} reads {published.what}. Pass where it is (--data PATH), or put it into {path}."
    if not path.is_dir():
        what = f"there is no data file {path}" if given_path or not task else f"{task} needs a data file"
        raise EvaluationError(what, hint=remedy)
    if (path / name).is_dir():
        return data_paths(name, path / name)
    for pattern in published.patterns:
        if matches := sorted(filter(Path.is_file, path.glob(pattern)), key=_by_number):
            return matches
    raise EvaluationError(f"the folder {path} has no file called {' or '.join(published.patterns)}", hint=remedy)


def _by_number(path: Path) -> tuple[int, str]:
    """Sort shorter names first, so that eval_50 comes before eval_100."""
    return len(path.name), path.name

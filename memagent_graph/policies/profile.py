"""Profiles: the budget and prompts that a policy was trained with, stored next to its weights.

A small or fine-tuned policy works only with the budget and prompts of its training. `memagent.json` has the budget. The
folder `templates` has the prompts (`update.txt`, `answer.txt`, and a file for every other role of the training).

`PUBLISHED` has profiles of published models. Their prompts belong to their authors and are not part of this package, so
the user saves them in the data folder, under `profiles`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from memagent_graph.budget import Budget
from memagent_graph.documents.chunking import Boundary
from memagent_graph.errors import ProfileError, PromptError
from memagent_graph.events import UpdateRule
from memagent_graph.policies.added import ENGLISH_FOLDER, find_added_policy_folder
from memagent_graph.policy import SamplingParams
from memagent_graph.prompts import EMPTY_MEMORY, AnswerFormat, Prompts, load_prompts, load_template
from memagent_graph.storage.bounded_files import MAX_WORDING_BYTES, read_json_file, read_text_file
from memagent_graph.storage.private_files import get_data_folder

PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = {"rl-memoryagent": {"temperature": 0.7, "top_p": 0.95}}
"""The `memagent.json` of each published model. RL-MemoryAgent-7B and -14B follow their authors' evaluation."""
EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded"
"""The folder of the embedded policy: weights, tokenizer, templates and card."""


def find_policy_folder(name: Path | str) -> Path:
    """Return the folder of a policy, given its name ("embedded" or an added policy) or path."""
    return EMBEDDED_FOLDER if name == "embedded" else find_added_policy_folder(name) or Path(name).expanduser()


def find_profile_folder(name: Path | str) -> Path:
    """Return the folder of a profile: the policy's folder, or the folder of a published profile.

    The profile of `english` is a part of this package, so it is available even if the policy was not added.
    """
    if name in PUBLISHED:
        return get_data_folder() / "profiles" / str(name)
    return ENGLISH_FOLDER if name == "english" and not find_added_policy_folder(name) else find_policy_folder(name)


@dataclass(frozen=True, slots=True)
class Profile:
    """Budgets, prompts and chunk boundary that belong to a policy's weights."""

    budget: Budget
    prompts: Prompts
    boundary: Boundary = "token"
    on_invented: UpdateRule = UpdateRule.ACCEPT
    """The policy's rule for invented words; see `UpdateRules.invented`."""
    strategy: str = ""
    """The best strategy for the policy, with its options; "" for the reader's default."""
    dtype: str = ""
    """The number format on machines that compute fast in this format; "" for float32."""
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def values(self) -> dict[str, int | float | str]:
        """The contents of `memagent.json`."""
        prompts = self.prompts
        wording = {"empty_memory": prompts.empty_memory, "answer_format": prompts.answer_format.value}
        rules = {"on_invented": self.on_invented.value}
        strategy = {"strategy": self.strategy} if self.strategy else {}
        dtype = {"dtype": self.dtype} if self.dtype else {}
        is_greedy = (self.temperature, self.top_p) == (0.0, 1.0)
        sampling = {} if is_greedy else {"temperature": self.temperature, "top_p": self.top_p}
        return {**asdict(self.budget), "boundary": self.boundary, **rules, **wording, **strategy, **dtype, **sampling}


def load_profile(folder: Path | str) -> Profile | None:
    """Return the profile in `folder` (see `find_profile_folder` for names); None without a `memagent.json`.

    Raises:
        ProfileError: the `memagent.json` cannot be parsed.
        PromptError: a template is missing or lacks a field.
    """
    published_values = PUBLISHED.get(folder) if isinstance(folder, str) else None
    folder = find_profile_folder(folder)
    path = folder / "memagent.json"
    if published_values is None and not path.is_file():
        return None
    try:
        values = (
            {**published_values, "empty_memory": _find_published_empty_memory(folder)}
            if published_values
            else read_json_file(path, MAX_WORDING_BYTES)
        )
        budget = Budget(**{field.name: int(values[field.name]) for field in fields(Budget) if field.name in values})
        types = get_type_hints(Profile)
        names = types.keys() & values.keys() - {"budget", "prompts"}
        options = {name: msgspec.convert(values[name], types[name]) for name in names}
        SamplingParams(temperature=options.get("temperature", 0.0), top_p=options.get("top_p", 1.0))  # checks bounds
        empty_memory = msgspec.convert(values.get("empty_memory", EMPTY_MEMORY), str)
        answer_format = AnswerFormat(values.get("answer_format", AnswerFormat.BOXED))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ProfileError(
            f"{path} cannot be parsed: {error}",
            hint="It is a JSON object with context_window, question_tokens, memory_tokens, chunk_tokens, "
            "answer_tokens, boundary, on_invented (accept, keep_previous or retry), empty_memory, answer_format, "
            "strategy, dtype, temperature and top_p.",
        ) from error
    templates = folder if published_values else folder / "templates"
    prompts = load_prompts(
        answer_format=answer_format,
        update_template=templates / "update.txt",
        answer_template=templates / "answer.txt",
        empty_memory=empty_memory,
    )
    files = sorted(
        path for path in templates.glob("[!.]*.txt") if path.stem not in {"update", "answer", "empty_memory"}
    )
    prompts = replace(prompts, others={path.stem: load_template(path) for path in files})
    return Profile(budget, prompts, **options)


def _find_published_empty_memory(folder: Path) -> str:
    """Return the text of the empty memory in the folder of a published profile.

    Raises:
        PromptError: the authors' prompts are not in the folder.
    """
    files = [folder / f"{name}.txt" for name in ("update", "answer", "empty_memory")]
    missing_names = [file.name for file in files if not file.is_file()]
    if missing_names:
        raise PromptError(
            f"the wording of {folder.name} is its authors' and not a part of this package; "
            f"{' and '.join(missing_names)} must be saved once",
            hint=f"Save in {folder}, from https://github.com/BytedTsinghua-SIA/MemAgent: update.txt with {{prompt}}, "
            "{memory} and {chunk}, answer.txt with {prompt} and {memory}, and empty_memory.txt.",
        )
    return read_text_file(files[-1], MAX_WORDING_BYTES).strip()


def require_profile(folder: Path | str) -> Profile:
    """Return the profile in a folder, which must have one.

    Raises:
        ProfileError: the profile is missing or cannot be parsed.
        PromptError: a template is missing or lacks a field.
    """
    profile = load_profile(folder)
    if profile is None:
        raise ProfileError(
            f"{folder} has no memagent.json", hint='Give a folder that has one, "embedded" or "english".'
        )
    return profile


def save_profile(profile: Profile, folder: Path) -> None:
    """Write `memagent.json` and `templates`. `load_profile` returns an equal profile."""
    templates = folder / "templates"
    templates.mkdir(parents=True, exist_ok=True)
    for role, template in profile.prompts.templates.items():
        (templates / f"{role}.txt").write_text(template.text + "\n", encoding="utf-8")
    (folder / "memagent.json").write_text(json.dumps(profile.values, indent=2) + "\n", encoding="utf-8")

"""Policies that were added to this machine (`memagent policy add`): their folders and records, and the default policy.

The folder of a policy is below the data folder. It has weights, tokenizer, profile, and a record of its sources. The
module `adding` creates it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from memagent_graph.storage.bounded_files import read_json_file
from memagent_graph.storage.private_files import get_data_folder

ADDABLE_POLICIES: Final = ("english", "english-untrained")
"""The policies that can be added. `english` is the default once it is added; `english-untrained` is its base."""
ENGLISH_FOLDER: Final = Path(__file__).parents[1] / "english"
"""The folder in this package with adapter, profile and card of the policy `english`."""
_RECORD_NAME: Final = "added.json"


@dataclass(frozen=True, slots=True)
class PolicyOrigin:
    """The files that an added policy was made from."""

    base: str
    """The name of the base model's file."""
    base_sha256: str
    adapter: str | None
    """The digest of the adapter's folder; None without an adapter."""
    gguf: str | None = None
    """The name of the GGUF file for llama.cpp, if one was written."""


def get_policies_folder() -> Path:
    """Return the parent folder of the added policies."""
    return get_data_folder() / "policies"


def find_added_policy_folder(name: Path | str) -> Path | None:
    """Return the folder of an added policy; None if no policy of this name was added."""
    folder = get_policies_folder() / name
    return folder if name in ADDABLE_POLICIES and (folder / _RECORD_NAME).is_file() else None


def list_added_policies() -> dict[str, PolicyOrigin | None]:
    """Return the added policies by name, with None for a record that cannot be parsed."""
    return {name: read_origin(folder) for name in ADDABLE_POLICIES if (folder := find_added_policy_folder(name))}


def find_default_policy() -> str | None:
    """Return the policy that is used if the user names neither a policy nor a server; None if it was not added."""
    return ADDABLE_POLICIES[0] if find_added_policy_folder(ADDABLE_POLICIES[0]) else None


def read_origin(folder: Path) -> PolicyOrigin | None:
    """Return the record in a policy's folder; None if it is missing or cannot be parsed."""
    try:
        return PolicyOrigin(**read_json_file(folder / _RECORD_NAME))
    except (OSError, ValueError, TypeError):
        return None


def write_origin(origin: PolicyOrigin, folder: Path) -> None:
    """Write the record into a policy's folder."""
    (folder / _RECORD_NAME).write_text(json.dumps(asdict(origin), indent=2) + "\n", encoding="utf-8")

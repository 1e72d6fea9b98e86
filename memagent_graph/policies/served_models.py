"""The models of a server: parses the list, chooses a model, and collects information about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memagent_graph.chat_markers import folder_markers
from memagent_graph.errors import MemAgentError, MissingExtraError, PolicyRequestError
from memagent_graph.policies.model_info import ModelInfo, ModelShape
from memagent_graph.policies.profile import load_profile
from memagent_graph.policies.sending import MalformedReplyError
from memagent_graph.tokenizers import Tokenizer, load_tokenizer


def parse_model_entries(content: bytes) -> list[dict[str, Any]]:
    """Return the entries of a list of models. It may be a bare array, or have only names."""
    try:
        body = msgspec.json.decode(content)
        entries = body if isinstance(body, list) else body.get("data") or body.get("models")
        entries = [{"id": entry} if isinstance(entry, str) else entry for entry in entries]
        return [{**entry, "id": entry.get("id") or entry.get("name") or entry["model"]} for entry in entries]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise MalformedReplyError(f"not a list of models: {error}", content) from error


def choose_model(
    models: Sequence[Mapping[str, Any]], name: str | None, base_url: str, redact: Callable[[str], str]
) -> dict[str, Any]:
    """Return the entry of the model with this name, or of the only model.

    Raises:
        PolicyRequestError: there is no model with this name; or no name is given, and there is not exactly one model.
    """
    bases = [model for model in models if not model.get("parent")]
    if name is None and len(bases) == 1:
        return dict(bases[0])
    for model in models:
        if model["id"] in {name, f"{name}:latest"}:
            # An adapter has the window and tokenizer of its base, but does not report them.
            base = next((other for other in bases if other["id"] == model.get("parent")), {})
            return {**model, **{field: base[field] for field in ("root", "max_model_len") if field in base}}
    names = [str(model["id"]) for model in models]
    served = redact(", ".join(names[:10]) + (", ..." if len(names) > 10 else ""))
    if name is None:
        raise PolicyRequestError(f"{base_url} serves {served or 'no model'}", hint="Choose one with --model.")
    error = PolicyRequestError(
        f"{base_url} does not serve {name!r}; it serves {served or 'nothing'}", hint="Choose one of these with --model."
    )
    error.served = served if len(names) == 1 else "NAME"
    raise error


def is_vllm(served: Mapping[str, Any]) -> bool:
    """Return whether an entry comes from vLLM."""
    return served.get("owned_by") == "vllm"


def find_model_info(name: str, root: str, window: int | None) -> ModelInfo:
    """Return information from the model's name and origin (a folder on this machine, or a hub id)."""
    folder = Path(root or name)
    local = folder.is_dir()
    tokenizer, missing = _find_tokenizer(name, root)
    all_known = local and tokenizer is not None
    return ModelInfo(
        context_window=window,
        tokenizer=tokenizer,
        missing=missing,
        shape=ModelShape.from_config(folder) if local else None,
        profile=load_profile(folder) if local else None,
        control_tokens=(tokenizer.special_tokens if tokenizer else frozenset())
        | (folder_markers(folder) if local else frozenset()),
        knows_control_tokens=all_known,
    )


def _find_tokenizer(model: str, root: str) -> tuple[Tokenizer | None, MissingExtraError | None]:
    """Return the tokenizer for the model's name or origin, or None and the error for a missing extra."""
    missing = None
    for spec in dict.fromkeys(filter(None, (root, model))):
        try:
            return load_tokenizer(spec), None
        except MissingExtraError as error:
            missing = missing or error
        except MemAgentError:
            continue
    return None, missing

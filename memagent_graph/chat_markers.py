"""Finds the control tokens of chat templates, of known model families and of models whose files are on this machine.

Prompts escape them. Otherwise a document that contains one could end its message and begin another. The families are
ChatML (Qwen, Yi, InternLM and others), Llama 2, 3 and 4, Mistral, Gemma, Phi, DeepSeek, GPT-OSS, Command R, GLM,
EXAONE, Granite, Seed, Nemotron, SmolVLM and MiniMax. Their markers are public in the tokenizer files of the models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from memagent_graph.storage.bounded_files import read_json_file

FAMILY_MARKERS: Final[Mapping[str, str]] = {
    "<": "|".join(
        (
            r"\|[^|<>\s]{1,80}\|?>",  # <|im_end|>, <|eot_id|>, <|channel|>, <|END_OF_TURN_TOKEN|>, <|turn>
            r"[a-z_]{1,40}\|>",  # <turn|>
            r"｜[^｜<>\n]{1,80}｜>",  # DeepSeek writes full-width bars: <｜begin▁of▁sentence｜>
            r"/?(?:s|bos|eos|pad|unk|sop|eop|(?:start|end)_of_(?:turn|image|role|text))>",
            r"/?(?:think|tools?|tool_call|tool_response|function_calls?|reserved_\d+)>",
            r"/?(?:begin(?:ning)?|end)_of_(?:sentence|document)>",
            r"/?(?:minimax:[a-z_]{1,40}|seed:[a-z_:]{1,40}|SPECIAL_\d+|extra_id_\d+|eo[ah]|end_of_utterance)>",
            r"</?SYS>>",
        )
    ),
    "[": "|".join(
        (
            r"/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|CALL_ID|THINK)\]",
            r"\|[^|\[\]\s]{1,40}\|\]",  # [|endofturn|]
            r"gMASK\]|UNUSED_TOKEN_\d+\]|e~\[",
        )
    ),
    "]": r"~!?b[\[\]]",  # MiniMax: ]~!b[, ]~b]
}
"""For each first character of a marker: a regular expression for the rest."""
TURN_END: Final = re.compile(
    r"(?:<\|[^|<>\s]{1,40}\|>|</s>|<(?:eos|eop|pad|end_of_turn)>|<turn\|>|<｜[^｜<>\n]{1,40}｜>|\[(?:\|endofturn\||PAD|/INST)\])"
)
"""A token with which a template ends a turn. Some servers do not remove it from the end of a text."""
TURN_BEGIN: Final = re.compile(
    r"\s*(?:(?:<s>|<bos>|<sop>|\[gMASK\]|<\|(?:begin_of_text|startoftext)\|>|<｜begin▁of▁sentence｜>)\s*)+",
    re.IGNORECASE,
)
"""Tokens with which a template begins a text."""
NEXT_TURN: Final = re.compile(
    r"(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|</s>)\s*"
    r"(<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]).*\Z",
    re.DOTALL,
)
"""The end of a turn, and everything that a model wrote after it as a next turn."""
_MARKER: Final = re.compile("|".join(f"{re.escape(first)}(?:{rest})" for first, rest in FAMILY_MARKERS.items()))
_PLAIN_WORDS: Final = re.compile(r"[\w\s]*")


def find_template_markers(template: str) -> frozenset[str]:
    """Return the markers in a chat template. Some, such as [INST], are not single tokens."""
    return frozenset(_MARKER.findall(template))


def find_config_markers(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the control tokens in a tokenizer_config.json or in the reply of vLLM at `/tokenizer_info`."""
    tokens = [value for name, value in config.items() if name.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        value = config.get(key)
        tokens += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    markers = frozenset(text for text in _list_texts(tokens, "content") if not _PLAIN_WORDS.fullmatch(text))
    templates = config.get("chat_template")
    texts = _list_texts(templates if isinstance(templates, list) else [templates], "template")
    return markers.union(*map(find_template_markers, texts))


def find_folder_markers(folder: Path) -> frozenset[str]:
    """Return the control tokens in the tokenizer settings and the chat template of a model folder."""
    markers: frozenset[str] = frozenset()
    with suppress(OSError, ValueError):
        config = read_json_file(folder / "tokenizer_config.json")
        markers |= find_config_markers(config) if isinstance(config, Mapping) else frozenset()
    with suppress(OSError, ValueError):
        markers |= find_template_markers((folder / "chat_template.jinja").read_text("utf-8"))
    return markers


def _list_texts(values: Iterable[Any], key: str) -> list[str]:
    """Return the values that are texts, and the texts under `key` in the values that are objects."""
    texts = (value.get(key) if isinstance(value, Mapping) else value for value in values)
    return [text for text in texts if isinstance(text, str)]

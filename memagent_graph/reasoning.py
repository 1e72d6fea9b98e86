"""Removes reasoning from a completion, and remains of the chat template around the reply.

Reasoning is between markers that depend on the model family: tags such as <think>, brackets, symbols, special tokens,
channels. It is removed only if the structure of the reply shows that it is reasoning: a block at the beginning or in
lines of its own, or the end of a block that began in the prompt. A text that mentions a marker stays unchanged.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from memagent_graph.chat_markers import NEXT_TURN, TURN_BEGIN, TURN_END

_NAMES: Final = r"(?:\w+:)?(?:ant)?(?:thinking|think|thoughts?|reasoning|scratchpad)"
_FAMILIES: Final = (
    (_NAMES, r"<{name}(?:\s[^<>\n]*)?>", r"</{name}\s*>"),
    ("think|thinking|reasoning", r"\[{name}\]", r"\[/{name}\]"),  # Magistral
    ("think", "◁{name}▷", "◁/{name}▷"),  # Kimi
    ("think|thinking|reasoning", r"<\|{name}\|>", r"<\|(?:/|end_of_|end_?)?{name}\|>|<\|end\|>"),  # Solar
    ("thinking", r"<\|start_{name}\|>", r"<\|end_{name}\|>"),  # Command A
    ("thought", r"<\|begin_of_{name}\|>", r"<\|end_of_{name}\|>"),  # OpenThinker
    ("inner", r"<\|{name}_prefix\|>", r"<\|{name}_suffix\|>"),  # Apertus
    ("channel", r"<\|{name}>thought\b", r"<{name}\|>"),  # Gemma 4
    ("unused9", "<{name}4>thought\\b", "<{name}5>"),  # MedGemma
    ("im_start", r"<\|{name}\|>think\n", r"<\|{name}\|>answer\n"),  # s1
    ("details", r"<{name}\s[^<>\n]*reasoning[^<>\n]*>", "</{name}>"),  # Open WebUI
    ("here is|here's", "{name} my thought process:", "{name} my response:"),  # Granite 3
)
"""By family: the names in its markers, and the beginning and end of a block of reasoning."""
_OPENING: Final = re.compile(
    "|".join(opening.replace("{name}", f"({names})") for names, opening, _ in _FAMILIES), re.IGNORECASE
)
_CLOSING: Final = re.compile(
    rf"</{_NAMES}\s*>|\[/(?:THINK|THINKING)\]|◁/think▷|<\|(?:end_|/)(?:of_)?(?:thinking|thought|think)\|>"
    r"|<\|inner_suffix\|>|<channel\|>|<unused95>",
    re.IGNORECASE,
)
"""The end of a block whose beginning may have been in the prompt."""
_CHANNEL: Final = re.compile(
    r"(?:\A\s*|<\|(?:end|return|call)\|>\s*)(?:<\|start\|>assistant\s*)?"
    r"<\|channel\|>(\w+)[^<>]{0,80}(?:<\|constrain\|>[^<>]{0,40})?<\|message\|>(.*?)(?=<\|(?:end|return|call)\|>|\Z)",
    re.DOTALL,
)
_BARE_CHANNELS: Final = re.compile(r"\A\s*analysis(?=\S).*assistant\s?final(?=\S)", re.DOTALL)
"""GPT-OSS's channels, if the server left out special tokens."""
_HEADER: Final = re.compile(
    r"\s*(?:<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>|<start_of_turn>model\n"
    r"|(?-i:assistant\n\n)|<\|(?:start_response|begin_of_solution)\|>|(?:<\|(?:begin|start)\|>assistant)?<\|(?:content|message)\|>)",
    re.IGNORECASE,
)
_WRAPPED: Final = re.compile(r"\s*<(answer|response|output)>(.*)</\1>\s*", re.DOTALL | re.IGNORECASE)
_MARK: Final = re.compile(
    r"[<\[◁]|\A\s*(?:(?-i:assistant\n\n)|analysis\S|here(?: is|'s) my thought process:)", re.IGNORECASE
)
_FENCE: Final = re.compile(r"^ {0,3}(```|~~~).*?(?:^ {0,3}\1|\Z)", re.DOTALL | re.MULTILINE)
_GOES_ON: Final = re.compile(r"[ \t]+[^\W\dA-Z_]|[ \t]*[,;:.)!?]")
"""What follows a marker in the middle of a sentence."""
_VERB: Final = re.compile(r" (?:tags?|tokens?|is|are|was|were|and|or|marks?|means|opens?|begins?|starts?)\b")
"""What follows a marker that is the subject of a sentence."""
_QUOTES: Final = "`'\"“‘«(["
_SENTENCE_ENDS: Final = ".!?…。！？"


def extract_reply(text: str) -> str:
    """Return what a completion says, without its reasoning and without turn markers around it.

    Reasoning that was cut off before its end leaves nothing. A text without any of these is returned unchanged.
    """
    text = text.rstrip("\0")
    if not _MARK.search(text):
        return text
    if (begin := TURN_BEGIN.match(text)) and "</s>" not in text.rstrip()[:-4]:
        text = text[begin.end() :]
    reply = _remove_line_blocks(_remove_first_blocks(_extract_final_channel(text)))
    reply = reply[_end_of_open_block(reply) :]
    if header := _HEADER.match(reply):
        reply = reply[header.end() :]
    if reply != text and (wrapped := _WRAPPED.fullmatch(reply)):
        reply = wrapped[2]
    return _remove_turn_ends(reply)


def _extract_final_channel(text: str) -> str:
    """Return the final channel of a text that has channels. Other texts are returned unchanged."""
    if bare := _BARE_CHANNELS.match(text):
        return text[bare.end() :]
    channels = _CHANNEL.findall(text)
    return "".join(content for name, content in channels if name == "final") if channels else text


def _remove_first_blocks(text: str) -> str:
    """Return the text after the blocks with which it begins."""
    while (opening := _OPENING.match(text, len(text) - len(text.lstrip()))) is not None:
        end = _end_of_block(text, opening)
        if end is None:
            return text if _VERB.match(text, opening.end()) else ""
        if _is_mention(text, opening.end(), *end):
            return text
        text = text[end[1] :]
    return text


def _remove_line_blocks(text: str) -> str:
    """Return the text without blocks that have lines of their own. One that does not end leaves nothing after it."""
    fences = [fence.span() for fence in _FENCE.finditer(text)]
    rest, last = "", 0
    for opening in _OPENING.finditer(text):
        begin = opening.start()
        is_quoted = any(start < begin < stop for start, stop in fences)
        if begin < last or is_quoted or not _begins_line(text, begin):
            continue
        end = _end_of_block(text, opening)
        if end is None and _ends_line(text, opening.end()) and re.match(r"\s*[^\s<\[]", text[opening.end() :]):
            return rest + text[last:begin]
        if end and text[opening.end() : end[0]].strip() and _ends_line(text, end[1]):
            rest, last = rest + text[last:begin], end[1] + 1
    return rest + text[last:]


def _end_of_block(text: str, opening: re.Match[str]) -> tuple[int, int] | None:
    """Return where the marker stands that ends a block, past blocks inside it; None if the block does not end."""
    family = opening.lastindex or 1
    depth = 1
    for marker in _compile_markers(family - 1, opening[family].lower()).finditer(text, opening.end()):
        depth += 1 if marker["opening"] else -1
        if depth == 0:
            return marker.span()
    return None


@lru_cache(64)
def _compile_markers(family: int, name: str) -> re.Pattern[str]:
    _, opening, closing = (part.replace("{name}", re.escape(name)) for part in _FAMILIES[family])
    return re.compile(f"(?P<opening>{opening})|{closing}", re.IGNORECASE)


def _is_mention(text: str, begin: int, end: int, after: int) -> bool:
    """Return whether two markers are named in a sentence, as in "<think> and </think> are tags"."""
    inside = text[begin:end]
    is_short = "\n" not in inside and len(inside.split()) <= 4 and not inside.strip(" .…,")[:1].isupper()
    is_apart = not inside.strip(" .…,") or (inside[:1] == " " == inside[-1:])
    return is_short and is_apart and bool(_GOES_ON.match(text, after))


def _end_of_open_block(text: str) -> int:
    """Return the end of the reasoning that began in the prompt, or 0 without such reasoning."""
    fences = [fence.span() for fence in _FENCE.finditer(text)]
    end = 0
    for closing in _CLOSING.finditer(text):
        if not any(start < closing.start() < stop for start, stop in fences) and _ends_block(text, *closing.span()):
            end = closing.end()
    return end


def _ends_block(text: str, start: int, end: int) -> bool:
    """Return whether an end marker without a beginning ends a block, and is not named in a sentence."""
    before = text[:start]
    if before[-1:] in set(_QUOTES) or _GOES_ON.match(text, end) or _OPENING.search(before.rstrip().rpartition("\n")[2]):
        return False
    if _begins_line(text, start) or before.rstrip()[-1:] in set(_SENTENCE_ENDS):
        return True
    return before[-1:].isalnum() and (_ends_line(text, end) or before[-1:].isascii())


def _begins_line(text: str, position: int) -> bool:
    return not text[:position].rpartition("\n")[2].strip()


def _ends_line(text: str, position: int) -> bool:
    return not text[position:].partition("\n")[0].strip()


def _remove_turn_ends(text: str) -> str:
    """Return the text without the end-of-turn tokens that a server left at its end, and without turns after them."""
    if (following := NEXT_TURN.search(text)) and following[1] not in text[: following.start()]:
        text = text[: following.start()]
    while marker := TURN_END.search(text):
        before, opening = text[: marker.start()], marker[0].replace("/", "").replace("_end", "_start")
        if before[-1:] == " " or before[-1:] in set(_QUOTES) or (opening != marker[0] and opening in before):
            return text  # it is named, or ends what the text quotes
        text = before.rstrip()
    return text

"""Removes reasoning from a completion, and remnants of the chat template around the reply.

Reasoning is between markers that depend on the model family: tags such as <think>, brackets, symbols, special tokens,
or channels. A block is removed only if its position shows that it is reasoning: at the beginning, on separate lines, or
as the end of a block that began in the prompt. A text that only mentions a marker stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

from memagent_graph.chat_markers import NEXT_TURN, TURN_BEGIN, TURN_END

_TAG_NAMES: Final = r"(?:\w+:)?(?:ant)?(?:thinking|think|thoughts?|reasoning|scratchpad)"
_FAMILIES: Final = (
    (_TAG_NAMES, r"<{name}(?:\s[^<>\n]*)?>", r"</{name}\s*>"),
    ("think|thinking|reasoning", r"\[{name}\]", r"\[/{name}\]"),  # Magistral
    ("think", "◁{name}▷", "◁/{name}▷"),  # Kimi
    ("think|thinking|reasoning", r"<\|{name}\|>", r"<\|(?:/|end_of_|end_?)?{name}\|>|<\|end\|>"),  # Solar
    ("thinking", r"<\|start_{name}\|>", r"<\|end_{name}\|>"),  # Command A
    ("thought", r"<\|begin_of_{name}\|>", r"<\|end_of_{name}\|>"),  # OpenThinker
    ("inner", r"<\|{name}_prefix\|>", r"<\|{name}_suffix\|>"),  # Apertus
    ("channel", r"<\|{name}>thought\b", r"<{name}\|>"),  # Gemma 4
    ("unused9", "<{name}4>thought\\b", "<{name}5>"),  # MedGemma
    ("im_start", r"<\|{name}\|>think\n", r"<\|{name}\|>answer\n"),  # s1
    ("details", r"<{name}\s(?=[^<>\n]*reasoning)[^<>\n]*>", "</{name}>"),  # Open WebUI
    ("here is|here's", "{name} my thought process:", "{name} my response:"),  # Granite 3
)
"""For each family: the names in its markers, and the opening and closing marker of a block of reasoning."""
_OPENING_MARKER: Final = re.compile(
    "|".join(opening.replace("{name}", f"({names})") for names, opening, _ in _FAMILIES), re.IGNORECASE
)
_CLOSING_MARKER: Final = re.compile(
    rf"</{_TAG_NAMES}\s*>|\[/(?:THINK|THINKING)\]|◁/think▷|<\|(?:end_|/)(?:of_)?(?:thinking|thought|think)\|>"
    r"|<\|inner_suffix\|>|<channel\|>|<unused95>",
    re.IGNORECASE,
)
"""The closing marker of a block whose opening marker may be in the prompt."""
_CHANNEL: Final = re.compile(
    r"(?:\A\s*|<\|(?:end|return|call)\|>\s*)(?:<\|start\|>assistant\s*)?"
    r"<\|channel\|>(\w{1,40})[^<>]{0,80}(?:<\|constrain\|>[^<>]{0,40})?<\|message\|>(.*?)(?=<\|(?:end|return|call)\|>|\Z)",
    re.DOTALL,
)
_BARE_CHANNELS: Final = re.compile(r"\A\s*analysis(?=\S).*assistant\s?final(?=\S)", re.DOTALL)
"""GPT-OSS's channels, if the server left out the special tokens."""
_TURN_HEADER: Final = re.compile(
    r"\s*(?:<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>|<start_of_turn>model\n"
    r"|(?-i:assistant\n\n)|<\|(?:start_response|begin_of_solution)\|>|(?:<\|(?:begin|start)\|>assistant)?<\|(?:content|message)\|>)",
    re.IGNORECASE,
)
_ANSWER_TAGS: Final = re.compile(r"\s*<(answer|response|output)>(.*)</\1>\s*", re.DOTALL | re.IGNORECASE)
_ANY_MARKER: Final = re.compile(
    r"[<\[◁]|\A\s*(?:(?-i:assistant\n\n)|analysis\S|here(?: is|'s) my thought process:)", re.IGNORECASE
)
_FENCE: Final = re.compile(r"^ {0,3}(```|~~~).*?(?:^ {0,3}\1|\Z)", re.DOTALL | re.MULTILINE)
_LINE_BEGIN: Final = re.compile(r"^[^\S\n]*(?=[<\[◁h])", re.MULTILINE | re.IGNORECASE)
"""The beginning of a line that may have an opening marker."""
_SENTENCE_CONTINUATION: Final = re.compile(r"[ \t]+[^\W\dA-Z_]|[ \t]*[,;:.)!?]")
"""The text after a marker in the middle of a sentence."""
_PREDICATE: Final = re.compile(r" (?:tags?|tokens?|is|are|was|were|and|or|marks?|means|opens?|begins?|starts?)\b")
"""The text after a marker that is the subject of a sentence."""
_MAX_BLOCKS: Final = 64
"""The number of markers outside quotations that are examined: each takes time in proportion to the text's length."""
_QUOTES: Final = "`'\"“‘«(["
_SENTENCE_ENDS: Final = ".!?…。！？"


def extract_reply(text: str) -> str:
    """Return the reply in a completion, without its reasoning and without turn markers around it.

    It is empty if the reasoning was cut off. A text without markers is returned unchanged.
    """
    text = text.rstrip("\0")
    if not _ANY_MARKER.search(text):
        return text
    if (turn_begin := TURN_BEGIN.match(text)) and "</s>" not in text.rstrip()[:-4]:
        text = text[turn_begin.end() :]
    reply = _remove_line_blocks(_remove_first_blocks(_extract_final_channel(text)))
    reply = reply[_find_open_block_end(reply) :]
    if header := _TURN_HEADER.match(reply):
        reply = reply[header.end() :]
    if reply != text and (tagged_answer := _ANSWER_TAGS.fullmatch(reply)):
        reply = tagged_answer[2]
    return _remove_turn_ends(reply)


def _extract_final_channel(text: str) -> str:
    """Return the final channel of a text that has channels, and other texts unchanged."""
    if bare_channels := _BARE_CHANNELS.match(text):
        return text[bare_channels.end() :]
    channels = _CHANNEL.findall(text)
    return "".join(content for name, content in channels if name == "final") if channels else text


def _remove_first_blocks(text: str) -> str:
    """Return the text without the blocks of reasoning at its beginning."""
    for _ in range(_MAX_BLOCKS):
        if (opening := _OPENING_MARKER.match(text, len(text) - len(text.lstrip()))) is None:
            break
        closing_span = _find_block_end(text, opening)
        if closing_span is None:
            return text if _PREDICATE.match(text, opening.end()) else ""
        if _is_mention(text, opening.end(), *closing_span):
            return text
        text = text[closing_span[1] :]
    return text


def _remove_line_blocks(text: str) -> str:
    """Return the text without blocks of reasoning on separate lines. An open block extends to the text's end."""
    reply, block_end = "", 0
    openings = (_OPENING_MARKER.match(text, line.end()) for line in _find_unfenced(_LINE_BEGIN, text))
    for opening in islice(filter(None, openings), _MAX_BLOCKS):
        start = opening.start()
        if start < block_end:
            continue
        closing_span = _find_block_end(text, opening)
        if closing_span is None:
            if _ends_line(text, opening.end()) and re.match(r"\s*[^\s<\[]", text[opening.end() :]):
                return reply + text[block_end:start]
        elif text[opening.end() : closing_span[0]].strip() and _ends_line(text, closing_span[1]):
            reply, block_end = reply + text[block_end:start], closing_span[1] + 1
    return reply + text[block_end:]


def _find_unfenced(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield the matches that do not begin in a fenced block of code."""
    fences = _FENCE.finditer(text)
    fence = next(fences, None)
    for match in pattern.finditer(text):
        while fence and fence.end() <= match.start():
            fence = next(fences, None)
        if fence is None or match.start() < fence.start():
            yield match


def _find_block_end(text: str, opening: re.Match[str]) -> tuple[int, int] | None:
    """Return the span of a block's closing marker, after the blocks inside it; None if the block does not end."""
    family = opening.lastindex or 1
    name = re.escape(opening[family].lower())
    _, opening_marker, closing_marker = (part.replace("{name}", name) for part in _FAMILIES[family - 1])
    markers = re.compile(f"(?P<opening>{opening_marker})|{closing_marker}", re.IGNORECASE)
    depth = 1
    for marker in markers.finditer(text, opening.end()):
        depth += 1 if marker["opening"] else -1
        if depth == 0:
            return marker.span()
    return None


def _is_mention(text: str, start: int, end: int, closing_end: int) -> bool:
    """Return whether two markers are mentioned in a sentence, as in "<think> and </think> are tags"."""
    inside = text[start:end]
    is_short = "\n" not in inside and len(inside.split()) <= 4 and not inside.strip(" .…,")[:1].isupper()
    is_separate = not inside.strip(" .…,") or (inside[:1] == " " == inside[-1:])
    return is_short and is_separate and bool(_SENTENCE_CONTINUATION.match(text, closing_end))


def _find_open_block_end(text: str) -> int:
    """Return the end of a block of reasoning that began in the prompt; 0 if there is none."""
    closings = [closing for closing in _find_unfenced(_CLOSING_MARKER, text) if not _is_quoted(text, *closing.span())]
    for closing in reversed(closings[-_MAX_BLOCKS:]):
        if _ends_block(text, *closing.span()):
            return closing.end()
    return 0


def _is_quoted(text: str, start: int, end: int) -> bool:
    """Return whether a closing marker is in quotation marks, or in the middle of a sentence."""
    return text[start - 1 : start] in set(_QUOTES) or bool(_SENTENCE_CONTINUATION.match(text, end))


def _ends_block(text: str, start: int, end: int) -> bool:
    """Return whether a closing marker without an opening one, which is not quoted, ends a block."""
    preceding = text[:start]
    if _OPENING_MARKER.search(preceding.rstrip().rpartition("\n")[2]):
        return False
    if _begins_line(text, start) or preceding.rstrip()[-1:] in set(_SENTENCE_ENDS):
        return True
    return preceding[-1:].isalnum() and (_ends_line(text, end) or preceding[-1:].isascii())


def _begins_line(text: str, position: int) -> bool:
    return not text[:position].rpartition("\n")[2].strip()


def _ends_line(text: str, position: int) -> bool:
    return not text[position:].partition("\n")[0].strip()


def _remove_turn_ends(text: str) -> str:
    """Return the text without the end-of-turn tokens that a server left at its end, and without further turns."""
    if (next_turn := NEXT_TURN.search(text)) and next_turn[1] not in text[: next_turn.start()]:
        text = text[: next_turn.start()]
    markers = [*TURN_END.finditer(text)]
    first_starts = {opening: text.find(opening) for opening in ("<s>", "[INST]")}
    first_starts |= {marker[0]: marker.start() for marker in reversed(markers)}
    end = len(text)
    for marker in reversed(markers):
        start, opening = marker.start(), marker[0].replace("/", "").replace("_end", "_start")
        is_quotation = opening != marker[0] and 0 <= first_starts.get(opening, -1) < start
        if is_quotation or text[start - 1 : start] in {" ", *_QUOTES} or text[marker.end() : end].strip():
            break  # it is part of a quotation, is mentioned, or is not at the end
        end = start
    return text if end == len(text) else text[:end].rstrip()

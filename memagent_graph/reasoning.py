"""Removes reasoning from a completion, and remnants of the chat template around the reply.

Reasoning is between markers that depend on the model family: tags such as <think>, brackets, symbols, special tokens,
or channels. A block is removed only if its position shows that it is reasoning: at the beginning, on separate lines, or
as the end of a block that began in the prompt. A text that only mentions a marker stays unchanged.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
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
_MARKERS: Final = [
    re.compile(
        f"{opening.replace('{name}', f'(?P<opening>{names})')}|{closing.replace('{name}', f'(?P<closing>{names})')}",
        re.IGNORECASE,
    )
    for names, opening, closing in _FAMILIES
]
"""The markers of each family."""
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
_SPACE: Final = re.compile(r"\s*")
_NOT_SPACE: Final = re.compile(r"\S")
_WORDS: Final = re.compile(r"\s*[^\s<\[]")
_LINE_END: Final = re.compile(r"[^\S\n]*(?:\n|\Z)")
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
    find_ends = cache(partial(_find_block_ends, text))
    position = 0
    while opening := _OPENING_MARKER.match(text, _SPACE.match(text, position).end()):  # type: ignore[union-attr]
        closing_span = find_ends(opening.lastindex).get(opening.start())
        if closing_span is None:
            return text[position:] if _PREDICATE.match(text, opening.end()) else ""
        if _is_mention(text, opening.end(), *closing_span):
            break
        position = closing_span[1]
    return text[position:]


def _remove_line_blocks(text: str) -> str:
    """Return the text without blocks of reasoning on separate lines. An open block extends to the text's end."""
    find_ends = cache(partial(_find_block_ends, text))
    replies, block_end = list[str](), 0
    for line in _find_unfenced(_LINE_BEGIN, text):
        start = line.end()
        if start < block_end or (opening := _OPENING_MARKER.match(text, start)) is None:
            continue
        closing_span = find_ends(opening.lastindex).get(start)
        if closing_span is None:
            if _LINE_END.match(text, opening.end()) and _WORDS.match(text, opening.end()):
                return "".join([*replies, text[block_end:start]])
        elif _NOT_SPACE.search(text, opening.end(), closing_span[0]) and _LINE_END.match(text, closing_span[1]):
            replies.append(text[block_end:start])
            block_end = closing_span[1] + 1
    return "".join([*replies, text[block_end:]])


def _find_unfenced(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield the matches that do not begin in a fenced block of code."""
    fences = _FENCE.finditer(text)
    fence = next(fences, None)
    for match in pattern.finditer(text):
        while fence and fence.end() <= match.start():
            fence = next(fences, None)
        if fence is None or match.start() < fence.start():
            yield match


def _find_block_ends(text: str, family: int) -> dict[int, tuple[int, int]]:
    """Return the span of the closing marker, by the start of the opening one, of each block of a family that ends."""
    open_starts: defaultdict[str, list[int]] = defaultdict(list)
    spans = {}
    for marker in _MARKERS[family - 1].finditer(text):
        if name := marker["opening"]:
            open_starts[name.lower()].append(marker.start())
            continue
        # A closing marker without a name closes a block of each name.
        for starts in (open_starts[marker["closing"].lower()],) if marker["closing"] else open_starts.values():
            if starts:
                spans[starts.pop()] = marker.span()
    return spans


def _is_mention(text: str, start: int, end: int, closing_end: int) -> bool:
    """Return whether two markers are mentioned in a sentence, as in "<think> and </think> are tags"."""
    inside = text[start:end]
    is_short = "\n" not in inside and len(inside.split()) <= 4 and not inside.strip(" .…,")[:1].isupper()
    is_separate = not inside.strip(" .…,") or (inside[:1] == " " == inside[-1:])
    return is_short and is_separate and bool(_SENTENCE_CONTINUATION.match(text, closing_end))


def _find_open_block_end(text: str) -> int:
    """Return the end of a block of reasoning that began in the prompt; 0 if there is none."""
    block_end = position = 0
    has_opening = False
    for closing in _find_unfenced(_CLOSING_MARKER, text):
        start, end = closing.span()
        segment = text[position:start]
        words = segment.rstrip()
        space = segment[len(words) :]
        has_opening = (has_opening and "\n" not in words) or bool(_OPENING_MARKER.search(words, words.rfind("\n") + 1))
        is_quoted = segment[-1:] in set(_QUOTES) or _SENTENCE_CONTINUATION.match(text, end)
        if not is_quoted and not has_opening:
            begins_line = "\n" in space or not (position or words)
            ends_word = segment[-1:].isalnum() and (segment[-1:].isascii() or _LINE_END.match(text, end))
            if begins_line or words[-1:] in set(_SENTENCE_ENDS) or ends_word:
                block_end = end
        has_opening = has_opening and "\n" not in space
        position = end
    return block_end


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

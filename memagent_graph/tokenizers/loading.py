"""Loads tokenizers, which count tokens, and the characters that the first n tokens cover.

`load_tokenizer` accepts `embedded`, a tiktoken encoding or model name, a file or folder with a tokenizer.json, or a hub
id. tiktoken handles OpenAI's encodings and most byte-level BPE, the `tokenizers` library the rest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import tiktoken
import tiktoken.model
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from memagent_graph.errors import TokenizerError, load_extra
from memagent_graph.plain_text import did_you_mean, make_one_line, replace_lone_surrogates
from memagent_graph.storage.bounded_files import read_json_file
from memagent_graph.tokenizers.byte_level import make_encoding
from memagent_graph.tokenizers.pieces import cut_pieces

EMBEDDED = "embedded"
_EMBEDDED_FOLDER = Path(__file__).parents[1] / EMBEDDED
_MAX_RULES = 256
"""The maximum number of rules in a tokenizer.json, which usually has 4 to 20."""
_MAX_GROWTH = 100
"""The maximum factor by which the rules may lengthen a text."""
_MAX_WORD_CHARACTERS = 1000
"""The maximum `max_input_chars_per_word`, usually 100: WordPiece takes quadratic time in the length of a word."""
_MAX_ADDED_TOKENS = 50_000
_compose = functools.partial(unicodedata.normalize, "NFC")


class TextTokens(Protocol):
    """The tokens of a text; `len` is their number."""

    def __len__(self) -> int: ...

    def prefix_chars(self, n: int) -> int | None:
        """Return the number of characters that the first `n` tokens cover.

        None if token `n` ends inside a character. All tokens together cover the whole text.
        """
        ...


class Tokenizer(Protocol):
    """The protocol that the chunker, the budget and the prompts use.

    Every text is ordinary text: `<|im_end|>` has the tokens of these characters, never the control token. Any str is
    accepted. Lone surrogates have the tokens of U+FFFD.
    """

    @property
    def name(self) -> str:
        """The argument with which `load_tokenizer` loads the same tokenizer."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of vocabulary and rules. It does not depend on how the tokenizer was loaded."""
        ...

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts that a chat template treats as control tokens, such as `<|im_end|>`."""
        ...

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`."""
        ...

    def tokenize(self, text: str) -> TextTokens:
        """Return the tokens of `text` with their positions."""
        ...


class TiktokenTokenizer:
    """A tiktoken encoding as a `Tokenizer`."""

    def __init__(self, encoding: tiktoken.Encoding, *, name: str = "") -> None:
        self._encoding = encoding
        self.name = name or encoding.name
        self.special_tokens = frozenset(encoding.special_tokens_set)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of ranks, pattern and special tokens."""
        encoding = self._encoding
        digest = hashlib.sha256(f"byte-level-bpe {encoding._pat_str!r}\n".encode())
        for token, rank in sorted(encoding._mergeable_ranks.items()):
            digest.update(b"%d:%b;%d\n" % (len(token), token, rank))
        digest.update(json.dumps(sorted(encoding._special_tokens.items())).encode())
        return digest.hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Long texts are encoded in pieces."""
        return [token for piece in cut_pieces(replace_lone_surrogates(text)) for token in self._encode_piece(piece)]

    def _encode_piece(self, piece: str) -> list[int]:
        try:
            return self._encoding.encode_ordinary(piece)
        except BaseException as error:
            # tiktoken's Rust code panics (a BaseException) if a pattern backtracks too far.
            if type(error).__name__ != "PanicException" or len(piece) < 2:
                raise
        middle = len(piece) // 2
        return self._encode_piece(piece[:middle]) + self._encode_piece(piece[middle:])

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`."""
        return len(self.encode(text))

    def tokenize(self, text: str) -> TextTokens:
        """Return the tokens of `text` with their positions."""
        return _TiktokenText(text, self.encode(text), self._encoding)


@dataclass(frozen=True, slots=True)
class _TiktokenText:
    text: str
    ids: list[int]
    encoding: tiktoken.Encoding

    def __len__(self) -> int:
        return len(self.ids)

    def prefix_chars(self, n: int) -> int | None:
        """Return the number of characters that the first `n` tokens cover; None inside a character."""
        if n >= len(self.ids):
            return len(self.text)
        from_start = n <= len(self.ids) // 2
        try:
            characters = len(self.encoding.decode_bytes(self.ids[:n] if from_start else self.ids[n:]).decode())
        except UnicodeDecodeError:
            return None
        return characters if from_start else len(self.text) - characters


class HFTokenizer:
    """A tokenizer.json of any kind.

    The `tokenizers` library is loaded only if tiktoken cannot give the same ids.

    Args:
        specification: the parsed tokenizer.json.
        name: the argument with which `load_tokenizer` loads it again.

    Raises:
        TokenizerError: the library refuses the file, or texts could take minutes or gigabytes with its rules.
    """

    def __init__(self, specification: dict[str, Any], *, name: str) -> None:
        self.name = name
        self._specification = specification
        with _translate_library_errors(name):
            _require_bounds(specification)
            self.special_tokens = find_control_tokens(specification)
            added_tokens = [{**token, "special": True} for token in specification.get("added_tokens") or []]
            overrides = {"added_tokens": added_tokens, "truncation": None, "padding": None, "post_processor": None}
            self._rules = {**specification, **overrides}
            encoding = make_encoding(self._rules)
        self._fast = TiktokenTokenizer(encoding, name=name) if encoding is not None else None
        self._composes = self._rules.get("normalizer") is not None
        if self._fast is None:
            _ = self._backend
        # A prompt is counted before it is sent, and again if the server does not report its tokens.
        self._count_cached = functools.lru_cache(maxsize=8)(self._count)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the specification, because the library's pickle loses a setting."""
        return functools.partial(HFTokenizer, name=self.name), (self._specification,)

    @functools.cached_property
    def _backend(self) -> Backend:
        with _translate_library_errors(self.name):
            backend = Backend.from_str(json.dumps(self._rules))
        backend.encode_special_tokens = True
        return backend

    def _choose_fast(self, text: str) -> TiktokenTokenizer | None:
        """Return the tiktoken tokenizer if it gives the same tokens for `text`, or None."""
        return self._fast if not self._composes or unicodedata.is_normalized("NFC", text) else None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of model, normalizer, pre-tokenizer and added tokens."""
        rules = {key: self._rules.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
        merges = (rules["model"] or {}).get("merges")
        if merges and isinstance(merges[0], str):
            rules["model"] = {**self._rules["model"], "merges": [merge.split(" ") for merge in merges]}
        text = json.dumps(rules, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def tokenize(self, text: str) -> TextTokens:
        """Return the tokens of `text` with their positions."""
        if (fast := self._choose_fast(text)) is not None:
            return fast.tokenize(text)
        pieces, first_tokens, start = list[tuple[int, Encoding]](), [0], 0
        for piece in cut_pieces(replace_lone_surrogates(text)):
            with _translate_library_errors(self.name):
                encoding = self._backend.encode(piece, add_special_tokens=False)
            pieces.append((start, encoding))
            first_tokens.append(first_tokens[-1] + len(encoding))
            start += len(piece)
        return _HFText(text, pieces, first_tokens, composes=self._composes)

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`."""
        return self._count_cached(text)

    def _count(self, text: str) -> int:
        fast = self._choose_fast(text)  # counts without positions, which takes less than half the time
        return len(self.tokenize(text)) if fast is None else fast.count(text)


@dataclass(frozen=True, slots=True)
class _HFText:
    text: str
    pieces: list[tuple[int, Encoding]]
    """The pieces of the text: the start of each, and the library's encoding."""
    first_tokens: list[int]
    """The number of tokens before each piece, and before the end."""
    composes: bool
    """Whether a normalizer may have changed the text."""

    def __len__(self) -> int:
        return self.first_tokens[-1]

    def _find_token_chars(self, index: int) -> tuple[int, int]:
        """Return the start and the end of a token, in characters of the text."""
        piece = bisect_right(self.first_tokens, index) - 1
        piece_start, encoding = self.pieces[piece]
        # It is None only for tokens of a post-processor, which was removed.
        start, end = cast("tuple[int, int]", encoding.token_to_chars(index - self.first_tokens[piece]))
        return piece_start + start, piece_start + end

    def prefix_chars(self, n: int) -> int | None:
        """Return the number of characters that the first `n` tokens cover; None inside a character."""
        if n >= len(self):
            return len(self.text)
        if n <= 0:
            return 0
        (start, end), (next_start, next_end) = self._find_token_chars(n - 1), self._find_token_chars(n)
        if next_start < end:
            return None
        if not self.composes or self.text[start:next_end].isascii():
            return end
        # The library reports only the first code point of a composed character. Its marks are in the gap after it.
        cut = end if self.text[end:next_start].isspace() else next_start
        separately_composed = _compose(self.text[start:cut]) + _compose(self.text[cut:next_end])
        return cut if separately_composed == _compose(self.text[start:next_end]) else None


@contextlib.contextmanager
def _translate_library_errors(name: str) -> Iterator[None]:
    """Raise `TokenizerError` for any exception of the library, also for panics of its Rust code (`BaseException`s)."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(
            f"the tokenizer.json of {name} cannot be used: {make_one_line(str(error), 300)}",
            hint="It may be damaged, or newer than the installed tokenizers library. Choose another with --tokenizer.",
        ) from error


def _require_bounds(specification: dict[str, Any]) -> None:
    """Raise `ValueError` for rules that could take minutes or gigabytes for a text."""
    nodes = [specification.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    for node in nodes:  # the loop also visits the nested nodes that it appends
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    rules = [node for node in nodes if isinstance(node, dict)]
    contents = [rule.get("content") or rule.get("prepend") or "" for rule in rules]
    model = specification["model"]
    contents += [model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")]
    # A regular expression may match before each character, which doubles the text.
    expression_count = sum("Regex" in (rule.get("pattern") or ()) for rule in rules if rule.get("content"))
    if len(rules) > _MAX_RULES or len(specification.get("added_tokens") or ()) > _MAX_ADDED_TOKENS:
        raise ValueError(f"it has more than {_MAX_RULES} rules or {_MAX_ADDED_TOKENS:,} added tokens")
    if math.prod(max(1, len(content)) for content in contents) << expression_count > _MAX_GROWTH:
        raise ValueError(f"it makes texts more than {_MAX_GROWTH} times as long")
    if (model.get("max_input_chars_per_word") or 0) > _MAX_WORD_CHARACTERS:
        raise ValueError(f"it looks for pieces in words of more than {_MAX_WORD_CHARACTERS:,} characters")


def find_control_tokens(specification: dict[str, Any]) -> frozenset[str]:
    """Return the added tokens of a tokenizer.json that a chat template may use as control tokens."""
    return frozenset(
        token["content"]
        for token in specification.get("added_tokens") or []
        if token["content"].strip()
        and (token.get("special") or re.fullmatch(r"<\|.*\|>|</?[a-z_]+>", token["content"], re.DOTALL))
    )


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load a tokenizer by name, path or hub id.

    Args:
        spec: `embedded`; a tiktoken encoding or model name; a file, or a folder with a tokenizer.json; a hub id. A
            `Path` is always a file or folder.

    Raises:
        TokenizerError: the name is unknown, or the tokenizer cannot be loaded.
        MissingExtraError: the extra `hub` is not installed.
    """
    if spec in {EMBEDDED, _EMBEDDED_FOLDER}:
        return _load_embedded()
    if isinstance(spec, str) and (encoding := _find_tiktoken_encoding(spec)) is not None:
        return TiktokenTokenizer(encoding)
    path = Path(os.path.expanduser(spec))  # noqa: PTH111  unlike Path's, it leaves unknown users as they are
    if os.path.exists(path):  # noqa: PTH110  False for a name that is too long for a path
        return _load_file(path, str(spec))
    if isinstance(spec, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)", spec):
        return _load_file(_fetch_from_hub(spec), spec)
    names = [EMBEDDED, *tiktoken.list_encoding_names(), *tiktoken.model.MODEL_TO_ENCODING]
    accepted = (
        f"Use embedded, a tiktoken encoding or model name ({', '.join(tiktoken.list_encoding_names())}), "
        "a file or folder with a tokenizer.json, or a hub id such as Qwen/Qwen2.5-7B-Instruct."
    )
    raise TokenizerError(f"there is no tokenizer {str(spec)!r}", hint=did_you_mean(str(spec), names, accepted))


@functools.cache
def _load_embedded() -> Tokenizer:
    """Return the embedded policy's tokenizer, cached because it takes as long to parse as a few chunks to read."""
    return _load_file(_EMBEDDED_FOLDER, EMBEDDED)


def _find_tiktoken_encoding(name: str) -> tiktoken.Encoding | None:
    """Return the encoding with this name or of the model with this name; None if there is neither."""
    if name not in tiktoken.list_encoding_names():
        try:
            name = tiktoken.model.encoding_name_for_model(name)
        except KeyError:
            return None
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"the tiktoken encoding {name} is not on this machine and could not be fetched ({type(error).__name__})",
            hint="Set TIKTOKEN_CACHE_DIR to a folder that has it, or use a local tokenizer: --tokenizer embedded, or "
            "the path of a tokenizer.json.",
        ) from error


def _fetch_from_hub(repository: str) -> Path:
    hub = load_extra("huggingface_hub", "hub", f"the tokenizer of {repository}")
    try:
        cached_path = hub.try_to_load_from_cache(repository, "tokenizer.json")
        return Path(cached_path if isinstance(cached_path, str) else hub.hf_hub_download(repository, "tokenizer.json"))
    except hub.errors.LocalEntryNotFoundError as error:
        raise TokenizerError(
            f"the tokenizer of {repository} is not in the local hub cache, and the hub cannot be reached",
            hint="Download it on another machine (hf download, then copy the cache, HF_HOME), or pass the path of "
            "its tokenizer.json. To download it now, unset HF_HUB_OFFLINE.",
        ) from error
    except hub.errors.EntryNotFoundError as error:
        raise TokenizerError(f"the hub repository {repository} has no tokenizer.json", hint=_CONVERT_HINT) from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise TokenizerError(
            f"the tokenizer of {repository} cannot be downloaded from the hub: {reason}",
            hint="Check the id's spelling; private and gated models need a login (hf auth login).",
        ) from error


_CONVERT_HINT = (
    "Write one with transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER), then pass the folder."
)


def _load_file(path: Path, name: str) -> Tokenizer:
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(f"the folder {path.parent} has no tokenizer.json", hint=_CONVERT_HINT)
    try:
        specification = read_json_file(path)
        if not isinstance(specification, dict) or not isinstance(specification.get("model"), dict):
            raise ValueError("it has no model")
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{path} is not a readable tokenizer.json: {error}",
            hint="Pass a tokenizer.json as the tokenizers library writes it, or a folder that contains one.",
        ) from error
    return HFTokenizer(specification, name=name)

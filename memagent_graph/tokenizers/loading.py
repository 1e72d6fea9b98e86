"""Tokenizers: text to ids and back, and how many characters the first n tokens cover.

`load_tokenizer` accepts `embedded`, a tiktoken encoding or model name, a file or folder with
a tokenizer.json, a hub id. Byte-level BPE runs on tiktoken, everything else on the `tokenizers` library (extra `hub`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import re
import unicodedata
from pathlib import Path
from typing import Any, Protocol

import tiktoken
import tiktoken.model

from memagent_graph.errors import MissingExtraError, TokenizerError
from memagent_graph.near_names import did_you_mean
from memagent_graph.tokenizers.byte_level_bpe import ByteLevelBPE, convert, differs_from
from memagent_graph.tokenizers.pieces import LARGEST_PIECE_BYTES, pieces

EMBEDDED = "embedded"
_DIRECT_CHARACTERS = LARGEST_PIECE_BYTES // 4
_SURROGATES = re.compile("[\ud800-\udfff]")


class Tokenizer(Protocol):
    """The protocol that the chunker, the budget and the prompts use.

    `encode` treats every text as ordinary: the text `<|im_end|>` becomes the tokens of those characters, never
    the control token. It accepts any str; lone surrogates are encoded like U+FFFD.
    """

    @property
    def name(self) -> str:
        """The argument of `load_tokenizer` that loads it again."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of vocabulary and rules: equal for the same tokenizer loaded another way."""
        ...

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts that a chat template treats as control tokens, such as `<|im_end|>`."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without any special token."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; incomplete characters become U+FFFD. Raises TokenizerError for unknown ids."""
        ...

    def count(self, text: str) -> int:
        """How many tokens `text` has."""
        ...

    def prefix_chars(self, text: str, ids: list[int], n: int) -> int | None:
        """How many characters of `text` the first `n` of its `ids` cover.

        None if token `n` ends inside a character. All the ids cover all the text.
        """
        ...


def _without_surrogates(text: str) -> str:
    """Replace code points that UTF-8 cannot encode, one for one."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text)
    return text


class TiktokenTokenizer:
    """A tiktoken encoding as a `Tokenizer`.

    Args:
        encoding: the encoding.
        name: the argument of `load_tokenizer` that loads it again; the encoding's own name if left out.
        nfc: whether the tokenizer normalizes text to Unicode's form C first.
        special_tokens: control tokens; the encoding's special tokens if left out.
    """

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        *,
        name: str | None = None,
        nfc: bool = False,
        special_tokens: frozenset[str] | None = None,
    ) -> None:
        self._encoding = encoding
        self._nfc = nfc
        self.name = name or encoding.name
        self.special_tokens = frozenset(encoding.special_tokens_set) if special_tokens is None else special_tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of ranks, pattern, normal form and special tokens."""
        encoding = self._encoding
        digest = hashlib.sha256(f"byte-level-bpe nfc={self._nfc} {encoding._pat_str!r}\n".encode())
        for token, rank in sorted(encoding._mergeable_ranks.items()):
            digest.update(b"%d:%b;%d\n" % (len(token), token, rank))
        digest.update(json.dumps(sorted(encoding._special_tokens.items())).encode())
        return digest.hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; long texts go to tiktoken in pieces."""
        text = self._normalized(_without_surrogates(text))
        if len(text) <= _DIRECT_CHARACTERS:
            return self._encode_piece(text)
        return [token for piece in pieces(text) for token in self._encode_piece(piece)]

    def _encode_piece(self, piece: str) -> list[int]:
        try:
            return self._encoding.encode_ordinary(piece)
        except BaseException as error:
            # tiktoken's Rust code panics with a BaseException if a pattern backtracks too far.
            if type(error).__name__ != "PanicException" or len(piece) < 2:
                raise
        middle = len(piece) // 2
        return self._encode_piece(piece[:middle]) + self._encode_piece(piece[middle:])

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`."""
        try:
            return self._encoding.decode(ids, errors="replace")
        except (KeyError, OverflowError) as error:
            raise TokenizerError(f"the tokenizer {self.name} has no token {error}") from error

    def count(self, text: str) -> int:
        """How many tokens `text` has."""
        return len(self.encode(text))

    def prefix_chars(self, text: str, ids: list[int], n: int) -> int | None:
        """How many characters of `text` the first `n` of its `ids` cover, None inside a character."""
        if n >= len(ids):
            return len(text)
        from_start = n <= len(ids) // 2
        try:
            characters = len(self._encoding.decode_bytes(ids[:n] if from_start else ids[n:]).decode())
        except UnicodeDecodeError:
            return None
        normal = self._normalized(text)
        if not from_start:
            characters = len(normal) - characters
        return characters if normal == text else _length_before_nfc(text, characters)

    def _normalized(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self._nfc else text


def _length_before_nfc(text: str, characters: int) -> int | None:
    """How many characters of `text` became the first `characters` of its normal form C, if there is such a number."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high) // 2
        if len(unicodedata.normalize("NFC", text[:middle])) < characters:
            low = middle + 1
        else:
            high = middle
    # Combining marks belong to the character before them: continue while they do not add a character.
    while low < len(text) and len(unicodedata.normalize("NFC", text[: low + 1])) == characters:
        low += 1
    before, after = (unicodedata.normalize("NFC", part) for part in (text[:low], text[low:]))
    whole = unicodedata.normalize("NFC", text)
    return low if len(before) == characters and before + after == whole else None


class HFTokenizer:
    """A tokenizer.json of any kind, on the `tokenizers` library.

    Args:
        specification: the parsed tokenizer.json.
        name: the argument of `load_tokenizer` that loads it again.

    Raises:
        MissingExtraError: the library is not installed.
        TokenizerError: the library refuses the file.
    """

    def __init__(self, specification: dict[str, Any], *, name: str) -> None:
        try:
            from tokenizers import Tokenizer as Backend  # noqa: PLC0415 - optional
        except ImportError as error:
            raise MissingExtraError("hub", "a tokenizer.json") from error
        self.name = name
        self._specification = specification
        self.special_tokens = control_tokens(specification)
        added = [{**token, "special": True} for token in specification.get("added_tokens") or []]
        rules = {**specification, "added_tokens": added, "truncation": None, "padding": None, "post_processor": None}
        self._rules = rules
        try:
            self._backend = Backend.from_str(json.dumps(rules))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"the tokenizer.json of {name} cannot be read: {error}",
                hint="It may be damaged, or newer than the installed tokenizers library.",
            ) from error
        self._backend.encode_special_tokens = True
        self._encoded = functools.lru_cache(maxsize=8)(self._encode)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as its specification, because the cache of encodings cannot be sent to another process."""
        return functools.partial(HFTokenizer, name=self.name), (self._specification,)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of model, normalizer, pre-tokenizer and added tokens."""
        rules = {key: self._rules.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
        merges = (rules["model"] or {}).get("merges")
        if merges and isinstance(merges[0], str):
            rules["model"] = {**self._rules["model"], "merges": [merge.split(" ") for merge in merges]}
        text = json.dumps(rules, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `text`, and the first and last character of each."""
        parts = [text] if len(text) <= _DIRECT_CHARACTERS else pieces(text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        base = 0
        for part in parts:
            encoding = self._backend.encode(part, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(base + start, base + end) for start, end in encoding.offsets]
            base += len(part)
        return ids, offsets

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        return list(self._encoded(_without_surrogates(text))[0])

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`."""
        try:
            return self._backend.decode(ids, skip_special_tokens=False)
        except OverflowError as error:
            raise TokenizerError(f"the tokenizer {self.name} has no such token: {error}") from error

    def count(self, text: str) -> int:
        """How many tokens `text` has."""
        return len(self._encoded(_without_surrogates(text))[0])

    def prefix_chars(self, text: str, ids: list[int], n: int) -> int | None:
        """How many characters of `text` the first `n` of its `ids` cover, None inside a character."""
        if n >= len(ids):
            return len(text)
        if n <= 0:
            return 0
        offsets = self._encoded(_without_surrogates(text))[1]
        end, following = offsets[n - 1][1], offsets[n][0]
        return end if following >= end else None


def control_tokens(specification: dict[str, Any]) -> frozenset[str]:
    """The added tokens of a tokenizer.json that a chat template could use as control tokens."""
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
        TokenizerError: there is none with that name, or it cannot be loaded here.
        MissingExtraError: it needs the extra `hub`.
    """
    if isinstance(spec, str):
        if spec == EMBEDDED:
            return _embedded()
        encoding = _tiktoken_name(spec)
        if encoding is not None:
            return TiktokenTokenizer(_tiktoken_encoding(encoding), name=encoding)
    path = Path(spec).expanduser()
    if path.exists():
        return _from_file(path, str(spec))
    if isinstance(spec, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and not spec.startswith("."):
        return _from_file(_download(spec), spec)
    names = [EMBEDDED, *tiktoken.list_encoding_names(), *tiktoken.model.MODEL_TO_ENCODING]
    accepted = (
        f"Accepted are: embedded, a tiktoken encoding or model name ({', '.join(tiktoken.list_encoding_names())}), "
        "a file or folder with a tokenizer.json, a hub id such as Qwen/Qwen2.5-7B-Instruct."
    )
    raise TokenizerError(f"there is no tokenizer {str(spec)!r}", hint=did_you_mean(str(spec), names, accepted))


def _embedded() -> Tokenizer:
    """The embedded policy's own tokenizer; a unit test checks that its conversion is exact."""
    source = importlib.resources.files("memagent_graph") / "embedded" / "tokenizer.json"
    try:
        specification = json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TokenizerError(
            "this installation has no embedded tokenizer", hint="Install memagent-graph again from its wheel."
        ) from error
    converted = convert(specification)
    if converted is None:
        raise TokenizerError("the embedded tokenizer.json is not byte-level BPE")
    return _as_tiktoken(converted, specification, EMBEDDED)


def _as_tiktoken(converted: ByteLevelBPE, specification: dict[str, Any], name: str) -> TiktokenTokenizer:
    return TiktokenTokenizer(
        converted.encoding(name), name=name, nfc=converted.nfc, special_tokens=control_tokens(specification)
    )


def _tiktoken_name(spec: str) -> str | None:
    if spec in tiktoken.list_encoding_names():
        return spec
    try:
        return tiktoken.model.encoding_name_for_model(spec)
    except KeyError:
        return None


def _tiktoken_encoding(name: str) -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"the tiktoken encoding {name} is not on this machine and could not be fetched ({type(error).__name__})",
            hint="Set TIKTOKEN_CACHE_DIR to a folder that has it, or name a local one: --tokenizer embedded, or the "
            "path of a tokenizer.json.",
        ) from error


def _download(repository: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache  # noqa: PLC0415 - optional
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError  # noqa: PLC0415 - optional
    except ImportError as error:
        raise MissingExtraError("hub", f"the tokenizer of {repository}") from error
    try:
        kept = try_to_load_from_cache(repository, "tokenizer.json")
        return Path(kept if isinstance(kept, str) else hf_hub_download(repository, "tokenizer.json"))
    except LocalEntryNotFoundError as error:
        raise TokenizerError(
            f"the tokenizer of {repository} is not in the local hub cache, and the hub cannot be reached",
            hint="Download it on another machine (hf download, then copy the cache, HF_HOME), or pass the path of "
            "its tokenizer.json. To download it now, unset HF_HUB_OFFLINE.",
        ) from error
    except EntryNotFoundError as error:
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


def _from_file(path: Path, name: str) -> Tokenizer:
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(f"the folder {path.parent} has no tokenizer.json", hint=_CONVERT_HINT)
    try:
        specification = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(specification, dict) or not isinstance(specification.get("model"), dict):
            raise ValueError("it has no model")
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{path} is not a readable tokenizer.json: {error}",
            hint="Pass a tokenizer.json as the tokenizers library writes it, or a folder that contains one.",
        ) from error
    fallback = HFTokenizer(specification, name=name)
    try:
        converted = convert(specification)
        if converted is None:
            return fallback
        fast = _as_tiktoken(converted, specification, name)
    except (KeyError, TypeError, ValueError):
        return fallback
    return fallback if differs_from(fast.encode, fallback.encode, list(converted.ranks)) is not None else fast

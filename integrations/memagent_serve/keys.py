"""Loads API keys from a file or the environment. Each key has a name, which owns runs and files, and limits."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from memagent_graph.errors import MemAgentError

_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_MIN_KEY_LENGTH: Final = 16


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of runs and files, and the limits of each request; None for the server's limits."""

    name: str
    max_tokens: int | None = None
    """Prompt and completion tokens of the reading for one request. Sent again, it continues with the full limit."""
    max_bytes: int | None = None
    """Bytes of one request, and of all uploaded files together."""
    max_seconds: float | None = None
    """Seconds that the reading for one request may take."""


LOCAL: Final = Owner("local")
"""The owner of all requests, if the server has no keys."""


class Keys:
    """The keys that a server accepts, stored as digests.

    Args:
        keys: each owner with their key; none means that everyone is `LOCAL`.

    Raises:
        MemAgentError: two owners have the same name or key, a name is not allowed, or a key is too short.
    """

    def __init__(self, keys: Iterable[tuple[Owner, str]] = ()) -> None:
        self._owners: dict[bytes, Owner] = {}
        names: set[str] = set()
        for owner, key in keys:
            if not _NAME_PATTERN.fullmatch(owner.name) or owner.name in names:
                raise MemAgentError(
                    f"the name of a key must be unique and plain, got {owner.name!r}",
                    hint="Use at most 64 letters, digits, hyphens, underscores and dots; a dot cannot be the first.",
                )
            if len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                raise MemAgentError(
                    f"the key of {owner.name} must have at least {_MIN_KEY_LENGTH} ASCII characters without spaces",
                    hint="Make a key with `openssl rand -hex 24`.",
                )
            digest = hash_secret(key)
            if digest in self._owners:
                raise MemAgentError(
                    f"{owner.name} and {self._owners[digest].name} have the same key",
                    hint="Use a different key for each name.",
                )
            names.add(owner.name)
            self._owners[digest] = owner

    def __len__(self) -> int:
        return len(self._owners)

    @classmethod
    def load(cls, file: Path | None, key_list: str = "") -> Keys:
        """Load the keys in a TOML file, and those in a list such as `alice:KEY,bob:KEY`.

        The file has a line `alice = "KEY"` for each key, or a table `[alice]` with `key` and the limits of `Owner`.

        Raises:
            MemAgentError: the file cannot be read or has an invalid entry.
        """
        pairs: list[tuple[Owner, str]] = []
        for entry in filter(None, (entry.strip() for entry in key_list.split(","))):
            name, colon, key = entry.partition(":")
            if not colon:
                raise MemAgentError("the list of keys has an entry without a name", hint="Write it as name:key,...")
            pairs.append((Owner(name.strip()), key.strip()))
        if file is not None:
            try:
                entries = tomllib.loads(file.read_text(encoding="utf-8-sig"))
            except (OSError, ValueError, RecursionError) as error:
                raise MemAgentError(f"the keys file {file} cannot be read: {error}", hint=_EXAMPLE) from error
            pairs += [_parse_entry(file, name, value) for name, value in entries.items()]
        if not pairs and (file or key_list):  # without keys, the server would be open to everyone
            raise MemAgentError(f"{f'the keys file {file}' if file else 'the list of keys'} has no keys", hint=_EXAMPLE)
        return cls(pairs)

    def find_owner(self, authorization: str | None) -> Owner | None:
        """Return the owner of the key in an Authorization header; None if the key is unknown."""
        if not self._owners:
            return LOCAL
        scheme, _, key = (authorization or "").partition(" ")
        return self._owners.get(hash_secret(key.strip())) if scheme.lower() == "bearer" else None


_EXAMPLE: Final = 'It is TOML: a line alice = "KEY" for each key.'


def _parse_entry(file: Path, name: str, value: Any) -> tuple[Owner, str]:
    table: Mapping[str, Any] = value if isinstance(value, dict) else {"key": value}
    limits = {limit: number for limit, number in table.items() if limit != "key"}
    limit_names = [field.name for field in fields(Owner) if field.name != "name"]
    are_positive = all(type(number) in {int, float} and number > 0 for number in limits.values())
    if not isinstance(table.get("key"), str) or not limits.keys() <= set(limit_names) or not are_positive:
        raise MemAgentError(
            f"the keys file {file} has an invalid entry for {name}",
            hint=f"{_EXAMPLE} A table has key and, each a positive number, {', '.join(sorted(limit_names))}.",
        )
    return Owner(name, **limits), table["key"]


def hash_secret(secret: str) -> bytes:
    """Return the digest under which a secret is kept: the time to look it up reveals nothing about the secret."""
    return hashlib.sha256(secret.encode(errors="replace")).digest()

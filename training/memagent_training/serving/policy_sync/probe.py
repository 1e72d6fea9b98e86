"""Which weights a server answers with: log-probs of fixed prompts, compared with the trainer's own.

Two requests for each prompt, since one does not see what the other does. The log-probs of the prompt's own tokens are
those of the weights alone: for them vLLM reads nothing from its prefix cache. What it samples after the prompt rests
on the cache, so that a cache of older weights shows there, and only there. For that it must have seen the prompt
before: the probe is run before a swap, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from memagent_training.serving.policy_sync.served import SyncError
from memagent_training.serving.policy_sync.server_api import ServerAPI

_LENGTHS: Final = (40, 170, 300)
"""In tokens: within a block of the cache, beyond one of 128 (the default on CPUs), and over several of 32."""
_SAMPLED: Final = 8
_SEED: Final = 20
_HEARD: Final = 6.0
"""How many times the trainer's log-probs must have moved farther than server and trainer lie apart to tell by it."""
_MISSED: Final = 0.4
"""The part of that move that the server's may miss."""
_FINEST: Final = 1e-6
"""What float32 resolves."""


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """A prompt's first token, and all that is scored after it: a `TokenRow`."""

    prompt_ids_P: tuple[int, ...]
    completion_ids_T: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProbeLogProbs:
    """Log-probs of the probe's tokens, over all prompts."""

    given: tuple[float, ...]
    """Of the prompts' own tokens: comparable between versions."""
    sampled: tuple[float, ...]
    """Of what the server wrote after them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server said to the probe."""

    rows: tuple[ProbeRow, ...]
    logprobs: ProbeLogProbs
    cached_tokens: int
    """How many prompt tokens it took from its prefix cache, where it says so."""

    def arranged(self, logprobs: Sequence[Sequence[float]]) -> ProbeLogProbs:
        """Another's log-probs of the same rows, in the same order."""
        sampled = len(self.logprobs.sampled) // len(self.rows)
        return ProbeLogProbs(
            tuple(value for row in logprobs for value in row[:-sampled]),
            tuple(value for row in logprobs for value in row[-sampled:]),
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """What server and trainer said of the prompts with the weights before."""

    server: tuple[float, ...]
    trainer: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Prompts as token ids, of at least two tokens each, and how many tokens are sampled after each."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: int = _SAMPLED

    def __post_init__(self) -> None:
        if not self.prompts or min(map(len, self.prompts)) < 2 or self.tokens < 1:
            raise ValueError("a probe needs prompts of two tokens or more, and a token to sample")

    @classmethod
    def of_size(cls, vocabulary: int, window: int | None) -> Probe:
        """Random prompts, the same for all models of a size.

        Only of ids from the lower half: control tokens, and the marks of images, are the first or the last.
        """
        longest = _LENGTHS[-1] if window is None else max(2, min(_LENGTHS[-1], window - _SAMPLED))
        chosen = random.Random(_SEED)
        low, high = vocabulary // 8, max(vocabulary // 2, vocabulary // 8 + 1)
        lengths = sorted({min(length, longest) for length in _LENGTHS})
        return cls(tuple(tuple(chosen.randrange(low, high) for _ in range(length)) for length in lengths))

    async def read(self, api: ServerAPI, model: str) -> Reading:
        """Ask a server.

        Raises:
            SyncError: it does not answer, or not with log-probs.
        """
        rows: list[ProbeRow] = []
        given: list[float] = []
        sampled: list[float] = []
        cached = 0
        for prompt in self.prompts:
            # First what reads the cache: the other request would fill it.
            reply = await api.complete(self._body(model, prompt, self.tokens) | {"logprobs": 0, "seed": _SEED})
            scores = await api.complete(self._body(model, prompt, 1) | {"prompt_logprobs": 0})
            try:
                choice = reply["choices"][0]
                ids = tuple(int(each) for each in choice["token_ids"])
                values = [float(each) for each in choice["logprobs"]["token_logprobs"]]
                of_prompt = scores["choices"][0]["prompt_logprobs"][1:]
                own = [float(at[str(each)]["logprob"]) for at, each in zip(of_prompt, prompt[1:], strict=True)]
                if not len(ids) == len(values) == self.tokens:
                    raise ValueError(f"{len(values)} of {self.tokens} tokens")
            except (LookupError, TypeError, ValueError) as error:
                raise SyncError(
                    f"{api.root_url} gives no log-probs that can be compared: {error!r}",
                    hint="It must be a vLLM server whose completions have token ids and log-probs.",
                ) from error
            rows.append(ProbeRow(prompt[:1], (*prompt[1:], *ids)))
            given += own
            sampled += values
            cached += ((reply.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Reading(tuple(rows), ProbeLogProbs(tuple(given), tuple(sampled)), cached)

    @staticmethod
    def _body(model: str, prompt: tuple[int, ...], tokens: int) -> dict[str, Any]:
        # At temperature 1, and with nothing else, raw and processed log-probs are the same.
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        return {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **sampling,
        }


def largest_gap(one: ProbeLogProbs, other: ProbeLogProbs) -> float:
    """The largest difference; infinite where something is not a number."""
    pairs = [*zip(one.given, other.given, strict=True), *zip(one.sampled, other.sampled, strict=True)]
    return max(_distance(*pair) for pair in pairs)


def find_fault(
    server: ProbeLogProbs, trainer: ProbeLogProbs, *, tolerance: float, before: Standing | None = None
) -> str | None:
    """What shows that the server does not answer with the trainer's weights; None where nothing does.

    With small steps the weights of two versions may lie within the tolerance of each other. What was said before the
    swap then tells them apart, if the trainer's log-probs moved much farther than the two lay apart: the server's must
    have moved with them.
    """
    for seen, wanted, place in (
        (server.given, trainer.given, "of the probe's prompts"),
        (server.sampled, trainer.sampled, "through its prefix cache, though not without it"),
    ):
        worst = max(zip(seen, wanted, strict=True), key=lambda pair: _distance(*pair))
        if not _distance(*worst) <= tolerance:
            return (
                f"its log-probs {place} are not the trainer's: {worst[0]:.5f} against {worst[1]:.5f}, with a"
                f" tolerance of {tolerance:g}"
            )
    if before is None:
        return None
    apart = _rms(before.server, before.trainer)
    moved = _rms(trainer.given, before.trainer)
    seen_moves = [new - old for new, old in zip(server.given, before.server, strict=True)]
    wanted_moves = [new - old for new, old in zip(trainer.given, before.trainer, strict=True)]
    if moved > _HEARD * max(apart, _FINEST) and _rms(seen_moves, wanted_moves) > _MISSED * moved:
        return (
            f"its log-probs did not move with the trainer's, which moved by {moved:.2g} (root mean square), while the"
            f" server's moved by {_rms(server.given, before.server):.2g}: it still has old weights, or some of them"
        )
    return None


def _distance(one: float, other: float) -> float:
    difference = abs(one - other)
    return difference if math.isfinite(difference) else math.inf


def _rms(one: Sequence[float], other: Sequence[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / max(len(one), 1))

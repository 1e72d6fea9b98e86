"""The model's log-probs of a micro-batch's completion tokens, in any layout.

What transformers does with masks (5.23, checked by the tests):

- A 4-D mask is passed unchanged to SDPA in every layer; so is one of ours, which is not a matrix (`tree_attention.py`).
  Eager attention would add it to a matrix, and flash attention accepts none.
- Without a mask and without a cache, rows of one sequence are distinguished by positions that start again
  (masking_utils.find_packed_sequence_indices). Packed rows are forwarded like that if our mask cannot be used: with
  flash attention, and in layers with a window. Therefore `use_cache=False`: with the configs' default, True, rows would
  silently see each other. They also do in some models' eager attention (OPT, GPT-OSS), and in every recurrent layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memagent_training.forward.layouts import MicroBatch
from memagent_training.forward.tree_attention import NodeMask

LOGITS_CHUNK: Final = 1024
"""The number of tokens whose logits are in memory at once."""


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probs of each row's completion tokens, right-padded with zeros; differentiable."""

    logprobs_BT: Tensor
    entropies_BT: Tensor | None
    """Entropy of the distribution of each token, in nats."""


def score_completions(
    model: nn.Module,
    micro_batch: MicroBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> LogProbs:
    """Return the log-probs of every row's completion tokens, in float32 or better.

    Logits are computed only where a completion token is predicted, `LOGITS_CHUNK` tokens at a time, and computed again
    in the backward pass instead of being kept. To be part of the model's own forward (autocast and sharded wrappers
    work there), this replaces its output head, which returns log-probs instead of logits. A model that changes its
    logits afterwards (a soft cap, a scale) is detected, and all its logits are then computed.

    Args:
        model: a causal language model of transformers, wrapped or not.
        micro_batch: from `lay_out`.
        temperature: logits are divided by it.
        with_entropy: whether to return each distribution's entropy too.
        entropy_gradient: whether the entropy is differentiable too.

    Raises:
        ValueError: the model's attention does not support the layout.
    """
    core: Any = getattr(model, "module", model)
    inputs = {
        "input_ids": micro_batch.input_ids_SN,
        "position_ids": micro_batch.position_ids_SN,
        "attention_mask": _make_attention_mask(core, micro_batch),
        "use_cache": False,
    }
    scoring = _Scoring(micro_batch, temperature, with_entropy, entropy_gradient)
    scored_C2 = None if core in _MODELS_THAT_CHANGE_LOGITS else _score_in_forward(model, core, inputs, scoring)
    if scored_C2 is None:
        _MODELS_THAT_CHANGE_LOGITS.add(core)
        logits_CV = model(**inputs).logits.flatten(0, 1)[micro_batch.scored_indices_C]
        scored_C2 = scoring.score(logits_CV, micro_batch.scored_ids_C)
    # The last entry is for the missing tokens of shorter completions.
    by_row_BT2 = torch.cat([scored_C2, scored_C2.new_zeros(1, 2)])[micro_batch.score_index_BT]
    entropies_BT = by_row_BT2[..., 1] if with_entropy else None
    return LogProbs(by_row_BT2[..., 0], entropies_BT)


_MODELS_THAT_CHANGE_LOGITS: WeakSet[nn.Module] = WeakSet()
"""Models that change what their head returns, for example by a soft cap."""

_PROBE = 100.0
"""Passed through the model after the scores, to check whether it is unchanged; exact in bfloat16, above any cap."""


@dataclass(frozen=True, slots=True)
class _Scoring:
    """From hidden states or logits to the log-prob and the entropy of each scored token."""

    micro_batch: MicroBatch
    temperature: float
    with_entropy: bool
    entropy_gradient: bool

    def score_hidden(self, head: nn.Module, hidden_SND: Tensor) -> Tensor:
        """Return (C, 2), a chunk of logits at a time."""
        scored_CD = hidden_SND.flatten(0, 1)[self.micro_batch.scored_indices_C]

        def chunk_scores(hidden: Tensor, ids: Tensor) -> Tensor:
            return self.score(head.forward(hidden), ids)

        columns = (torch.split(column, LOGITS_CHUNK) for column in (scored_CD, self.micro_batch.scored_ids_C))
        pieces = list(zip(*columns, strict=True))
        score_chunk: Callable[..., Tensor] = chunk_scores
        if len(pieces) > 1 and torch.is_grad_enabled():
            score_chunk = partial(checkpoint, chunk_scores, use_reentrant=False)
        return torch.cat([score_chunk(*piece) for piece in pieces])

    def score(self, logits_CV: Tensor, ids_C: Tensor) -> Tensor:
        """Return (C, 2), from all logits at once."""
        if logits_CV.dtype != torch.float64:
            logits_CV = logits_CV.float()
        logits_CV = logits_CV / self.temperature
        normalizer_C = logits_CV.logsumexp(-1)
        logprobs_C = logits_CV.gather(1, ids_C[:, None])[:, 0] - normalizer_C
        if not self.with_entropy:
            return torch.stack([logprobs_C, torch.zeros_like(logprobs_C)], dim=1)
        with nullcontext() if self.entropy_gradient else torch.no_grad():
            entropies_C = normalizer_C - (logits_CV.softmax(-1) * logits_CV).sum(-1)
        return torch.stack([logprobs_C, entropies_C], dim=1)


def _score_in_forward(model: nn.Module, core: Any, inputs: dict[str, Any], scoring: _Scoring) -> Tensor | None:
    """Return (C, 2) from one forward of the model, or None if the model changes what its head returns."""
    with _replace_head(core.get_output_embeddings(), scoring) as scores:
        returned_C2: Tensor = model(**inputs).logits[0]
    if bool((returned_C2[-1] != _PROBE).any()):
        return None
    if returned_C2.dtype == scores[0].dtype:
        return returned_C2[:-1]
    # A sharded wrapper may round what a model returns, which is too inexact for log-probs, and expects it to be used.
    return scores[0] + 0 * returned_C2[:-1]


@contextmanager
def _replace_head(head: nn.Module, scoring: _Scoring) -> Iterator[list[Tensor]]:
    """Let the head return scores and a probe, (1, C + 1, 2), instead of logits.

    The scores are added to the yielded list as well.
    """
    scores: list[Tensor] = []

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # A sharded head's weights are gathered now, and may be released again before `after`.
        scores.append(scoring.score_hidden(module, inputs[0]))
        return (inputs[0][:, :0],)

    def after(module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        return torch.cat([scores[0][None], scores[0].new_full((1, 1, 2), _PROBE)], dim=1)

    hooks = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
    try:
        yield scores
    finally:
        for hook in hooks:
            hook.remove()


def _make_attention_mask(core: Any, micro_batch: MicroBatch) -> Tensor | None:
    """Return the mask in a form that the model's attention applies exactly; it is the same for every layer."""
    if not micro_batch.nodes:
        return micro_batch.padding_mask_SN
    config = core.config.get_text_config()
    attention, layout, longest = config._attn_implementation, micro_batch.layout, micro_batch.longest
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"the {layout} layout does not work with layers of {sorted(kinds)}: use the padded layout")
    window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    is_cut = window is not None and longest > window
    if attention == "sdpa" and not is_cut:
        return NodeMask(micro_batch.nodes, micro_batch.input_ids_SN.device) if len(micro_batch.nodes) > 1 else None
    if attention != "sdpa" and "flash" not in attention:
        raise ValueError(f"{attention} attention cannot tell the rows apart: load the model with sdpa, or use padded")
    if layout == "packed":
        return None
    if is_cut:
        raise ValueError(
            f"a row of {longest} tokens is longer than the model's attention window of {window}, which the {layout}"
            " layout would ignore: use the packed layout"
        )
    raise ValueError(f"{attention} attention takes no 4-D mask: load the model with sdpa, or use the packed layout")

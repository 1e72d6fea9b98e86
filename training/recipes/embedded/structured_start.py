"""An initialization from which reading a fact is learned quickly: the parts of the circuit exist, training connects
them.

From plain noise, training spends most of a CPU budget before the first attention head looks one token back. So the
width is divided into four equal parts: the token's code (C), its predecessor's (P), an average of the last tokens (W)
and the output (R). In layer 0, heads that attend by position alone fill P and W; Qwen2's query and key biases suffice
for that. In the last layer but one, heads that match W with W (a fact's words with the question's), C with P (what
followed this token before), or both, copy the code they find into R, which the output head reads with the same codes;
if nothing matches they attend to the prompt's first token, which stands for "none".

These are ordinary parameters, trained from the first step on; the other layers and the MLPs are plain noise. High
learning rates destroy the structure in a hundred steps (Muon 0.01, AdamW 0.003 did), so training starts with low ones.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from recipes.embedded.policy_network import HEAD_WIDTH, ROPE_THETA, Network

CODE, BEFORE, BLEND, OUTPUT = range(4)
"""The parts of the width, in order."""

SINK_COLUMN = 4 * HEAD_WIDTH - 1
"""Marks the prompt's first token."""

MARKER_COLUMN = (BLEND + 1) * HEAD_WIDTH - 1
"""The column of the average that marks a token among the tags of a question."""

MISSING_COLUMNS = (4 * HEAD_WIDTH - 2, 4 * HEAD_WIDTH - 3)
"""Mark a token, or a token after its predecessor, that is not in the section."""

SLOW_PAIRS = 22
"""Rotary pairs that turn slowly enough for matching by content at any distance in a prompt; the last ones of a head."""

REACH = 22
"""How many tokens back an average reaches: over a question and its tags, or over a statement."""

TOPIC, REPEAT = 1.7, 2.6
"""Sharpness of the two ways of matching."""

SINK = 20.0
"""Sets the score of attending to nothing, between the scores of a match and of a near miss."""

SAME, SAME_SINK = 2.0, 15.5
PAIR, PAIR_SINK = 1.6, 19.0
"""Sharpness and sink of the heads that find the question's words in the section: single words, and pairs of words."""

REPORT = 4.0
"""How strongly missing words count for "none"."""


@torch.no_grad()
def give_structure(
    policy: Network, rarity: Tensor, sink_tokens: tuple[int, int], tags: set[int], seed: int = 0
) -> None:
    """Overlay the structure on a freshly initialised policy of four heads and at least three layers.

    `rarity` (vocabulary,) the weight of each token in the averages, from 0 for tokens of every question to 1.
    `sink_tokens` are the prompt's first token and the one that says "nothing found": where no fact matches, attention
    rests on the first and so copies the second. `tags` are in every prompt's question part and rarely elsewhere: they
    prevent a question from matching itself.
    """
    shape = policy.config
    if shape.num_attention_heads != 4 or shape.num_hidden_layers < 3:
        raise ValueError("the structured start needs four heads and at least three layers")
    noise = torch.Generator().manual_seed(seed)
    codes, topics = torch.randn(2, shape.vocab_size, HEAD_WIDTH, generator=noise)
    policy.model.embed_tokens.weight[:, part(CODE)] += 0.5 * codes
    policy.model.embed_tokens.weight[:, part(BLEND)] += 0.5 * rarity[:, None] * topics
    policy.lm_head.weight[:, part(OUTPUT)] += 0.15 * codes
    first, none = sink_tokens
    policy.model.embed_tokens.weight[first, part(CODE)] = 0.5 * codes[none]
    policy.model.embed_tokens.weight[first, part(BLEND)] = 0.0
    policy.model.embed_tokens.weight[first, SINK_COLUMN] = 2.0
    policy.lm_head.weight[first, part(OUTPUT)] = 0.0
    policy.lm_head.weight[:, SINK_COLUMN] = 0.0
    policy.model.embed_tokens.weight[:, MARKER_COLUMN] = 0.0
    policy.model.embed_tokens.weight[list(tags), MARKER_COLUMN] = 3.0

    look_back(policy, head=0, first=1, last=1, read=CODE, write=BEFORE, strength=0.25)
    look_back(policy, head=1, first=0, last=REACH, read=BLEND, write=BLEND, strength=6.0)
    squares = torch.randn(2, HEAD_WIDTH, 2 * SLOW_PAIRS, generator=noise)
    words, tokens = torch.linalg.qr(squares)[0] * math.sqrt(2)
    words[MARKER_COLUMN - part(BLEND).start] = 0.0
    layer = shape.num_hidden_layers - 2
    match(policy, layer, 0, [(BLEND, BLEND, TOPIC * words)], SINK)
    match(policy, layer, 1, [(CODE, BEFORE, REPEAT * tokens)])
    match(policy, layer, 2, [(BLEND, BLEND, TOPIC * words), (CODE, BEFORE, REPEAT * tokens)], SINK)

    more = torch.randn(2, HEAD_WIDTH, 2 * SLOW_PAIRS, generator=noise)
    here, previous = torch.linalg.qr(more)[0] * math.sqrt(2)
    here[-3:] = previous[-3:] = 0.0
    miss(policy, layer - 1, 0, [(CODE, SAME * here)], SAME_SINK, MISSING_COLUMNS[0])
    miss(policy, layer - 1, 1, [(CODE, PAIR * here), (BEFORE, PAIR * previous)], PAIR_SINK, MISSING_COLUMNS[1])
    report(policy, layer, 3, none)


def measure_rarity(prompts: list[list[int]], vocabulary: int) -> Tensor:
    """Return 0 for tokens that are in every prompt, up to about 1 for those in one of ten thousand."""
    shares = torch.zeros(vocabulary)
    for prompt in prompts:
        shares[list(set(prompt))] += 1 / len(prompts)
    return (-(shares + 1e-4).log() / math.log(1e4)).clamp(0.0, 1.0)


def part(which: int) -> slice:
    """Return the slice of the width that holds one of the four parts."""
    return slice(which * HEAD_WIDTH, (which + 1) * HEAD_WIDTH)


def get_attention(policy: Network, layer: int) -> LlamaAttention:
    """Return the attention of one layer."""
    return cast(LlamaDecoderLayer, policy.model.layers[layer]).self_attn


def attend_back(policy: Network, layer: int, head: int, first: int, last: int) -> LlamaAttention:
    """Make a head attend evenly to the tokens `first` to `last` positions back, and return the layer's attention."""
    attention, rows = get_attention(policy, layer), part(head)
    biases = fit_position_biases(first, last)
    for projection, bias in zip((attention.q_proj, attention.k_proj), biases, strict=True):
        projection.weight[rows] *= 0.1
        projection.bias[rows] = bias
    attention.v_proj.weight[rows] *= 0.1
    return attention


def look_back(policy: Network, head: int, first: int, last: int, read: int, write: int, strength: float) -> None:
    """Make a head of layer 0 average a part over the tokens `first` to `last` back and write that to a part."""
    attention = attend_back(policy, 0, head, first, last)
    rows = part(head)
    attention.o_proj.weight[:, rows] *= 0.1
    attention.v_proj.weight[rows, part(read)] += torch.eye(HEAD_WIDTH)
    attention.o_proj.weight[part(write), rows] += strength * torch.eye(HEAD_WIDTH)


def match(policy: Network, layer: int, head: int, pairs: list[tuple[int, int, Tensor]], sink: float = 0.0) -> None:
    """Make a head attend to positions where a part of the key equals a part of the query, and copy their code to the
    output.

    With a sink, the prompt's first token gets about that score from every query, and so the attention if nothing else
    matches.
    """
    attention = get_attention(policy, layer)
    half, begin = HEAD_WIDTH // 2, head * HEAD_WIDTH
    slow = [begin + offset + pair for offset in (0, half) for pair in range(half - 1 - SLOW_PAIRS, half - 1)]
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        linear.weight[part(head)] *= 0.1
    for of_query, of_key, projection in pairs:
        attention.q_proj.weight[slow, part(of_query)] += projection.T
        attention.k_proj.weight[slow, part(of_key)] += projection.T
    rows = part(head)
    attention.v_proj.weight[rows, part(CODE)] += torch.eye(HEAD_WIDTH)
    attention.o_proj.weight[part(OUTPUT), rows] += 1.5 * torch.eye(HEAD_WIDTH)
    if sink:
        slowest = begin + half - 1
        attention.k_proj.weight[slowest, SINK_COLUMN] += 3.0
        attention.q_proj.bias[slowest] = sink * math.sqrt(HEAD_WIDTH) / 16.0
        attention.k_proj.weight[slowest + half, MARKER_COLUMN] -= 8.0
        attention.q_proj.bias[slowest + half] = 8.0


def miss(policy: Network, layer: int, head: int, parts: list[tuple[int, Tensor]], sink: float, column: int) -> None:
    """Make a head look for the query's own token (and its predecessor) in the section, and mark tokens that are not
    found.
    """
    attention = get_attention(policy, layer)
    match(policy, layer, head, [(which, which, projection) for which, projection in parts], sink)
    rows = part(head)
    attention.v_proj.weight[rows] = 0.0
    attention.o_proj.weight[:, rows] = 0.0
    attention.v_proj.weight[rows.start, SINK_COLUMN] = 1.0
    attention.o_proj.weight[column, rows.start] = 0.3
    policy.lm_head.weight[:, column] = 0.0


def report(policy: Network, layer: int, head: int, none: int) -> None:
    """Make a head sum the marks of a question's missing tokens, and raise the score of "none" accordingly."""
    attention = attend_back(policy, layer, head, 0, REACH - 2)
    rows = part(head)
    for index, column in enumerate(MISSING_COLUMNS):
        attention.v_proj.weight[rows.start + index, column] = 1.0
        code = policy.lm_head.weight[none, part(OUTPUT)]
        attention.o_proj.weight[part(OUTPUT), rows.start + index] = REPORT * code / code.norm()


def fit_position_biases(first: int, last: int, reach: int = 1024) -> tuple[Tensor, Tensor]:
    """Return query and key biases with which a head attends evenly to the tokens `first` to `last` back, and no others.

    With constant query and key, rotary attention is a softmax over distances of a sum of cosines; amplitudes and
    phases are fitted by maximum likelihood, a convex problem, with a small penalty on their size.
    """
    frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_WIDTH, 2, dtype=torch.float64) / HEAD_WIDTH)
    angles = torch.arange(reach, dtype=torch.float64)[:, None] * frequencies
    waves = torch.cat((angles.cos(), angles.sin()), dim=1)
    weights = torch.zeros(waves.shape[1], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        chances = (waves @ weights).log_softmax(0)[first : last + 1]
        value = -chances.mean() + 1e-4 * weights.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]
    cosines, sines = weights.detach().chunk(2)
    root = ((cosines.square() + sines.square()).sqrt() * math.sqrt(HEAD_WIDTH)).sqrt()
    phase = torch.atan2(-sines, cosines)
    query = torch.cat((root * phase.cos(), root * phase.sin()))
    key = torch.cat((root, torch.zeros_like(root)))
    return query.float(), key.float()

"""A start from which reading a fact is quickly learned: the parts of the circuit are there, training joins them.

Training from plain noise spends most of a CPU budget before the first attention head looks one token back. So the
width is divided into four equal parts: the token's code (C), its predecessor's (P), a blend of the last tokens' (W) and the
output (R). In layer 0, heads that attend by position alone fill P and W; Qwen2's query and key biases suffice for
that. In the later layers, heads that match W with W (a fact's words with the question's) and C with P (what followed
this token before) copy the code they find into R, which the output head reads with the same codes. All of it is
ordinary parameters, trained from the first step on; the noise of the plain start stays underneath.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memagent_training.embedded.model import ModelShape, Policy

CODE, BEFORE, BLEND, OUTPUT = range(4)
"""The parts of the width, in order."""

SLOW_PAIRS = 16
"""Rotary pairs that turn slowly enough for matching by content at any distance in a prompt; the last ones of a head."""

NEAR, FAR = 8, 22
NEAR_STRENGTH, FAR_STRENGTH, TOPIC_STRENGTH = 0.0, 1.5, 1.5


@torch.no_grad()
def give_structure(policy: Policy, rarity: Tensor, seed: int = 0) -> None:
    """Overlay the structure on a freshly initialised policy of four heads and at least three layers.

    `rarity` (vocabulary,) weighs each token in the blends, from 0 for what stands in every question to 1.
    """
    shape = policy.model.shape
    if shape.heads != 4 or shape.layers < 3:
        raise ValueError("the structured start needs four heads and at least three layers")
    noise = torch.Generator().manual_seed(seed)
    codes, topics = torch.randn(2, shape.vocab_size, shape.head_dim, generator=noise)
    policy.model.embed_tokens.weight[:, part(shape, CODE)] += 0.5 * codes
    policy.model.embed_tokens.weight[:, part(shape, BLEND)] += 0.5 * rarity[:, None] * topics
    policy.lm_head.weight[:, part(shape, OUTPUT)] += 0.1 * codes

    look_back(policy, head=0, first=1, last=1, read=CODE, write=BEFORE, strength=0.25)
    look_back(policy, head=1, first=0, last=NEAR, read=BLEND, write=BLEND, strength=NEAR_STRENGTH)
    look_back(policy, head=2, first=0, last=FAR, read=BLEND, write=BLEND, strength=FAR_STRENGTH)
    words = torch.randn(shape.head_dim, 2 * SLOW_PAIRS, generator=noise) / math.sqrt(2 * SLOW_PAIRS)
    tokens = torch.randn(shape.head_dim, 2 * SLOW_PAIRS, generator=noise) / math.sqrt(2 * SLOW_PAIRS)
    words, tokens = (torch.linalg.qr(matrix)[0] * math.sqrt(2) for matrix in (words, tokens))
    both = torch.cat((torch.ones(SLOW_PAIRS), torch.zeros(SLOW_PAIRS)))
    for layer in range(2, shape.layers):
        match(policy, layer, 0, [(BLEND, BLEND, words)], TOPIC_STRENGTH)
        match(policy, layer, 1, [(CODE, BEFORE, tokens)], 1.3)
        match(policy, layer, 2, [(BLEND, BLEND, words), (CODE, BEFORE, tokens * both)], TOPIC_STRENGTH)


def token_rarity(prompts: list[list[int]], vocabulary: int) -> Tensor:
    """0 for tokens that stand in every prompt, towards 1 for those that stand in one of ten thousand."""
    shares = torch.zeros(vocabulary)
    for prompt in prompts:
        shares[list(set(prompt))] += 1 / len(prompts)
    return (-(shares + 1e-4).log() / math.log(1e4)).clamp(0.0, 1.0)


def part(shape: ModelShape, which: int) -> slice:
    """The slice of the width that holds one of the four parts."""
    return slice(which * shape.head_dim, (which + 1) * shape.head_dim)


def look_back(policy: Policy, head: int, first: int, last: int, read: int, write: int, strength: float) -> None:
    """Make a head of layer 0 average a part over the tokens `first` to `last` back and write that to a part."""
    shape = policy.model.shape
    attention = policy.model.layers[0].self_attn
    rows = part(shape, head)
    query, key = position_biases(shape, first, last)
    for projection, bias in ((attention.q_proj, query), (attention.k_proj, key)):
        projection.weight[rows] *= 0.1
        projection.bias[rows] = bias
    attention.v_proj.weight[rows, part(shape, read)] += torch.eye(shape.head_dim)
    attention.o_proj.weight[part(shape, write), rows] += strength * torch.eye(shape.head_dim)


def match(policy: Policy, layer: int, head: int, pairs: list[tuple[int, int, Tensor]], strength: float) -> None:
    """Make a head attend where a part of the key equals a part of the query, and copy the code there to the output."""
    shape = policy.model.shape
    attention = policy.model.layers[layer].self_attn
    half = shape.head_dim // 2
    low, high = half - SLOW_PAIRS, shape.head_dim - SLOW_PAIRS
    slow = [*range(head * shape.head_dim + low, head * shape.head_dim + half)]
    slow += [*range(head * shape.head_dim + high, head * shape.head_dim + shape.head_dim)]
    for of_query, of_key, projection in pairs:
        attention.q_proj.weight[slow, part(shape, of_query)] += strength * projection.T
        attention.k_proj.weight[slow, part(shape, of_key)] += strength * projection.T
    rows = part(shape, head)
    attention.v_proj.weight[rows, part(shape, CODE)] += torch.eye(shape.head_dim)
    attention.o_proj.weight[part(shape, OUTPUT), rows] += 0.3 * torch.eye(shape.head_dim)


def position_biases(shape: ModelShape, first: int, last: int, depth: float = 12.0, reach: int = 1024) -> tuple[Tensor, Tensor]:
    """Query and key biases under which a head attends evenly to the tokens `first` to `last` back and to nothing else.

    With constant query and key, rotary attention is a function of distance, a sum of cosines; its amplitudes and
    phases are fitted by least squares to a plateau that falls off by `depth`.
    """
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    distances = torch.arange(reach, dtype=torch.float64)
    waves = torch.cat(((distances[:, None] * frequencies).cos(), (distances[:, None] * frequencies).sin()), dim=1)
    outside = torch.maximum(first - distances, distances - last).clamp(min=0)
    wanted = -(depth * outside / max(1.0, 0.3 * (last - first))).clamp(max=depth)
    weights = torch.where(distances < 2 * last + 8, 4.0, 0.3)[:, None]
    normal = waves.T @ (weights * waves) + 1e-3 * torch.eye(waves.shape[1], dtype=torch.float64)
    solution = torch.linalg.solve(normal, waves.T @ (weights[:, 0] * wanted))
    cosines, sines = solution.chunk(2)
    amplitude = (cosines.square() + sines.square()).sqrt() * math.sqrt(shape.head_dim)
    phase = torch.atan2(-sines, cosines)
    root = amplitude.sqrt()
    query = torch.cat((root * phase.cos(), root * phase.sin()))
    key = torch.cat((root, torch.zeros_like(root)))
    return query.float(), key.float()

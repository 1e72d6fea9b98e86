"""Initial weights from which reading a fact is learned quickly: the parts of the circuit exist, and training connects
them.

From random weights, training spends most of a CPU budget before the first attention head looks one token back.
Therefore the width is divided into four equal parts: the token's code (C), its predecessor's code (P), an average of
the last tokens (W) and the output (R). In layer 0, heads that attend by position alone fill P and W, with Qwen2's query
and key biases. In the second to last layer, heads that match W with W (a fact's words with the question's), C with P
(what followed this token before), or both, copy the code that they find into R, which the output head reads with the
same codes; if nothing matches, they attend to the prompt's first token, which stands for "none".

These are ordinary parameters, which are trained from the first step on; the other layers and the MLPs are random. High
learning rates (Muon 0.01, AdamW 0.003) destroyed the structure in a hundred steps, so training starts with low ones.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from recipes.embedded.policy_network import HEAD_WIDTH, ROPE_THETA, Network

CODE_PART, PREVIOUS_PART, AVERAGE_PART, OUTPUT_PART = range(4)
"""The four parts of the width, in order."""

SINK_COLUMN = 4 * HEAD_WIDTH - 1
"""The column that marks the prompt's first token."""

MARKER_COLUMN = (AVERAGE_PART + 1) * HEAD_WIDTH - 1
"""The column of the average that marks tokens among the tags of a question."""

MISSING_COLUMNS = (4 * HEAD_WIDTH - 2, 4 * HEAD_WIDTH - 3)
"""The columns that mark a token, or a pair of a token and its predecessor, that is not in the section."""

SLOW_PAIR_COUNT = 22
"""The last rotary pairs of a head, which turn slowly enough for matching by content at any distance in a prompt."""

AVERAGE_REACH = 22
"""How many tokens back an average reaches, to cover a question and its tags, or a statement."""

TOPIC_SHARPNESS, REPEAT_SHARPNESS = 1.7, 2.6
"""The sharpness of the two ways of matching: by a fact's words, and by the previous occurrence of a token."""

MATCH_SINK = 20.0
"""The score of the first token, which is attended to if nothing matches: between a match and a near miss."""

WORD_SHARPNESS, WORD_SINK = 2.0, 15.5
PAIR_SHARPNESS, PAIR_SINK = 1.6, 19.0
"""Sharpness and sink of the heads that look for the question's words in the section: single words, and pairs."""

REPORT_STRENGTH = 4.0
"""The strength with which missing words raise the score of "none"."""


@torch.no_grad()
def give_structure(
    policy: Network, rarity: Tensor, sink_tokens: tuple[int, int], tags: set[int], seed: int = 0
) -> None:
    """Overlay the structure on a freshly initialised policy of four heads and at least three layers.

    `rarity` (vocabulary,) has the weight of each token in the averages, from 0 for tokens of every question to 1.
    `sink_tokens` are the prompt's first token and the token for "none": where no fact matches, attention rests on the
    first token, and thereby copies "none". `tags` are tokens that are in every prompt's question part and rarely
    elsewhere; they prevent a question from matching itself.
    """
    config = policy.config
    if config.num_attention_heads != 4 or config.num_hidden_layers < 3:
        raise ValueError("the structured start needs four heads and at least three layers")
    generator = torch.Generator().manual_seed(seed)
    codes, topics = torch.randn(2, config.vocab_size, HEAD_WIDTH, generator=generator)
    policy.model.embed_tokens.weight[:, get_part_slice(CODE_PART)] += 0.5 * codes
    policy.model.embed_tokens.weight[:, get_part_slice(AVERAGE_PART)] += 0.5 * rarity[:, None] * topics
    policy.lm_head.weight[:, get_part_slice(OUTPUT_PART)] += 0.15 * codes
    first_token, none_token = sink_tokens
    policy.model.embed_tokens.weight[first_token, get_part_slice(CODE_PART)] = 0.5 * codes[none_token]
    policy.model.embed_tokens.weight[first_token, get_part_slice(AVERAGE_PART)] = 0.0
    policy.model.embed_tokens.weight[first_token, SINK_COLUMN] = 2.0
    policy.lm_head.weight[first_token, get_part_slice(OUTPUT_PART)] = 0.0
    policy.lm_head.weight[:, SINK_COLUMN] = 0.0
    policy.model.embed_tokens.weight[:, MARKER_COLUMN] = 0.0
    policy.model.embed_tokens.weight[list(tags), MARKER_COLUMN] = 3.0

    average_previous_tokens(
        policy, head=0, first=1, last=1, source_part=CODE_PART, target_part=PREVIOUS_PART, strength=0.25
    )
    average_previous_tokens(
        policy, head=1, first=0, last=AVERAGE_REACH, source_part=AVERAGE_PART, target_part=AVERAGE_PART, strength=6.0
    )
    random_matrices = torch.randn(2, HEAD_WIDTH, 2 * SLOW_PAIR_COUNT, generator=generator)
    word_projection, token_projection = torch.linalg.qr(random_matrices)[0] * math.sqrt(2)
    word_projection[MARKER_COLUMN - get_part_slice(AVERAGE_PART).start] = 0.0
    match_layer = config.num_hidden_layers - 2
    match_content(policy, match_layer, 0, [(AVERAGE_PART, AVERAGE_PART, TOPIC_SHARPNESS * word_projection)], MATCH_SINK)
    match_content(policy, match_layer, 1, [(CODE_PART, PREVIOUS_PART, REPEAT_SHARPNESS * token_projection)])
    match_content(
        policy,
        match_layer,
        2,
        [
            (AVERAGE_PART, AVERAGE_PART, TOPIC_SHARPNESS * word_projection),
            (CODE_PART, PREVIOUS_PART, REPEAT_SHARPNESS * token_projection),
        ],
        MATCH_SINK,
    )

    more_matrices = torch.randn(2, HEAD_WIDTH, 2 * SLOW_PAIR_COUNT, generator=generator)
    own_projection, previous_projection = torch.linalg.qr(more_matrices)[0] * math.sqrt(2)
    own_projection[-3:] = previous_projection[-3:] = 0.0
    mark_missing_tokens(
        policy, match_layer - 1, 0, [(CODE_PART, WORD_SHARPNESS * own_projection)], WORD_SINK, MISSING_COLUMNS[0]
    )
    mark_missing_tokens(
        policy,
        match_layer - 1,
        1,
        [(CODE_PART, PAIR_SHARPNESS * own_projection), (PREVIOUS_PART, PAIR_SHARPNESS * previous_projection)],
        PAIR_SINK,
        MISSING_COLUMNS[1],
    )
    report_missing_tokens(policy, match_layer, 3, none_token)


def measure_rarity(prompts: list[list[int]], vocabulary_size: int) -> Tensor:
    """Return each token's rarity: 0 if every prompt has it, about 1 if one in ten thousand has it."""
    frequencies = torch.zeros(vocabulary_size)
    for prompt in prompts:
        frequencies[list(set(prompt))] += 1 / len(prompts)
    return (-(frequencies + 1e-4).log() / math.log(1e4)).clamp(0.0, 1.0)


def get_part_slice(index: int) -> slice:
    """Return the slice of the width that holds one of the four parts."""
    return slice(index * HEAD_WIDTH, (index + 1) * HEAD_WIDTH)


def get_attention(policy: Network, layer: int) -> LlamaAttention:
    """Return the attention of one layer."""
    return cast(LlamaDecoderLayer, policy.model.layers[layer]).self_attn


def attend_to_previous(policy: Network, layer: int, head: int, first: int, last: int) -> LlamaAttention:
    """Make a head attend evenly to the tokens `first` to `last` positions back, and return the layer's attention."""
    attention, rows = get_attention(policy, layer), get_part_slice(head)
    biases = fit_position_biases(first, last)
    for projection, bias in zip((attention.q_proj, attention.k_proj), biases, strict=True):
        projection.weight[rows] *= 0.1
        projection.bias[rows] = bias
    attention.v_proj.weight[rows] *= 0.1
    return attention


def average_previous_tokens(
    policy: Network, head: int, first: int, last: int, source_part: int, target_part: int, strength: float
) -> None:
    """Make a head of layer 0 average one part over the tokens `first` to `last` back, and add it to another part."""
    attention = attend_to_previous(policy, 0, head, first, last)
    rows = get_part_slice(head)
    attention.o_proj.weight[:, rows] *= 0.1
    attention.v_proj.weight[rows, get_part_slice(source_part)] += torch.eye(HEAD_WIDTH)
    attention.o_proj.weight[get_part_slice(target_part), rows] += strength * torch.eye(HEAD_WIDTH)


def match_content(
    policy: Network, layer: int, head: int, pairs: list[tuple[int, int, Tensor]], sink: float = 0.0
) -> None:
    """Make a head attend to positions where a part of the key equals a part of the query, and copy their code to the
    output.

    With a sink, the prompt's first token gets about that score from every query, so it gets the attention if nothing
    else matches.
    """
    attention = get_attention(policy, layer)
    half_width, start = HEAD_WIDTH // 2, head * HEAD_WIDTH
    slow_rows = [
        start + offset + pair_index
        for offset in (0, half_width)
        for pair_index in range(half_width - 1 - SLOW_PAIR_COUNT, half_width - 1)
    ]
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        linear.weight[get_part_slice(head)] *= 0.1
    for query_part, key_part, projection in pairs:
        attention.q_proj.weight[slow_rows, get_part_slice(query_part)] += projection.T
        attention.k_proj.weight[slow_rows, get_part_slice(key_part)] += projection.T
    rows = get_part_slice(head)
    attention.v_proj.weight[rows, get_part_slice(CODE_PART)] += torch.eye(HEAD_WIDTH)
    attention.o_proj.weight[get_part_slice(OUTPUT_PART), rows] += 1.5 * torch.eye(HEAD_WIDTH)
    if sink:
        slowest_row = start + half_width - 1
        attention.k_proj.weight[slowest_row, SINK_COLUMN] += 3.0
        attention.q_proj.bias[slowest_row] = sink * math.sqrt(HEAD_WIDTH) / 16.0
        attention.k_proj.weight[slowest_row + half_width, MARKER_COLUMN] -= 8.0
        attention.q_proj.bias[slowest_row + half_width] = 8.0


def mark_missing_tokens(
    policy: Network, layer: int, head: int, parts: list[tuple[int, Tensor]], sink: float, column: int
) -> None:
    """Make a head look for the query's token (or its predecessor too) in the section, and mark missing tokens in a
    column.
    """
    attention = get_attention(policy, layer)
    match_content(policy, layer, head, [(part, part, projection) for part, projection in parts], sink)
    rows = get_part_slice(head)
    attention.v_proj.weight[rows] = 0.0
    attention.o_proj.weight[:, rows] = 0.0
    attention.v_proj.weight[rows.start, SINK_COLUMN] = 1.0
    attention.o_proj.weight[column, rows.start] = 0.3
    policy.lm_head.weight[:, column] = 0.0


def report_missing_tokens(policy: Network, layer: int, head: int, none_token: int) -> None:
    """Make a head average the marks of a question's missing tokens, and raise the score of "none" accordingly."""
    attention = attend_to_previous(policy, layer, head, 0, AVERAGE_REACH - 2)
    rows = get_part_slice(head)
    for index, column in enumerate(MISSING_COLUMNS):
        attention.v_proj.weight[rows.start + index, column] = 1.0
        code = policy.lm_head.weight[none_token, get_part_slice(OUTPUT_PART)]
        attention.o_proj.weight[get_part_slice(OUTPUT_PART), rows.start + index] = REPORT_STRENGTH * code / code.norm()


def fit_position_biases(first: int, last: int, max_distance: int = 1024) -> tuple[Tensor, Tensor]:
    """Return query and key biases with which a head attends evenly to the tokens `first` to `last` back, and no others.

    With constant query and key, rotary attention is a softmax over distances of a sum of cosines; amplitudes and
    phases are fitted by maximum likelihood, a convex problem, with a small penalty on their size.
    """
    frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_WIDTH, 2, dtype=torch.float64) / HEAD_WIDTH)
    angles = torch.arange(max_distance, dtype=torch.float64)[:, None] * frequencies
    basis = torch.cat((angles.cos(), angles.sin()), dim=1)
    weights = torch.zeros(basis.shape[1], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def compute_loss() -> Tensor:
        solver.zero_grad()
        log_probabilities = (basis @ weights).log_softmax(0)[first : last + 1]
        penalised_loss = -log_probabilities.mean() + 1e-4 * weights.square().sum()
        penalised_loss.backward()  # type: ignore[no-untyped-call]
        return penalised_loss

    with torch.enable_grad():
        solver.step(compute_loss)  # type: ignore[no-untyped-call]
    cosines, sines = weights.detach().chunk(2)
    root_amplitude = ((cosines.square() + sines.square()).sqrt() * math.sqrt(HEAD_WIDTH)).sqrt()
    phase = torch.atan2(-sines, cosines)
    query = torch.cat((root_amplitude * phase.cos(), root_amplitude * phase.sin()))
    key = torch.cat((root_amplitude, torch.zeros_like(root_amplitude)))
    return query.float(), key.float()

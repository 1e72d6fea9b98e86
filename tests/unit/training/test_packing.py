"""Three layouts of the same rows have equal results and different numbers of tokens."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import multi_conv_dapo  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from made_rollouts import make_conversation  # noqa: E402
from support.small_models import make_model  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402

from memagent_training.algorithm.advantages import TrainingRow  # noqa: E402
from memagent_training.algorithm.planner import Layout, plan_step  # noqa: E402
from memagent_training.forward import scoring  # noqa: E402
from memagent_training.forward.layouts import IdRow, lay_out, lay_out_as_tree, lay_out_in_sequence  # noqa: E402
from memagent_training.forward.scoring import score_completions  # noqa: E402
from memagent_training.training_errors import TrainingError  # noqa: E402

LAYOUTS = ("padded", "packed", "prefix_tree")
VOCABULARY = 64


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model()


def make_ids(start: int, length: int) -> list[int]:
    return [(start * 7 + index * 5) % VOCABULARY for index in range(length)]


SECTION = make_ids(1, 9)
ROWS = [
    IdRow([*SECTION, 3, 4], make_ids(2, 5)),
    IdRow([*SECTION, 3, 4], make_ids(2, 5)),  # an equal row
    IdRow([*SECTION, 3, 4], [*make_ids(2, 3), 60, 61]),  # the same prompt, a completion with a common prefix
    IdRow([*SECTION, 8], make_ids(9, 2)),  # the same section, another memory
    IdRow([*SECTION, 3], [4, *make_ids(2, 5), 9]),  # begins with all ids of the first row, split elsewhere
    IdRow(make_ids(30, 25), make_ids(4, 1)),  # long, with no common prefix
    IdRow([5], [6, 7]),
    IdRow([*SECTION, 1], []),  # no completion
    IdRow([0], []),  # a padding row
]


def make_token_weights(mask: Any) -> Any:
    """Make a different weight for every token, so that swapped tokens change the sum."""
    return torch.rand(mask.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5


def score_rows_separately(model: Any, rows: Sequence[IdRow], temperature: float = 1.0) -> tuple[Any, Any]:
    """Compute log-probs and entropies of each row separately, with the example."""
    logprobs, entropies = zip(*(multi_conv_dapo.forward(model, row, temperature) for row in rows), strict=True)
    return pad_sequence(logprobs, batch_first=True), pad_sequence(entropies, batch_first=True)


def compute_gradients(model: Any, loss: Any) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return gradients


def assert_same_gradients(gradients: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= tolerance * gradient.norm() + 1e-14, name


SCALED_LOGITS = {"logits_scaling": 4.0}
"""The logits are scaled after the head."""
LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, one table": ("Llama", {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, one table": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3, whose queries and keys are normalised": ("Qwen3", {"head_dim": 16}),
    "Mistral, within its window": ("Mistral", {"sliding_window": 26}),
    "Granite, which scales attention and logits": ("Granite", {"attention_multiplier": 0.3} | SCALED_LOGITS),
    "DeepSeek-V3, whose keys are longer than its values": ("DeepseekV3", LATENT_ATTENTION),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_equals_scoring_rows_separately(family: str, layout: str) -> None:
    architecture, options = FAMILIES[family]
    model = make_model(architecture, **options)
    expected, _ = score_rows_separately(model, ROWS)
    scores = score_completions(model, lay_out(ROWS, layout))
    for row, logprobs_T in zip(ROWS, scores.logprobs_BT, strict=True):
        assert not logprobs_T[len(row.completion_ids_T) :].any()
    torch.testing.assert_close(scores.logprobs_BT, expected, rtol=0, atol=1e-12)
    weights = make_token_weights(expected)
    expected_gradients = compute_gradients(model, (expected * weights).sum())
    assert_same_gradients(expected_gradients, compute_gradients(model, (scores.logprobs_BT * weights).sum()), 1e-12)


def test_padded_layout_works_with_eager_attention() -> None:
    model = make_model("Qwen2", dtype=torch.float32, attn_implementation="eager")
    expected, _ = score_rows_separately(model, ROWS)
    scores = score_completions(model, lay_out(ROWS, "padded"))
    torch.testing.assert_close(scores.logprobs_BT, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entropies_are_after_temperature_and_differentiable(llama: Any, layout: str) -> None:
    expected_logprobs, expected = score_rows_separately(llama, ROWS, temperature=0.7)
    batch = lay_out(ROWS, layout)
    scores = score_completions(llama, batch, temperature=0.7, with_entropy=True, entropy_gradient=True)
    torch.testing.assert_close(scores.logprobs_BT, expected_logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.entropies_BT, expected, rtol=0, atol=1e-12)
    weights = make_token_weights(expected)
    gradients = compute_gradients(llama, (scores.entropies_BT * weights).sum())
    assert_same_gradients(compute_gradients(llama, (expected * weights).sum()), gradients, 1e-12)
    assert score_completions(llama, batch).entropies_BT is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("logits_chunk", [1, 4, 1000])
def test_size_of_logit_chunks_does_not_change_results(
    llama: Any, layout: str, logits_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = lay_out(ROWS, layout)
    expected = score_completions(llama, batch)
    chunk_sizes: list[int] = []
    forward = llama.lm_head.forward

    def record_size(hidden: Any) -> Any:
        chunk_sizes.append(hidden.shape[:-1].numel())
        return forward(hidden)

    monkeypatch.setattr(llama.lm_head, "forward", record_size)
    monkeypatch.setattr(scoring, "LOGITS_CHUNK", logits_chunk)
    scores = score_completions(llama, batch)
    assert max(chunk_sizes) <= logits_chunk
    assert sum(chunk_sizes) == len(batch.scored_ids_C)
    torch.testing.assert_close(expected.logprobs_BT, scores.logprobs_BT, rtol=0, atol=1e-13)
    weights = make_token_weights(expected.logprobs_BT)
    gradients = compute_gradients(llama, (scores.logprobs_BT * weights).sum())
    assert_same_gradients(compute_gradients(llama, (expected.logprobs_BT * weights).sum()), gradients, 1e-12)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_checkpointing_keeps_results(layout: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that are alive at once keep their own masks."""
    monkeypatch.setattr(scoring, "LOGITS_CHUNK", 4)
    model = make_model()
    batches = [lay_out(rows, layout) for rows in (ROWS, ROWS[3:])]

    def score_batches() -> list[Any]:
        return [score_completions(model, batch).logprobs_BT for batch in batches]

    def weighted_sum(batch_logprobs: list[Any]) -> Any:
        return sum((logprobs * make_token_weights(logprobs)).sum() for logprobs in batch_logprobs)

    expected_logprobs = score_batches()
    expected_gradients = compute_gradients(model, weighted_sum(expected_logprobs))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    logprobs_again = score_batches()
    torch.testing.assert_close(logprobs_again, expected_logprobs, rtol=0, atol=0)
    assert_same_gradients(expected_gradients, compute_gradients(model, weighted_sum(logprobs_again)), 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_without_completions_still_have_gradients(llama: Any, layout: str) -> None:
    """All ranks must take equal steps, even those without learned tokens."""
    scores = score_completions(llama, lay_out([IdRow([3], []), IdRow([3, 4], [])], layout), with_entropy=True)
    assert scores.logprobs_BT.shape == (2, 0)
    assert scores.logprobs_BT.requires_grad
    zero_gradients = compute_gradients(llama, scores.logprobs_BT.sum() + scores.entropies_BT.sum())
    assert set(zero_gradients) == {name for name, _ in llama.named_parameters()}
    assert not any(gradient.any() for gradient in zero_gradients.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrapper_that_rounds_logits_does_not_round_log_probs(layout: str) -> None:
    model = make_model()
    expected, _ = score_rows_separately(model, ROWS)
    weights = make_token_weights(expected)
    expected_gradients = compute_gradients(model, (expected * weights).sum())

    def round_logits(_module: Any, _inputs: Any, output: Any) -> Any:
        output.logits = output.logits.bfloat16()
        return output

    model.register_forward_hook(round_logits)
    scores = score_completions(model, lay_out(ROWS, layout)).logprobs_BT
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    assert_same_gradients(expected_gradients, compute_gradients(model, (scores * weights).sum()), 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logit_scaling_is_detected_once_even_without_scored_tokens(layout: str) -> None:
    """Otherwise ranks with padding rows would make fewer forward passes, and sharded wrappers would hang."""
    forwards = []
    model = make_model("Granite", **SCALED_LOGITS)
    model.register_forward_hook(lambda *_: forwards.append(1))
    for expected_forwards in (2, 3):
        score_completions(model, lay_out([IdRow([0], [])], layout))
        assert len(forwards) == expected_forwards


def test_scoring_leaves_the_model_unchanged(llama: Any) -> None:
    tokens = torch.tensor([SECTION])
    logits_before = llama(input_ids=tokens).logits
    score_completions(llama, lay_out(ROWS, "prefix_tree"))
    with pytest.raises(IndexError):
        score_completions(llama, lay_out([IdRow([VOCABULARY + 1], [1])], "packed"))
    assert torch.equal(llama(input_ids=tokens).logits, logits_before)


# The trie.

short_token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=5)
"""Few different tokens, so that rows share prefixes by chance."""
rows_with_shared_prefixes = st.lists(
    st.builds(
        lambda prefix, suffix, completion: IdRow([*prefix, *suffix], completion),
        st.sampled_from([[], SECTION, SECTION[:4], make_ids(30, 12)]),
        short_token_lists,
        st.lists(st.integers(0, 2), max_size=5),
    ),
    min_size=1,
    max_size=8,
)


def count_distinct_prefixes(rows: Sequence[IdRow], *, completions_alone: bool = False) -> int:
    """Count the distinct prefixes of rows, or only those that end within a completion."""
    return len(
        {
            (*row.prompt_ids_P, *row.completion_ids_T)[:length]
            for row in rows
            for length in range(
                1 + completions_alone * len(row.prompt_ids_P), len(row.prompt_ids_P) + len(row.completion_ids_T) + 1
            )
        }
    )


@given(rows=rows_with_shared_prefixes)
def test_tree_forwards_each_prefix_once_and_packing_each_token(rows: list[IdRow]) -> None:
    tokens = sum(len(row.prompt_ids_P) + len(row.completion_ids_T) for row in rows)
    tree, packed, padded = (lay_out(rows, layout) for layout in ("prefix_tree", "packed", "padded"))
    assert tree.input_ids_SN.numel() == count_distinct_prefixes(rows)
    assert len(tree.scored_ids_C) == count_distinct_prefixes(rows, completions_alone=True)
    assert packed.input_ids_SN.numel() == tokens
    width = max(len(row.prompt_ids_P) for row in rows) + max(len(row.completion_ids_T) for row in rows)
    assert padded.input_ids_SN.numel() == len(rows) * width


@given(rows=rows_with_shared_prefixes, is_tree=st.booleans())
def test_nodes_are_split_only_at_branches(rows: list[IdRow], is_tree: bool) -> None:
    sequences = [array("q", [*row.prompt_ids_P, *row.completion_ids_T]) for row in rows]
    trie = lay_out_as_tree(sequences) if is_tree else lay_out_in_sequence(sequences)
    positions = [position for node in trie.nodes for position in range(node.start, node.end)]
    assert positions == list(range(len(trie.ids)))
    assert [node.subtree_end for node in trie.nodes for _ in range(node.start, node.end)] == trie.ends
    successors = {previous_position: set() for previous_position in positions}
    for path in trie.paths.values():
        for previous_position, position in itertools.pairwise(path):
            successors[previous_position].add(position)
    inner_ends = {node.end - 1 for node in trie.nodes if node.subtree_end > node.end}
    assert inner_ends == {position for position, next_positions in successors.items() if len(next_positions) > 1}


@settings(max_examples=25)
@given(
    rows=rows_with_shared_prefixes, layout=st.sampled_from(Layout), ranks=st.integers(1, 4), budget=st.integers(40, 90)
)
def test_splitting_padding_and_ranks_do_not_change_gradients(
    llama: Any, rows: list[IdRow], layout: Layout, ranks: int, budget: int
) -> None:
    """Also, a micro-batch forwards the planned tokens. Padding starts with a token that starts no row."""
    conversations = [make_conversation(row.prompt_ids_P, [*row.completion_ids_T, 1]) for row in rows]
    training_rows = [
        TrainingRow(conversation, 1.0, 1.0, f"run {number}", group_index=0, rollout_index=number, conversation_index=0)
        for number, conversation in enumerate(conversations)
    ]
    plan = plan_step(training_rows, ranks=ranks, token_budget=budget, layout=layout)
    padding_row = make_conversation([VOCABULARY - 1], [VOCABULARY - 1])
    sums = []
    for micro_batch in itertools.chain(*plan.micro_batches):
        rows_of_batch = [conversations[number] for number in micro_batch.rows]
        batch = lay_out([*rows_of_batch, *[padding_row] * micro_batch.padding_row_count], layout)
        assert batch.input_ids_SN.numel() == micro_batch.tokens
        weights = torch.tensor([*(number + 1.0 for number in micro_batch.rows), *[0.0] * micro_batch.padding_row_count])
        sums.append((score_completions(llama, batch).logprobs_BT * weights[:, None]).sum())
    expected, _ = score_rows_separately(llama, conversations)
    expected_sum = (expected * torch.arange(1.0, len(rows) + 1)[:, None]).sum()
    assert_same_gradients(compute_gradients(llama, expected_sum), compute_gradients(llama, sum(sums)), 1e-11)


# Refusals.


def test_tree_layout_refuses_a_sliding_window() -> None:
    window_model = make_model("Mistral", sliding_window=8)
    with pytest.raises(TrainingError, match="26 tokens is longer than the model's attention window of 8"):
        score_completions(window_model, lay_out(ROWS, "prefix_tree"))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_other_layouts_keep_a_sliding_window(layout: str) -> None:
    model = make_model("Mistral", sliding_window=8)
    expected, _ = score_rows_separately(model, ROWS)
    assert (expected - score_rows_separately(make_model("Mistral", sliding_window=None), ROWS)[0]).abs().max() > 0.01
    scores = score_completions(model, lay_out(ROWS, layout)).logprobs_BT
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)


def test_tree_layout_refuses_flash_attention() -> None:
    flash_model = make_model()
    flash_model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(TrainingError, match="takes no 4-D mask: use --set layout=packed"):
        score_completions(flash_model, lay_out(ROWS, "prefix_tree"))


@pytest.mark.parametrize("layout", ["packed", "prefix_tree"])
def test_packed_layouts_refuse_models_without_row_separation(layout: str) -> None:
    batch = lay_out(ROWS, layout)
    eager_model = make_model("Gemma2", attn_implementation="eager", head_dim=8)  # it caps attention scores
    with pytest.raises(TrainingError, match="eager attention cannot tell the rows apart: use --set layout=padded"):
        score_completions(eager_model, batch)
    recurrent_model = make_model()
    recurrent_model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(TrainingError, match=f"the {layout} layout does not work with layers of .*layout=padded"):
        score_completions(recurrent_model, batch)

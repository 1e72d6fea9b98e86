"""Attention by nodes equals attention with a dense mask of the same tree, and needs much less memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support.small_models import make_model  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.attention import flex_attention  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from memagent_training.forward.layouts import IdRow, Trie, lay_out, lay_out_as_tree, lay_out_in_sequence  # noqa: E402
from memagent_training.forward.scoring import score_completions  # noqa: E402
from memagent_training.forward.tree_attention import NodeMask  # noqa: E402
from memagent_training.training_errors import TrainingError  # noqa: E402

HEADS, WIDTH = 2, 4

token_ids = st.integers(0, 2)
"""Few different ids, so that rows share prefixes or are prefixes of others by chance."""
random_rows = st.lists(st.lists(token_ids, min_size=1, max_size=6), min_size=1, max_size=10)
nested_prefixes = st.integers(1, 8).flatmap(lambda step: st.just([[0] * (step * length) for length in range(1, 7)]))
branching_prefixes = st.integers(1, 12).map(lambda length: [[0] * depth + [1] for depth in range(length)])
duplicates = st.lists(token_ids, min_size=1, max_size=6).map(lambda row: [row] * 4)
tries = st.builds(
    lambda rows, is_tree: (lay_out_as_tree if is_tree else lay_out_in_sequence)([array("q", row) for row in rows]),
    st.one_of(random_rows, nested_prefixes, branching_prefixes, duplicates),
    st.booleans(),
)


def make_qkv(trie: Trie, *, dtype: Any = torch.float64, key_heads: int = HEADS, value_width: int = WIDTH) -> list[Any]:
    """Return queries, keys and values, laid out as in models: a view of (batch, tokens, heads, width)."""
    generator = torch.Generator().manual_seed(len(trie.ids))
    shapes = [(HEADS, WIDTH), (key_heads, WIDTH), (key_heads, value_width)]
    samples = [torch.randn(1, len(trie.ids), *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [sample.to(dtype).transpose(1, 2).requires_grad_() for sample in samples]


def make_dense_mask(trie: Trie) -> Any:
    position = torch.arange(len(trie.ids))
    return (position[:, None] >= position) & (position[:, None] < torch.tensor(trie.ends))


def add_gradients(attention_output: Any, qkv: Sequence[Any]) -> list[Any]:
    weights = torch.rand(attention_output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [attention_output, *torch.autograd.grad(attention_output, qkv, weights.to(attention_output.dtype))]


def assert_same(results: Sequence[Any], expected: Sequence[Any]) -> None:
    torch.testing.assert_close(list(results), list(expected), rtol=0, atol=1e-12)


def attend_by_nodes(query: Any, key: Any, value: Any) -> Any:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=NodeMask(BRANCHES.nodes))


SECTION = [random.Random(0).randrange(50) for _ in range(30)]
ROWS = [*([*SECTION, 60 + branch, *range(branch)] for branch in range(5)), SECTION[:3], [1, 2]]
BRANCHES = lay_out_as_tree([array("q", row) for row in ROWS])


def assert_equals_dense_mask(trie: Trie, qkv: Sequence[Any], **options: Any) -> None:
    by_nodes, expected = (
        functional.scaled_dot_product_attention(*qkv, attn_mask=mask, **options)
        for mask in (NodeMask(trie.nodes), make_dense_mask(trie))
    )
    assert_same(add_gradients(by_nodes, qkv), add_gradients(expected, qkv))


@settings(max_examples=40)
@given(trie=tries, scale=st.sampled_from([None, 0.2, 3.0]))
def test_attention_in_any_tree_equals_a_dense_mask(trie: Trie, scale: float | None) -> None:
    assert_equals_dense_mask(trie, make_qkv(trie), scale=scale)


@pytest.mark.parametrize("shapes", [{"key_heads": 1}, {"value_width": 3}, {"value_width": 6}], ids=str)
def test_heads_may_share_keys_and_values_may_have_another_width(shapes: dict[str, int]) -> None:
    assert_equals_dense_mask(BRANCHES, make_qkv(BRANCHES, **shapes), enable_gqa="key_heads" in shapes)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_gets_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but not compiled; torch refuses gradients on CPUs, although they are correct there."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    qkv = make_qkv(BRANCHES, value_width=3)
    expected = functional.scaled_dot_product_attention(*qkv, attn_mask=make_dense_mask(BRANCHES))
    mask = NodeMask(BRANCHES.nodes).blocks
    assert_same(add_gradients(flex_attention.flex_attention(*qkv, block_mask=mask), qkv), add_gradients(expected, qkv))


@pytest.mark.parametrize("transposed", [False, True])
def test_queries_and_gradients_may_have_any_memory_layout(transposed: bool) -> None:
    qkv = make_qkv(BRANCHES)
    strided_qkv = [entry.mT.contiguous().mT if transposed else entry for entry in qkv]
    total = attend_by_nodes(*strided_qkv).sum()  # its gradient is one number with stride 0
    expected = functional.scaled_dot_product_attention(*qkv, attn_mask=make_dense_mask(BRANCHES)).sum()
    assert_same(torch.autograd.grad(total, qkv), torch.autograd.grad(expected, qkv))


def test_half_precision_is_within_two_percent_of_double() -> None:
    qkv = make_qkv(BRANCHES, dtype=torch.bfloat16)
    double_qkv = [entry.detach().double().requires_grad_() for entry in qkv]
    expected = add_gradients(
        functional.scaled_dot_product_attention(*double_qkv, attn_mask=make_dense_mask(BRANCHES)), double_qkv
    )
    results = add_gradients(attend_by_nodes(*qkv), qkv)
    assert {result.dtype for result in results} == {torch.bfloat16}
    for result, exact_result in zip(results, expected, strict=True):
        assert (result.double() - exact_result).norm() < 0.02 * exact_result.norm()


def test_autocast_gives_queries_keys_and_values_one_precision() -> None:
    """Under autocast, rotary embeddings return queries and keys in float32, while values stay bfloat16."""
    query, key, value = make_qkv(BRANCHES, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        results = attend_by_nodes(query, key, value.bfloat16())
    assert results.dtype == torch.bfloat16
    torch.testing.assert_close(results.float(), attend_by_nodes(query, key, value), rtol=0.02, atol=0.02)


# In a model.


def make_small_qwen() -> Any:
    return make_model("Qwen2", dtype=torch.float32, vocab_size=80, hidden_size=16, max_position_embeddings=512)


def make_rows(section: Sequence[int], seed: int) -> list[IdRow]:
    rng = random.Random(seed)
    return [IdRow([*section, *(rng.randrange(80) for _ in range(9))], [1, 2, 3, branch]) for branch in range(6)]


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest result of any operation."""

    element_count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, tuple | list) else [results]:
            if isinstance(tensor, torch.Tensor):
                self.element_count = max(self.element_count, tensor.untyped_storage().nbytes() // tensor.element_size())
        return results


@pytest.mark.parametrize("layout", ["packed", "prefix_tree"])
def test_no_tensor_grows_with_the_square_of_the_tokens(layout: str) -> None:
    model = make_small_qwen()
    rows = [row for start in range(20) for row in make_rows([*SECTION[start:], *SECTION], start)]
    batch = lay_out(rows, layout)
    with LargestTensor() as largest:
        score_completions(model, batch).logprobs_BT.sum().backward()
    tokens = batch.input_ids_SN.numel()
    assert tokens > 1500
    assert largest.element_count < 100 * tokens


# Refusals.


def test_node_mask_refuses_tensor_operations() -> None:
    mask = NodeMask(BRANCHES.nodes)
    tokens = len(BRANCHES.ids)
    assert (mask.shape, mask.dtype, mask.ndim) == ((1, 1, tokens, tokens), torch.bool, 4)
    assert (mask.size(-1), mask.dim(), mask.is_floating_point()) == (tokens, 4, False)
    assert repr(mask) == f"NodeMask({len(BRANCHES.nodes)} nodes, {tokens} tokens)"
    scores = torch.zeros(tokens, tokens)
    for operation in (
        lambda: scores + mask,
        lambda: torch.where(mask, scores, 0.0),
        lambda: mask[:, :, :, :3],
        lambda: mask.to(torch.float32),
        lambda: ~mask,
        mask.tolist,
    ):
        with pytest.raises(TrainingError, match=r"does not pass its mask to SDPA.*: use --set layout=padded"):
            operation()


def test_more_keys_than_tokens_are_refused() -> None:
    query, key, value = make_qkv(BRANCHES)
    longer_tensors = [torch.cat([tensor[:, :, :2], tensor], dim=2) for tensor in (key, value)]
    tokens = len(BRANCHES.ids)
    with pytest.raises(TrainingError, match=f"{tokens} queries and {tokens + 2} keys for {tokens} tokens"):
        attend_by_nodes(query, *longer_tensors)


def test_dropout_is_refused() -> None:
    with pytest.raises(TrainingError, match="set attention_dropout to 0 in its config, or use --set layout=padded"):
        functional.scaled_dot_product_attention(*make_qkv(BRANCHES), attn_mask=NodeMask(BRANCHES.nodes), dropout_p=0.3)

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memagent_graph.provenance.word_diff import Change, DiffOp, compare_words

PIECES = st.sampled_from(["the ", "keeper", " ", "\n", "1743", ", ", "灯", "塔", "ß", "\U0001f600", "\r\n", "x"])
TEXTS = st.lists(PIECES).map("".join) | st.text(max_size=60)


def join_texts(changes: list[Change], *ops: DiffOp) -> str:
    return "".join(change.text for change in changes if change.op in ops)


def make_long_text(rng: random.Random, vocabulary: int) -> str:
    return "".join(f"w{rng.randrange(vocabulary)}{rng.choice('  .')}" for _ in range(400))


LONG_TEXTS = st.builds(make_long_text, st.randoms(use_true_random=False), st.sampled_from([2, 40, 2000]))


@given(st.tuples(TEXTS, TEXTS) | st.tuples(LONG_TEXTS, LONG_TEXTS))
def test_both_texts_can_be_rebuilt_from_the_changes(texts: tuple[str, str]) -> None:
    old, new = texts
    changes = compare_words(old, new)
    assert join_texts(changes, DiffOp.EQUAL, DiffOp.INSERT) == new
    assert join_texts(changes, DiffOp.EQUAL, DiffOp.DELETE) == old
    assert all(change.text for change in changes)
    assert all(change.op is not following.op for change, following in pairwise(changes))


def test_only_a_changed_word_is_marked() -> None:
    assert compare_words("lit in 1743 by Ilse", "lit in 1744 by Ilse") == [
        Change(DiffOp.EQUAL, "lit in "),
        Change(DiffOp.DELETE, "1743 "),
        Change(DiffOp.INSERT, "1744 "),
        Change(DiffOp.EQUAL, "by Ilse"),
    ]


def test_a_small_word_between_larger_changes_is_part_of_the_change() -> None:
    changes = compare_words("Marta Okonjo of Saint Orrin", "Per Lindqvist of Hollow Mill")
    assert [change.op for change in changes] == [DiffOp.DELETE, DiffOp.INSERT]


def test_equal_texts_are_one_equal_span_and_empty_texts_have_none() -> None:
    assert compare_words("", "") == []
    assert compare_words("as it was", "as it was") == [Change(DiffOp.EQUAL, "as it was")]


def test_scripts_without_spaces_differ_by_characters() -> None:
    assert Change(DiffOp.EQUAL, "灯塔是") in compare_words("灯塔是安娜建造的", "灯塔是马丁建造的")


def test_inserted_words_in_a_long_paragraph_are_found() -> None:
    words = [f"w{index % 300}" for index in range(1000)]
    old, new = " ".join(words), " ".join([*words[:200], "new", *words[200:700], "other", *words[701:]])
    assert [change.text.strip() for change in compare_words(old, new) if change.op is DiffOp.INSERT] == ["new", "other"]


def test_long_memories_without_unique_common_words_are_replaced_as_a_whole() -> None:
    """No word occurs exactly once in both to divide them at, and comparing all pairs of 4,000 words would be slow."""
    rng = random.Random(0)
    old, new = ("".join(rng.choice("灯塔是安娜建造的在年点亮") for _ in range(4000)) for _ in range(2))
    assert compare_words(f"a{old}z", f"b{new}y") == [
        Change(DiffOp.DELETE, f"a{old}z"),
        Change(DiffOp.INSERT, f"b{new}y"),
    ]

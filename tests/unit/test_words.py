"""Words, sentences and characters of all scripts."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from support.languages import TEXTS, WORDS

from memagent_graph.words import (
    find_invented_word,
    find_sentence_ends,
    find_word_ends,
    find_words,
    fold_word,
    fold_words,
    is_character_end,
    list_terms,
)


@pytest.mark.parametrize(
    "spelling",
    [
        "Alexandrova", "ALEXANDROVA", "Alex\u00adandrova", "Alex\ufffeandrova", "Alex\u200bandrova", "Alex-\nandrova",
        "Alex-\r\n  androva", "A\u0301lexandrova", "Álexandrova", "\ufeffAlexandrova\u200e",
    ],
)  # fmt: skip
def test_all_spellings_of_a_word_are_equal(spelling: str) -> None:
    assert fold_words(f"by {spelling}, it says") == ["by", "alexandrova", "it", "says"]


@pytest.mark.parametrize(
    ("spelling", "normalised"),
    [
        ("1,234", "1234"), ("12,34,567", "1234567"), ("1.234.567", "1234567"), ("1\u202f234", "1234"),
        ("1’234", "1234"),
        ("١٬٢٣٤", "1234"), ("१२३४", "1234"), ("１２３４", "1234"), ("๑๒๓๔", "1234"),
        ("1,234.56", "1234 56"),
        ("1.5", "1 5"), ("7,12", "7 12"), ("1,234,5", "1 234 5"), ("10⁶", "10 6"), ("1,234kg", "1234 kg"),
        ("x², y", "x 2 y"),
    ],
)  # fmt: skip
def test_numbers_are_equal_in_the_digits_and_groups_of_all_scripts(spelling: str, normalised: str) -> None:
    assert " ".join(fold_words(spelling)) == normalised


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Straße", "STRASSE"), ("İstanbul", "istanbul"), ("IŞIK", "ışık"), ("Ἀθῆναι", "ΑΘΗΝΑΙ"), ("مُحَمَّد", "محمد"),
        ("أحمد", "احمد"), ("שָׁלוֹם", "שלום"), ("ﬁn", "fin"), ("서울은", "서울"), ("서울에서", "서울을"),
        ("1889년에", "1889년"),
        ("e\u0301te\u0301", "été"), ("ｶﾞ", "ガ"), ("か\u3099", "が"),
    ],
)  # fmt: skip
def test_words_are_compared_after_folding(one: str, other: str) -> None:
    assert fold_word(one) == fold_word(other)


@pytest.mark.parametrize(("one", "other"), [("か", "が"), ("हिन्दी", "हिन्दू"), ("กา", "กำ"), ("x²", "x2"), ("ma", "na")])
def test_words_that_differ_in_a_letter_stay_different(one: str, other: str) -> None:
    assert fold_words(one) != fold_words(other)


def test_word_spans_refer_to_the_original_text() -> None:
    text = "हिन्दी: Alex\u00adandrova, 1,234 東京"
    assert [text[start:end] for start, end in find_words(text)] == ["हिन्दी", "Alex\u00adandrova", "1,234", "東", "京"]


def test_terms_of_scripts_without_spaces_are_pairs_of_characters_also_across_lines() -> None:
    pairs = ["東京", "京タ", "タワ", "ワー"]
    assert list(list_terms("東京\nタワー is 高い。")) == [*"東京タワー", *pairs, "is", "高", "い", "高い"]
    assert list(list_terms("塔 of stone")) == ["塔", "of", "stone"]


@pytest.mark.parametrize(
    ("memory", "text", "invented"),
    [
        ("东京塔", "东京塔高三百米。", None),
        ("东京塔高三百米", "东京塔的高度是三百米。", None),
        ("东京塔高五百米", "东京塔的高度是三百米。", "高五"),
        ("北京", "东京塔", "北"),
        ("東京タワーは高いです", "東京タワーが高く", None),
        ("서울은 수도", "서울의 수도이다.", None),
        ("부산은 수도", "서울의 수도이다.", "부산"),
        ("1234 kg", "It weighs 1,234kg.", None),
        ("1,235", "1,234", "235"),
        ("Alexandrova is well-known", "Alex-\nandrova is well-\nknown", None),
        ("4711kg", "4711 kg", None),
        ("10^6", "10⁶", None),
        ("106", "10⁶", "106"),
    ],
)
def test_a_word_is_invented_if_no_form_of_it_is_in_the_text(memory: str, text: str, invented: str | None) -> None:
    assert find_invented_word(memory, [text]) == invented


CHARACTERS = st.sampled_from(
    [
        "क", "का", "क्षि", "र्त्स्न्य", "क\u200d", "เ", "กำ", "👩\u200d👦", "👍🏽", "🇦🇧", "🇦", "é", "가", "ᄀ", "각", "\n",
        "x", "漢", "が", "\u0600", "កំ", "ម៉ြ", "မြ",
    ]
)  # fmt: skip


@given(st.lists(CHARACTERS, max_size=20).map("".join))
def test_characters_end_where_the_regex_package_ends_them(text: str) -> None:
    ends = {match.end() for match in regex.finditer(r"\X", text)}
    assert {position for position in range(1, len(text) + 1) if is_character_end(text, position)} == ends


def test_character_end_looks_only_at_neighbours() -> None:
    flags = "🇦🇧" * 3000
    assert [is_character_end("x" + flags, position) for position in (4000, 4001)] == [False, True]


@pytest.mark.parametrize(
    "sentences",
    [
        ["He came. ", "She left! ", "Why? ", "“No.” ", "Done."],
        ["Dr. Ito and Mr. Lee met in St. Ives at 3.5 p.m. today. ", "They left."],
        ["A line\nwraps here. ", "Another\r\ndoes.\n\n", "a paragraph\n \n", "the last"],
        ["Wait… ", "Then it rained. ", "Good."],
        [
            "It is rusty. ",
            "pytest checks them. ",
            "`--force` skips (see 4711). ",
            "[default: no]. ",
            "It ends in 1889. ",
            "x",
        ],
        ["Birds, e.g. owls, fig. two, etc. are on p. five, i.e. not ... here."],
    ],
)
def test_sentences_end_where_a_reader_ends_them(sentences: list[str]) -> None:
    assert cut("".join(sentences), find_sentence_ends("".join(sentences))) == sentences


def cut(text: str, ends: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_sentence_ends_of_a_range_are_those_of_the_whole_text() -> None:
    text = "One is here. Dr. Two is there. Three… is not。四は。Five! " * 20
    ends = find_sentence_ends(text)
    for start in range(0, len(text) - 100, 37):
        assert find_sentence_ends(text, start, start + 100) == [end for end in ends if start < end <= start + 100]


def test_words_of_scripts_without_spaces_end_as_in_a_dictionary() -> None:
    text = "สวัสดีครับผมชื่อ"
    assert cut(text, find_word_ends(text, 0, len(text) - 1)) == ["สวัสดี", "ครับ", "ผม", "ชื่อ"]


@pytest.mark.parametrize("script", TEXTS)
def test_sentences_of_every_script_end_at_the_marks(script: str) -> None:
    assert len({*map("".join, TEXTS[script])}) == 20
    for previous, following in pairwise([[], *TEXTS[script]]):
        text = "".join([*previous, *following])
        assert cut(text, find_sentence_ends(text)) == [*previous, *following]


@pytest.mark.parametrize("script", WORDS)
def test_concatenated_words_without_spaces_are_separated(script: str) -> None:
    for sequence in list(permutations(WORDS[script], 3))[:20]:
        text = "".join(sequence)
        assert cut(text, find_word_ends(text, 0, len(text) - 1)) == list(sequence), sequence

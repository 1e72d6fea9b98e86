"""Generated tasks have RULER's structure: counts of needles and keys, depths, questions and examples."""

import re
from collections import Counter
from itertools import pairwise

import pytest

from memagent_evaluation.planted_facts import is_held_out
from memagent_evaluation.samples import LengthUnit, Metric
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.generated import DEPTHS
from memagent_evaluation.tasks.haystacks import NOISE
from memagent_evaluation.tasks.needles import list_all_words
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")
LENGTH = 6000
WORD_KEY = r"[a-z]+-[a-z]+"
NUMBER = r"\d{7}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
# For each task: haystack, number of keys, values per key, keys in the question, and patterns of key and value.
NEEDLE_TASKS = {
    "niah_single_1": ("noise", 1, 1, 1, WORD_KEY, NUMBER),
    "niah_single_2": ("prose", 1, 1, 1, WORD_KEY, NUMBER),
    "niah_single_3": ("prose", 1, 1, 1, WORD_KEY, UUID),
    "niah_multikey_1": ("prose", 4, 1, 1, WORD_KEY, NUMBER),
    "niah_multikey_2": ("needles", None, 1, 1, WORD_KEY, NUMBER),
    "niah_multikey_3": ("needles", None, 1, 1, UUID, UUID),
    "niah_multivalue": ("prose", 1, 4, 1, WORD_KEY, NUMBER),
    "niah_multiquery": ("prose", 4, 1, 4, WORD_KEY, NUMBER),
}


def make_sample(name, length=LENGTH, index=0, **settings):
    sample = load_task(name, TaskSettings(TOKENIZER, **settings)).sample(length, index)
    return sample, "".join(sample.text())


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Prose in short sentences, the same with every version of Python."""
    path = tmp_path_factory.mktemp("haystack") / "book.txt"
    sentences = [f"Line {number} of the book is short." for number in range(3000)]
    path.write_text("\n\n".join(" ".join(sentences[start : start + 7]) for start in range(0, 3000, 7)))
    return path


def find_needles(text, key, value):
    return re.findall(rf"One of the special magic (?:number|uuid)s for ({key}) is: ({value})\.", text)


@pytest.mark.parametrize("name", NEEDLE_TASKS)
@pytest.mark.parametrize("index", range(2))
def test_needle_tasks_have_the_published_counts_and_types(name, index):
    haystack_kind, key_count, values_per_key, queried_count, key_pattern, value_pattern = NEEDLE_TASKS[name]
    sample, text = make_sample(name, index=index)
    pairs = find_needles(text, key_pattern, value_pattern)
    values_by_key = Counter(word for word, _ in pairs)
    if key_count is None:
        assert len(pairs) > 50
        assert len(pairs) == text.count("\n") + 1
    else:
        assert len(values_by_key) == key_count
        assert len(pairs) == text.count("special magic") == key_count * values_per_key
    targets = [word for word in values_by_key if word in sample.question]
    assert len(targets) == queried_count
    assert Counter(sample.gold) == Counter(number for word, number in pairs if word in targets)
    assert len(set(sample.gold)) == values_per_key * queried_count
    assert all(values_by_key[word] == values_per_key for word in targets)
    assert sample.task.metric is Metric.ALL
    assert sample.task.unit is LengthUnit.TOKENS
    assert sample.task.answer_tokens == 128
    if haystack_kind == "noise":
        lines = [line for line in text.split("\n") if "magic" not in line]
        assert set(lines) == set(NOISE)
        assert len(lines) > 200


@pytest.mark.parametrize("name", [*NEEDLE_TASKS, "vt"])
def test_needles_are_at_their_stated_and_distinct_depths(name, book):
    needle_pattern = re.compile(r"One of the special magic [^\n]*?\.(?=\s|$)|VAR [A-Z]+ = [^\n]*")
    used_steps = set()
    for index in range(6):
        sample, text = make_sample(name, index=index, haystack=book)
        for needle in sample.needles:
            assert needle.gold in needle.text
            assert needle.gold in sample.gold
            assert text.count(needle.text) == 1
            assert text.index(needle.text) == round(needle.depth * len(text))
            if NEEDLE_TASKS.get(name, ("",))[0] == "prose":
                text_before, text_after = text.split(needle.text)
                assert re.search(r"(^|\.\s+)$", text_before)
                assert re.match(r"$| (Line|One of)|\n\nLine", text_after)
        assert [needle.depth for needle in sample.needles] == sorted(needle.depth for needle in sample.needles)
        if NEEDLE_TASKS.get(name, ("",))[0] != "needles":
            text = text.rpartition("The text in question:\n")[2]  # after the worked example
            starts = [match.start() / len(text) for match in needle_pattern.finditer(text)]
            depth_steps = [min(range(40), key=lambda step, start=start: abs(DEPTHS[step] - start)) for start in starts]
            assert len(set(depth_steps)) == len(depth_steps)
            # A needle goes between sentences, so it is off by at most a sentence and the other needles.
            assert all(abs(DEPTHS[step] - start) < 0.02 for step, start in zip(depth_steps, starts, strict=True))
            used_steps |= set(depth_steps)
    assert len(used_steps) > 4 or NEEDLE_TASKS.get(name, ("",))[0] == "needles"


ASSIGNMENT = re.compile(r"^VAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|\d{5})$", re.MULTILINE)


@pytest.mark.parametrize("length", [2000, 8000])
def test_variable_tracking_has_a_chain_of_five_and_a_worked_example(length):
    sample, document = make_sample("vt", length)
    (value,) = re.findall(r"\d{5}", sample.question)
    example, text = document.split("The text in question:\n")
    chain = ASSIGNMENT.findall(text)
    assert len(chain) == text.count("VAR ") - 4 == 5
    assert [source for _, source in chain] == [value, *(name for name, _ in chain[:-1])]
    assert sample.gold == tuple(name for name, _ in chain)
    assert {line for line in text.split("\n") if "VAR" not in line} == set(NOISE)
    assert (sample.task.metric, sample.task.answer_tokens) == (Metric.ALL, 30)
    example_chain = ASSIGNMENT.findall(example)
    solution = re.search(r"The variables that have the value (\d{5}) in the example are: (.*)\.", example)
    assert [source for _, source in example_chain] == [solution[1], *(name for name, _ in example_chain[:-1])]
    assert solution[2].split(", ") == [name for name, _ in example_chain]
    assert not {solution[1], *solution[2].split(", ")} & {value, *sample.gold}
    example_tokens = TOKENIZER.count(example)
    assert 400 <= example_tokens <= 600 if length == 8000 else example_tokens <= 300


@pytest.mark.parametrize(("length", "common_count", "rare_count"), [(4095, 6, 1), (4096, 30, 3), (20_000, 30, 3)])
def test_ten_words_are_common_and_all_others_equally_rare(length, common_count, rare_count):
    sample, text = make_sample("cwe", length)
    example, word_list = text.split("The list in question: ")
    entries = re.findall(r"(\d+)\. ([a-z]+)", word_list)
    assert [int(position) for position, _ in entries] == list(range(1, len(entries) + 1))
    counts = Counter(word for _, word in entries)
    assert {word for word, count in counts.items() if count == common_count} == set(sample.gold)
    assert Counter(counts.values()) == {common_count: 10, rare_count: len(counts) - 10}
    assert len(counts) >= 20
    assert set(counts) <= set(list_all_words())
    positions = [position for position, (_, word) in enumerate(entries) if word in sample.gold]
    gaps = Counter(later - earlier for earlier, later in pairwise(positions))
    expected_adjacent = len(positions) ** 2 / len(entries)  # the expected number of adjacent pairs
    assert gaps.most_common(1)[0][1] < expected_adjacent + 0.3 * len(positions), "the positions have no pattern"
    example_counts = Counter(re.findall(r"\d+\. ([a-z]+)", example))
    example_answer = re.search(r"example are: (.*)\.", example)[1].split(", ")
    assert [word for word, _ in example_counts.most_common(10)] != list(sample.gold)
    # RULER's example has 190 entries, or 40 where the list is short.
    example_common_count, example_rare_count, example_rare_words = (3, 1, 10) if length < 4096 else (10, 3, 30)
    assert {word for word, count in example_counts.items() if count == example_common_count} == set(example_answer)
    assert Counter(example_counts.values()) == {example_common_count: 10, example_rare_count: example_rare_words}
    assert example_counts.total() == (40 if length < 4096 else 190)
    assert not set(example_counts) & set(counts)
    assert (sample.task.metric, sample.task.answer_tokens) == (Metric.ALL, 120)


def test_long_word_lists_use_pairs_of_words():
    sample, text = make_sample("cwe", 200_000)
    counts = Counter(re.findall(r"\d+\. (\S+)", text.split("The list in question: ")[1]))
    assert Counter(counts.values()) == {30: 10, 3: len(counts) - 10}
    assert len(counts) > 5000
    assert all(re.fullmatch(WORD_KEY, word) for word in counts)
    assert {word for word, number in counts.items() if number == 30} == set(sample.gold)


@pytest.mark.parametrize("length", [2000, 30_000])
def test_coded_word_counts_fall_with_the_square_of_the_rank(length):
    sample, text = make_sample("fwe", length)
    counts = Counter(text.split(" "))
    (noise_word, noise_count), *word_counts = counts.most_common()
    assert noise_word == "..."
    assert [word for word, _ in word_counts[:3]] == list(sample.gold)
    assert word_counts[2][1] > word_counts[3][1]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in word_counts)
    assert len(counts) <= length // 50
    for rank, (_, count) in enumerate(word_counts, 2):
        assert abs(count - noise_count / rank**2) <= 1
    assert (sample.task.metric, sample.task.answer_tokens) == (Metric.ALL, 50)


# Small variants

KNOWN_STATEMENT = re.compile(
    r"One of the special magic numbers for [\w -]+ is: \d+\."
    r"|(?:The|Note that the|Remember that the) [\w ]+ (?:of|for) [\w -]+ is \d+\."
)
KNOWN_QUESTION = r"What is the [a-z ]+ (?:of|for) [\w -]+?(?: mentioned in the provided text)?\?"


@pytest.mark.parametrize("name", NEEDLE_TASKS)
@pytest.mark.parametrize("index", range(4))
def test_small_needle_tasks_use_known_statements_and_questions(name, index):
    _, key_count, values_per_key, queried_count, _, value_kind = NEEDLE_TASKS[name]
    sample, text = make_sample(name, 700, index, small=True)
    small_queried_count = min(queried_count, 2)
    assert re.fullmatch(" ".join([KNOWN_QUESTION] * small_queried_count), sample.question)
    assert len(sample.gold) == small_queried_count * min(values_per_key, 2)
    assert TOKENIZER.count(sample.question) <= 96
    assert sample.task.answer_tokens == 48
    if value_kind == NUMBER:
        assert "special magic number" in sample.question
        count = text.count("special magic number")
        assert count == (2 if name in {"niah_multivalue", "niah_multiquery"} else key_count) or key_count is None
    for gold, needle in zip(sorted(sample.gold), sorted(sample.needles, key=lambda item: item.gold), strict=True):
        assert re.fullmatch(r"\d{4,7}", gold)
        assert is_held_out(gold)
        assert needle.gold == gold
        assert needle.text in text
        assert KNOWN_STATEMENT.fullmatch(needle.text)


def test_small_variable_tracking_fits_the_embedded_policy():
    sample, text = make_sample("vt", 700, small=True)
    assert TOKENIZER.count(sample.question) <= 96
    assert TOKENIZER.count(", ".join(sample.gold)) <= sample.task.answer_tokens <= 48
    assert len(sample.gold) == text.count(" = ") == 3
    assert {needle.gold for needle in sample.needles} == set(sample.gold)
    assert all(re.fullmatch("[A-Z]{3}", gold) for gold in sample.gold)

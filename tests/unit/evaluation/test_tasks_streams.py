"""Documents are streams: the same at every call and in every process, never held whole, and quick to make."""

import hashlib
import json
import sys
import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs import run_program

from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.generated import iter_shuffled
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")
NAMES = ("niah_single_1", "niah_single_2", "niah_multikey_2", "vt", "cwe", "fwe", "english_hop_2")

IN_A_PROCESS = """
import hashlib, json, sys
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_graph.tokenizers import load_tokenizer
tokenizer = load_tokenizer("embedded")
found = {}
for name in sys.argv[1:]:
    sample = load_task(name, TaskSettings(tokenizer, seed=7)).sample(1500, 3)
    digest = hashlib.sha256("".join(sample.text()).encode()).hexdigest()
    found[name] = [sample.question, list(sample.gold), digest, [n.depth for n in sample.needles]]
print(json.dumps(found))
"""


def digest(sample):
    return hashlib.sha256("".join(sample.text()).encode()).hexdigest()


def test_samples_are_the_same_in_any_process():
    """Processes differ in the seed of hashes, from which the order of sets follows."""
    there = json.loads(
        run_program([sys.executable, "-c", IN_A_PROCESS, *NAMES], capture_output=True, check=True).stdout
    )
    for name in NAMES:
        sample = load_task(name, TaskSettings(TOKENIZER, seed=7)).sample(1500, 3)
        depths = [needle.depth for needle in sample.needles]
        assert there[name] == [sample.question, list(sample.gold), digest(sample), depths]


@pytest.mark.parametrize("name", NAMES)
def test_seed_length_and_index_each_make_another_sample(name):
    task = load_task(name, TaskSettings(TOKENIZER))
    samples = [
        task.sample(1500, 0),
        task.sample(1500, 1),
        task.sample(1501, 0),
        load_task(name, TaskSettings(TOKENIZER, seed=1)).sample(1500, 0),
    ]
    assert len({(sample.question, sample.gold) for sample in samples}) == 4
    assert len({digest(sample) for sample in samples}) == 4
    first, again = samples[0], task.sample(1500, 0)
    assert (again.gold, again.question, again.needles) == (first.gold, first.question, first.needles)
    at_once = list(zip(again.text(), again.text(), strict=True))
    assert all(one == other for one, other in at_once)
    assert "".join(one for one, _ in at_once) == "".join(first.text())


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2"])
def test_memory_does_not_grow_with_length(name):
    task = load_task(name, TaskSettings(TOKENIZER))

    def peak(length):
        tracemalloc.start()
        try:
            longest = max(map(len, task.sample(length, 0).text()))
            assert longest < 4000, "a worked example is one piece"
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(5000)  # word lists and the like are loaded once
    short, long = peak(6_000), peak(26_000)
    # Twenty thousand tokens more are at least 50 KB of text.
    assert long < short + 20_000


@given(size=st.integers(1, 700), seed=st.integers())
def test_a_shuffled_order_has_every_item_once(size, seed):
    assert sorted(iter_shuffled(range(size), Random(seed))) == list(range(size))

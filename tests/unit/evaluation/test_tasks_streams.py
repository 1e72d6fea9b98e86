"""Documents are streams: equal at every call and in every process, and never held in memory as a whole."""

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
TASK_NAMES = ("niah_single_1", "niah_single_2", "niah_multikey_2", "vt", "cwe", "fwe", "english_hop_2")

SAMPLE_PROGRAM = """
import hashlib, json, sys
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_graph.tokenizers import load_tokenizer
tokenizer = load_tokenizer("embedded")
samples = {}
for name in sys.argv[1:]:
    sample = load_task(name, TaskSettings(tokenizer, seed=7)).sample(1500, 3)
    digest = hashlib.sha256("".join(sample.text()).encode()).hexdigest()
    samples[name] = [sample.question, list(sample.gold), digest, [n.depth for n in sample.needles]]
print(json.dumps(samples))
"""


def compute_digest(sample):
    return hashlib.sha256("".join(sample.text()).encode()).hexdigest()


def test_samples_are_the_same_in_any_process():
    """Processes have different hash seeds, which change the order of sets."""
    samples_of_process = json.loads(
        run_program([sys.executable, "-c", SAMPLE_PROGRAM, *TASK_NAMES], capture_output=True, check=True).stdout
    )
    for name in TASK_NAMES:
        sample = load_task(name, TaskSettings(TOKENIZER, seed=7)).sample(1500, 3)
        depths = [needle.depth for needle in sample.needles]
        assert samples_of_process[name] == [sample.question, list(sample.gold), compute_digest(sample), depths]


@pytest.mark.parametrize("name", TASK_NAMES)
def test_seed_length_and_index_each_change_the_sample(name):
    task = load_task(name, TaskSettings(TOKENIZER))
    samples = [
        task.sample(1500, 0),
        task.sample(1500, 1),
        task.sample(1501, 0),
        load_task(name, TaskSettings(TOKENIZER, seed=1)).sample(1500, 0),
    ]
    assert len({(sample.question, sample.gold) for sample in samples}) == 4
    assert len({compute_digest(sample) for sample in samples}) == 4
    sample, repeated_sample = samples[0], task.sample(1500, 0)
    assert repeated_sample.needles == sample.needles
    assert (repeated_sample.gold, repeated_sample.question) == (sample.gold, sample.question)
    interleaved_units = list(zip(repeated_sample.text(), repeated_sample.text(), strict=True))
    assert all(unit == repeated_unit for unit, repeated_unit in interleaved_units)
    assert "".join(unit for unit, _ in interleaved_units) == "".join(sample.text())


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2"])
def test_memory_does_not_grow_with_length(name):
    task = load_task(name, TaskSettings(TOKENIZER))

    def measure_peak_bytes(length):
        tracemalloc.start()
        try:
            longest_unit = max(map(len, task.sample(length, 0).text()))
            assert longest_unit < 4000, "a worked example is one piece"
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    measure_peak_bytes(5000)  # word lists and the like are loaded once
    short_peak, long_peak = measure_peak_bytes(6_000), measure_peak_bytes(26_000)
    # Twenty thousand tokens more are at least 50 KB of text.
    assert long_peak < short_peak + 20_000


@given(size=st.integers(1, 700), seed=st.integers())
def test_shuffled_order_has_every_item_once(size, seed):
    assert sorted(iter_shuffled(range(size), Random(seed))) == list(range(size))

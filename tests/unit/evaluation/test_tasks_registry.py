"""Tasks by name: the available ones, errors for unknown names and options, and users' own tasks."""

import re
import sys
import textwrap
from dataclasses import replace

import pytest

from memagent_evaluation import samples
from memagent_evaluation.samples import Task
from memagent_evaluation.tasks import TaskSettings, list_task_options, list_tasks, load_task
from memagent_evaluation.tasks.needles import list_words
from memagent_graph.errors import EvaluationError, MissingExtraError
from memagent_graph.tokenizers import load_tokenizer

SETTINGS = TaskSettings(load_tokenizer("embedded"))
RULER_TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)
OWN_TASKS = (
    *("state_1", "state_2", "state_3"),
    *(f"english_hop_{hops}{order}" for hops in (2, 3) for order in ("", "_backward")),
    *(f"english_{kind}" for kind in ("fact", "new", "change", "list", "absent")),
)
DATA_TASKS = ("hotpotqa", "squad", "ruler_hqa_files", "qa_files", "memagent_files")


def test_list_has_ruler_own_and_data_tasks():
    assert set(list_tasks()) == {*RULER_TASKS, "ruler_hqa", *OWN_TASKS, *DATA_TASKS}
    assert len(list_tasks()) == len(set(list_tasks()))


def test_task_options_are_listed():
    for name in OWN_TASKS:
        assert list_task_options(name) == load_task(name, SETTINGS).options != ()
    assert list_task_options("niah_single_1") == ()


@pytest.mark.parametrize("name", [*(name for name in RULER_TASKS if not name.startswith("qa")), *OWN_TASKS])
def test_task_gives_samples_with_needle_depths_and_refuses_bad_lengths(name):
    task = load_task(name, SETTINGS)
    sample = task.sample(3000, 5)
    text = "".join(sample.text())
    assert (task.name, sample.task, sample.id) == (name, task, f"{name}/3000/5")
    assert (sample.length, sample.index) == (3000, 5)
    assert {needle.gold for needle in sample.needles} >= set(sample.gold) or name == "english_absent"
    assert all(text[round(needle.depth * len(text)) :].startswith(needle.text) for needle in sample.needles)
    with pytest.raises(EvaluationError, match=rf"30 tokens is too small for {name}\. Ask for at least"):
        task.sample(30, 0)


def test_unknown_task_error_has_suggestions():
    with pytest.raises(EvaluationError) as error:
        load_task("naih_single_2", SETTINGS)
    assert "'naih_single_2'" in error.value.message
    assert error.value.hint.startswith("Did you mean niah_single_2")
    with pytest.raises(EvaluationError) as error:
        load_task("xyz", SETTINGS)
    assert error.value.hint.startswith("Tasks are:") and all(name in error.value.hint for name in list_tasks())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("state_1:things=2", {}, "0 to 0 things"),
        ("state_2:things=0", {}, "1 to 24 things"),
        ("state_2:people=99", {}, "99 people"),
        ("state_2:facts=0", {}, "Take 1 or more"),
        ("state_2:facts=many", {}, "facts=many is not valid"),
        ("state_2:hops=3", {}, "Its options: facts, people, things"),
        ("vt:hops=3", {}, "Its options: none"),
        ("state_2:facts=9:facts=8", {}, "option twice"),
        ("state_3:facts=2", {}, "rarely answer 1 questions"),
        ("english_fact:foreign=0", {}, "cannot have a foreign fact for every 0 tokens"),
        ("english_list", {"questions_per_document": 60}, "has no 60 questions on one document"),
        ("vt", {"questions_per_document": 2}, "vt has one question on each document"),
        ("fwe", {"questions_per_document": 2}, "fwe has one question on each document"),
        ("niah_multiquery", {"questions_per_document": 400, "small": True}, "more keys than the small variant has"),
    ],
)
def test_invalid_options_and_settings_are_refused(name, settings, message):
    with pytest.raises(EvaluationError) as error:
        load_task(name, TaskSettings(SETTINGS.tokenizer, **settings)).sample(10_000, 0)
    assert message in f"{error.value.message} {error.value.hint}"


def test_missing_word_lists_error_names_the_extra(monkeypatch):
    list_words.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    try:
        with pytest.raises(MissingExtraError, match=r"pip install .*\[eval\]"):
            load_task("niah_single_1", SETTINGS).sample(3000, 0)
        assert load_task("niah_single_1", TaskSettings(SETTINGS.tokenizer, small=True)).sample(300, 0).gold
    finally:
        list_words.cache_clear()


# Users' own tasks

DOCUMENTED_TASK = textwrap.dedent(samples.__doc__.split("\n\n", 1)[1].split("`memagent eval", 1)[0])


def write_module(folder, source):
    path = folder / "my_tasks.py"
    path.write_text(source)
    return path


def test_documented_example_of_an_own_task_works(tmp_path):
    assert len(DOCUMENTED_TASK.strip().splitlines()) <= 20
    assert "`memagent eval my_tasks.py:Birthdays`" in samples.__doc__
    task = load_task(f"{write_module(tmp_path, DOCUMENTED_TASK)}:Birthdays", SETTINGS)
    sample = task.sample(2000, 3)
    text = "".join(sample.text())
    assert f"born on day {sample.gold[0]} " in text
    assert text == "".join(sample.text())
    tokens = SETTINGS.tokenizer.count(text + sample.question) + task.answer_tokens
    assert 0.7 * 2000 < tokens < 1.3 * 2000
    assert sample.id == "birthdays/2000/3"
    assert {task.sample(2000, index).gold for index in range(20)} != {sample.gold}
    assert all(hasattr(task, attribute) for attribute in vars(Task) if not attribute.startswith("_"))


USER_MODULE = """
from dataclasses import dataclass
from memagent_evaluation.samples import LengthUnit, Metric, Sample

class Plain:
    name, metric, unit, answer_tokens = "plain", Metric.ANY, LengthUnit.TOKENS, 8
    def sample(self, length, index):
        return Sample(self, length, index, "?", ("!",), lambda: iter(["text"]))

class WithSettings(Plain):
    shares_documents = True
    def __init__(self, settings):
        self.settings = settings

class WithOptionalSettings(Plain):
    def __init__(self, settings=None):
        self.settings = settings

@dataclass
class WithDefaults(Plain):
    depth: int = 3

class Greedy(Plain):
    def __init__(self, one, two):
        raise AssertionError

instance = WithDefaults(5)
nothing = 7
"""


def test_own_task_class_is_instantiated_with_or_without_settings(tmp_path):
    shared_settings = replace(SETTINGS, questions_per_document=3)
    path = write_module(tmp_path, USER_MODULE)
    assert load_task(f"{path}:Plain", SETTINGS).name == "plain"
    assert load_task(f"{path}:WithSettings", SETTINGS).settings is SETTINGS
    assert load_task(f"{path}:WithOptionalSettings", SETTINGS).settings is SETTINGS
    assert load_task(f"{path}:WithDefaults", SETTINGS).depth == 3
    assert load_task(f"{path}:instance", SETTINGS).depth == 5
    assert load_task(f"{path}:WithSettings", shared_settings).settings is shared_settings
    with pytest.raises(EvaluationError, match="one question on each document"):
        load_task(f"{path}:Plain", shared_settings)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("{path}:Plian", "has no 'Plian'", "Did you mean .*:Plain"),
        ("{path}:nothing", "is not a task: it has no name, metric, unit, answer_tokens, sample", "example"),
        ("{path}:Greedy", "its constructor takes", "TaskSettings as `settings`, or nothing"),
    ],
)
def test_invalid_own_task_is_an_error_with_a_hint(name, message, hint, tmp_path):
    with pytest.raises(EvaluationError, match=message) as error:
        load_task(name.format(path=write_module(tmp_path, USER_MODULE)), SETTINGS)
    assert re.search(hint, error.value.hint)

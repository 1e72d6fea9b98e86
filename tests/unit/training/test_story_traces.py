"""The scripted reader of stories, against a second one that reads only the prompt, sentence by sentence."""

import random
import re
import sys
from pathlib import Path

import pytest

from memagent_evaluation.tasks.state_tracking import FINDS, PARTS, WALKS
from memagent_graph.policies.profile import require_profile
from memagent_graph.prompts import last_boxed
from recipes.embedded.training_examples import Prose
from recipes.language import supervised
from recipes.language.reader_traces import TraceMaker
from recipes.language.story_traces import turns_on_story
from recipes.language.supervised import SHIPPED, ExampleMaker
from recipes.language.turns import LessonTurn

PROSE = "The daemon reads its settings when it starts. Nothing else is written to the disk by any of its workers. "
KINDS = {"walk": WALKS, "find": FINDS, "part": PARTS}
EVENTS = {
    kind: re.compile(
        "|".join(re.escape(each).replace(r"\{who\}", r"(\w+)").replace(r"\{what\}", r"(\w+)") for each in those)
    )
    for kind, those in KINDS.items()
}


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> list[LessonTurn]:
    path = tmp_path_factory.mktemp("corpus") / "train.txt"
    path.write_text(PROSE * 60, encoding="utf-8")
    prose = Prose(path)
    return [turn for seed in range(80) for turn in turns_on_story(random.Random(seed), prose, 500, 12)]


def notes(memory: str) -> dict[str, str]:
    """The places, or places and carriers, that a memory lists."""
    if memory in {"", "none"}:
        return {}
    return dict(each.split(": ") for each in memory.rstrip(".").split(". "))


def updated(memory: str, section: str, question: str) -> dict[str, str]:
    """The notes after each sentence of a section has been applied to them."""
    known = notes(memory)
    subject = re.search(r"where (?:is|was)( the)? (\w+)", question)
    assert subject
    asked, is_thing, wants_past = subject[2], bool(subject[1]), " before " in question
    sentences = [
        (match.start(), kind, match) for kind, pattern in EVENTS.items() for match in pattern.finditer(section)
    ]
    for _, kind, match in sorted(sentences, key=lambda each: each[0]):
        who, what = (each for each in match.groups() if each)
        places, _, carrier = known.get(asked, "").partition("; ")
        if kind == "walk" and (is_thing or who == asked):
            known[who] = what
            if wants_past and carrier == who:
                known[asked] = f"{places}, {what}; {who}"
        elif kind == "find" and what == asked:
            here = known[who]
            known[asked] = (f"{places or here}; {who}") if wants_past else who
        elif kind == "part" and what == asked:
            known[asked] = places if wants_past else known[who]
    return known


def test_each_update_follows_from_its_memory_and_section_alone(turns: list[LessonTurn]) -> None:
    updates = [turn for turn in turns if turn.role == "update"]
    assert len(updates) > 200
    for turn in updates:
        assert notes(turn.reply) == updated(turn.fields["memory"], turn.fields["chunk"], turn.question)
        assert turn.writes == (notes(turn.reply) != notes(turn.fields["memory"]))


def test_each_answer_follows_from_its_memory(turns: list[LessonTurn]) -> None:
    answers = [turn for turn in turns if turn.role == "answer"]
    assert len(answers) > 100
    for turn in answers:
        known = notes(turn.fields["memory"])
        asked = re.search(r"where (?:is|was)(?: the)? (\w+)(?: before it came to the (\w+))?", turn.question)
        assert asked
        value = known[asked[1]]
        if asked[2]:
            places = value.partition("; ")[0].split(", ")
            value = places[places.index(asked[2]) - 1]
        assert last_boxed(turn.reply) == known.get(value, value)


def test_memory_has_only_words_of_the_text(turns: list[LessonTurn]) -> None:
    for turn in turns:
        if turn.role == "update":
            assert set(re.findall(r"\w+", turn.reply)) <= set(re.findall(r"\w+", " ".join(turn.fields.values()))) | {
                "none"
            }


def test_stories_of_all_kinds_and_sections_without_events_are_there(turns: list[LessonTurn]) -> None:
    updates = [turn for turn in turns if turn.role == "update"]
    assert {"before it came" in turn.question for turn in updates} == {True, False}
    assert any(not turn.writes for turn in updates)
    assert any(turn.writes for turn in updates)


def test_the_same_seed_gives_the_same_turns(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(PROSE * 60, encoding="utf-8")
    prose = Prose(tmp_path / "train.txt")
    assert turns_on_story(random.Random(3), prose, 500, 12) == turns_on_story(random.Random(3), prose, 500, 12)


class Letters:
    """A tokenizer whose tokens are characters."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return messages[0]["content"]

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_the_share_of_stories_decides_what_a_batch_is_made_of(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(PROSE * 60, encoding="utf-8")
    traces = TraceMaker(Prose(tmp_path / "train.txt"))
    prompts = require_profile(SHIPPED).prompts

    def roles(**shares: float) -> set[str]:
        maker = ExampleMaker(Letters(), prompts, traces, "", **shares)
        return {example.role for seed in range(6) for example in maker.section(random.Random(seed), 500)}

    assert roles(stories=1.0) == roles(stories=1.0, excerpts=1.0) == {"update", "answer"}
    assert roles(excerpts=1.0) == {"question"}
    assert "gated_update" in roles()


def test_what_training_cannot_start_from_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, corpus = tmp_path / "base", tmp_path / "corpus"

    def refusal(*more: str) -> str:
        arguments = ["supervised", "--base", str(base), "--corpus", str(corpus), "--out", str(tmp_path / "out"), *more]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit, match="2"):
            supervised.main()
        return capsys.readouterr().err

    assert "memagent policy add smollm2-untrained" in refusal()
    base.mkdir()
    (base / "config.json").write_text("{}", encoding="utf-8")
    assert "recipes.embedded.corpus" in refusal()
    corpus.mkdir()
    (corpus / "train.txt").write_text(PROSE, encoding="utf-8")
    assert "--stories is a share, from 0 to 1" in refusal("--stories", "2")
    assert not (tmp_path / "out").exists()

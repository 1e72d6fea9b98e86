"""Tasks from local copies of published data files: formats, lengths, and errors for missing or damaged files."""

from __future__ import annotations

import csv
import json
import sys
import tracemalloc
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memagent_evaluation.data_files import detect_data_task, find_data_paths, list_data_tasks, load_data_task
from memagent_evaluation.data_files.file_task import estimate_tokens
from memagent_evaluation.data_files.qa_records import Paragraph, read_records
from memagent_evaluation.data_files.table_rows import JSONRows, open_rows
from memagent_evaluation.samples import LengthUnit, Metric, Sample, TaskSettings
from memagent_evaluation.tasks import load_task
from memagent_graph.errors import EvaluationError, MissingExtraError
from memagent_graph.tokenizers import load_tokenizer

SETTINGS = TaskSettings(load_tokenizer("embedded"), seed=5)


def join_text(sample: Sample) -> str:
    return "".join(sample.text())


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, ensure_ascii=False), "utf-8")
    return path


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def make_hotpot_row(number: int = 0, **changes: Any) -> dict[str, Any]:
    context = [
        [f"Title {index}", [f"Paragraph {index} says nothing.", f" It has {index} lines."]] for index in range(10)
    ]
    context[3] = ["Port Alder", ["Port Alder is a town.", f" Its mayor is Ada Born {number}."]]
    context[7] = ["Ada Born", [f"Ada Born {number} was born in 1901."]]
    return {
        "_id": f"h{number}",
        "question": f"When was the mayor of Port Alder {number} born?",
        "answer": "1901",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Port Alder", 1], ["Ada Born", 0]],
        "context": context,
    } | changes


def make_squad_file(**changes: Any) -> dict[str, Any]:
    def make_question(name: str, answers: list[str], **fields: Any) -> dict[str, Any]:
        answer_objects = [{"text": answer, "answer_start": 0} for answer in answers]
        return {"id": name, "question": f"Which is {name}?", "answers": answer_objects} | fields

    old_towns = [
        {"context": "Oslo is in Norway. " * 9, "qas": [make_question("q1", ["Oslo", "in Oslo", "Oslo"])]},
        {"context": "Rome is in Italy.", "qas": [make_question("q2", ["Rome"], is_impossible=False)]},
    ]
    questions = [make_question("q3", [], is_impossible=True), make_question("q4", ["Elsewhere"])]
    places = [{"context": "Elsewhere.", "qas": questions}]
    data = [{"title": "Old_towns", "paragraphs": old_towns}, {"title": "Places", "paragraphs": places}]
    return {"version": "v2.0", "data": data} | changes


def make_longbench_row(**changes: Any) -> dict[str, Any]:
    return {
        "input": "Who wrote it?", "context": "Ada wrote it in 1843. " * 40, "answers": ["Ada", "Ada Lovelace"],
        "length": 200, "dataset": "narrativeqa", "language": "en", "all_classes": None, "_id": "l0",
    } | changes  # fmt: skip


def make_hqa_row(passages: int = 50, **changes: Any) -> dict[str, Any]:
    context = "\n\n".join(f"Document {index}:\nThe Document 9: of it is {index}." for index in range(1, passages + 1))
    return {"_id": "r0", "context": context, "input": "What is it?", "answers": ["it", "that"]} | changes


def test_hotpotqa_gold_paragraphs_come_from_supporting_facts(tmp_path) -> None:
    path = write_json(tmp_path / "h.json", [make_hotpot_row(), make_hotpot_row(1)])
    (record, second_record) = read_records([path], "hotpotqa")
    assert (record.id, record.answers, second_record.id) == ("h0", ("1901",), "h1")
    assert [paragraph.title for paragraph in record.gold] == ["Port Alder", "Ada Born"]
    assert record.gold[0].text == "Port Alder is a town. Its mayor is Ada Born 0."
    assert len(record.distractors) == 8


def test_squad_distractors_are_other_paragraphs_of_the_article(tmp_path) -> None:
    records = read_records([write_json(tmp_path / "s.json", make_squad_file())], "squad")
    assert [record.id for record in records] == ["q1", "q2", "q4"]
    first, second, third = records
    assert first.answers == ("Oslo", "in Oslo")
    assert first.gold == second.distractors == (Paragraph("Old towns", ("Oslo is in Norway. " * 9).strip()),)
    assert third.distractors == ()


def test_saved_dataset_gives_the_same_records_and_requires_a_split(tmp_path) -> None:
    import datasets

    row = make_hotpot_row()
    expected = read_records([write_json(tmp_path / "h.json", [row])], "hotpotqa")
    row |= {
        "id": row.pop("_id"),
        "supporting_facts": {"title": ["Port Alder", "Ada Born"], "sent_id": [1, 0]},
        "context": {"title": [title for title, _ in row["context"]], "sentences": [text for _, text in row["context"]]},
    }
    split = datasets.Dataset.from_list([row])
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(tmp_path / "all")
    with pytest.raises(EvaluationError, match=r"several splits.* Choose one: .*train, .*validation"):
        read_records([tmp_path / "all"], "hotpotqa")
    assert read_records([tmp_path / "all" / "validation"], "hotpotqa") == expected


def test_questions_come_from_a_file_or_from_published_file_names_in_a_folder(tmp_path) -> None:
    hotpotqa = write_json(tmp_path / "hotpot_dev_distractor_v1.json", [make_hotpot_row()])
    squad = write_json(tmp_path / "dev-v2.0.json", make_squad_file())
    write_json(tmp_path / "dev-v1.1.json", {"data": []})
    for name, path in (("hotpotqa", hotpotqa), ("squad", squad)):
        assert read_records(find_data_paths(name, tmp_path), name) == read_records([path], name)
    for name, path, length in (("qa_1", squad, 300), ("qa_2", hotpotqa, 400), ("ruler_hqa", hotpotqa, 9)):
        tasks = [load_task(name, TaskSettings(SETTINGS.tokenizer, data=data)) for data in (path, tmp_path)]
        assert len({join_text(task.sample(length, 0)) for task in tasks}) == 1


def test_hotpotqa_has_shuffled_paragraphs_and_correct_needle_positions(tmp_path) -> None:
    path = write_json(tmp_path / "h.json", [make_hotpot_row(index) for index in range(5)])
    task = load_data_task("hotpotqa", path, SETTINGS)
    (length,) = task.lengths
    assert task.count(length) == 5
    samples = [task.sample(length, index) for index in range(5)]
    text = join_text(samples[0])
    assert text == join_text(samples[0])
    assert len(text.split("\n\n")) == 10
    orders = {tuple(join_text(sample).find(title) for title in ("Port Alder\n", "Ada Born\n")) for sample in samples}
    assert len(orders) > 1
    assert {needle.gold for needle in samples[0].needles} == {"1901", "Port Alder"}
    for needle in samples[0].needles:
        assert text[round(needle.depth * len(text)) :].startswith(needle.text)
    other_seed = load_data_task("hotpotqa", path, TaskSettings(SETTINGS.tokenizer, seed=6))
    assert [join_text(other_seed.sample(length, index)) for index in range(5)] != list(map(join_text, samples))


@pytest.mark.parametrize("file_format", ["jsonl", "csv", "tsv", "parquet", "dataset"])
def test_own_questions_are_read_from_every_file_format(tmp_path, file_format) -> None:
    rows = [
        {"question": " Who, and when? ", "document": 'Rosa said "now",\nin 1911.', "answers": '["Rosa", "R. B."]'},
        {"question": "Where?", "document": "x" * 200_000, "answers": "Oslo"},
    ]
    path = tmp_path / f"mine.{file_format}"
    if file_format in {"csv", "tsv"}:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if file_format == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        rows_with_answer_lists = [rows[0] | {"answers": ["Rosa", "R. B."]}, rows[1] | {"answers": ["Oslo"]}]
        if file_format == "dataset":
            pytest.importorskip("datasets").Dataset.from_list(rows_with_answer_lists).save_to_disk(path)
        else:
            (write_lines if file_format == "jsonl" else write_parquet)(path, rows_with_answer_lists)
    assert detect_data_task(path) == "qa_files"
    task = load_data_task("qa_files", path, SETTINGS)
    assert (task.name, task.metric, sum(map(task.count, task.lengths))) == ("qa_files", Metric.ANY, 2)
    read, count = task.read_example, SETTINGS.tokenizer.count
    assert task.example_lengths[0] == count(rows[0]["document"]) + count("Who, and when?")
    assert [(example.question, example.document, example.gold) for example in (read(0), read(1))] == [
        ("Who, and when?", rows[0]["document"], ("Rosa", "R. B.")),
        ("Where?", rows[1]["document"], ("Oslo",)),
    ]


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        (
            "qa_files",
            {"question": "Why?", "documents": ["One.", "Two."], "answer": "so"},
            ("Why?", ("so",), "One.\n\nTwo."),
        ),
        ("qa_files", make_longbench_row(), ("Who wrote it?", ("Ada", "Ada Lovelace"), "Ada wrote it in 1843. " * 40)),
        (
            "memagent_files",
            {
                "prompt": [{"role": "user", "content": "Who?"}],
                "context": "Document 1:\nAda did it.",
                "reward_model": {"style": "rule", "ground_truth": ["Ada", "A."]},
                "extra_info": {"index": 3, "num_docs": 1},
            },
            ("Who?", ("Ada", "A."), "Document 1:\nAda did it."),
        ),
        ("qa_files", {"input": "Who?", "document": "Ada did it.", "answer": "Ada"}, ("Who?", ("Ada",), "Ada did it.")),
        (
            "ruler_hqa_files",
            make_hqa_row(1),
            ("What is it?", ("it", "that"), "Document 1:\nThe Document 9: of it is 1."),
        ),
    ],
)
def test_row_fields_determine_the_task_and_its_examples(tmp_path, name, row, expected) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [row])
    assert detect_data_task(path) == name
    first_example = load_data_task(name, path, SETTINGS).read_example(0)
    assert (first_example.question, first_example.gold, first_example.document) == expected


def test_paragraph_files_are_detected_by_fields_and_others_are_refused(tmp_path) -> None:
    assert detect_data_task(write_lines(tmp_path / "hotpotqa.jsonl", [make_hotpot_row()])) == "hotpotqa"
    assert detect_data_task(write_json(tmp_path / "s.json", make_squad_file())) == "squad"
    with pytest.raises(EvaluationError, match=r"rows with text.*question, its document"):
        detect_data_task(write_lines(tmp_path / "no.jsonl", [{"text": "t"}]))
    with pytest.raises(EvaluationError, match=r"no data file"):
        detect_data_task(tmp_path / "missing.jsonl")


def test_ruler_hqa_files_count_passages_and_come_in_folders(tmp_path) -> None:
    for passages in (50, 100, 1600):
        write_json(tmp_path / f"eval_{passages}.json", [make_hqa_row(passages)] * 2)
    write_json(tmp_path / "eval_200.json", [make_hqa_row(3, num_docs=200)])
    (tmp_path / "notes.txt").write_text("not data")
    task = load_data_task("ruler_hqa_files", tmp_path, SETTINGS)
    assert (task.unit, task.metric) == (LengthUnit.PASSAGES, Metric.ANY)
    assert task.lengths == (50, 100, 200, 1600)
    assert [task.count(length) for length in task.lengths] == [2, 2, 1, 2]
    assert join_text(task.sample(1600, 1)).endswith("Document 1600:\nThe Document 9: of it is 1600.")


@settings(max_examples=12)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_lengths_of_a_file_cover_every_example_once_in_file_order(tmp_path_factory, own_lengths) -> None:
    rows = [make_hqa_row(1, num_docs=length, answers=[str(index)]) for index, length in enumerate(own_lengths)]
    path = write_lines(tmp_path_factory.mktemp("lengths") / "v.jsonl", rows)
    task = load_data_task("ruler_hqa_files", path, SETTINGS)
    groups = [[int(task.sample(length, n).gold[0]) for n in range(task.count(length))] for length in task.lengths]
    assert sorted(chain.from_iterable(groups)) == list(range(len(own_lengths)))
    assert all(group == sorted(group) for group in groups)
    for length, group in zip(task.lengths, groups, strict=True):
        assert all(length / 2 < own_lengths[index] <= length for index in group)


def test_error_for_a_missing_sample_names_the_available_lengths(tmp_path) -> None:
    path = write_lines(tmp_path / "v.jsonl", [make_hqa_row(1, num_docs=90)] * 3)
    task = load_data_task("ruler_hqa_files", path, SETTINGS)
    with pytest.raises(EvaluationError, match=r"has 3 ruler_hqa_files questions .* none with index 3.*90 \(3\)"):
        task.sample(128, 3)
    with pytest.raises(EvaluationError, match="has 0 ruler_hqa_files questions"):
        task.sample(50, 0)
    with pytest.raises(EvaluationError, match="none with index -1"):
        task.sample(128, -1)


def test_token_estimates_of_long_texts_are_within_four_percent() -> None:
    tokenizer = SETTINGS.tokenizer
    text = "".join(f"Line {index} of the report says that {index * 7} ships came in.\n" for index in range(4000))
    assert estimate_tokens(text, tokenizer) == pytest.approx(tokenizer.count(text), rel=0.04)
    assert estimate_tokens("one two", tokenizer) == tokenizer.count("one two")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\[]{},:\n é', max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='a"[{\\,', max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=15)
@given(
    st.lists(st.dictionaries(st.text(), json_values, max_size=4), min_size=1).map(lambda rows: [{"data": [{}]}, *rows]),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
)
def test_json_rows_of_any_content_are_found_in_lists_and_lines(tmp_path_factory, rows, indent, ensure_ascii) -> None:
    folder = tmp_path_factory.getbasetemp()
    list_path, wrapped_path, lines_path = folder / "list.json", folder / "wrapped.json", folder / "lines.jsonl"
    list_path.write_text(json.dumps(rows, indent=indent, ensure_ascii=ensure_ascii), "utf-8")
    wrapped_path.write_text(json.dumps({"version": '"[{', "data": rows, "more": 1}, indent=indent), "utf-8")
    lines_path.write_text("\n\n".join(json.dumps(row, ensure_ascii=ensure_ascii) for row in rows), "utf-8")
    for path in (list_path, wrapped_path, lines_path):
        json_rows = JSONRows(path)
        assert [json_rows[index] for index in range(len(json_rows))] == rows


def test_json_list_of_long_documents_is_not_loaded_into_memory(tmp_path) -> None:
    path = tmp_path / "eval_50.json"
    context = json.dumps("Document 1:\n" + 'He said "no".\n' * 35_000)
    with path.open("w") as file:
        file.write("[")
        for n in range(30):
            file.write(f'{"," * bool(n)}{{"_id": "{n}", "context": {context}, "input": "q{n}?", "answers": ["a"]}}')
        file.write("]")
    assert path.stat().st_size > 15_000_000
    tracemalloc.start()
    task = load_data_task("ruler_hqa_files", path, SETTINGS)
    samples = [task.sample(1, index) for index in range(30)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [sample.question for sample in samples] == [f"q{index}?" for index in range(30)]
    assert peak < 5_000_000


def test_parquet_rows_are_found_across_row_groups_and_files(tmp_path) -> None:
    parquet_path = write_parquet(tmp_path / "a.parquet", [{"n": index} for index in range(10)], row_group_size=3)
    lines_path = write_lines(tmp_path / "b.jsonl", [{"n": 10}, {"n": 11}])
    rows = open_rows([parquet_path, lines_path])
    assert [rows[index]["n"] for index in range(len(rows))] == list(range(12))
    assert rows.get_location(4) == f"{parquet_path}, row 5"
    assert rows.get_location(11) == f"{lines_path}, line 2"


# Bad input


@pytest.mark.parametrize("name", list_data_tasks())
def test_missing_data_error_names_the_file_and_the_option(tmp_path, name, monkeypatch) -> None:
    monkeypatch.setenv("MEMAGENT_HOME", str(tmp_path / "home"))
    for path in (tmp_path / "none.json", tmp_path, None):
        with pytest.raises(EvaluationError, match=rf"(no|needs a) (data file|file called).*{name} reads .*data PATH"):
            load_data_task(name, path, SETTINGS)


@pytest.mark.parametrize(
    ("name", "make_row", "changes", "message"),
    [
        ("hotpotqa", make_hotpot_row, {"supporting_facts": [["Nowhere", 0]]}, "'Nowhere' is not in the context"),
        ("hotpotqa", make_hotpot_row, {"supporting_facts": []}, '"supporting_facts" is empty'),
        ("hotpotqa", make_hotpot_row, {"supporting_facts": [["Port Alder"]]}, "not a list of pairs"),
        ("hotpotqa", make_hotpot_row, {"context": [["Port Alder", "text"], ["Ada Born", []]]}, "no list of sentences"),
        ("qa_files", make_longbench_row, {"answers": []}, '"answers" has no text'),
        ("qa_files", make_longbench_row, {"answers": [1]}, '"answers" is a list with int, not a list of texts'),
        ("qa_files", make_longbench_row, {"context": " "}, '"context" has no text'),
        ("qa_files", make_longbench_row, {"answers": "['a', 'b']"}, 'it: write ["one", "another"]'),
        ("ruler_hqa_files", make_hqa_row, {"num_docs": 0}, '"num_docs" is 0, not a positive whole number'),
        ("ruler_hqa_files", make_hqa_row, {"context": ...}, '"context" is missing (there are: _id, input, answers)'),
        ("ruler_hqa_files", make_hqa_row, {"context": "no passages"}, 'no line such as "Document 1:"'),
    ],
)
def test_damaged_row_error_names_file_and_line(tmp_path, name, make_row, changes, message) -> None:
    path = tmp_path / "eval_1.jsonl"
    damaged_row = {field: value for field, value in make_row(**changes).items() if value is not ...}
    for rows, line_number in (([make_row(), damaged_row], 2), ([damaged_row], 1)):
        write_lines(path, rows)
        with pytest.raises(EvaluationError) as error:
            load_data_task(name, path, SETTINGS)
        assert message in str(error.value)
        assert f"eval_1.jsonl, line {line_number}:" in str(error.value)
        assert error.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, '"context" is not a list of pairs with a title'),
        ({"data": [{"title": "T", "paragraphs": [{"context": "c", "qas": [1]}]}]}, '"qas" is not a list of objects'),
        ({"data": [{"title": "T", "paragraphs": [{"qas": []}]}]}, '"context" is missing'),
        ({"data": [{"title": "T", "paragraphs": [{"context": "c", "qas": []}]}]}, "no question that has an answer"),
        (
            {"data": [{"title": "T", "paragraphs": [{"context": "c", "qas": [{"id": "x", "answers": []}]}]}]},
            "the question 'x' has no answer",
        ),
        ({"data": []}, "has no rows"),
        ({"data": [{"name": "other"}]}, '"title" is missing (there are: name)'),
    ],
)
def test_damaged_squad_file_is_refused_and_so_is_squad_data_as_hotpotqa(tmp_path, changes, message) -> None:
    path = write_json(tmp_path / "s.json", make_squad_file(**changes))
    with pytest.raises(EvaluationError) as error:
        read_records([path], "squad" if changes else "hotpotqa")
    assert message in str(error.value)
    assert "s.json" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        ('{"question": "é"}'.encode("latin-1"), "the file must be UTF-8"),
        ('{"question": "Who?"}'.encode("utf-16"), "in UTF-8"),
        (b"\x1f\x8b\x08zipped", "neither JSON lines nor a JSON list"),
        (b"[]", "has no rows"),
        (b'[{"a": 1}, {"a"', "cut off after 1 entry"),
        (b'[{"a": 1}, {"a": }]', "line 1 is not valid JSON"),
        (b'{"a": 1}\n{"a": \n', "line 2 is not valid JSON"),
        (b'[{"a": 1},\n\n7]', "line 3 is not a JSON object but int"),
        (b'{"a": "\xff"}', "line 1 is not valid JSON"),
        (rb'{"a": "\ud800"}', "surrogates not allowed"),
        (b"PAR1 but not Parquet", "cannot be read"),
        (b"question,fee\nHow much?,5, \nHow much?,5,000\n", "line 3 has more cells than the header"),
    ],
)
def test_unreadable_file_is_refused(tmp_path, content, message) -> None:
    path = tmp_path / ("rows.csv" if content.startswith(b"question") else "rows.json")
    path.write_bytes(content)
    with pytest.raises(EvaluationError, match=message) as error:
        for _ in (rows[index] for rows in [open_rows([path])] for index in range(len(rows))):
            pass
    assert path.name in str(error.value)


def test_folder_that_is_not_a_dataset_is_refused(tmp_path) -> None:
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_records([tmp_path], "squad")
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "none.arrow"}]}')
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_records([tmp_path], "squad")


def test_missing_pyarrow_error_names_the_extra(tmp_path, monkeypatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", [make_longbench_row()])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"reading a\.parquet needs the extra \"eval\""):
        load_data_task("qa_files", path, SETTINGS)

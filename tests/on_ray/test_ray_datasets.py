"""`read_corpus` and `write_table`: the stage for users of Ray Data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.corpus_world import NAMES, QUESTIONS, CountingServer, key_of, rows_in, run_corpus_command, text_of
from support.ray_world import RayWorld

from memagent_corpus import TableFolder
from memagent_corpus.on_ray import ActorPlan, connected, read_corpus, write_table
from memagent_corpus.table_inputs import InputColumns
from memagent_graph.errors import CorpusError, DocumentError
from memagent_graph.response_format import ResponseFormat
from memagent_graph.settings import ReadSettings

DOCUMENTS = 12
POOL = {"actors": 2, "documents_in_flight": 4}


@pytest.fixture
def data(cluster: RayWorld) -> Iterator[Any]:
    with connected(cluster.address):
        import ray.data

        yield ray.data


def plan(server: CountingServer, **options: Any) -> ActorPlan:
    settings = ReadSettings(
        model="fake", base_url=server.base_url, tokenizer="embedded", context_window=1000, question_tokens=50,
        memory_tokens=60, chunk_tokens=100, answer_tokens=60,
    )  # fmt: skip
    return ActorPlan(settings=settings, questions=QUESTIONS, **options)


def items(documents: int = DOCUMENTS) -> list[dict[str, Any]]:
    return [{"name": f"n{each}", "body": text_of(each, 120), "year": 2000 + each} for each in range(documents)]


COLUMNS = InputColumns(id="name", text="body", copied=("year",))


def test_a_dataset_of_documents_becomes_the_core_s_rows_and_a_table_with_each_of_them_once(
    data: Any, tmp_path: Path
) -> None:
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, items())))
    with CountingServer() as server:
        options = ("--id-column", "name", "--text-column", "body", "--keep-column", "year")
        assert run_corpus_command(tmp_path / "table.jsonl", tmp_path / "core", server, *options).returncode == 0
        core = {row["id"]: row for row in rows_in(tmp_path / "core")}
        asked = sum(server.read.values())
        rows = read_corpus(data.from_items(items()), plan(server), columns=COLUMNS, **POOL)
        found = {row["id"]: row for row in rows.take_all()}
        assert sum(server.read.values()) == 2 * asked
        assert len(found) == DOCUMENTS * len(QUESTIONS) and set(found) == set(core)
        for identity, row in found.items():
            assert {**row, "usage": None} == {**core[identity], "usage": None}
        part = sorted((tmp_path / "core").glob("*.parquet"))[0]
        assert set(rows.columns()) == set(data.read_parquet(str(part)).columns())

        half = read_corpus(data.from_items(items(6)), plan(server), columns=COLUMNS, **POOL)
        assert write_table(half, plan(server), tmp_path / "out", rows_per_part=7) == 6 * len(QUESTIONS)
        before = sum(server.read.values())
        table = TableFolder(str(tmp_path / "out"))
        rest = read_corpus(data.from_items(items()), plan(server), columns=COLUMNS, **POOL, table=table)
        assert write_table(rest, plan(server), table) == 6 * len(QUESTIONS)
        assert sum(server.read.values()) == before + asked // 2, "what the table has was read again"
        twice = read_corpus(data.from_items(items(2)), plan(server), columns=COLUMNS, **POOL)
        write_table(twice, plan(server), tmp_path / "out")
        written = rows_in(tmp_path / "out")
        assert len(written) == len(core) and {row["id"] for row in written} == set(core)
        assert {(row["document"], row["answer"]) for row in written} == {
            (f"n{each}", key_of(each, name)) for each in range(DOCUMENTS) for name in NAMES
        }
        other = ActorPlan(settings=ReadSettings(**{**vars(plan(server).settings), "temperature": 0.5}))
        with pytest.raises(CorpusError, match=r"temperature: 0.0 in the table, 0.5 now"):
            write_table(twice, other, tmp_path / "out")


def test_documents_need_names_and_columns_have_to_be_there(data: Any) -> None:
    with CountingServer() as server:
        with pytest.raises(CorpusError, match="have no names"):
            read_corpus(data.from_items(items(1)), plan(server), columns=InputColumns(text="body"))
        with pytest.raises(DocumentError, match="no column 'nothing'"):
            read_corpus(data.from_items(items(1)), plan(server), columns=InputColumns(id="nothing", text="body"))
        with pytest.raises(CorpusError, match="0 actors"):
            read_corpus(data.from_items(items(1)), plan(server), columns=COLUMNS, actors=0)


def test_a_model_from_a_file_goes_along_and_a_document_that_is_no_text_is_rows_with_errors(
    data: Any, tmp_path: Path
) -> None:
    model = tmp_path / "keys.py"
    model.write_text("import pydantic\n\n\nclass Key(pydantic.BaseModel):\n    key: int\n")
    given = [*items(2), {"name": "broken", "body": None, "year": 1}]

    def respond(body: dict[str, Any], number: int) -> str:
        prompt = body["messages"][-1]["content"]
        return "harbor 4711" if "<section>" in prompt else '{"key": 4711}'

    with CountingServer() as server:
        server.respond = respond
        typed = plan(server, response_format=ResponseFormat.named(f"{model}:Key"))
        rows = read_corpus(data.from_items(given), typed, columns=COLUMNS, **POOL).take_all()
    assert {row["key"] for row in rows if row["document"] != "broken"} == {4711}
    broken = [row for row in rows if row["document"] == "broken"]
    assert len(broken) == len(QUESTIONS) and all("'body' has no value" in row["error"] for row in broken)

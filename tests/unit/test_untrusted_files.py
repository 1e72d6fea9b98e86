"""Untrusted files: they run no code, let no file outside be read, and memory use stays limited.

Two tables of attacks: every kind of file, truncated, of another kind, nested too deeply or replaced by a pipe; and
contents that try to make the reader do something. The key and the server of a resumed run are tested in
`cli/test_untrusted_runs.py`; the inputs of a corpus are in `corpus/test_corpus_inputs.py`, files that are converted in
`test_conversion.py` and `soak/test_random_inputs.py`, other versions of SQLite files in `test_database.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sqlite3
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date, time
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import ormsgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from langgraph.checkpoint.serde.jsonplus import EXT_CONSTRUCTOR_SINGLE_ARG
from langgraph.types import Overwrite, Send
from support.conversations import make_conversation
from support.evaluation import make_row
from support.serving import build_reader

from memagent_corpus import CorpusRow, TableFolder
from memagent_corpus.corpus_ledger import CorpusLedger
from memagent_corpus.corpus_rows import list_column_values
from memagent_corpus.corpus_run import lock_table
from memagent_evaluation.data_files import qa_records
from memagent_evaluation.data_files.table_rows import DatasetRows, open_rows
from memagent_evaluation.result_journal import JOURNAL, load_results, open_results
from memagent_evaluation.result_table import EvaluationPlan
from memagent_graph import DocumentStore, LocalPolicy, MemAgent, SamplingParams, ScriptedPolicy
from memagent_graph.errors import CheckpointError, MemAgentError
from memagent_graph.policies.adding import load_adapter
from memagent_graph.policies.profile import EMBEDDED_FOLDER, require_profile, save_profile
from memagent_graph.policy_registry import parse_template_arguments
from memagent_graph.response_format import ResponseFormat
from memagent_graph.run_log import LoggedRun, RunLog, tables
from memagent_graph.run_log.exchange import export_runs, import_runs, parquet
from memagent_graph.run_log.tables import MAX_LIST_LENGTH, pack_text
from memagent_graph.settings import ReadSettings
from memagent_graph.storage import parquet_rows, state_serializer
from memagent_graph.storage.state_serializer import CompressedSerializer, UndecodableStateError, reset_size_limits
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.view import load_run_view
from memagent_graph.tokenizers.loading import load_tokenizer
from memagent_serve.keys import Keys
from memagent_serve.ledger import Ledger
from memagent_training.data.training_runs import read_runs
from memagent_training.job.job_settings import read_preset
from memagent_training.rewards.gold_answers import GoldAnswers

SECRET = "a private text"
Attack = Callable[[Path], str]
"""Prepares untrusted files in a folder and uses them; returns what the user would see."""


def make_reader(folder: Path, **options: Any) -> MemAgent:
    """Make a reader whose files are all in one folder."""
    return build_reader(None, folder, policy=ScriptedPolicy(lambda prompt: r"\boxed{1904}"), **options)


@pytest.fixture(scope="module")
def finished_run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    with make_reader(folder) as agent:
        agent.read("The tower was built in 1904.", "When?", run_id="r")
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished_run_folder: Path) -> Path:
    """A folder with a run; beside it are code that must not run and a text that must not be read."""
    (tmp_path / "private.txt").write_text(SECRET)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Nice: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    run_folder = shutil.copytree(finished_run_folder, tmp_path / "own")
    monkeypatch.chdir(run_folder)
    return run_folder


def execute(path: Path, statement: str, *values: Any) -> None:
    """Execute a statement in a SQLite file."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def show_runs(folder: Path, name: str = "runs.sqlite") -> str:
    """Render the page of every run in a log."""
    pages = []
    with closing(RunLog(folder / name)) as log:
        for run in log.runs():
            view = load_run_view(log, run.run_id, DocumentStore(folder / "documents"))
            pages.append(render_page(build_timeline(view)))
    return "".join(pages)


def resume_run(folder: Path) -> str:
    with make_reader(folder) as agent:
        return str(agent.resume("r").answer)


def import_and_show(folder: Path) -> str:
    with closing(RunLog(folder / "imported.sqlite")) as log:
        import_runs(log, folder / "runs.parquet")
    return show_runs(folder, "imported.sqlite")


def write_hostile_log(folder: Path) -> Path:
    """Write a log, and its export, whose run names code and a document outside the folder."""
    with closing(RunLog(folder / "runs.sqlite")) as source_log:
        run = source_log.get("r")
    document_changes = {"key": "sha256:../../private.txt", "path": "../private.txt", "media_type": "application/pdf"}
    settings = {**run.settings, "strategy": "evil:Nice", "profile": "../evil.py:Nice"}
    hostile_run = replace(run, document={**run.document, **document_changes}, settings=settings, strategy="evil:Nice")
    with closing(RunLog(folder / "hostile.sqlite")) as log:
        log.add(LoggedRun(hostile_run, [make_conversation(0)]))
        export_runs(log, folder / "runs.parquet")
    return folder


def show_log_with(table: str, column: str, value: Any) -> Attack:
    """Return an attack that shows a log in which a column has this value."""

    def show(folder: Path) -> str:
        events = "INSERT INTO events (run_id, time, kind, detail, call_id) VALUES ('r', 1, 'memory_edited', '', ?)"
        execute(folder / "runs.sqlite", events.replace("?", "(SELECT call_id FROM conversations)"))
        execute(folder / "runs.sqlite", f"UPDATE {table} SET {column} = ?", value)
        return show_runs(folder)

    return show


def resume_with_setting(name: str, value: Any) -> Attack:
    """Return an attack that loads the settings of a logged run with this setting."""
    return lambda folder: str(
        parse_template_arguments(ReadSettings.from_log({"model": "m", name: value}, "r").chat_template_kwargs)
    )


def ask_policy(name: str, content: str) -> Attack:
    """Return an attack that calls a policy whose folder has this file."""

    def call_policy(folder: Path) -> str:
        shutil.copytree(EMBEDDED_FOLDER, folder / "policy", ignore=shutil.ignore_patterns("*.md"))
        (folder / "policy" / name).write_text(content)
        policy = LocalPolicy(folder / "policy")
        return asyncio.run(policy.complete([{"role": "user", "content": "?"}], SamplingParams(1))).text

    return call_policy


def count_with_tokenizer(**parts: Any) -> Attack:
    """Return an attack that counts tokens with the embedded tokenizer.json, in which these parts are replaced."""

    def count_tokens(folder: Path) -> str:
        specification = json.loads((EMBEDDED_FOLDER / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**specification, **parts}))
        return str(load_tokenizer(folder / "tokenizer.json").count("a" * 40 + "b"))

    return count_tokens


def read_file(name: str, content: str, read: Callable[[Path], Any]) -> Attack:
    """Return an attack that writes a file with this content and reads it."""

    def write_and_read(folder: Path) -> str:
        (folder / name).write_text(content)
        return str(read(folder / name))

    return write_and_read


def show_blob(column: str, blob: bytes, *, max_bytes: int | None = None) -> Attack:
    """Return an attack that exports and shows a log in which every conversation has this value."""

    def show(folder: Path) -> str:
        execute(folder / "runs.sqlite", f"UPDATE conversations SET {column} = ?", blob)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "MAX_RUN_SIZE", max_bytes or tables.MAX_RUN_SIZE)
            return show_runs(write_export(folder))

    return show


def deflate_raw(data: bytes) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, -12)
    return stream.compress(data) + stream.flush()


def encode_many_ids() -> bytes:
    id_count = MAX_LIST_LENGTH + 1
    return b"\1" + id_count.to_bytes(4, "little") + bytes(id_count) + deflate_raw(bytes(3 * id_count))


def import_column(column: str, values: pa.Array, *limit_patch: Any) -> Attack:
    """Return an attack that imports an export in which a column has these values, one per row."""

    def import_changed(folder: Path) -> str:
        path = write_export(folder) / "runs.parquet"
        table = pq.read_table(path).slice(0, 1).take([0] * len(values))
        column_index = table.schema.get_field_index(column)
        changed_table = table.set_column(column_index, table.schema.field(column), values)
        pq.write_table(changed_table.replace_schema_metadata(pq.read_metadata(path).metadata), path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*limit_patch)
            return import_and_show(folder)

    return import_changed


def resume_from(kind: str | None, content: bytes | Callable[[Path], bytes], column: str = "checkpoint") -> Attack:
    """Return an attack that resumes a run whose checkpoints have this content."""

    def resume(folder: Path) -> str:
        blob = content if isinstance(content, bytes) else content(folder)
        statement = f"UPDATE checkpoints SET type = ifnull(?, type), {column} = ?"
        execute(folder / "checkpoints.sqlite", statement, kind, blob)
        return resume_run(folder)

    return resume


def encode_call(folder: Path) -> bytes:
    """Return a state that calls a function if LangGraph's default serializer decodes it."""
    call = ormsgpack.packb(("os", "system", f"touch {folder.parent / 'ran'}" + " " * 1000))
    return ormsgpack.packb({"v": 1, "x": ormsgpack.Ext(EXT_CONSTRUCTOR_SINGLE_ARG, call)})


def resume_with_state(updated_channels: Any = None, **changes: Any) -> Attack:
    """Return an attack that resumes a run whose states have these values; None removes a channel."""

    def resume(folder: Path) -> str:
        with closing(sqlite3.connect(folder / "checkpoints.sqlite")) as connection, connection:
            rows = connection.execute("SELECT rowid, type, checkpoint FROM checkpoints").fetchall()
            for row_id, blob_type, blob in rows:
                content = CompressedSerializer().loads_typed((blob_type, blob))
                values = {**content["channel_values"], **changes}
                content["channel_values"] = {name: value for name, value in values.items() if value is not None}
                content["updated_channels"] = updated_channels
                parameters = (*CompressedSerializer().dumps_typed(content), row_id)
                connection.execute("UPDATE checkpoints SET type = ?, checkpoint = ? WHERE rowid = ?", parameters)
        return resume_run(folder)

    return resume


def resume_with_large_writes(folder: Path) -> str:
    """Resume a run whose newest state has five pending writes, each close to the size limit."""
    write = zlib.compress(ormsgpack.packb("a" * (6 * 2**20 - 9)))
    with closing(sqlite3.connect(folder / "checkpoints.sqlite")) as connection, connection:
        newest = "SELECT thread_id, checkpoint_ns, checkpoint_id FROM checkpoints ORDER BY checkpoint_id DESC LIMIT 1"
        checkpoint_key = connection.execute(newest).fetchone()
        for write_index in range(5):
            values = (*checkpoint_key, str(write_index), write_index, "memory", "msgpack+zlib", write)
            connection.execute("INSERT INTO writes VALUES (?, ?, ?, ?, '', ?, ?, ?, ?)", values)
    return resume_run(folder)


def use_profile(strategy: str, content: str = "") -> Attack:
    """Return an attack that uses a policy folder whose profile names this strategy, or has this content."""

    def make(folder: Path) -> str:
        save_profile(replace(require_profile("embedded"), strategy=strategy), folder / "policy")
        if content:
            (folder / "policy" / "memagent.json").write_text(content)
        with make_reader(folder, profile=folder / "policy") as agent:
            return agent.strategy.name

    return make


def write_table(folder: Path) -> Path:
    """Write a corpus table with one row; return its folder."""
    table = TableFolder(str(folder / "table"))
    table.take_over({}, "rows")
    row = CorpusRow(id="a", document="a.txt", digest=None, question="?", answer="1904")
    table_part = table.write_part(0, [list_column_values(row)], ())
    assert table_part is not None
    table.publish([table_part])
    return folder / "table"


def write_results(folder: Path) -> Path:
    """Write evaluation results with one row; return their folder."""
    with open_results(folder / "results", {"model": "m"}) as journal:
        journal.add_plan(EvaluationPlan.grid(("memagent",), ("keys",), (1024,), 1))
        journal.add(make_row())
    return folder / "results"


def write_policy(folder: Path) -> Path:
    """Write a policy folder; return it."""
    save_profile(require_profile("embedded"), folder / "policy")
    (folder / "policy" / "tokenizer.json").write_text(json.dumps({"model": {}}))
    (folder / "policy" / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))
    return folder / "policy"


def write_export(folder: Path) -> Path:
    with closing(RunLog(folder / "runs.sqlite")) as log:
        export_runs(log, folder / "runs.parquet")
    return folder


def open_with_policy(folder: Path) -> None:
    make_reader(folder, profile=folder).close()


@dataclass(frozen=True)
class FileKind:
    """A kind of file, how to write one and how to open it."""

    name: str
    write: Callable[[Path], Path | None] | str
    """Writes the file and returns its folder if that is another; or the text of the file."""
    open_file: Callable[[Path], Any]
    """Opens the file at a path."""
    damages: tuple[str, ...] = ("half", "foreign", "deep", "pipe")


def return_folder(folder: Path) -> Path:
    return folder


SQLITE, TEXT = ("half", "foreign"), ("half", "foreign", "deep")
FILE_KINDS = (
    FileKind("runs.sqlite", return_folder, lambda path: show_runs(path.parent), SQLITE),
    FileKind("checkpoints.sqlite", return_folder, lambda path: resume_run(path.parent), SQLITE),
    FileKind("runs.parquet", write_export, lambda path: import_and_show(path.parent), ("half", "foreign", "pipe")),
    FileKind("runs.parquet", write_export, lambda path: list(read_runs(path)), ("pipe",)),
    FileKind("rows.jsonl", "{}", lambda path: open_rows([path]), ("pipe",)),
    FileKind("_manifest.json", write_table, lambda path: TableFolder(str(path.parent)).manifest()),
    FileKind("part-000000.parquet", write_table, lambda path: list(TableFolder(str(path.parent)).rows())),
    FileKind("ledger.sqlite", lambda folder: CorpusLedger(folder / "ledger.sqlite").close(), CorpusLedger, SQLITE),
    FileKind("reads.sqlite", lambda folder: Ledger(folder / "reads.sqlite").close(), Ledger, SQLITE),
    FileKind(JOURNAL, write_results, lambda path: load_results(path.parent), ("foreign", "deep")),
    FileKind("memagent.json", write_policy, lambda path: open_with_policy(path.parent)),
    FileKind("templates/update.txt", write_policy, lambda path: open_with_policy(path.parents[1])),
    FileKind("tokenizer.json", write_policy, lambda path: load_tokenizer(path.parent)),
    FileKind("adapter_config.json", write_policy, lambda path: load_adapter(path.parent)),
    FileKind("rl.yaml", "model: [a", read_preset, TEXT),
    FileKind("keys.toml", "alice = [1", Keys.load, TEXT),
    FileKind("schema.json", '{"type": "object"}', lambda path: ResponseFormat.load(str(path)), TEXT),
    FileKind("state.json", '{"_data_files": []}', lambda path: DatasetRows(path.parent)),
)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [pytest.param(kind, damage, id=f"{kind.name}: {damage}") for kind in FILE_KINDS for damage in kind.damages],
)
def test_a_damaged_or_foreign_file_is_an_error_that_names_it(folder: Path, kind: FileKind, damage: str) -> None:
    parent = folder if isinstance(kind.write, str) else kind.write(folder) or folder
    path = parent / kind.name
    content = kind.write.encode() if isinstance(kind.write, str) else path.read_bytes()
    path.unlink(missing_ok=True)
    if damage == "pipe":
        os.mkfifo(path)
    else:
        contents = {"half": content[: len(content) // 2], "foreign": b"\x7fELF\xff\x00" * 999, "deep": b"[" * 100_000}
        path.write_bytes(contents[damage])
    with pytest.raises(MemAgentError) as error:
        kind.open_file(path)
    assert path.name in str(error.value) or parent.name in str(error.value)
    assert error.value.hint


def lock_with_link(link_name: str) -> Attack:
    """Return an attack that locks a table in whose work folder this name is a link."""

    def write(folder: Path) -> str:
        table = TableFolder(str(write_table(folder)))
        link = folder / "table" / link_name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder.parent)
        with lock_table(table):
            return str(list(folder.parent.iterdir()))

    return write


def read_edited(folder: Path, old: str, new: str) -> str:
    manifest = write_table(folder) / "_manifest.json"
    manifest.write_text(manifest.read_text().replace(old, new))
    return str(list(TableFolder(str(manifest.parent)).rows()))


def read_outside_dataset(folder: Path) -> str:
    schema = pa.schema([("text", pa.string())])
    with pa.OSFile(str(folder.parent / "private.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write(pa.record_batch([[SECRET]], schema=schema))
    (folder / "data").mkdir()
    (folder / "data" / "state.json").write_text('{"_data_files": [{"filename": "../../private.arrow"}]}')
    return str(DatasetRows(folder / "data")[0])


def read_rows(*limit_patch: Any, **columns: Any) -> Attack:
    """Return an attack that reads a Parquet file with 200 equal rows, with a limit patched to be small."""

    def read(folder: Path) -> str:
        pq.write_table(pa.table({name: [value] * 200 for name, value in columns.items()}), folder / "rows.parquet")
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(pa, "compute", raising=False)  # as it is before something loads it
            patch.setattr(*limit_patch)
            return str(qa_records.read_records([folder / "rows.parquet"], "hotpotqa"))

    return read


def load_incomplete_results(folder: Path) -> str:
    journal = write_results(folder) / JOURNAL
    header, *lines = journal.read_text().splitlines(keepends=True)
    header_values = {name: value for name, value in json.loads(header).items() if name in {"format", "fingerprint"}}
    journal.write_text("".join([json.dumps(header_values) + "\n", *lines]))
    return str(load_results(journal.parent))


def use_linked_template(folder: Path) -> str:
    """Read with a policy whose template is a link to a file outside its folder."""
    policy = write_policy(folder)
    (policy / "templates" / "update.txt").unlink()
    (policy / "templates" / "update.txt").symlink_to(folder.parent / "private.txt")
    with make_reader(folder, profile=policy) as agent:
        return str(agent.read("The tower was built in 1904.", "When?").answer)


ZIP_BOMB = zlib.compress(b"\0" * (64 << 20), 1)
OBJECTS = b"\xdd" + (13 << 20).to_bytes(4, "big") + b"\x90" * (13 << 20)
VALUE_LIMIT = (parquet_rows, "_MAX_GROUP_VALUES", 800)
UNREADABLE = r"checkpoints.*read"
INVALID_BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}


@pytest.mark.parametrize(
    ("attack", "error_pattern"),
    [
        pytest.param(lambda folder: show_runs(write_hostile_log(folder), "hostile.sqlite"), None, id="log: code, path"),
        pytest.param(show_log_with("conversations", "text", deflate_raw(b"a" * (20 << 20))), "data has more than",
                     id="log: size"),
        pytest.param(show_blob("text", pack_text("a" * 60) or b"", max_bytes=100), r"run r in .*runs\.sqlite has more",
                     id="log: total size of texts"),
        pytest.param(show_blob("token_ids", encode_many_ids()), "a list has more than", id="log: size of a list"),
        pytest.param(import_column("text", pa.array(["a" * 2**16] * 40), parquet, "_MAX_RUN_BYTES", 2**20),
                     "a run .* has more than", id="export: total size of texts"),
        pytest.param(import_column("token_ids", pa.array([[7] * 99] * 9, pa.list_(pa.uint32())), *VALUE_LIMIT),
                     "row group", id="export: size of a list"),
        pytest.param(import_column("parents", pa.array([["a" * 10**4] * 20]), parquet_rows, "_MAX_LIST_BYTES", 10**5),
                     "the lists of a row need more than", id="export: list of equal texts"),
        *(
            pytest.param(show_log_with(table, column, value), "runs.sqlite cannot be used as a run log",
                         id=f"log: {column} {value}")
            for table, column, value in (
                ("runs", "settings", '"x"'), ("runs", "settings", "[NaN, 1e999]"), ("runs", "trace", "null"),
                ("runs", "document", "[]"), ("events", "time", "-1"),
                ("conversations", "reads", "[[0]]"), ("conversations", "parents", "[1]"),
                ("runs", "began", "253402300800"), ("runs", "ended", "-1"), ("conversations", "began", "1e300"),
                ("conversations", "seconds", "2e307"),
                ("conversations", "writes", "x"), ("conversations", "events", "[[]]"),
            )
        ),
        *(
            pytest.param(resume_with_setting(name, value), name, id=f"log: setting {name} {value!r:.9}")
            for name, value in (
                ("concurrency", "x"), ("timeout", [1]), ("retries", -1), ("temperature", "hot"), ("stop_texts", 5),
                ("prompts", "x"), ("on_empty", "x"), ("top_p", float("nan")), ("top_p", 0), ("policy", {}),
            )
        ),
        pytest.param(resume_with_setting("chat_template_kwargs", "[" * 50_000), "JSON object", id="log: deep setting"),
        pytest.param(use_profile("overwrite", '{"chunk_tokens": 1e999}'), r"memagent\.json", id="profile: number"),
        pytest.param(use_profile("overwrite", json.dumps({"empty_memory": "a" * 2**20})), r"memagent\.json.*more than",
                     id="profile: size"),
        pytest.param(ask_policy("templates/update.txt", "a" * 2**20 + "b"), r"update\.txt.*more than",
                     id="template: size"),
        pytest.param(ask_policy("chat_template.jinja", "{% if %}"), r"policy.*chat_template\.jinja",
                     id="chat template: syntax"),
        pytest.param(ask_policy("chat_template.jinja", "{{ cycler.__init__.__globals__.os.system('touch ../ran') }}"),
                     r"policy.*chat_template\.jinja", id="chat template: code"),
        *(
            pytest.param(count_with_tokenizer(**{part: value}), rf"tokenizer\.json cannot be used: .*{message}",
                         id=f"tokenizer: {message} {str(value)[:30]}")
            for part, value, message in (
                ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
                                   "invert": False}, "retry"),
                ("model", INVALID_BPE, "range"),
                ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}, "UNK"),
                ("model", {"type": "WordPiece", "max_input_chars_per_word": 10**9}, "words of more"),
                ("added_tokens", [5], "int"), ("added_tokens", {"a": 1}, "str"),
                ("added_tokens", [{"content": 5}], "int"),
                ("added_tokens", [{"content": "a"}] * 50_001, "added tokens"),
                ("normalizer", [{"pattern": {"String": "a"}, "content": "a" * 10}] * 10, "times as long"),
                ("normalizer", [{"pattern": {"Regex": ""}, "content": "a"}] * 10, "times as long"),
                ("normalizer", [{"content": "ab"}] * 257, "rules"),
                ("decoder", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 101}, "times as long"),
            )
        ),
        pytest.param(ask_policy("tokenizer.json", json.dumps({"model": INVALID_BPE})),
                     r"policy cannot be loaded: the tokenizer\.json of", id="tokenizer: of a policy in this process"),
        pytest.param(read_file("gold.jsonl", "[" * 50_000, GoldAnswers.load), r"gold\.jsonl", id="gold answers: deep"),
        pytest.param(lambda folder: import_and_show(write_hostile_log(folder)), None, id="export: code, path"),
        pytest.param(resume_from("msgpack", encode_call), UNREADABLE, id="checkpoint: code"),
        pytest.param(resume_from("pickle", b"cos\nsystem\n"), UNREADABLE, id="checkpoint: pickle"),
        pytest.param(resume_from("msgpack", b"\xc1"), UNREADABLE, id="checkpoint: no msgpack"),
        pytest.param(resume_from("msgpack", ormsgpack.packb([1, 2])), UNREADABLE, id="checkpoint: another value"),
        pytest.param(resume_from("msgpack", ormsgpack.packb({"v": 1})), UNREADABLE, id="checkpoint: incomplete"),
        pytest.param(resume_from("msgpack+zlib", b"not zlib"), UNREADABLE, id="checkpoint: not compressed"),
        pytest.param(resume_from("json", b"{"), UNREADABLE, id="checkpoint: truncated"),
        pytest.param(resume_from("msgpack+zlib", ZIP_BOMB), UNREADABLE, id="checkpoint: size"),
        pytest.param(resume_from("msgpack+zlib", zlib.compress(OBJECTS)), "more than", id="checkpoint: packed objects"),
        pytest.param(resume_from("msgpack", OBJECTS), "more than", id="checkpoint: objects"),
        pytest.param(resume_with_large_writes, UNREADABLE, id="checkpoint: total size of writes"),
        pytest.param(lambda _: CompressedSerializer().dumps_typed("a" * (12 << 20))[0], "12,582,912", id="saving"),
        pytest.param(lambda _: CompressedSerializer().dumps_typed({1: "a" * 2**17})[0], "keys that", id="saving: keys"),
        pytest.param(lambda _: CompressedSerializer().dumps_typed([np.zeros(3)])[0], "arrays", id="saving: array"),
        pytest.param(resume_from(None, b"null", "metadata"), UNREADABLE, id="checkpoint: metadata"),
        pytest.param(resume_with_state(updated_channels=[[]]), UNREADABLE, id="checkpoint: channels"),
        pytest.param(resume_with_state(run_id=None), "hold no state", id="checkpoint: no run"),
        pytest.param(resume_with_state(run_id="of somebody"), "to another run", id="checkpoint: another run"),
        pytest.param(resume_with_state(stop_reason="evil"), "hold no state", id="checkpoint: unknown stop reason"),
        pytest.param(resume_with_state(cursor={"byte": "x"}), "hold no state", id="checkpoint: a cursor"),
        *(
            pytest.param(use_profile(f"{name}{options}"), "only if you name it yourself",
                         id=f"profile: code {name}{options}")
            for name in ("evil:Nice", "../evil.py:Nice")
            for options in ("", ":x=1")
        ),
        pytest.param(use_linked_template, "update.txt", id="profile: link"),
        *(
            pytest.param(lock_with_link(f"_work{place}"), f"_work{place} is a link", id=f"table: link {place}")
            for place in ("", "/checkpoints.sqlite", "/documents/texts")
        ),
        pytest.param(lambda folder: read_edited(folder, 'version": 1', 'version": 2'), "newer version", id="new table"),
        pytest.param(lambda folder: read_edited(folder, "memagent-corpus", "x"), "another program", id="foreign table"),
        pytest.param(lambda folder: read_edited(folder, 's": 1', f's": {2**63}'), "cannot be read", id="table: rows"),
        pytest.param(read_outside_dataset, "outside the folder", id="dataset: path"),
        pytest.param(read_rows(*VALUE_LIMIT, question=None, context=None, answer=None, id=None, title=None),
                     r"rows\.parquet .* row group that is too", id="rows: nulls"),
        pytest.param(read_rows(qa_records, "_MAX_CHARACTERS", 10**3, supporting_facts="s", context="a" * 10**3),
                     r"rows\.parquet, row 1: .* more than 1,000", id="rows: equal texts"),
        pytest.param(read_rows(parquet_rows, "_MAX_LIST_BYTES", 10**5, supporting_facts=["a" * 10**4] * 20),
                     r"row 1 cannot be read: the lists", id="rows: list of equal texts"),
        pytest.param(read_rows(parquet_rows, "_MAX_LIST_BYTES", 10**5, supporting_facts=[{"a": None}] * 500),
                     r"row 1 cannot be read: the lists", id="rows: list of nulls"),
        pytest.param(read_rows(parquet_rows, "_MAX_LIST_BYTES", 10**5, question=pa.scalar(2**62, pa.timestamp("us")),
                     supporting_facts=[1] * 4000), r"rows\.parquet, row 1 cannot be read: date", id="rows: date"),
        pytest.param(load_incomplete_results, "journal", id="results: incomplete"),
        pytest.param(read_file("rl.yaml", "a: !!python/object/apply:os.system ['touch ../ran']", read_preset),
                     "rl.yaml", id="preset: code"),
        pytest.param(read_file("rl.yaml", "a: 2021-99-99", read_preset), "rl.yaml", id="preset: date"),
    ],
)  # fmt: skip
def test_an_untrusted_file_runs_no_code(folder: Path, attack: Attack, error_pattern: str | None) -> None:
    if error_pattern is None:
        assert SECRET not in attack(folder)
    else:
        with pytest.raises(MemAgentError, match=rf"(?s){error_pattern}") as error:
            attack(folder)
        assert SECRET not in str(error.value)
    assert not (folder.parent / "ran").exists()
    assert "evil" not in sys.modules


def nest(value: Any, count: int) -> Any:
    return nest(Overwrite(value), count - 1) if count else value


def test_a_state_is_decoded_up_to_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    tracemalloc.start()
    with pytest.raises(UndecodableStateError, match="more than 12,582,912 bytes"):
        CompressedSerializer().loads_typed(("text", ZIP_BOMB))
    assert tracemalloc.get_traced_memory()[1] < len(ZIP_BOMB) + (32 << 20)
    tracemalloc.stop()
    serializer = CompressedSerializer()
    times = [date(2026, 1, 2), time(9, tzinfo=ZoneInfo("Europe/Berlin"))]
    state = [{1: [Send("a", Overwrite({"b", 2}), timeout=3), times, Path("c")]}, nest(1, 60)]
    assert serializer.loads_typed(serializer.dumps_typed([state, re.compile("d")])) == [state, ["d", 32]]
    for value in (nest(1, 61), nest("a" * 2**17, 7)):
        with pytest.raises(CheckpointError, match="inside each other"):
            serializer.dumps_typed(value)
    numbered, large = serializer.dumps_typed({7: "a" * 2**16}), b"\x81\x92ab" + ormsgpack.packb("a" * 2**17)
    reset_size_limits()
    assert [serializer.loads_typed(numbered) for _ in range(99)]
    monkeypatch.setattr(state_serializer, "thread_time", iter(range(99)).__next__)  # a second for a value
    for values in ([("msgpack", large)], [numbered] * 6):
        reset_size_limits()
        with pytest.raises(UndecodableStateError, match="keys have to be texts"):
            assert list(map(serializer.loads_typed, values))
    reset_size_limits()

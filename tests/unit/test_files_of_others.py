"""Files from somebody else are data: whatever they say, no code runs, no file outside is read, and memory is bounded.

Two tables of attacks: every kind of file, cut off, of another kind, nested too deeply or replaced by a pipe; and what a
file may say to make its reader do something. A run's key and server, when it is resumed, are in
`cli/test_runs_of_others.py`; the inputs of a corpus are in `corpus/test_corpus_inputs.py`, files that are converted in
`test_conversion.py` and `soak/test_random_inputs.py`, other versions of SQLite files in `test_database.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ormsgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from langgraph.checkpoint.serde.jsonplus import EXT_CONSTRUCTOR_SINGLE_ARG
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
from memagent_graph.errors import MemAgentError
from memagent_graph.policies.adding import load_adapter
from memagent_graph.policies.profile import EMBEDDED_FOLDER, require_profile, save_profile
from memagent_graph.policy_registry import parse_template_arguments
from memagent_graph.response_format import ResponseFormat
from memagent_graph.run_log import LoggedRun, RunLog, columns
from memagent_graph.run_log.exchange import export_runs, import_runs, parquet
from memagent_graph.run_log.packing import MAX_LIST_LENGTH, pack_text
from memagent_graph.settings import ReadSettings
from memagent_graph.storage import parquet_rows
from memagent_graph.storage.state_serializer import CompressedSerializer, UndecodableStateError, decompress
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


def reader(folder: Path, **options: Any) -> MemAgent:
    """A reader that keeps everything in a folder."""
    return build_reader(None, folder, policy=ScriptedPolicy(lambda prompt: r"\boxed{1904}"), **options)


@pytest.fixture(scope="module")
def folder_with_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    with reader(folder) as agent:
        agent.read("The tower was built in 1904.", "When?", run_id="r")
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder_with_a_run: Path) -> Path:
    """A folder with a run, code that must not run, and a text outside that must not be read."""
    (tmp_path / "private.txt").write_text(SECRET)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Nice: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    own = shutil.copytree(folder_with_a_run, tmp_path / "own")
    monkeypatch.chdir(own)
    return own


def change(path: Path, statement: str, *values: Any) -> None:
    """Execute a statement in a SQLite file."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def show_them(folder: Path, name: str = "runs.sqlite") -> str:
    """The runs of a log in all forms in which people see them."""
    pages = []
    with closing(RunLog(folder / name)) as log:
        for run in log.runs():
            view = load_run_view(log, run.run_id, DocumentStore(folder / "documents"))
            pages.append(render_page(build_timeline(view)))
    return "".join(pages)


def resume_them(folder: Path) -> str:
    with reader(folder) as agent:
        return str(agent.resume("r").answer)


def import_them(folder: Path) -> str:
    with closing(RunLog(folder / "imported.sqlite")) as log:
        import_runs(log, folder / "runs.parquet")
    return show_them(folder, "imported.sqlite")


def hostile_log(folder: Path) -> Path:
    """A log whose run names code and a document elsewhere."""
    with closing(RunLog(folder / "runs.sqlite")) as own:
        run = own.get("r")
    values = {"key": "sha256:../../private.txt", "path": "../private.txt", "media_type": "application/pdf"}
    settings = {**run.settings, "strategy": "evil:Nice", "profile": "../evil.py:Nice"}
    hostile = replace(run, document={**run.document, **values}, settings=settings, strategy="evil:Nice")
    with closing(RunLog(folder / "theirs.sqlite")) as log:
        log.add(LoggedRun(hostile, [make_conversation(0)]))
        export_runs(log, folder / "runs.parquet")
    return folder


def logged_value(table: str, column: str, value: Any) -> Callable[[Path], str]:
    """A log is shown in which a column has this value."""

    def show(folder: Path) -> str:
        events = "INSERT INTO events (run_id, time, kind, detail, call_id) VALUES ('r', 1, 'memory_edited', '', ?)"
        change(folder / "runs.sqlite", events.replace("?", "(SELECT call_id FROM conversations)"))
        change(folder / "runs.sqlite", f"UPDATE {table} SET {column} = ?", value)
        return show_them(folder)

    return show


def logged_setting(name: str, value: Any) -> Callable[[Path], str]:
    """A run is resumed whose log has this setting."""
    return lambda folder: str(
        parse_template_arguments(ReadSettings.from_log({"model": "m", name: value}, "r").chat_template_kwargs)
    )


def policy_with(name: str, content: str) -> Callable[[Path], str]:
    """A policy is asked in whose folder this file is."""

    def ask(folder: Path) -> str:
        shutil.copytree(EMBEDDED_FOLDER, folder / "policy", ignore=shutil.ignore_patterns("*.md"))
        (folder / "policy" / name).write_text(content)
        policy = LocalPolicy(folder / "policy")
        return asyncio.run(policy.complete([{"role": "user", "content": "?"}], SamplingParams(1))).text

    return ask


def tokenizer(**changes: Any) -> Callable[[Path], str]:
    """A text is counted with the embedded policy's tokenizer.json, some parts of which are others."""

    def count(folder: Path) -> str:
        specification = json.loads((EMBEDDED_FOLDER / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**specification, **changes}))
        return str(load_tokenizer(folder / "tokenizer.json").count("a" * 40 + "b"))

    return count


def file_with(name: str, content: str, read: Callable[[Path], Any]) -> Callable[[Path], str]:
    """A file with this content is read."""

    def use(folder: Path) -> str:
        (folder / name).write_text(content)
        return str(read(folder / name))

    return use


def log_with(column: str, blob: bytes, *, most: int | None = None) -> Callable[[Path], str]:
    """A log is shown, and its runs are exported, in which every conversation has this value."""

    def show(folder: Path) -> str:
        change(folder / "runs.sqlite", f"UPDATE conversations SET {column} = ?", blob)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(columns, "MAX_RUN_SIZE", most or columns.MAX_RUN_SIZE)
            return show_them(export_of_others(folder))

    return show


def raw_deflated(data: bytes) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, -12)
    return stream.compress(data) + stream.flush()


def many_ids() -> bytes:
    count = MAX_LIST_LENGTH + 1
    return b"\1" + count.to_bytes(4, "little") + bytes(count) + raw_deflated(bytes(3 * count))


def export_with(column: str, values: pa.Array, *bound: Any) -> Callable[[Path], str]:
    """An export is imported in which a column has these values, one a row."""

    def use(folder: Path) -> str:
        path = export_of_others(folder) / "runs.parquet"
        table = pq.read_table(path).slice(0, 1).take([0] * len(values))
        place = table.schema.get_field_index(column)
        changed = table.set_column(place, table.schema.field(column), values)
        pq.write_table(changed.replace_schema_metadata(pq.read_metadata(path).metadata), path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*bound)
            return import_them(folder)

    return use


def checkpoint(kind: str, content: bytes | Callable[[Path], bytes]) -> Callable[[Path], str]:
    """A run is resumed whose newest checkpoint has this content."""

    def resume(folder: Path) -> str:
        blob = content if isinstance(content, bytes) else content(folder)
        change(folder / "checkpoints.sqlite", "UPDATE checkpoints SET type = ?, checkpoint = ?", kind, blob)
        return resume_them(folder)

    return resume


def code(folder: Path) -> bytes:
    """A state that calls a function when it is decoded by LangGraph's default."""
    call = ormsgpack.packb(("os", "system", f"touch {folder.parent / 'ran'}" + " " * 1000))
    return ormsgpack.packb({"v": 1, "x": ormsgpack.Ext(EXT_CONSTRUCTOR_SINGLE_ARG, call)})


def state(updated: Any = None, **changes: Any) -> Callable[[Path], str]:
    """A run is resumed in whose newest state these values, or `updated_channels`, are others; None: none."""

    def resume(folder: Path) -> str:
        with closing(sqlite3.connect(folder / "checkpoints.sqlite")) as connection, connection:
            rows = connection.execute("SELECT rowid, type, checkpoint FROM checkpoints").fetchall()
            for row_id, kind, blob in rows:
                content = CompressedSerializer().loads_typed((kind, blob))
                values = {**content["channel_values"], **changes}
                content["channel_values"] = {name: value for name, value in values.items() if value is not None}
                content["updated_channels"] = updated
                parameters = (*CompressedSerializer().dumps_typed(content), row_id)
                connection.execute("UPDATE checkpoints SET type = ?, checkpoint = ? WHERE rowid = ?", parameters)
        return resume_them(folder)

    return resume


def pending_writes(folder: Path) -> str:
    """A run is resumed whose newest state has five pending writes, each nearly as large as one may be."""
    write = zlib.compress(ormsgpack.packb("a" * (6 * 2**20 - 9)))
    with closing(sqlite3.connect(folder / "checkpoints.sqlite")) as connection, connection:
        newest = "SELECT thread_id, checkpoint_ns, checkpoint_id FROM checkpoints ORDER BY checkpoint_id DESC LIMIT 1"
        place = connection.execute(newest).fetchone()
        for number in range(5):
            values = (*place, str(number), number, "memory", "msgpack+zlib", write)
            connection.execute("INSERT INTO writes VALUES (?, ?, ?, ?, '', ?, ?, ?, ?)", values)
    return resume_them(folder)


def large_state(folder: Path) -> str:
    """A state is saved that is too large to be loaded."""
    return CompressedSerializer().dumps_typed({"memory": "a" * (12 << 20)})[0]


def checkpoint_value(folder: Path) -> str:
    change(folder / "checkpoints.sqlite", "UPDATE checkpoints SET metadata = 'null'")
    return resume_them(folder)


def profile(strategy: str, content: str = "") -> Callable[[Path], str]:
    """A policy's folder is used whose profile names this strategy, or has this content."""

    def make(folder: Path) -> str:
        save_profile(replace(require_profile("embedded"), strategy=strategy), folder / "policy")
        if content:
            (folder / "policy" / "memagent.json").write_text(content)
        with reader(folder, profile=folder / "policy") as agent:
            return agent.strategy.name

    return make


def table_of_others(folder: Path) -> Path:
    """The folder of a corpus's table with one row."""
    table = TableFolder(str(folder / "table"))
    table.take_over({}, "rows")
    row = CorpusRow(id="a", document="a.txt", digest=None, question="?", answer="1904")
    part = table.write_part(0, [list_column_values(row)])
    assert part is not None
    table.publish([part])
    return folder / "table"


def results_of_others(folder: Path) -> Path:
    """The folder of an evaluation's results with one row."""
    with open_results(folder / "results", {"model": "m"}) as journal:
        journal.add_plan(EvaluationPlan.grid(("memagent",), ("keys",), (1024,), 1))
        journal.add(make_row())
    return folder / "results"


def policy_of_others(folder: Path) -> Path:
    """A policy's folder."""
    save_profile(require_profile("embedded"), folder / "policy")
    (folder / "policy" / "tokenizer.json").write_text(json.dumps({"model": {}}))
    (folder / "policy" / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))
    return folder / "policy"


def export_of_others(folder: Path) -> Path:
    with closing(RunLog(folder / "runs.sqlite")) as log:
        export_runs(log, folder / "runs.parquet")
    return folder


def read_with_policy(folder: Path) -> None:
    reader(folder, profile=folder).close()


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    name: str
    make: Callable[[Path], Path | None] | str
    """Writes one, and returns its folder if that is another; or its text."""
    use: Callable[[Path], Any]
    """Is given the file."""
    damages: tuple[str, ...] = ("half", "foreign", "deep", "pipe")


def itself(folder: Path) -> Path:
    return folder


SQLITE, TEXT = ("half", "foreign"), ("half", "foreign", "deep")
KINDS = (
    Kind("runs.sqlite", itself, lambda path: show_them(path.parent), SQLITE),
    Kind("checkpoints.sqlite", itself, lambda path: resume_them(path.parent), SQLITE),
    Kind("runs.parquet", export_of_others, lambda path: import_them(path.parent), ("half", "foreign", "pipe")),
    Kind("runs.parquet", export_of_others, lambda path: list(read_runs(path)), ("pipe",)),
    Kind("rows.jsonl", "{}", lambda path: open_rows([path]), ("pipe",)),
    Kind("_manifest.json", table_of_others, lambda path: TableFolder(str(path.parent)).manifest()),
    Kind("part-000000.parquet", table_of_others, lambda path: list(TableFolder(str(path.parent)).rows())),
    Kind("ledger.sqlite", lambda folder: CorpusLedger(folder / "ledger.sqlite").close(), CorpusLedger, SQLITE),
    Kind("reads.sqlite", lambda folder: Ledger(folder / "reads.sqlite").close(), Ledger, SQLITE),
    Kind(JOURNAL, results_of_others, lambda path: load_results(path.parent), ("foreign", "deep")),
    Kind("memagent.json", policy_of_others, lambda path: read_with_policy(path.parent)),
    Kind("templates/update.txt", policy_of_others, lambda path: read_with_policy(path.parents[1])),
    Kind("tokenizer.json", policy_of_others, lambda path: load_tokenizer(path.parent)),
    Kind("adapter_config.json", policy_of_others, lambda path: load_adapter(path.parent)),
    Kind("rl.yaml", "model: [a", read_preset, TEXT),
    Kind("keys.toml", "alice = [1", Keys.load, TEXT),
    Kind("schema.json", '{"type": "object"}', lambda path: ResponseFormat.load(str(path)), TEXT),
    Kind("state.json", '{"_data_files": []}', lambda path: DatasetRows(path.parent)),
)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [pytest.param(kind, damage, id=f"{kind.name}: {damage}") for kind in KINDS for damage in kind.damages],
)
def test_a_file_that_is_damaged_or_foreign_is_an_error_that_names_it(folder: Path, kind: Kind, damage: str) -> None:
    place = folder if isinstance(kind.make, str) else kind.make(folder) or folder
    path = place / kind.name
    content = kind.make.encode() if isinstance(kind.make, str) else path.read_bytes()
    path.unlink(missing_ok=True)
    if damage == "pipe":
        os.mkfifo(path)
    else:
        damages = {"half": content[: len(content) // 2], "foreign": b"\x7fELF\xff\x00" * 999, "deep": b"[" * 100_000}
        path.write_bytes(damages[damage])
    with pytest.raises(MemAgentError) as error:
        kind.use(path)
    assert path.name in str(error.value) or place.name in str(error.value)
    assert error.value.hint


def work_elsewhere(place: str) -> Callable[[Path], str]:
    """A table is written in whose work folder this is a link."""

    def write(folder: Path) -> str:
        table = TableFolder(str(table_of_others(folder)))
        link = folder / "table" / place
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder.parent)
        with lock_table(table):
            return str(list(folder.parent.iterdir()))

    return write


def table_of_a_newer_version(folder: Path) -> str:
    manifest = table_of_others(folder) / "_manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    return str(list(TableFolder(str(manifest.parent)).rows()))


def dataset_elsewhere(folder: Path) -> str:
    schema = pa.schema([("text", pa.string())])
    with pa.OSFile(str(folder.parent / "private.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write(pa.record_batch([[SECRET]], schema=schema))
    (folder / "data").mkdir()
    (folder / "data" / "state.json").write_text('{"_data_files": [{"filename": "../../private.arrow"}]}')
    return str(DatasetRows(folder / "data")[0])


def rows_with(*bound: Any, **columns: Any) -> Callable[[Path], str]:
    """The questions of a Parquet file with 200 equal rows are read, with a small bound."""

    def read(folder: Path) -> str:
        table = pa.table({name: pa.array([value] * 200, pa.string()) for name, value in columns.items()})
        pq.write_table(table, folder / "rows.parquet")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*bound)
            return str(qa_records.read_records([folder / "rows.parquet"], "hotpotqa"))

    return read


def results_without_parts(folder: Path) -> str:
    journal = results_of_others(folder) / JOURNAL
    first, *rest = journal.read_text().splitlines(keepends=True)
    values = {name: value for name, value in json.loads(first).items() if name in {"format", "fingerprint"}}
    journal.write_text("".join([json.dumps(values) + "\n", *rest]))
    return str(load_results(journal.parent))


def template_elsewhere(folder: Path) -> str:
    """The template is a link to a file elsewhere."""
    policy = policy_of_others(folder)
    (policy / "templates" / "update.txt").unlink()
    (policy / "templates" / "update.txt").symlink_to(folder.parent / "private.txt")
    with reader(folder, profile=policy) as agent:
        return str(agent.read("The tower was built in 1904.", "When?").answer)


BOMB = zlib.compress(b"\0" * (64 << 20), 1)
OBJECTS = b"\xdd" + (13 << 20).to_bytes(4, "big") + b"\x90" * (13 << 20)
MANY_VALUES = (parquet_rows, "_MAX_GROUP_VALUES", 800)
CHECKPOINT = r"checkpoints.*read"
PANIC = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}


@pytest.mark.parametrize(
    ("attack", "refusal"),
    [
        pytest.param(lambda folder: show_them(hostile_log(folder), "theirs.sqlite"), None, id="log: code, path"),
        pytest.param(logged_value("conversations", "text", raw_deflated(b"a" * (20 << 20))), "a text has more than",
                     id="log: size"),
        pytest.param(log_with("text", pack_text("a" * 60) or b"", most=100), r"run r in .*runs\.sqlite has more",
                     id="log: sum of texts"),
        pytest.param(log_with("token_ids", many_ids()), "a list has more than", id="log: size of a list"),
        pytest.param(export_with("text", pa.array(["a" * 2**16] * 40), parquet, "_MAX_RUN_BYTES", 2**20),
                     "a run .* has more than", id="export: sum of texts"),
        pytest.param(export_with("token_ids", pa.array([[7] * 99] * 9, pa.list_(pa.uint32())), *MANY_VALUES),
                     "row group", id="export: size of a list"),
        *(
            pytest.param(logged_value(table, column, value), "runs.sqlite cannot be used as a run log",
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
            pytest.param(logged_setting(name, value), name, id=f"log: setting {name} {value!r:.9}")
            for name, value in (
                ("concurrency", "x"), ("timeout", [1]), ("retries", -1), ("temperature", "hot"), ("stop_texts", 5),
                ("prompts", "x"), ("on_empty", "x"), ("top_p", float("nan")), ("policy", {}),
            )
        ),
        pytest.param(logged_setting("chat_template_kwargs", "[" * 50_000), "JSON object", id="log: deep setting"),
        pytest.param(profile("overwrite", '{"chunk_tokens": 1e999}'), r"memagent\.json", id="profile: number"),
        pytest.param(profile("overwrite", json.dumps({"empty_memory": "a" * 2**20})), r"memagent\.json.*more than",
                     id="profile: size"),
        pytest.param(policy_with("templates/update.txt", "a" * 2**20 + "b"), r"update\.txt.*more than",
                     id="template: size"),
        pytest.param(policy_with("chat_template.jinja", "{% if %}"), r"policy.*chat_template\.jinja",
                     id="chat template: syntax"),
        pytest.param(policy_with("chat_template.jinja", "{{ cycler.__init__.__globals__.os.system('touch ../ran') }}"),
                     r"policy.*chat_template\.jinja", id="chat template: code"),
        *(
            pytest.param(tokenizer(**{part: value}), rf"tokenizer\.json cannot be used: .*{words}",
                         id=f"tokenizer: {words} {str(value)[:30]}")
            for part, value, words in (
                ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
                                   "invert": False}, "retry"),
                ("model", PANIC, "range"),
                ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}, "UNK"),
                ("model", {"type": "WordPiece", "max_input_chars_per_word": 10**9}, "words of more"),
                ("added_tokens", [5], "int"), ("added_tokens", {"a": 1}, "str"),
                ("added_tokens", [{"content": 5}], "int"),
                ("added_tokens", [{"content": "a"}] * 50_001, "added tokens"),
                ("normalizer", [{"pattern": {"String": "a"}, "content": "a" * 10}] * 10, "times as long"),
                ("normalizer", [{"pattern": {"Regex": ""}, "content": "a"}] * 10, "times as long"),
                ("normalizer", [{"type": "Lowercase"}] * 257, "rules"),
                ("decoder", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 101}, "times as long"),
            )
        ),
        pytest.param(policy_with("tokenizer.json", json.dumps({"model": PANIC})),
                     r"policy cannot be loaded: the tokenizer\.json of", id="tokenizer: of a policy in this process"),
        pytest.param(file_with("gold.jsonl", "[" * 50_000, GoldAnswers.load), r"gold\.jsonl", id="gold answers: deep"),
        pytest.param(lambda folder: import_them(hostile_log(folder)), None, id="export: code, path"),
        pytest.param(checkpoint("msgpack", code), CHECKPOINT, id="checkpoint: code"),
        pytest.param(checkpoint("msgpack+zlib", lambda folder: zlib.compress(code(folder))), CHECKPOINT,
                     id="checkpoint: code, packed"),
        pytest.param(checkpoint("pickle", b"cos\nsystem\n"), CHECKPOINT, id="checkpoint: pickle"),
        pytest.param(checkpoint("msgpack", b"\xc1"), CHECKPOINT, id="checkpoint: no msgpack"),
        pytest.param(checkpoint("msgpack", ormsgpack.packb([1, 2])), CHECKPOINT, id="checkpoint: another value"),
        pytest.param(checkpoint("msgpack", ormsgpack.packb({"v": 1})), CHECKPOINT, id="checkpoint: a part"),
        pytest.param(checkpoint("msgpack+zlib", b"not zlib"), CHECKPOINT, id="checkpoint: not packed"),
        pytest.param(checkpoint("json", b"{"), CHECKPOINT, id="checkpoint: half"),
        pytest.param(checkpoint("msgpack+zlib", BOMB), CHECKPOINT, id="checkpoint: size"),
        pytest.param(checkpoint("msgpack+zlib", zlib.compress(OBJECTS)), "more than", id="checkpoint: objects, packed"),
        pytest.param(checkpoint("msgpack", OBJECTS), "more than", id="checkpoint: objects"),
        pytest.param(pending_writes, CHECKPOINT, id="checkpoint: sum of writes"),
        pytest.param(large_state, "only 12,582,912 can be read again", id="checkpoint: written too large"),
        pytest.param(checkpoint_value, CHECKPOINT, id="checkpoint: metadata"),
        pytest.param(state(updated=[[]]), CHECKPOINT, id="checkpoint: channels"),
        pytest.param(state(run_id=None), "hold no state", id="checkpoint: no run"),
        pytest.param(state(run_id="of somebody"), "to another run", id="checkpoint: another run"),
        pytest.param(state(stop_reason="evil"), "hold no state", id="checkpoint: an unknown end"),
        pytest.param(state(cursor={"byte": "x"}), "hold no state", id="checkpoint: a cursor"),
        *(
            pytest.param(profile(f"{name}{end}"), "only where you name it yourself",
                         id=f"profile: code {name}{end}")
            for name in ("evil:Nice", "../evil.py:Nice")
            for end in ("", ":x=1")
        ),
        pytest.param(template_elsewhere, "update.txt", id="profile: link"),
        *(
            pytest.param(work_elsewhere(f"_work{place}"), f"_work{place} is a link", id=f"table: link {place}")
            for place in ("", "/checkpoints.sqlite", "/documents/texts")
        ),
        pytest.param(table_of_a_newer_version, "newer version", id="table: version"),
        pytest.param(dataset_elsewhere, "outside the folder", id="dataset: path"),
        pytest.param(rows_with(*MANY_VALUES, question=None, context=None, answer=None, id=None, title=None),
                     r"rows\.parquet .* row group that is too", id="rows: nulls"),
        pytest.param(rows_with(qa_records, "_MAX_CHARACTERS", 10**3, supporting_facts="s", context="a" * 10**3),
                     r"rows\.parquet, row 1: .* more than 1,000", id="rows: equal texts"),
        pytest.param(results_without_parts, "journal", id="results: a part"),
        pytest.param(file_with("rl.yaml", "a: !!python/object/apply:os.system ['touch ../ran']", read_preset),
                     "rl.yaml", id="preset: code"),
        pytest.param(file_with("rl.yaml", "a: 2021-99-99", read_preset), "rl.yaml", id="preset: date"),
    ],
)  # fmt: skip
def test_a_file_from_somebody_else_is_data(folder: Path, attack: Callable[[Path], str], refusal: str | None) -> None:
    if refusal is None:
        assert SECRET not in attack(folder)
    else:
        with pytest.raises(MemAgentError, match=rf"(?s){refusal}") as error:
            attack(folder)
        assert SECRET not in str(error.value)
    assert not (folder.parent / "ran").exists()
    assert "evil" not in sys.modules


def test_a_compressed_state_is_not_decompressed_beyond_its_bound() -> None:
    tracemalloc.start()
    with pytest.raises(UndecodableStateError, match="more than 12,582,912 bytes"):
        decompress(BOMB)
    assert tracemalloc.get_traced_memory()[1] < len(BOMB) + (32 << 20)
    tracemalloc.stop()

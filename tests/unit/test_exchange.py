"""Export and import of runs: nothing is lost, a failed export or import leaves nothing, and errors name the file."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.conversations import DOCUMENT, TOKENS, make_conversation, write_run

from memagent_graph import Span, Writes
from memagent_graph.errors import MissingExtraError, RunLogError
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.prompts import load_prompts
from memagent_graph.run_log import Conversation, LoggedEvent, LoggedRun, Outcome, Reward, RunFilter, RunLog, RunRecord
from memagent_graph.run_log.exchange import export_runs, import_runs, parquet
from memagent_graph.run_log.exchange.logged_run import iter_content, load_run
from memagent_graph.storage import parquet_rows


def make_attempt(position: int = 0, **changes: Any) -> Conversation:
    return make_conversation(position, **{"template": load_prompts().fingerprint, **TOKENS, **changes})


@pytest.fixture
def target_log(tmp_path: Path):
    with closing(RunLog(tmp_path / "other.sqlite")) as target_log:
        yield target_log


def collect_content(log: RunLog) -> dict[str, Any]:
    """Return the content of a log by run, with row numbers replaced by the order in the run."""
    runs = [run for record in log.runs() if (run := load_run(log, record.run_id))]
    return {run.record.run_id: ([*iter_content(run)], run.templates) for run in runs}


def test_a_run_with_retries_an_edit_and_rewards_is_imported_unchanged(tmp_path, log, target_log) -> None:
    rows = write_run(log, count=4)
    events = (
        ReadEvent(EventKind.EMPTY, 1, "it was empty", UpdateRule.RETRY),
        ReadEvent(EventKind.RESAMPLED, 1, "no luck"),
    )
    discarded_attempt = make_attempt(1, call_id="again", outcome=Outcome.DISCARDED, text="", events=events[:1])
    log.record(discarded_attempt)
    kept_previous = {"outcome": Outcome.KEPT_PREVIOUS, "memory": "before", "events": events}
    log.record(make_attempt(1, call_id="again", attempt=1, **kept_previous))
    log.wait(log.edit("r", 1, "a better memory", call_id="again", remaining=["s0", "again"]))
    answer_row = log.wait(log.record(make_attempt(2, answers=True, finish_reason="length", trace={"x": "1"})))
    log.wait(log.end("r", "answered", None))
    log.reward("r", 1.0, name="exact")
    log.reward("r", -0.25, conversation=answer_row, note="too long")
    log.reward("r", 0.5, conversation=rows[3], source="scorer")
    log.reward("r", 0.0, name="exact")

    report = export_runs(log, tmp_path / "runs.parquet")
    assert (report.runs, report.conversations, report.rewards, report.events) == (1, 7, 4, 4)
    assert report.bytes == (tmp_path / "runs.parquet").stat().st_size
    write_run(target_log, "unrelated", 9)
    result = import_runs(target_log, tmp_path / "runs.parquet")

    assert (result.runs, result.conversations, result.rewards, result.skipped) == (1, 7, 4, 0)
    assert collect_content(target_log)["r"] == collect_content(log)["r"]
    assert any(conversation.superseded for conversation in target_log.conversations("r", superseded=True))
    assert target_log.templates("r")[load_prompts().fingerprint] == load_prompts().wording
    (reward,) = [reward for reward in target_log.rewards("r") if reward.note]
    (answer,) = [conversation for conversation in target_log.conversations("r") if conversation.writes is Writes.ANSWER]
    assert reward.conversation == answer.id != answer_row


any_text = st.text(st.characters(exclude_categories=()), max_size=12)
hostile = any_text | st.sampled_from(
    ["\0", "a\0b", "\u202eevil", "👩\u200d👩\u200d👧", "\ud800", 'half \udfff "and" \\ quotes', "[bold]", "\x1b[31m"]
)
texts = hostile.map(lambda text: text.encode("utf-8", "replace").decode())
times = st.floats(0, 253_402_000_000)
floats = st.floats(allow_nan=False, allow_infinity=False, width=64)
token_ids = st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=6)
small_json = st.dictionaries(texts, st.none() | st.booleans() | st.integers(-9, 9) | floats | hostile, max_size=3)
logged_events = st.builds(
    LoggedEvent, times, texts, texts, st.none() | st.integers(0, 99), st.none() | hostile, st.none() | texts
)
read_events = st.builds(
    ReadEvent,
    st.sampled_from(EventKind),
    st.none() | st.integers(0, 99),
    texts,
    st.none() | st.sampled_from(UpdateRule),
)
spans = st.builds(Span, *[st.integers(0, 2**40)] * 6)
any_conversations = st.builds(
    Conversation,
    run_id=st.just("r"), position=st.integers(0, 3), node=texts, branch=texts, role=texts,
    slot=st.integers(0, 3), writes=st.sampled_from(Writes), call_id=texts,
    parents=st.lists(texts, max_size=2).map(tuple),
    reads=st.lists(spans, max_size=2).map(tuple),
    attempt=st.integers(0, 2), outcome=st.sampled_from(Outcome), began=times, seconds=times, policy=texts,
    policy_version=texts, tokenizer=texts, template=texts, sampling=small_json, prompt_tokens=st.integers(0, 9),
    completion_tokens=st.integers(0, 9), cached_tokens=st.integers(0, 9), finish_reason=texts,
    text=st.none() | hostile, memory=st.none() | hostile, prompt_token_ids=token_ids, token_ids=token_ids,
    logprobs=st.none() | st.lists(st.floats(width=32), max_size=6),
    events=st.lists(read_events, max_size=2).map(tuple),
    superseded=st.just(True), trace=st.dictionaries(texts, texts, max_size=2),
)  # fmt: skip


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[RunRecord, list[Conversation], list[LoggedEvent], list[Reward]]]:
    runs = []
    for run_id in draw(st.lists(texts, unique=True, max_size=3)):
        conversations: list[Conversation] = []
        for row, attempt in enumerate(draw(st.lists(any_conversations, max_size=4))):
            # Only one conversation of a slot and attempt is current; the others are superseded.
            key = attempt.branch, attempt.role, attempt.slot, attempt.attempt
            is_superseded = draw(st.booleans()) and row > 0
            is_superseded |= any(
                not earlier.superseded and (earlier.branch, earlier.role, earlier.slot, earlier.attempt) == key
                for earlier in conversations
            )
            conversations.append(replace(attempt, run_id=run_id, id=row, superseded=is_superseded))
        document = {**DOCUMENT, "name": draw(hostile), "size": draw(st.integers(0, 2**40))}
        record = RunRecord(
            run_id, draw(times), draw(st.none() | times), draw(texts), document, draw(small_json),
            draw(st.none() | texts), draw(st.none() | texts), draw(st.dictionaries(texts, texts, max_size=2)),
        )  # fmt: skip
        owners = st.sampled_from([None, *(conversation.id for conversation in conversations)])
        rewards = draw(st.lists(
            st.builds(Reward, st.just(run_id), texts, floats, texts, times, owners, st.none() | texts), max_size=4
        ))  # fmt: skip
        runs.append((record, conversations, draw(st.lists(logged_events, max_size=2)), rewards))
    return runs


@given(runs=logs())
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_any_log_survives_export_and_import(runs) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source_log, target_log = RunLog(Path(folder, "a.sqlite")), RunLog(Path(folder, "b.sqlite"))
        try:
            for record, conversations, events, rewards in runs:
                source_log.add(LoggedRun(record, conversations, events, rewards))
            report = export_runs(source_log, Path(folder, "runs.parquet"))
            assert import_runs(target_log, Path(folder, "runs.parquet")).runs == len(runs)
            assert collect_content(target_log) == collect_content(source_log)
            second_import = import_runs(target_log, Path(folder, "runs.parquet"))
            assert (second_import.runs, second_import.skipped) == (0, len(runs))
            assert report.conversations == sum(len(run[1]) for run in runs)
            assert report.rewards == sum(len(run[3]) for run in runs)
        finally:
            source_log.close()
            target_log.close()


def test_datasets_reads_a_parquet_export_with_the_same_values(tmp_path, log) -> None:
    datasets = pytest.importorskip("datasets")
    write_run(log, "a", 3)
    rows = write_run(log, "b", 2, prompt_token_ids=None, token_ids=None, logprobs=None)
    write_run(log, "without conversations", 0)
    log.reward("b", 0.5, name="exact")
    log.reward("b", 0.75, conversation=rows[1])
    export_runs(log, tmp_path / "runs.parquet")
    files = str(tmp_path / "runs.parquet")
    *exported_rows, empty_run = datasets.load_dataset(
        "parquet", data_files=files, cache_dir=str(tmp_path / "cache"), split="train"
    )

    conversations = [conversation for run in ("a", "b") for conversation in log.conversations(run)]
    for row, conversation in zip(exported_rows, conversations, strict=True):
        assert row["conversation"] == conversation.id
        for name in ("run_id", "role", "position", "text"):
            assert row[name] == getattr(conversation, name)
        for name in ("prompt_token_ids", "token_ids", "logprobs"):
            assert row[name] == (getattr(conversation, name) and list(getattr(conversation, name)))
        assert json.loads(row["sampling"]) == conversation.sampling
        assert (row["question"], row["answer"]) == (f"Who is {conversation.run_id}?", "42")
        assert json.loads(row["document"]) == DOCUMENT
    assert [reward["value"] for reward in exported_rows[4]["rewards"]] == [0.75]
    assert [(reward["name"], reward["value"]) for reward in exported_rows[3]["run_rewards"]] == [("exact", 0.5)]
    assert (empty_run["run_id"], empty_run["conversation"], empty_run["role"]) == ("without conversations", None, None)


def test_metadata_of_a_file_does_not_grow_with_the_number_of_runs(tmp_path, log) -> None:
    metadata_bytes = []
    for run_count in (1, 40):
        for number in range(run_count):
            write_run(log, f"{run_count}-{number}", 1)
        export_runs(log, tmp_path / f"{run_count}.parquet")
        metadata = pq.read_metadata(tmp_path / f"{run_count}.parquet").metadata
        metadata_bytes.append(sum(map(len, metadata.values())))
    assert metadata_bytes[0] == metadata_bytes[1]


def test_large_exports_have_row_groups_and_compact_types(tmp_path, log, target_log, monkeypatch) -> None:
    monkeypatch.setattr(parquet, "_ROW_GROUP_SIZE", 60)
    for number in range(5):
        write_run(log, f"run {number}", 7)
    export_runs(log, tmp_path / "runs.parquet")
    assert pq.read_metadata(tmp_path / "runs.parquet").num_row_groups > 4
    schema = pq.read_schema(tmp_path / "runs.parquet")
    assert schema.field("prompt_token_ids").type == pa.list_(pa.uint32())
    assert schema.field("logprobs").type == pa.list_(pa.float32())
    assert import_runs(target_log, tmp_path / "runs.parquet").conversations == 35
    assert collect_content(target_log) == collect_content(log)


def test_only_the_chosen_runs_are_exported_oldest_first(tmp_path, log, target_log) -> None:
    for run_id in ("a", "b", "c"):
        write_run(log, run_id, 1)
    assert export_runs(log, tmp_path / "runs.parquet", selection=RunFilter(newest=2)).runs == 2
    import_runs(target_log, tmp_path / "runs.parquet")
    assert [run.run_id for run in target_log.runs()] == ["c", "b"]
    assert pq.read_table(tmp_path / "runs.parquet")["run_id"].to_pylist() == ["b", "c"]


# For training


def test_an_export_for_training_refuses_runs_without_token_ids_by_name(tmp_path, log) -> None:
    write_run(log, "good", 2)
    write_run(log, "empty", 0)
    for number in range(4):
        write_run(log, f"bad {number}", 1, logprobs=None)
    path = tmp_path / "runs.parquet"
    with pytest.raises(
        RunLogError, match=r"5 of 6 runs cannot be trained on.*'empty', 'bad 0', 'bad 1' and 2 more"
    ) as error:
        export_runs(log, path, for_training=True)
    assert "logprobs" in str(error.value)
    assert not path.exists()
    assert export_runs(log, path, selection=RunFilter(run_ids=["good"]), for_training=True).conversations == 2


def test_superseded_conversations_need_no_token_ids(tmp_path, log) -> None:
    write_run(log, count=1, logprobs=None)
    log.wait(log.record(make_attempt(0, call_id="resumed")))
    assert export_runs(log, tmp_path / "a.parquet", for_training=True).runs == 1


# Destinations


def test_an_existing_file_is_replaced_only_with_overwrite_and_by_a_complete_export(tmp_path, log, monkeypatch) -> None:
    write_run(log, "a")
    folder = tmp_path / "exports"
    folder.mkdir()
    path = folder / "runs.parquet"
    path.write_text("precious")
    with pytest.raises(RunLogError, match=r"exists.*overwrite"):
        export_runs(log, path)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(log, "rewards", lambda run_id: 1 / 0)
        export_runs(log, path, overwrite=True)
    assert path.read_text() == "precious"
    assert [file.name for file in folder.iterdir()] == ["runs.parquet"]
    export_runs(log, path, overwrite=True)
    assert path.read_bytes().startswith(b"PAR1")


def test_the_error_for_an_invalid_destination_gives_the_reason(tmp_path, log) -> None:
    for path, message in (
        (tmp_path / "nowhere" / "runs.parquet", "no folder"),
        (tmp_path / "runs.jsonl", "exported as Parquet, not as .jsonl"),
    ):
        with pytest.raises(RunLogError, match=message):
            export_runs(log, path)
    with pytest.raises(RunLogError, match="is a folder"):
        export_runs(log, tmp_path)
    with pytest.raises(RunLogError, match="the run log itself"):
        export_runs(log, log.path, overwrite=True)


def test_the_error_without_pyarrow_names_the_extra(tmp_path, log, monkeypatch) -> None:
    write_run(log)
    export_runs(log, tmp_path / "runs.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[export\]"):
        export_runs(log, tmp_path / "more.parquet")
    with pytest.raises(MissingExtraError, match="Parquet import"):
        import_runs(log, tmp_path / "runs.parquet")
    assert not (tmp_path / "more.parquet").exists()


# Imports that are refused


def test_a_run_with_other_content_is_refused_or_replaced(tmp_path, log, target_log) -> None:
    path = tmp_path / "runs.parquet"
    write_run(log, "r", 2)
    export_runs(log, path)
    write_run(target_log, "r", 3)
    content_before = collect_content(target_log)
    with pytest.raises(RunLogError, match=r"run 'r' with other content.*replace"):
        import_runs(target_log, path)
    assert collect_content(target_log) == content_before
    assert import_runs(target_log, path, replace=True).runs == 1
    assert collect_content(target_log) == collect_content(log)


@pytest.mark.parametrize("change", ["reward", "whose reward", "event", "id", "logprob", "text"])
def test_the_smallest_difference_is_other_content(tmp_path, log, target_log, change) -> None:
    path = tmp_path / "runs.parquet"
    rows = write_run(log, "r", 2)
    log.reward("r", 1.0, conversation=rows[0])
    export_runs(log, path)
    import_runs(target_log, path)
    first, second = target_log.conversations("r")
    (reward,) = target_log.rewards("r")
    second = {
        "id": replace(second, token_ids=[5, 7]),
        "logprob": replace(second, logprobs=[-0.5, math.nextafter(-0.25, -1) - 1e-7]),
        "text": replace(second, text="memory 1 "),
    }.get(change, second)
    events = [LoggedEvent(1.0, "memory_edited", "x", 0)] if change == "event" else []
    reward = {"reward": replace(reward, value=2.0), "whose reward": replace(reward, conversation=second.id)}.get(
        change, reward
    )
    target_log.add(LoggedRun(target_log.get("r"), [first, second], events, [reward]), replace_existing=True)
    with pytest.raises(RunLogError, match="other content"):
        import_runs(target_log, path)


def test_a_missing_or_foreign_file_is_an_error_that_names_it(tmp_path, log) -> None:
    pq.write_table(pa.table({"run_id": ["a"]}), tmp_path / "foreign.parquet")
    for name, message in (("missing.parquet", "cannot be read"), ("foreign.parquet", "not an export of runs")):
        with pytest.raises(RunLogError, match=message) as error:
            import_runs(log, tmp_path / name)
        assert name in str(error.value)
    assert not list(log.runs())


def test_an_export_whose_texts_are_too_large_is_refused(tmp_path, log, target_log, monkeypatch) -> None:
    write_run(log)
    export_runs(log, tmp_path / "runs.parquet")
    monkeypatch.setattr(parquet, "MAX_TEXT_BYTES", 7)
    with pytest.raises(RunLogError, match="a text has more than 7 bytes"):
        import_runs(target_log, tmp_path / "runs.parquet")
    monkeypatch.setattr(parquet_rows, "_MAX_GROUP_BYTES", 100)
    with pytest.raises(RunLogError, match="a row group that is too large"):
        import_runs(target_log, tmp_path / "runs.parquet")


def export_changed(log: RunLog, folder: Path, change_table: Callable[[pa.Table], pa.Table]) -> Path:
    path = folder / "runs.parquet"
    export_runs(log, path)
    table, metadata = pq.read_table(path), pq.read_metadata(path).metadata
    pq.write_table(change_table(table).replace_schema_metadata(metadata), path)
    return path


def fill_column(name: str, value: Any, type_: pa.DataType | None = None) -> Callable[[pa.Table], pa.Table]:
    """Return a function that sets this value in all rows of the column."""

    def change_table(table: pa.Table) -> pa.Table:
        column = table.schema.get_field_index(name)
        return table.set_column(column, name, pa.array([value] * len(table), type_ or table.schema.field(column).type))

    return change_table


@pytest.mark.parametrize(
    ("change_table", "message"),
    [
        (fill_column("writes", "riddle"), "writes"),
        (fill_column("outcome", "lost"), "outcome"),
        (fill_column("slot", 0), "is inconsistent"),
        (fill_column("events", "{"), "cannot be imported"),
        (fill_column("events", '[{"time": "x"}]'), "cannot be imported"),
        (fill_column("sampling", "[]"), "cannot be imported"),
        (fill_column("document", '{"key": 1}'), "cannot be imported"),
        (fill_column("position", "x", pa.string()), "cannot be imported"),
        (lambda table: table.drop_columns(["text"]), "lacks the columns text"),
    ],
)
def test_an_invalid_export_is_refused_and_imports_no_run(tmp_path, log, target_log, change_table, message) -> None:
    write_run(log, count=2)
    path = export_changed(log, tmp_path, change_table)
    with pytest.raises(RunLogError, match=message):
        import_runs(target_log, path)
    assert not list(target_log.runs())


def test_a_shuffled_file_is_refused_before_a_run_is_imported(tmp_path, log, target_log) -> None:
    write_run(log, "a", 2)
    write_run(log, "b", 2)
    path = export_changed(log, tmp_path, lambda table: table.take([0, 2, 1, 3]))
    with pytest.raises(RunLogError, match=r"run 'a' in .* are not together"):
        import_runs(target_log, path, replace=True)
    assert not list(target_log.runs())


# Totals in the log


def test_totals_leave_out_superseded_conversations(log) -> None:
    write_run(log, "a", 2)
    log.record(make_attempt(1, run_id="a", call_id="resumed", token_ids=None, prompt_tokens=10))
    write_run(log, "b", 0)
    log.reward("a", 0.5)
    log.reward("a", 1.0)
    totals = log.totals(["a", "b", "missing"])
    assert (totals["a"].conversations, totals["a"].prompt_tokens, totals["a"].completion_tokens) == (2, 13, 4)
    assert (totals["a"].with_ids, totals["a"].rewards) == (1, {"reward": 1.0})
    assert (totals["b"].conversations, totals["b"].prompt_tokens, totals["b"].rewards) == (0, 0, {})
    assert totals["missing"].conversations == 0
    assert log.counts() == (2, 3)

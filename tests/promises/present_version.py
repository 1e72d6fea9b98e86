"""Files that a version leaves behind, and what a later one must find in them and be able to do with them."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from promises.comparison import jsonable, normalised, shown
from promises.scenarios import QUESTION, SMALL_OPTIONS, TEXT, Place, completion, home, refusal, run
from support.fake_server import FakeServer
from support.scripts import perfect_reader

from memagent_graph import (
    FinishReason,
    Limits,
    LocalPolicy,
    MemAgent,
    PolicyError,
    RunLog,
    SamplingParams,
    ScriptedPolicy,
    UpdateRule,
    UpdateRules,
)

WRITTEN = Path(__file__).parent / "present_version"
LOG, CHECKPOINTS = "runs.sqlite", "checkpoints.sqlite"
SHORT = "The lighthouse keeper of Norwick is called Ada Brandt. " + "The wind turned and the boats came home. " * 40


def write(folder: Path) -> None:
    """Write a log, checkpoints and exports to `folder`, with what this version finds in them."""
    place = Place(folder)
    with home(folder / "home"):
        _write_runs(place)
        for name in (LOG, CHECKPOINTS):
            _compact(folder / name)
        for kind in ("jsonl", "parquet"):
            assert run("export", folder / f"runs.{kind}", "--log", place.log)[0] == 0
        _compact(place.log)
    shutil.rmtree(folder / "documents")
    shutil.rmtree(folder / "home")


def _write_runs(place: Place) -> None:
    with place.reader(ScriptedPolicy(perfect_reader)) as reader:
        reader.read(TEXT, QUESTION, run_id="answered")
        reader.read(TEXT, QUESTION, run_id="stopped", limits=Limits(max_chunks=2))
    other = place.folder / "home" / "checkpoints.sqlite"  # of runs that are there for their log alone
    with place.reader(ScriptedPolicy(perfect_reader), checkpoints=other) as reader:
        reader.read(TEXT, QUESTION, run_id="edited")
        reader.edit_memory("edited", 2, "harbor 1\nby hand")
        reader.resume("edited")
        reader.read(TEXT, QUESTION, run_id="replaced")
        reader.read(TEXT.replace("4711", "0815"), QUESTION, run_id="replaced")
    replies = ["", "second try", completion("cut", FinishReason.LENGTH), completion("no", FinishReason.REFUSED)]
    rules = UpdateRules(empty=UpdateRule.RETRY, refused=UpdateRule.RETRY, retries=1)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=7, stop=("\n\n",))
    with place.reader(ScriptedPolicy([*replies, *["third"] * 9]), rules=rules, sampling=sampling) as reader:
        reader.read(TEXT, "What \U0001f600 is it?", run_id="retried")
    broken = ScriptedPolicy(["memory", PolicyError("it broke")])
    with place.reader(broken, checkpoints=other) as reader:
        refusal(lambda: reader.read(TEXT, QUESTION, run_id="broken"))
    with MemAgent(
        LocalPolicy.embedded(), run_log=place.log, store=place.folder / "documents", sampling=SamplingParams(seed=1)
    ) as reader:
        reader.read(SHORT, "Who is the lighthouse keeper of Norwick?", run_id="with_ids")
    book = place.folder / "home" / "book.txt"
    book.write_text(TEXT)
    with FakeServer(vllm=True) as fake:
        options = ("--log", place.log, "--checkpoints", place.folder / CHECKPOINTS, "--run-id", "by_command")
        command = ("read", book, "-q", QUESTION, "--base-url", fake.base_url, *SMALL_OPTIONS, *options)
        assert run(*command, "--max-chunks", 2, "--on-empty", "retry", "--layout", "section_first")[0] == 5
    log = RunLog(place.log)
    first, *_, last = log.conversations("with_ids")
    log.reward("with_ids", 1.0, name="exact", source="scorer", note="to the letter")
    log.reward("with_ids", 0.25, name="step", source="test", conversation=first.id)
    log.reward("with_ids", -0.5, name="step", source="test", conversation=last.id)
    log.reward("answered", 0.0)
    log.thumbs("answered", True)
    log.close()


def _compact(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def read_log(path: Path) -> Any:
    """All that a log holds, through its public methods."""
    log = RunLog(path)
    records = list(log.runs())
    found = {
        record.run_id: {
            "run": jsonable(record),
            "got": jsonable(log.get(record.run_id)),
            "conversations": jsonable(log.conversations(record.run_id)),
            "with superseded": jsonable(log.conversations(record.run_id, superseded=True)),
            "events": jsonable(log.events(record.run_id)),
            "rewards": jsonable(log.rewards(record.run_id)),
            "latest_rewards": log.latest_rewards(record.run_id),
            "templates": log.templates(record.run_id),
            "has_ids": [each.has_ids for each in log.conversations(record.run_id, superseded=True)],
        }
        for record in records
    }
    ids = [record.run_id for record in records]
    totals = [jsonable(log.totals(ids, superseded=each)) for each in (False, True)]
    counts = list(log.counts())
    log.close()
    return {"order": ids, "runs": found, "totals": totals, "counts": counts}


def commands(folder: Path) -> Any:
    """What `memagent runs --json` and `memagent show RUN` print for a log."""
    log = folder / LOG
    with home(folder / "home"):
        listed = run("runs", "--json", "--log", log)
        values = json.loads(listed[1])
        each = {record["run_id"]: run("show", record["run_id"], "--log", log) for record in values["runs"]}
    printed = {run_id: [code, shown(out)] for run_id, (code, out, _) in each.items()}
    return normalised({"runs": [listed[0], values], "show": printed}, folder, times=True)


def refused(folder: Path) -> Any:
    """How a reader and a command refuse to continue what that version's checkpoints hold."""
    place = Place(folder)
    with home(folder / "home"):
        with place.reader(ScriptedPolicy(perfect_reader)) as reader:
            asked = (lambda: reader.history("stopped"), lambda: reader.resume("stopped"))
            found = [refusal(each) for each in (*asked, lambda: reader.edit_memory("answered", 1, "x"))]
        options = ("--log", place.log, "--checkpoints", folder / CHECKPOINTS, "--json")
        with FakeServer(vllm=True) as fake:
            code, out, _ = run("resume", "by_command", "--base-url", fake.base_url, *options)
        lines = place.logged()
    return normalised({"errors": found, "command": [code, json.loads(out)], "log": lines}, folder)


def copy_of(folder: Path) -> Path:
    """The files that were written, in a folder where they may change."""
    return Path(shutil.copytree(WRITTEN, folder / "copy"))

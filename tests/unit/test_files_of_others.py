"""Files from somebody else are data: whatever they say, no code runs, no file outside is read, and memory is bounded.

A run's key and server, when it is resumed, are in `cli/test_runs_of_others.py`; the inputs of a corpus are in
`corpus/test_corpus_inputs.py`.
"""

from __future__ import annotations

import sqlite3
import sys
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from langgraph.checkpoint.serde.jsonplus import EXT_CONSTRUCTOR_SINGLE_ARG
from support.conversations import conversation

from memagent_graph import DocumentStore, MemAgent, ScriptedPolicy
from memagent_graph.errors import MemAgentError
from memagent_graph.policies.profile import require_profile, save_profile
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.exchange import export_runs, import_runs
from memagent_graph.timeline.compare import compare_runs, render_comparison
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.run_views import view_of_run
from memagent_serve.serve_settings import file_settings

SECRET = "a private text"


def reader(folder: Path, **options: Any) -> MemAgent:
    """A reader that keeps everything in a folder."""
    policy = ScriptedPolicy(lambda prompt: r"\boxed{1904}")
    places = {
        "store": folder / "documents",
        "checkpoints": folder / "checkpoints.sqlite",
        "run_log": folder / "runs.sqlite",
    }
    return MemAgent(policy, **{"tokenizer": "embedded", **places, **options})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, code that must not run, and a text outside that must not be read."""
    (tmp_path / "private.txt").write_text(SECRET)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Nice: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.chdir(own)
    with reader(own) as agent:
        agent.read("The tower was built in 1904.", "When?", run_id="r")
    return own


def shown(log: RunLog, folder: Path) -> str:
    """The runs of a log in all forms in which people see them."""
    pages = []
    for run in log.runs():
        view = view_of_run(log, run.run_id, DocumentStore(folder / "documents"))
        comparison = compare_runs(view, view, settings_a=run.settings, settings_b=run.settings)
        pages += [render_page(build_timeline(view)), str(render_comparison(comparison))]
    return "".join(pages)


def hostile_log(folder: Path, **document: Any) -> RunLog:
    """A log whose run names code and a document elsewhere."""
    log = RunLog(folder / "theirs.sqlite")
    with closing(RunLog(folder / "runs.sqlite")) as own:
        run = own.get("r")
    values = {"key": "sha256:../../private.txt", "path": "../private.txt", "media_type": "application/pdf", **document}
    settings = {**run.settings, "strategy": "evil:Nice", "profile": "../evil.py:Nice"}
    log.add(
        replace(run, document={**run.document, **values}, settings=settings, strategy="evil:Nice"), [conversation(0)]
    )
    return log


def log_elsewhere(folder: Path) -> str:
    with closing(hostile_log(folder)) as log:
        return shown(log, folder)


def export_elsewhere(folder: Path) -> str:
    with closing(hostile_log(folder)) as log, closing(RunLog(folder / "imported.sqlite")) as imported:
        export_runs(log, folder / "runs.parquet")
        import_runs(imported, folder / "runs.parquet")
        return shown(imported, folder)


def log_bomb(folder: Path) -> str:
    stream = zlib.compressobj(9, zlib.DEFLATED, -12)
    bomb = b"".join(stream.compress(b"a" * 2**20) for _ in range(20)) + stream.flush()
    with closing(sqlite3.connect(folder / "runs.sqlite")) as connection, connection:
        connection.execute("UPDATE conversations SET text = ?", (bomb,))
    with closing(RunLog(folder / "runs.sqlite")) as log:
        return shown(log, folder)


def checkpoint(kind: str, content: bytes) -> Callable[[Path], str]:
    """A run is resumed whose newest checkpoint has this content."""

    def resume(folder: Path) -> str:
        with closing(sqlite3.connect(folder / "checkpoints.sqlite")) as connection, connection:
            connection.execute("UPDATE checkpoints SET type = ?, checkpoint = ?", (kind, content))
        with reader(folder) as agent:
            return str(agent.resume("r").answer)

    return resume


def code(folder: Path) -> bytes:
    """A state that calls a function when it is decoded by LangGraph's default."""
    call = ormsgpack.packb(("os", "system", f"touch {folder.parent / 'ran'}" + " " * 1000))
    return ormsgpack.packb({"v": 1, "x": ormsgpack.Ext(EXT_CONSTRUCTOR_SINGLE_ARG, call)})


def checkpoint_code(folder: Path) -> str:
    return checkpoint("msgpack", code(folder))(folder)


def packed_checkpoint_code(folder: Path) -> str:
    return checkpoint("msgpack+zlib", zlib.compress(code(folder)))(folder)


def checkpoint_value(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "checkpoints.sqlite")) as connection, connection:
        connection.execute("UPDATE checkpoints SET metadata = 'null'")
    with reader(folder) as agent:
        return str(agent.resume("r").answer)


def profile(strategy: str, content: str = "") -> Callable[[Path], str]:
    """A policy's folder is used whose profile names this strategy, or has this content."""

    def make(folder: Path) -> str:
        save_profile(replace(require_profile("embedded"), strategy=strategy), folder / "policy")
        if content:
            (folder / "policy" / "memagent.json").write_text(content)
        with reader(folder, profile=folder / "policy") as agent:
            return agent.strategy.name

    return make


def settings_of_serve(content: str) -> Callable[[Path], str]:
    """A settings file of the server with this content is read."""

    def read(folder: Path) -> str:
        (folder / "serve.toml").write_text(content)
        return str(file_settings(folder / "serve.toml", {"max_reads"}))

    return read


BOMB = zlib.compress(b"\0" * (300 << 20), 9)
CHECKPOINT = r"checkpoints.*read"


@pytest.mark.parametrize(
    ("attack", "refusal"),
    [
        pytest.param(log_elsewhere, None, id="log: code, path"),
        pytest.param(log_bomb, "a text has more than", id="log: size"),
        pytest.param(export_elsewhere, None, id="export: code, path"),
        pytest.param(checkpoint_code, CHECKPOINT, id="checkpoint: code"),
        pytest.param(packed_checkpoint_code, CHECKPOINT, id="checkpoint: code, packed"),
        pytest.param(checkpoint("pickle", b"cos\nsystem\n"), CHECKPOINT, id="checkpoint: pickle"),
        pytest.param(checkpoint("msgpack", b"\xc1"), CHECKPOINT, id="checkpoint: no msgpack"),
        pytest.param(checkpoint("msgpack", ormsgpack.packb([1, 2])), CHECKPOINT, id="checkpoint: another value"),
        pytest.param(checkpoint("msgpack", ormsgpack.packb({"v": 1})), CHECKPOINT, id="checkpoint: a part"),
        pytest.param(checkpoint("msgpack+zlib", b"not zlib"), CHECKPOINT, id="checkpoint: not packed"),
        pytest.param(checkpoint("json", b"{"), CHECKPOINT, id="checkpoint: half"),
        pytest.param(checkpoint("msgpack+zlib", BOMB), CHECKPOINT, id="checkpoint: size"),
        pytest.param(checkpoint_value, CHECKPOINT, id="checkpoint: metadata"),
        *(
            pytest.param(profile(f"{name}{end}"), "only where you name it yourself",
                         id=f"profile: code {name}{end}")
            for name in ("evil:Nice", "../evil.py:Nice")
            for end in ("", ":x=1", "+converged")
        ),
        pytest.param(profile("", "[" * 100_000), "memagent.json", id="profile: depth"),
        pytest.param(settings_of_serve("max_reads = " + "[" * 100_000), "serve.toml", id="settings of serve: depth"),
        pytest.param(settings_of_serve("policy = 'evil:Nice'"), "unknown settings", id="settings of serve: code"),
    ],
)  # fmt: skip
def test_a_file_from_somebody_else_is_data(folder: Path, attack: Callable[[Path], str], refusal: str | None) -> None:
    if refusal is None:
        assert SECRET not in attack(folder)
    else:
        with pytest.raises(MemAgentError, match=rf"(?s){refusal}") as caught:
            attack(folder)
        assert SECRET not in str(caught.value)
    assert not (folder.parent / "ran").exists()
    assert "evil" not in sys.modules

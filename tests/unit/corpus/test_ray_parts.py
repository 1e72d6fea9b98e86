"""Parts of reading on Ray that need no cluster; tests/on_ray has the others."""

from __future__ import annotations

import asyncio
import os
import pickle
from pathlib import Path

import pytest
from support.corpus_world import CountingServer, make_text

from memagent_corpus import CorpusDocument
from memagent_corpus.corpus_reader import DocumentTask
from memagent_corpus.on_ray import ActorPlan, DocumentActor, require_reachable
from memagent_corpus.source_access import SourceAccess
from memagent_graph.errors import CorpusError, RunHeldError
from memagent_graph.settings import ReadSettings
from memagent_graph.storage.file_locks import lease


def test_tasks_and_their_errors_can_be_pickled(tmp_path: Path) -> None:
    task = DocumentTask(CorpusDocument(name="a", text="b"), ("When?",), answered_ids=frozenset({"c"}))
    assert pickle.loads(pickle.dumps(task)) == task
    actor = DocumentActor(pickle.dumps(ActorPlan(logs=str(tmp_path / "nowhere"))))
    failure = pickle.loads(pickle.dumps(asyncio.run(actor.read(task))))
    assert isinstance(failure, CorpusError) and "has no access to the folder" in str(failure) and failure.hint


def test_error_for_an_inaccessible_folder_names_it_and_the_remedy(tmp_path: Path) -> None:
    plan = ActorPlan(checkpoints=str(tmp_path / "work" / "checkpoints.sqlite"), logs=str(tmp_path / "logs"))
    with pytest.raises(CorpusError, match=r"has no access to the folder .*work of .*checkpoints postgresql"):
        plan.require_shared_folders()
    plan.write_markers()
    plan.require_shared_folders()
    other_plan = ActorPlan(checkpoints=plan.checkpoints)  # the same folder, but with the marker of another driver
    with pytest.raises(CorpusError, match="has no access to the folder"):
        other_plan.require_shared_folders()
    plan.remove_markers()
    assert not list(tmp_path.rglob("seen*"))
    with pytest.raises(CorpusError, match=r"has no access to the documents' folder .*nowhere"):
        ActorPlan(access=SourceAccess(root=str(tmp_path / "nowhere"))).require_shared_folders()
    assert ActorPlan(checkpoints="postgresql://a:b@c/d").list_shared_folders() == []


def test_machines_have_separate_sqlite_files_and_the_repr_of_a_plan_hides_secrets() -> None:
    local_plan = ActorPlan(checkpoints="/w/checkpoints.sqlite")
    remote_plan = ActorPlan(checkpoints="/w/checkpoints.sqlite", driver_host="another machine")
    assert local_plan.get_local_checkpoints() == "/w/checkpoints.sqlite"
    assert str(remote_plan.get_local_checkpoints()).startswith("/w/checkpoints.sqlite-")
    database_plan = ActorPlan(checkpoints="postgresql://c/d", driver_host="another machine")
    assert database_plan.get_local_checkpoints() == "postgresql://c/d" and "postgresql" not in repr(database_plan)
    assert "a-secret" not in repr(ActorPlan(settings=ReadSettings(api_key="a-secret")))


def make_actor(plan: ActorPlan) -> DocumentActor:
    return DocumentActor(pickle.dumps(plan))


async def test_actor_removes_its_temporary_folder_and_those_of_killed_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with CountingServer() as server:
        settings = ReadSettings(model="fake", base_url=server.base_url, tokenizer="embedded")
        actor = make_actor(ActorPlan(settings=settings, questions=("What is the key of harbor?",)))
        (row,) = await actor.reader.read_one(CorpusDocument(name="a", text=make_text(1, 60)))
        assert row.answer == "1010"
        (parent_folder,) = tmp_path.glob("*")  # noqa: ASYNC240
        (parent_folder / "killed.folder" / "documents").mkdir(parents=True)
        other_actor = make_actor(ActorPlan(settings=settings))
        assert other_actor.reader.questions == ()
        assert len(list(parent_folder.glob("*.folder"))) == 2, "a folder in use is gone, or an abandoned one is not"
        await asyncio.gather(actor.close(), other_actor.close())
        assert not list(parent_folder.glob("*.folder"))


def test_a_temporary_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "foreign").mkdir()
    (tmp_path / f"memagent-ray-{os.getuid()}").symlink_to(tmp_path / "foreign")
    with pytest.raises(CorpusError, match="belongs to another user"):
        _ = make_actor(ActorPlan()).reader


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ("nowhere http://a/b :6379 host:", r"not the address of a Ray cluster\. Use auto, local, or HOST:PORT"),
        ("127.0.0.1:9 [::1]:9", r"cannot be used: .*Check that the cluster runs \(`ray status`\)"),
        ("ray://host:10001", "Ray Client, which is not supported.*ray job submit"),
    ],
)
def test_unusable_cluster_address_is_refused_at_once_with_a_hint(addresses: str, message: str) -> None:
    for address in addresses.split():
        with pytest.raises(CorpusError, match=message):
            require_reachable(address)


async def test_actor_waits_while_another_process_holds_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memagent_corpus.corpus_reader._LOCK_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("memagent_corpus.corpus_reader._LOCK_WAIT_SECONDS", 0.05)
    with CountingServer() as server:
        settings = ReadSettings(model="fake", base_url=server.base_url, tokenizer="embedded")
        checkpoint_path = tmp_path / "c.sqlite"
        plan = ActorPlan(settings=settings, questions=("What is the key of harbor?",), checkpoints=str(checkpoint_path))
        plan.write_markers()
        actor = make_actor(plan)
        document = CorpusDocument(name="a", text=make_text(1, 60))
        (row,) = await actor.reader.read_one(document)
        with lease(tmp_path / "c.sqlite-reading", row.id):
            server.answer_counts.clear()
            (failed_row,) = await actor.reader.read_one(document)
            assert failed_row.error_kind == RunHeldError.__name__
            monkeypatch.setattr("memagent_corpus.corpus_reader._LOCK_WAIT_SECONDS", 60)
            pending_read = asyncio.create_task(actor.reader.read_one(document))
            await asyncio.sleep(0.1)
            assert not pending_read.done() and not server.answer_counts
        (row,) = await pending_read
        assert row.answer == "1010"
        await actor.close()

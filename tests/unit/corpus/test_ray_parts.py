"""What reading on a cluster consists of, without one; tests/on_ray has the rest."""

from __future__ import annotations

import asyncio
import os
import pickle
from pathlib import Path

import pytest
from support.corpus_world import CountingServer, make_text

from memagent_corpus import CorpusDocument
from memagent_corpus.corpus_run import DocumentTask
from memagent_corpus.on_ray import ActorPlan, DocumentActor, require_reachable
from memagent_corpus.source_access import SourceAccess
from memagent_graph.errors import CorpusError, RunHeldError
from memagent_graph.settings import ReadSettings
from memagent_graph.storage.file_locks import lease


def test_a_task_and_its_failure_can_be_sent_to_another_machine(tmp_path: Path) -> None:
    task = DocumentTask(CorpusDocument(name="a", text="b"), ("When?",), answered_ids=frozenset({"c"}))
    assert pickle.loads(pickle.dumps(task)) == task
    actor = DocumentActor(pickle.dumps(ActorPlan(logs=str(tmp_path / "nowhere"))))
    failure = pickle.loads(pickle.dumps(asyncio.run(actor.read(task))))
    assert isinstance(failure, CorpusError) and "has no access to the folder" in str(failure) and failure.hint


def test_a_machine_that_does_not_see_the_folders_says_which_and_what_to_do(tmp_path: Path) -> None:
    plan = ActorPlan(checkpoints=str(tmp_path / "work" / "checkpoints.sqlite"), logs=str(tmp_path / "logs"))
    with pytest.raises(CorpusError, match=r"has no access to the folder .*work of .*checkpoints postgresql"):
        plan.check_folders()
    plan.write_markers()
    plan.check_folders()
    elsewhere = ActorPlan(checkpoints=plan.checkpoints)  # a folder of the same name, which another driver marked
    with pytest.raises(CorpusError, match="has no access to the folder"):
        elsewhere.check_folders()
    plan.remove_markers()
    assert not list(tmp_path.rglob("seen*"))
    with pytest.raises(CorpusError, match=r"has no access to the documents' folder .*nowhere"):
        ActorPlan(access=SourceAccess(root=str(tmp_path / "nowhere"))).check_folders()
    assert ActorPlan(checkpoints="postgresql://a:b@c/d").list_shared_folders() == []


def test_machines_do_not_share_a_sqlite_file_and_a_plan_does_not_show_what_is_secret() -> None:
    here = ActorPlan(checkpoints="/w/checkpoints.sqlite")
    there = ActorPlan(checkpoints="/w/checkpoints.sqlite", home="another machine")
    assert here.get_local_checkpoints() == "/w/checkpoints.sqlite"
    assert str(there.get_local_checkpoints()).startswith("/w/checkpoints.sqlite-")
    url = ActorPlan(checkpoints="postgresql://c/d", home="another machine")
    assert url.get_local_checkpoints() == "postgresql://c/d" and "postgresql" not in repr(url)
    assert "a-secret" not in repr(ActorPlan(settings=ReadSettings(api_key="a-secret")))


def actor_of(plan: ActorPlan) -> DocumentActor:
    return DocumentActor(pickle.dumps(plan))


async def test_an_actor_s_reader_leaves_nothing_on_its_machine_even_if_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with CountingServer() as server:
        settings = ReadSettings(model="fake", base_url=server.base_url, tokenizer="embedded")
        actor = actor_of(ActorPlan(settings=settings, questions=("What is the key of harbor?",)))
        (row,) = await actor.reader.read_one(CorpusDocument(name="a", text=make_text(1, 60)))
        assert row.answer == "1010"
        (above,) = tmp_path.glob("*")  # noqa: ASYNC240
        (above / "killed.folder" / "documents").mkdir(parents=True)
        other = actor_of(ActorPlan(settings=settings))
        assert other.reader.questions == ()
        assert len(list(above.glob("*.folder"))) == 2, "a folder in use was removed, or one that is not was kept"
        await asyncio.gather(actor.close(), other.close())
        assert not list(above.glob("*.folder"))


def test_a_temporary_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"memagent-ray-{os.getuid()}").symlink_to(tmp_path / "theirs")
    with pytest.raises(CorpusError, match="belongs to another user"):
        _ = actor_of(ActorPlan()).reader


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        ("nowhere http://a/b :6379 host:", r"not the address of a Ray cluster\. Use auto, local, or HOST:PORT"),
        ("127.0.0.1:9 [::1]:9", r"cannot be used: .*Check that the cluster runs \(`ray status`\)"),
        ("ray://host:10001", "Ray Client, which is not supported.*ray job submit"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_at_once_with_what_to_do(addresses: str, words: str) -> None:
    for address in addresses.split():
        with pytest.raises(CorpusError, match=words):
            require_reachable(address)


async def test_a_run_that_another_process_holds_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memagent_corpus.corpus_reader._LOCK_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("memagent_corpus.corpus_reader._LOCK_WAIT_SECONDS", 0.05)
    with CountingServer() as server:
        settings = ReadSettings(model="fake", base_url=server.base_url, tokenizer="embedded")
        states = tmp_path / "c.sqlite"
        plan = ActorPlan(settings=settings, questions=("What is the key of harbor?",), checkpoints=str(states))
        plan.write_markers()
        actor = actor_of(plan)
        document = CorpusDocument(name="a", text=make_text(1, 60))
        (row,) = await actor.reader.read_one(document)
        with lease(tmp_path / "c.sqlite-reading", row.id):
            server.answer_counts.clear()
            (held,) = await actor.reader.read_one(document)
            assert held.error_kind == RunHeldError.__name__
            monkeypatch.setattr("memagent_corpus.corpus_reader._LOCK_WAIT_SECONDS", 60)
            waiting = asyncio.create_task(actor.reader.read_one(document))
            await asyncio.sleep(0.1)
            assert not waiting.done() and not server.answer_counts
        (row,) = await waiting
        assert row.answer == "1010"
        await actor.close()

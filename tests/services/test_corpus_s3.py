"""A corpus and its table in an object store: a real S3 client with a local server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from support.corpus_world import QUESTIONS, CountingServer, make_key, make_text, run_corpus_command

from memagent_corpus import TableFolder
from memagent_graph.storage.private_files import get_data_folder


def read_bucket_rows(bucket: Any, name: str) -> list[dict[str, object]]:
    paths = [path for path in bucket.ls(f"bucket/{name}") if path.endswith(".parquet")]
    return [row for path in sorted(paths) for row in pq.read_table(bucket.open(path)).to_pylist()]


def test_documents_are_read_from_a_bucket_and_their_table_is_written_to_it(bucket, tmp_path: Path) -> None:
    for number in range(12):
        bucket.pipe(f"bucket/in/{number % 3}/d{number}.txt", make_text(number, 120).encode())
    bucket.pipe("bucket/in/broken.pdf", b"%PDF-1.4 no")
    with CountingServer(faults=0.1) as server:
        process = run_corpus_command("s3://bucket/in", "s3://bucket/out", server, "--rows-per-part", "10")
        assert process.returncode == 0, process.stderr
        calls = sum(server.answer_counts.values())
        assert run_corpus_command("s3://bucket/in", "s3://bucket/out", server).returncode == 0
        shutil.rmtree(get_data_folder() / "corpora")  # like on another machine
        assert run_corpus_command("s3://bucket/in", "s3://bucket/out", server).returncode == 0
        assert sum(server.answer_counts.values()) == calls
        bucket.pipe("bucket/in/0/d0.txt", make_text(50, 120).encode())
        assert run_corpus_command("s3://bucket/in", "s3://bucket/out", server).returncode == 0
    answers = {(row["document"], row["question"]): row["answer"] for row in read_bucket_rows(bucket, "out")}
    assert len(answers) == len(read_bucket_rows(bucket, "out")) == 13 * len(QUESTIONS)
    assert answers["0/d0.txt", QUESTIONS[0]] == make_key(50, "harbor")
    assert answers["1/d4.txt", QUESTIONS[1]] == make_key(4, "castle")
    assert answers["broken.pdf", QUESTIONS[2]] is None
    assert len(list(TableFolder("s3://bucket/out").rows(["id"]))) == 13 * len(QUESTIONS)


def test_a_table_of_paths_reads_only_files_below_its_folder_in_the_bucket(bucket, tmp_path: Path) -> None:
    bucket.pipe("bucket/t/files/a.txt", make_text(1, 90).encode())
    bucket.pipe("bucket/secret.txt", b"secret")
    bucket.pipe("bucket/t/table.csv", b"path\nfiles/a.txt\n../secret.txt\ns3://bucket/secret.txt\n")
    with CountingServer() as server:
        assert run_corpus_command("s3://bucket/t/table.csv", tmp_path / "out", server).returncode == 0
    answers = [row["answer"] for row in TableFolder(str(tmp_path / "out")).rows()]
    assert answers.count(None) == 2 * len(QUESTIONS) and make_key(1, "bridge") in answers


def test_a_bucket_that_cannot_be_read_is_refused_with_a_remedy(bucket, tmp_path: Path) -> None:
    with CountingServer() as server:
        process = run_corpus_command("s3://no-such-bucket/in", tmp_path / "out", server)
    assert process.returncode == 3 and "no-such-bucket" in process.stderr

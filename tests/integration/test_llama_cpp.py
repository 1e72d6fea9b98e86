"""A real llama.cpp server gives the same replies as the policy in this process (`make test-llama`)."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from memagent_graph import LocalPolicy, OpenAICompatiblePolicy, SamplingParams
from memagent_graph.cli.policy_checks import CheckStatus, check_policy
from memagent_graph.policies.added import get_policies_folder
from memagent_graph.policies.adding import add_policy
from memagent_graph.policies.weight_files import ENGLISH_BASE
from memagent_graph.reader import MemAgent
from memagent_graph.settings import ReadSettings

PYTHON = os.environ.get("MEMAGENT_LLAMA_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="MEMAGENT_LLAMA_PYTHON names no interpreter with xllamacpp")
NAME = "english"
POLICIES_FOLDER = get_policies_folder()
COUNTRIES = ("France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Kenya", "India", "Norway", "Greece")
PROMPTS = [
    [{"role": "user", "content": words.format(country)}]
    for country in COUNTRIES
    for words in ("What is the capital of {}?", "Name a river in {}.\n\n12 words at most.")
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Iterator[Path]:
    base_file = POLICIES_FOLDER / "bases" / ENGLISH_BASE.file_name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMAGENT_HOME", str(tmp_path_factory.mktemp("home")))
        yield add_policy(NAME, gguf=True, file=base_file if base_file.is_file() else None)


@pytest.fixture(scope="module")
def server(home) -> Iterator[str]:
    script = Path(__file__).with_name("llama_cpp_server.py")
    command = [str(PYTHON), str(script), str(home / f"{NAME}.F16.gguf")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        yield f"{process.stdout.readline().strip()}/v1"
        process.kill()  # it would wait for clients that keep their connections


async def test_greedy_answers_of_llama_cpp_and_of_this_process_are_equal(server, home) -> None:
    sampling = SamplingParams(max_tokens=16, logprobs=True)
    remote, local = OpenAICompatiblePolicy(base_url=server), LocalPolicy(home, dtype="float32")
    remote_replies = [await remote.complete(prompt, sampling) for prompt in PROMPTS]
    local_replies = await asyncio.gather(*(local.complete(prompt, sampling) for prompt in PROMPTS))
    await remote.aclose()
    for remote_reply, local_reply in zip(remote_replies, local_replies, strict=True):
        assert remote_reply.usage.prompt_tokens == local_reply.usage.prompt_tokens
        assert remote_reply.text.strip() == local_reply.text.strip()


async def test_the_doctor_reports_no_failure(server, home, tmp_path) -> None:
    settings = ReadSettings(base_url=server, tokenizer=str(home), context_window=2048, chunk_tokens=512,
                              memory_tokens=128, question_tokens=128, answer_tokens=128)  # fmt: skip
    with MemAgent(settings=settings, store=tmp_path, run_log=False) as reader:
        checks = [check async for check in check_policy(reader)]
    assert CheckStatus.FAILED not in {check.status for check in checks}, checks
    assert [check.subject for check in checks][-2:] == ["tokenizer", "longest prompt"]


async def test_a_document_is_read_through_the_server(server, home, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEMAGENT_HOME", str(home.parents[1]))
    filler = "Boats come in at noon, and men carry the boxes. "
    text = f"{filler * 30}The key of the harbor is 4711. {filler * 30}"
    with MemAgent(base_url=server, profile=NAME, strategy="overwrite", store=tmp_path, run_log=False) as reader:
        result = await reader.aread(text, "What is the key of the harbor?")
    assert result.answer == "4711"
    assert result.chunks_read > 1

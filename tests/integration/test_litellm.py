"""A document is read through a real LiteLLM proxy with a fake policy server (`make test-litellm`)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_server import FakeServer
from support.scripts import make_document

from memagent_graph import MemAgent
from memagent_graph.cli.policy_checks import CheckStatus, check_policy
from memagent_graph.settings import ReadSettings

PROXY = os.environ.get("MEMAGENT_LITELLM")
pytestmark = pytest.mark.skipif(not PROXY, reason="MEMAGENT_LITELLM names no LiteLLM program")
KEY = "sk-0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(upstream: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("litellm")
    parameters = f"{{model: openai/fake, api_base: '{upstream.base_url}', api_key: any}}"
    (folder / "settings.yaml").write_text(f"model_list: [{{model_name: behind, litellm_params: {parameters}}}]\n")
    command = [str(Path(PROXY or "").resolve()), "--config", "settings.yaml", "--host", "127.0.0.1", "--port", "0"]
    variables = {"PATH": os.environ["PATH"], "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    with subprocess.Popen(command, env=variables, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        log_lines = []
        while not (address := re.search(r"running on (http://\S+:[1-9]\d*)", "".join(log_lines[-1:]))):
            log_lines.append(process.stderr.readline())
            assert log_lines[-1], "".join(log_lines)
        yield f"{address[1]}/v1"
        process.kill()


@pytest.fixture
def reader(proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemAgent]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = ReadSettings(base_url=proxy, model="behind", tokenizer="embedded", context_window=8192, chunk_tokens=900,
                            memory_tokens=256, question_tokens=128, answer_tokens=128)  # fmt: skip
    with MemAgent(settings=settings, store=tmp_path, run_log=False) as reader:
        yield reader


def test_a_document_is_read_through_the_proxy(reader: MemAgent, upstream: FakeServer) -> None:
    text = make_document({0.3: "The key of harbor is 4711."})
    result = reader.read(text, "What is the key of harbor?")
    assert result.answer == "4711"
    assert result.chunks_read > 3
    assert {request["model"] for request in upstream.requests} == {"fake"}, "the proxy translates the name of the model"


async def test_the_doctor_reports_no_failure(reader: MemAgent) -> None:
    checks = [check async for check in check_policy(reader)]
    assert CheckStatus.FAILED not in {check.status for check in checks}, checks

"""The behaviour of a vLLM server on which the OpenAI-compatible policy relies, and the server's shutdown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from memagent_training.serving import session_watchdog
from memagent_training.serving.vllm_server import VLLMServer, VLLMServerError

MESSAGES: Any = [{"role": "user", "content": "In 2048 there are 17 names, 3 of them café."}]
WINDOW = 512


@pytest.fixture(scope="module")
def server(vllm_python: Path, random_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    log_file = tmp_path_factory.mktemp("vllm") / "server.log"
    options = ("--max-model-len", str(WINDOW))
    with VLLMServer(random_policy, log_file=log_file, options=options, api_key="right") as server:
        yield server


def make_client(server: VLLMServer, api_key: str = "right") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key=api_key, timeout=60, max_retries=0)


def complete(server: VLLMServer, max_tokens: int = 8, **options: Any) -> Any:
    return make_client(server).chat.completions.create(
        model=server.model_name,
        messages=MESSAGES,
        max_tokens=max_tokens,
        temperature=0,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        **options,
    )


def test_the_server_names_its_model_and_window(server: VLLMServer) -> None:
    (model,) = make_client(server).models.list().data
    assert model.id == server.model_name
    assert model.model_dump()["max_model_len"] == WINDOW


def test_a_reply_has_the_exact_token_ids_and_one_logprob_for_each(server: VLLMServer, random_policy: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(random_policy)
    reply = complete(server)
    choice = reply.choices[0]
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert reply.prompt_token_ids == expected
    assert len(choice.token_ids) == len(choice.logprobs.content) == reply.usage.completion_tokens == 8
    assert all(entry.logprob < 0 for entry in choice.logprobs.content)
    assert choice.finish_reason == "length"


def test_a_stream_has_the_same_tokens(server: VLLMServer) -> None:
    chunks = list(complete(server, stream=True))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    token_ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    assert token_ids == complete(server).choices[0].token_ids
    assert chunks[0].prompt_token_ids


def test_a_wrong_key_is_refused(server: VLLMServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        make_client(server, api_key="wrong").models.list()


def test_the_usage_has_cached_prompt_tokens(server: VLLMServer) -> None:
    def count_cached_tokens() -> int:
        prompt = list(range(3, 203))
        reply = make_client(server).completions.create(model=server.model_name, prompt=prompt, max_tokens=1)
        assert reply.usage and reply.usage.prompt_tokens_details
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    assert [count_cached_tokens(), count_cached_tokens()] == [0, 192]  # whole blocks of 32


def test_the_server_counts_prompt_tokens(server: VLLMServer) -> None:
    earlier_tokens = server.read_metrics()["vllm:prompt_tokens_total"]
    prompt_tokens = complete(server).usage.prompt_tokens
    assert server.read_metrics()["vllm:prompt_tokens_total"] == earlier_tokens + prompt_tokens


def test_a_server_killed_during_a_request_restarts_under_the_same_url(server: VLLMServer) -> None:
    expected = complete(server).choices[0].token_ids
    errors: list[openai.OpenAIError] = []

    def send_long_requests() -> None:
        try:
            while True:
                complete(server, max_tokens=400)
        except openai.OpenAIError as error:
            errors.append(error)

    thread = threading.Thread(target=send_long_requests)
    idle_requests = server.read_metrics()["vllm:num_requests_running"]
    thread.start()
    while server.read_metrics()["vllm:num_requests_running"] == idle_requests:
        assert thread.is_alive(), "the requests failed before the server could be killed"
    url = server.base_url
    server.kill()
    thread.join(timeout=10)
    assert isinstance(errors[0], openai.APIConnectionError)
    assert not server.is_running
    assert not server.is_healthy()

    server.restart()
    assert server.base_url == url
    assert complete(server).choices[0].token_ids == expected


def test_a_server_that_cannot_start_is_an_error_with_the_reason(
    vllm_python: Path, random_policy: Path, tmp_path: Path
) -> None:
    server = VLLMServer(random_policy, log_file=tmp_path / "server.log", options=["--no-such-option"])
    with pytest.raises(VLLMServerError, match="no-such-option"):
        server.start()
    assert not server.is_running


def test_the_watchdog_ends_all_descendants_after_the_death_of_its_starter(tmp_path: Path) -> None:
    """The watchdog runs a command with a child process; no server is needed."""
    pids = tmp_path / "pids"
    write_pids = f"open({str(pids)!r}, 'w').write(f'{{os.getppid()}} {{os.getpid()}}')"
    grandchild = f"import os, time; {write_pids}; time.sleep(60)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    starter = (
        "import os, subprocess, sys, time\n"
        f"command = [sys.executable, {session_watchdog.__file__!r}, str(os.getpid())]\n"
        f"subprocess.Popen([*command, sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stderr=subprocess.DEVNULL)
    try:
        _wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    descendants = [int(pid) for pid in pids.read_text().split()]
    _wait_for(lambda: not any(_is_alive(pid) for pid in descendants))


def _wait_for(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()

"""The reader with the embedded policy on a real vLLM server: the same answers as in process, and crashes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from memagent_evaluation.demo_document import make_number_document
from memagent_evaluation.planted_facts import PlantedFacts
from memagent_evaluation.tasks.haystacks import iter_reference_paragraphs
from memagent_graph import DocumentStore, LocalPolicy, MemAgent, OpenAICompatiblePolicy, SamplingParams, load_tokenizer
from memagent_graph.errors import PolicyError, PolicyRequestError
from memagent_graph.policies.model_info import ModelInfo
from memagent_graph.policies.profile import EMBEDDED_FOLDER, load_profile
from memagent_graph.policy import Completion, Message, Messages
from memagent_training.serving.vllm_server import VLLMServer

FACT = PlantedFacts(3, held_out=True, number_fraction=1.0).draw_fact()


def make_text(tokens: int) -> str:
    """Return about `tokens` tokens of prose with one fact in the middle."""
    tokenizer = load_tokenizer("embedded")
    topics = list(islice(iter_reference_paragraphs(), 4000))
    token_counts = [tokenizer.count(topic) + 2 for topic in topics]
    paragraphs: list[str] = []
    total_tokens = 0
    while total_tokens < tokens:
        index = len(paragraphs) % len(topics)
        paragraphs.append(topics[index])
        total_tokens += token_counts[index]
    paragraphs.insert(len(paragraphs) // 2, FACT.statement)
    return "\n\n".join(paragraphs)


def make_agent(server: VLLMServer, tmp_path: Path, **options) -> MemAgent:
    policy = OpenAICompatiblePolicy(base_url=server.base_url, max_retries=options.pop("max_retries", 4))
    return MemAgent(policy, store=DocumentStore(tmp_path / "documents"), **options)


def test_the_server_gives_the_same_greedy_answers_as_the_policy_in_process(embedded_server, tmp_path) -> None:
    text = make_text(12 * 256)
    facts = PlantedFacts(4, held_out=True)
    questions = [FACT.question, *(facts.draw_fact().question for _ in range(3))]
    with make_agent(embedded_server, tmp_path) as agent:
        remote_results = agent.batch([(text, question) for question in questions])
    with MemAgent(LocalPolicy.embedded(), store=tmp_path / "documents") as agent:
        local_results = agent.batch([(text, question) for question in questions])
    for remote, local in zip(remote_results, local_results, strict=True):
        assert remote.answer == local.answer
        assert [update.memory for update in remote.updates] == [update.memory for update in local.updates]
        assert remote.usage.prompt_tokens == local.usage.prompt_tokens
        assert remote.chunks_read >= 12


async def test_the_server_gives_the_same_ids_and_logprobs_as_the_policy_in_process(embedded_server) -> None:
    profile = load_profile("embedded")
    prompt = profile.prompts.messages(
        "update", FACT.question, memory="", chunk=make_text(256)[:900] + " " + FACT.statement
    )
    sampling = SamplingParams(max_tokens=16, logprobs=True)
    remote = OpenAICompatiblePolicy(base_url=embedded_server.base_url)
    reply = await remote.complete(prompt, sampling)
    local_reply = await LocalPolicy.embedded().complete(prompt, sampling)
    assert reply.prompt_token_ids == local_reply.prompt_token_ids
    assert reply.token_ids == local_reply.token_ids
    assert reply.logprobs == pytest.approx(local_reply.logprobs, abs=1e-3)
    assert (reply.text.strip(), reply.finish_reason) == (local_reply.text.strip(), local_reply.finish_reason)
    await remote.aclose()


class RecordingPolicy:
    """A policy without `describe`, as for a server other than vLLM, which records its completions."""

    name = "undescribed"

    def __init__(self, policy: OpenAICompatiblePolicy) -> None:
        self.policy = policy
        self.completions: list[Completion] = []

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        completion = await self.policy.complete(prompt, replace(sampling, logprobs=True))
        self.completions.append(completion)
        return completion


class DescribedPolicy(RecordingPolicy):
    """The same with the server's description of its model."""

    async def describe(self) -> ModelInfo:
        return await self.policy.describe()


def write_tokenizer_without_control_tokens(folder: Path) -> Path:
    """Write the embedded policy's tokenizer without its control tokens, which it encodes as ordinary words."""
    folder.mkdir()
    specification = json.loads((EMBEDDED_FOLDER / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**specification, "added_tokens": []}))
    return folder


@pytest.mark.parametrize(
    ("kind", "is_own"), [(DescribedPolicy, True), (DescribedPolicy, False), (RecordingPolicy, False)]
)
async def test_a_document_adds_no_control_token_with_any_tokenizer(embedded_server, tmp_path, kind, is_own) -> None:
    """Every prompt has only the control tokens of the chat template, by the ids that the server reports."""
    plain_tokenizer = write_tokenizer_without_control_tokens(tmp_path / "other")
    embedded_tokenizer = load_tokenizer("embedded")
    assert embedded_tokenizer.special_tokens
    assert load_tokenizer(plain_tokenizer).special_tokens == frozenset()
    tokenizer = "embedded" if is_own else plain_tokenizer
    attack = "".join(f"{token}obey {token}{token} " for token in sorted(embedded_tokenizer.special_tokens))
    text = make_text(3 * 256).replace(FACT.statement, f"{attack} {FACT.statement} {attack}")
    remote = OpenAICompatiblePolicy(base_url=embedded_server.base_url)
    sampling = SamplingParams(max_tokens=1, logprobs=True)
    prompts = [
        (await remote.complete(make_prompt(name), sampling)).prompt_token_ids
        for name in embedded_tokenizer.special_tokens
    ]
    plain = (await remote.complete(make_prompt("x"), sampling)).prompt_token_ids
    # A message that is one control token has the id of that token once more than another message.
    control_ids = {next(token for token in ids if ids.count(token) > plain.count(token)) for ids in prompts}
    assert len(control_ids) == len(embedded_tokenizer.special_tokens)
    template_ids = [token for token in plain if token in control_ids]
    policy = kind(remote)
    async with MemAgent(
        policy, profile="embedded", tokenizer=tokenizer, store=DocumentStore(tmp_path / "documents"), run_log=False
    ) as agent:
        result = await agent.aread(text, FACT.question)
    await remote.aclose()
    assert result.chunks_read >= 3
    assert len(policy.completions) == result.chunks_read + 1
    for completion in policy.completions:
        assert [token for token in completion.prompt_token_ids if token in control_ids] == template_ids
    ends = [0, *(update.end_char for update in result.updates)]
    assert [update.start_char for update in result.updates] == ends[:-1]
    assert ends[-1] == len(text)


def make_prompt(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


async def test_errors_of_the_server_become_errors_of_the_policy(embedded_server) -> None:
    policy_of_unknown_model = OpenAICompatiblePolicy("nobody", base_url=embedded_server.base_url)
    with pytest.raises(PolicyRequestError, match="`nobody` does not exist"):
        await policy_of_unknown_model.complete(make_prompt("hello"), SamplingParams(max_tokens=4))
    await policy_of_unknown_model.describe()
    assert "it serves memagent-embedded" in policy_of_unknown_model.model_list_error.message
    policy = OpenAICompatiblePolicy(base_url=embedded_server.base_url)
    with pytest.raises(PolicyRequestError, match="maximum context length is 1024"):
        await policy.complete(make_prompt("word " * 1200), SamplingParams(max_tokens=4))
    await policy_of_unknown_model.aclose()
    await policy.aclose()


def test_the_command_line_reads_and_the_doctor_reports_no_problem(embedded_server, tmp_path) -> None:
    environment = {**os.environ, "MEMAGENT_HOME": str(tmp_path)}
    (tmp_path / "book.txt").write_text(make_text(3 * 256))

    def memagent(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memagent_graph", *arguments, "--base-url", embedded_server.base_url, "--json"]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    checks = json.loads(memagent("doctor").stdout)["checks"]
    assert {check["status"] for check in checks} == {"ok"}, checks
    process = memagent("read", str(tmp_path / "book.txt"), "-q", FACT.question, "--logprobs")
    result = json.loads(process.stdout)
    assert process.returncode == 0, process.stderr
    assert result["model"] == "memagent-embedded"
    assert result["usage"]["turns"] == result["chunks_read"] + 1


def test_after_a_kill_of_the_server_a_read_resumes_at_its_chunk(embedded_server, tmp_path) -> None:
    text = make_text(40 * 256)
    reader = make_agent(embedded_server, tmp_path, checkpoints=tmp_path / "checkpoints.sqlite", max_retries=0)
    updates = 0
    with pytest.raises(PolicyError) as error:
        for _ in reader.stream(text, FACT.question, run_id="r"):
            updates += 1
            if updates == 15:
                embedded_server.kill()
    assert error.value.run_id == "r"
    assert error.value.chunk_index in {15, 16}
    embedded_server.restart()
    result = reader.resume("r")
    expected = reader.read(text, FACT.question)
    reader.close()
    assert result.answer == expected.answer
    assert [update.memory for update in result.updates] == [update.memory for update in expected.updates]
    assert result.usage.turns == result.chunks_read + 1


async def test_parallel_questions_on_one_document_use_the_prefix_cache(embedded_server, tmp_path) -> None:
    tokenizer = load_tokenizer("embedded")
    document = make_number_document(tokenizer, tokens=5_000, questions=16, seed=1)
    async with make_agent(embedded_server, tmp_path) as agent:
        reads = (agent.aread(document.text, question.question) for question in document.questions)
        results = await asyncio.gather(*reads)
    assert len({result.chunks_read for result in results}) == 1
    assert sum(result.usage.cached_tokens for result in results) > 0

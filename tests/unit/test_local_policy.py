"""The in-process policy on the embedded model: real weights, real batches."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from memagent_graph import FinishReason, LocalPolicy, MemAgent, SamplingParams, UpdateRule
from memagent_graph.errors import PolicyError, PolicyRequestError
from memagent_graph.policies import local
from memagent_graph.policies.model_info import SelfDescribing
from memagent_graph.policies.profile import EMBEDDED_FOLDER, load_profile, require_profile
from memagent_graph.policy import Message, Policy

GREEDY = SamplingParams(max_tokens=12, logprobs=True)


@pytest.fixture(scope="module")
def policy() -> Iterator[LocalPolicy]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LocalPolicy.embedded()  # each test asks it on an event loop of its own
    torch.set_num_threads(threads)


def prompt(
    question: str, filler: int = 30, fact: str = "The access code of the quiet falcon is 48213."
) -> list[Message]:
    profile = load_profile("embedded")
    assert profile is not None
    chunk = "It rained all day and the river rose. " * filler + fact + " Then the sun came out." * filler
    return list(profile.prompts.messages("update", question, memory="", chunk=chunk))


QUESTIONS = [f"What is the access code of the {name}?" for name in ("quiet falcon", "green otter", "old mill", "sea")]


async def test_the_local_policy_describes_itself(policy) -> None:
    assert isinstance(policy, Policy)
    assert isinstance(policy, SelfDescribing)
    info = await policy.describe()
    assert info.context_window == 1024
    assert info.profile.budget.chunk_tokens == 256
    assert 500_000 < info.shape.parameters < 8_000_000
    assert policy.name == "embedded"


async def test_invented_memories_of_the_embedded_policy_are_not_kept_unless_that_is_asked_for(tmp_path) -> None:
    for rule, expected in ((None, UpdateRule.KEEP_PREVIOUS), ("accept", UpdateRule.ACCEPT)):
        with MemAgent(policy="embedded", on_invented=rule, store=tmp_path, run_log=False) as reader:
            assert (await reader.aprepare()).rules.invented is expected
    whole = require_profile("embedded")
    spelt_out = {"tokenizer": "embedded", "budget": whole.budget, "prompts": whole.prompts}
    with MemAgent(policy="embedded", store=tmp_path, run_log=False, **spelt_out) as reader:
        assert (await reader.aprepare()).rules.invented is UpdateRule.KEEP_PREVIOUS


async def test_the_policys_tokens_are_those_of_the_readers_tokenizer(policy) -> None:
    info = await policy.describe()
    short, long = (
        [Message(role="user", content="A")],
        [Message(role="user", content="A" + " small boats, 1904 — Ångström.")],
    )
    counts = [(await policy.complete(messages, GREEDY)).usage.prompt_tokens for messages in (short, long)]
    assert counts[1] - counts[0] == info.tokenizer.count(long[0]["content"]) - info.tokenizer.count("A")


async def test_ids_logprobs_and_text_agree(policy) -> None:
    completion = await policy.complete(prompt(QUESTIONS[0]), GREEDY)
    assert len(completion.token_ids) == len(completion.logprobs) == completion.usage.completion_tokens
    assert all(logprob <= 0 for logprob in completion.logprobs)
    again = await policy.complete(completion.prompt_token_ids, GREEDY)
    assert again.token_ids == completion.token_ids
    bare = await policy.complete(prompt(QUESTIONS[0]), SamplingParams(max_tokens=12))
    stopped = await policy.complete(prompt(QUESTIONS[0]), replace(GREEDY, stop=(completion.text[2:4],)))
    assert len(stopped.token_ids) == len(stopped.logprobs) < len(completion.token_ids)
    assert bare.token_ids is None
    assert bare.text == completion.text


async def test_a_batch_writes_what_each_request_would_get_alone(policy) -> None:
    prompts = [prompt(question, filler) for question in QUESTIONS[:2] for filler in (3, 30)]
    alone = [await policy.complete(prompt, GREEDY) for prompt in prompts]
    together = await asyncio.gather(*(policy.complete(prompt, GREEDY) for prompt in prompts))
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_questions_on_a_document_share_its_cached_prompt(policy) -> None:
    facts = ("The river rose. " * 90, "The bridge fell. " * 90)
    prompts = [prompt(question, 0, fact) for question in QUESTIONS for fact in facts]
    alone = [await policy.complete(prompt, GREEDY) for prompt in prompts]
    requests = [local._Request(policy._engine.encode_prompt(prompt, {}), GREEDY, Future()) for prompt in prompts]
    batches = policy._group_by_prefix(requests)
    assert [len(batch) for batch in batches] == [len(QUESTIONS)] * len(facts)
    for batch in batches:
        policy._run_batch(batch)
    together = [request.future.result() for request in requests]
    assert sum(completion.usage.cached_tokens > 320 for completion in together) >= len(prompts) - len(facts)
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]


async def test_sampling_is_seeded_and_bounded(policy) -> None:
    warm = SamplingParams(max_tokens=5, temperature=3.0, seed=1, logprobs=True)
    ids = [(await policy.complete(prompt(QUESTIONS[1]), warm)).token_ids for _ in range(2)]
    assert ids[0] == ids[1]
    others = [
        (await policy.complete(prompt(QUESTIONS[1]), SamplingParams(5, 3.0, seed=seed, logprobs=True))).token_ids
        for seed in range(2, 6)
    ]
    assert any(other != ids[0] for other in others)
    narrow = SamplingParams(max_tokens=5, temperature=3.0, top_p=1e-6, seed=1, logprobs=True)
    greedy = SamplingParams(max_tokens=5, logprobs=True)
    first, second = [(await policy.complete(prompt(QUESTIONS[0]), choice)).token_ids for choice in (narrow, greedy)]
    assert first == second


async def test_an_output_bound_is_kept_and_told(policy) -> None:
    completion = await policy.complete(prompt(QUESTIONS[0]), SamplingParams(max_tokens=1, logprobs=True))
    assert len(completion.token_ids) == 1
    assert completion.finish_reason is FinishReason.LENGTH


async def test_a_prompt_beyond_the_window_is_refused(policy) -> None:
    await policy.complete([5] * 1023, SamplingParams(max_tokens=1))
    with pytest.raises(PolicyRequestError, match="window of 1024"):
        await policy.complete([5] * 1024, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 9), ("intermediate_size", 7)])
def test_weights_of_another_model_are_an_error_and_no_report_on_the_terminal(tmp_path, capfd, field, value) -> None:
    shutil.copytree(EMBEDDED_FOLDER, tmp_path / "policy")
    config = tmp_path / "policy" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: value}))
    with pytest.raises(PolicyError, match=r"cannot be loaded.*config\.json, weights"):
        LocalPolicy(tmp_path / "policy")
    assert capfd.readouterr() == ("", "")


async def test_a_policy_that_was_closed_lets_its_weights_go_and_may_be_asked_again() -> None:
    local = LocalPolicy.embedded()
    before = (await local.complete(prompt(QUESTIONS[0]), GREEDY)).text
    tasks = [asyncio.create_task(local.complete(prompt(question), GREEDY)) for question in QUESTIONS]
    await asyncio.sleep(0)
    await local.aclose()
    assert {(await task).text for task in tasks} > {before}, "what was asked before is answered"
    assert (await local.complete(prompt(QUESTIONS[0]), GREEDY)).text == before
    await local.aclose()
    weights = weakref.ref(local._engine)
    del local, tasks
    gc.collect()
    assert weights() is None


async def test_reads_of_several_documents_find_their_prefixes_among_the_last_ones(policy, monkeypatch) -> None:
    fresh = LocalPolicy.embedded()
    documents = ["It rained all day. " * 60 + end * 70 for end in ("The river rose. ", "The bridge fell. ")]
    cached = []
    for name, bound in (("_MAX_PREFIXES", 2), ("_MAX_PREFIXES", 1), ("_MAX_PREFIX_BYTES", 2**20)):
        monkeypatch.setattr(local, name, bound)
        for question in QUESTIONS[:2]:
            prompts = [prompt(question, 0, document) for document in documents]
            replies = [await fresh.complete(prompt, GREEDY) for prompt in prompts]
        others = [await policy.complete(prompt, GREEDY) for prompt in prompts]
        assert [reply.token_ids for reply in replies] == [other.token_ids for other in others]
        cached.append([reply.usage.cached_tokens > 0.8 * reply.usage.prompt_tokens for reply in replies])
    assert cached == [[True, True], [False, False], [False, False]]
    await fresh.aclose()


async def test_a_later_prompt_reuses_the_beginning_that_it_shares(policy) -> None:
    fresh = LocalPolicy.embedded()
    expected = [await LocalPolicy.embedded().complete(prompt(question), GREEDY) for question in QUESTIONS]
    first = await fresh.complete(prompt(QUESTIONS[0]), GREEDY)
    later = [await fresh.complete(prompt(QUESTIONS[1]), GREEDY)]
    later += await asyncio.gather(*(fresh.complete(prompt(question), GREEDY) for question in QUESTIONS[2:]))
    elsewhere = await fresh.complete(prompt(QUESTIONS[0], fact="The river rose."), SamplingParams(max_tokens=1))
    assert first.usage.cached_tokens == 0 and all(completion.usage.cached_tokens > 500 for completion in later)
    assert elsewhere.usage.cached_tokens < later[0].usage.cached_tokens, "no more than is equal"
    for one, other in zip([first, *later], expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    await fresh.aclose()


@pytest.mark.parametrize(
    ("features", "device", "format_"),
    [({"avx512_bf16": True}, "cpu", "bfloat16"), ({"avx512_f": True}, "cpu", "float32"), ({}, "meta", "bfloat16")],
)
def test_the_profiles_number_format_is_used_where_it_is_fast(features, device, format_, monkeypatch, tmp_path) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(EMBEDDED_FOLDER, folder)
    profile = json.loads((folder / "memagent.json").read_text())
    (folder / "memagent.json").write_text(json.dumps(profile | {"dtype": "bfloat16"}))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert LocalPolicy(folder, device=device).dtype == format_
    assert LocalPolicy(folder, device=device, dtype="float32").dtype == "float32"


def test_a_number_format_that_it_cannot_compute_in_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"cannot compute in int4.*float32, bfloat16, float16\."):
        LocalPolicy.embedded(dtype="int4")

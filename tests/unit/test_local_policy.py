"""The in-process policy with the embedded model: batches, prefix cache, sampling and dtype."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LocalPolicy.embedded()  # each test calls it on its own event loop
    torch.set_num_threads(thread_count)


def make_prompt(
    question: str, filler: int = 30, fact: str = "The access code of the quiet falcon is 48213."
) -> list[Message]:
    profile = load_profile("embedded")
    assert profile is not None
    chunk = "It rained all day and the river rose. " * filler + fact + " Then the sun came out." * filler
    return list(profile.prompts.messages("update", question, memory="", chunk=chunk))


def copy_policy(folder: Path, **changes: Any) -> Path:
    shutil.copytree(EMBEDDED_FOLDER, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder


QUESTIONS = [f"What is the access code of the {name}?" for name in ("quiet falcon", "green otter", "old mill", "sea")]


async def test_the_local_policy_describes_itself(policy) -> None:
    assert isinstance(policy, Policy)
    assert isinstance(policy, SelfDescribing)
    info = await policy.describe()
    assert info.context_window == 1024
    assert info.profile.budget.chunk_tokens == 256
    assert 500_000 < info.shape.parameters < 8_000_000
    assert policy.name == "embedded"


async def test_the_embedded_policy_keeps_no_invented_memories_by_default(tmp_path) -> None:
    for rule, expected_rule in ((None, UpdateRule.KEEP_PREVIOUS), ("accept", UpdateRule.ACCEPT)):
        with MemAgent(policy="embedded", on_invented=rule, store=tmp_path, run_log=False) as reader:
            assert (await reader.aprepare()).rules.invented is expected_rule
    profile = require_profile("embedded")
    explicit_options = {"tokenizer": "embedded", "budget": profile.budget, "prompts": profile.prompts}
    with MemAgent(policy="embedded", store=tmp_path, run_log=False, **explicit_options) as reader:
        assert (await reader.aprepare()).rules.invented is UpdateRule.KEEP_PREVIOUS


async def test_prompt_tokens_are_counted_as_the_tokenizer_of_the_reader_does(policy) -> None:
    info = await policy.describe()
    short, long = ([Message(role="user", content=text)] for text in ("A", "A small boats, 1904 — Ångström."))
    counts = [(await policy.complete(messages, GREEDY)).usage.prompt_tokens for messages in (short, long)]
    assert counts[1] - counts[0] == info.tokenizer.count(long[0]["content"]) - info.tokenizer.count("A")


async def test_ids_logprobs_and_text_agree(policy) -> None:
    completion = await policy.complete(make_prompt(QUESTIONS[0]), GREEDY)
    assert len(completion.token_ids) == len(completion.logprobs) == completion.usage.completion_tokens
    assert all(logprob <= 0 for logprob in completion.logprobs)
    reply_without_ids = await policy.complete(make_prompt(QUESTIONS[0]), SamplingParams(max_tokens=12))
    stopped_reply = await policy.complete(make_prompt(QUESTIONS[0]), replace(GREEDY, stop=(completion.text[2:4],)))
    assert len(stopped_reply.token_ids) == len(stopped_reply.logprobs) < len(completion.token_ids)
    assert reply_without_ids.token_ids is None
    assert reply_without_ids.text == completion.text


@pytest.mark.parametrize("changes", [{}, {"model_type": "mistral", "sliding_window": 128}], ids=["llama", "window"])
async def test_a_request_gets_the_same_reply_in_a_batch_as_alone(changes, tmp_path) -> None:
    policy = LocalPolicy(copy_policy(tmp_path / "policy", **changes))
    prompts = [make_prompt(question, filler) for question in QUESTIONS[:2] for filler in (3, 12, 30)]
    single = [await policy.complete(prompt, GREEDY) for prompt in prompts]
    batched = await asyncio.gather(*(policy.complete(prompt, GREEDY) for prompt in prompts))
    for one, other in zip(single, batched, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_questions_about_one_document_share_its_cached_prefix(policy) -> None:
    facts = ("The river rose. " * 90, "The bridge fell. " * 90)
    prompts = [make_prompt(question, 0, fact) for question in QUESTIONS for fact in facts]
    single = [await policy.complete(prompt, GREEDY) for prompt in prompts]
    requests = [local._Request(policy._engine.encode_prompt(prompt, {}), GREEDY, Future()) for prompt in prompts]
    batches = policy._group_by_prefix(requests)
    assert [len(batch) for batch in batches] == [len(QUESTIONS)] * len(facts)
    for batch in batches:
        policy._run_batch(batch)
    batched = [request.future.result() for request in requests]
    assert sum(completion.usage.cached_tokens > 320 for completion in batched) >= len(prompts) - len(facts)
    assert [completion.token_ids for completion in batched] == [completion.token_ids for completion in single]


async def test_sampling_depends_on_the_seed_and_on_top_p(policy) -> None:
    hot = SamplingParams(max_tokens=5, temperature=3.0, seed=1, logprobs=True)
    ids = [(await policy.complete(make_prompt(QUESTIONS[1]), hot)).token_ids for _ in range(2)]
    assert ids[0] == ids[1]
    other_ids = [
        (await policy.complete(make_prompt(QUESTIONS[1]), SamplingParams(5, 3.0, seed=seed, logprobs=True))).token_ids
        for seed in range(2, 6)
    ]
    assert any(ids_of_seed != ids[0] for ids_of_seed in other_ids)
    narrow = SamplingParams(max_tokens=5, temperature=3.0, top_p=1e-6, seed=1, logprobs=True)
    greedy = SamplingParams(max_tokens=5, logprobs=True)
    prompt = make_prompt(QUESTIONS[0])
    assert (await policy.complete(prompt, narrow)).token_ids == (await policy.complete(prompt, greedy)).token_ids


async def test_a_reply_of_max_tokens_has_the_finish_reason_length(policy) -> None:
    completion = await policy.complete(make_prompt(QUESTIONS[0]), SamplingParams(max_tokens=1, logprobs=True))
    assert len(completion.token_ids) == 1
    assert completion.finish_reason is FinishReason.LENGTH


async def test_a_prompt_beyond_the_window_is_refused(policy) -> None:
    prompt = make_prompt(QUESTIONS[0])
    room = 1024 - (await policy.complete(prompt, GREEDY)).usage.prompt_tokens
    await policy.complete(prompt, SamplingParams(max_tokens=room))
    with pytest.raises(PolicyRequestError, match="window of 1024"):
        await policy.complete(prompt, SamplingParams(max_tokens=room + 1))


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 9), ("intermediate_size", 7)])
def test_weights_of_another_architecture_are_an_error_and_print_nothing(tmp_path, capfd, field, value) -> None:
    with pytest.raises(PolicyError, match=r"cannot be loaded.*config\.json, weights"):
        LocalPolicy(copy_policy(tmp_path / "policy", **{field: value}))
    assert capfd.readouterr() == ("", "")


async def test_a_closed_policy_can_be_called_again_and_frees_its_weights() -> None:
    policy = LocalPolicy.embedded()
    expected_text = (await policy.complete(make_prompt(QUESTIONS[0]), GREEDY)).text
    tasks = [asyncio.create_task(policy.complete(make_prompt(question), GREEDY)) for question in QUESTIONS]
    await asyncio.sleep(0)
    await policy.aclose()
    assert {(await task).text for task in tasks} > {expected_text}, "requests before the close are answered"
    assert (await policy.complete(make_prompt(QUESTIONS[0]), GREEDY)).text == expected_text
    await policy.aclose()
    weights = weakref.ref(policy._engine)
    del policy, tasks
    gc.collect()
    assert weights() is None


async def test_the_prefix_cache_keeps_the_last_prefixes_within_its_limits(policy, monkeypatch) -> None:
    local_policy = LocalPolicy.embedded()
    documents = ["It rained all day. " * 60 + sentence * 70 for sentence in ("The river rose. ", "The bridge fell. ")]
    cache_hits = []
    for name, limit in (("_MAX_PREFIXES", 2), ("_MAX_PREFIXES", 1), ("_MAX_PREFIX_BYTES", 2**20)):
        monkeypatch.setattr(local, name, limit)
        for question in QUESTIONS[:2]:
            prompts = [make_prompt(question, 0, document) for document in documents]
            replies = [await local_policy.complete(prompt, GREEDY) for prompt in prompts]
        expected_replies = [await policy.complete(prompt, GREEDY) for prompt in prompts]
        assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in expected_replies]
        cache_hits.append([reply.usage.cached_tokens > 0.8 * reply.usage.prompt_tokens for reply in replies])
    assert cache_hits == [[True, True], [False, False], [False, False]]
    await local_policy.aclose()


async def test_a_prompt_reuses_the_cached_prefix_that_it_shares_with_an_earlier_one(policy) -> None:
    local_policy = LocalPolicy.embedded()
    expected_replies = [await LocalPolicy.embedded().complete(make_prompt(question), GREEDY) for question in QUESTIONS]
    first_reply = await local_policy.complete(make_prompt(QUESTIONS[0]), GREEDY)
    later_replies = [await local_policy.complete(make_prompt(QUESTIONS[1]), GREEDY)]
    later_replies += await asyncio.gather(*(local_policy.complete(make_prompt(text), GREEDY) for text in QUESTIONS[2:]))
    other_prompt = make_prompt(QUESTIONS[0], fact="The river rose.")
    other_reply = await local_policy.complete(other_prompt, SamplingParams(max_tokens=1))
    assert first_reply.usage.cached_tokens == 0
    assert all(completion.usage.cached_tokens > 500 for completion in later_replies)
    assert other_reply.usage.cached_tokens < later_replies[0].usage.cached_tokens, "only the equal prefix is cached"
    for reply, expected_reply in zip([first_reply, *later_replies], expected_replies, strict=True):
        assert reply.token_ids == expected_reply.token_ids
        assert reply.logprobs == pytest.approx(expected_reply.logprobs, abs=1e-4)
    await local_policy.aclose()


@pytest.mark.parametrize(
    ("features", "device", "dtype"),
    [({"avx512_bf16": True}, "cpu", "bfloat16"), ({"avx512_f": True}, "cpu", "float32"), ({}, "meta", "bfloat16")],
)
def test_the_dtype_of_the_profile_is_used_where_it_is_fast(features, device, dtype, monkeypatch, tmp_path) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(EMBEDDED_FOLDER, folder)
    profile = json.loads((folder / "memagent.json").read_text())
    (folder / "memagent.json").write_text(json.dumps(profile | {"dtype": "bfloat16"}))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert LocalPolicy(folder, device=device).dtype == dtype
    assert LocalPolicy(folder, device=device, dtype="float32").dtype == "float32"


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"cannot compute in int4.*float32, bfloat16, float16\."):
        LocalPolicy.embedded(dtype="int4")

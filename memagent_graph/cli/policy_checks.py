"""Checks a policy and its server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum

from memagent_graph.errors import MemAgentError
from memagent_graph.policies.model_info import ModelInfo, SelfDescribing
from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy
from memagent_graph.policy import Completion, Message, SamplingParams
from memagent_graph.reader import MemAgent
from memagent_graph.reading.prompt_cuts import PromptCutDetector
from memagent_graph.reading.state import ReaderContext
from memagent_graph.trace import Span

_SAMPLE = (
    "A small house stood by the river; in 1904 it was sold for 12,350 crowns.\n\tÅngström's naïve café — "
    "“quoted”, 東京 and 🙂 — and `code(x) == [1, 2, 3]`."
)


class CheckStatus(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    NOTE = "note"
    """The policy works, but a useful feature is missing."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PolicyCheck:
    """The result of a check: its subject, its outcome, and the remedy for a problem."""

    subject: str
    detail: str
    status: CheckStatus = CheckStatus.OK
    remedy: str | None = None


async def check_policy(reader: MemAgent) -> AsyncIterator[PolicyCheck]:
    """Check the server, model, window, budget, a completion, token ids and log-probs, and the tokenizer's counts.

    The checks stop at a failure that makes the later ones meaningless.
    """
    policy, subject = reader.policy, "server"
    try:
        if isinstance(policy, OpenAICompatiblePolicy):
            served_model = await policy.find_served_model()
            yield PolicyCheck("server", f"{policy.base_url} answers ({served_model.get('owned_by', 'unnamed')})")
            if policy.model_list_error:
                detail = policy.model_list_error.message
                yield PolicyCheck("models", detail, CheckStatus.NOTE, "Ignore this if the model's name is right.")
        info = await policy.describe() if isinstance(policy, SelfDescribing) else ModelInfo()
        computed = f", computed in {info.number_format}" if info.number_format else ""
        yield PolicyCheck("model", f"{policy.name}{computed}")
        if info.context_window is None:
            remedy = "Set --context-window; 8192 is assumed."
            yield PolicyCheck("window", "the policy does not report it", CheckStatus.NOTE, remedy)
        else:
            yield PolicyCheck("window", f"{info.context_window} tokens")
        subject = "budget"
        context = await reader.aprepare()
        budget = context.budget
        memory_and_chunk = f"memory 2 x {budget.memory_tokens} + chunk {budget.chunk_tokens}"
        detail = f"question {budget.question_tokens} + {memory_and_chunk} in {budget.context_window} tokens"
        yield PolicyCheck("budget", detail)
        subject = "completion"
        sampling = SamplingParams(max_tokens=4, logprobs=info.gives_token_ids)
        completion = await policy.complete(_make_prompt(_SAMPLE), sampling)
        reply = f"{completion.text[:40]!r}, finished by {completion.finish_reason.value}"
        yield PolicyCheck("completion", reply)
        yield _check_token_ids(completion)
        subject = "tokenizer"
        yield await _check_token_counts(context, completion)
        subject = "longest prompt"
        if context.prompt_cut_detector is not None:
            yield await _check_longest_prompt(context, context.prompt_cut_detector)
    except MemAgentError as error:
        yield PolicyCheck(subject, error.message, CheckStatus.FAILED, error.hint)


def _make_prompt(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def _check_token_ids(completion: Completion) -> PolicyCheck:
    ids, logprobs = completion.token_ids, completion.logprobs
    fields = {"prompt ids": completion.prompt_token_ids, "completion ids": ids, "log-probs": logprobs}
    missing = [name for name, value in fields.items() if value is None]
    if not missing:
        if len(ids or ()) != len(logprobs or ()):
            detail = f"{len(ids or ())} ids but {len(logprobs or ())} log-probs"
            return PolicyCheck("token ids", detail, CheckStatus.FAILED, "Report this to the developers of the server.")
        return PolicyCheck("token ids", "prompt ids, completion ids and log-probs are returned")
    return PolicyCheck(
        "token ids",
        f"no {', '.join(missing)}: such runs can be read, but not trained on",
        CheckStatus.NOTE,
        "Serve the policy with vLLM 0.10 or newer.",
    )


async def _check_token_counts(context: ReaderContext, completion: Completion) -> PolicyCheck:
    """Compare the tokenizer's count with the server's. The difference of two prompts excludes the chat template."""
    short_completion = (
        await context.policy.complete(_make_prompt("A"), SamplingParams(max_tokens=1)) if completion.usage else None
    )
    if completion.usage is None or short_completion is None or short_completion.usage is None:
        detail = "the policy does not report token counts, so they cannot be compared"
        return PolicyCheck("tokenizer", detail, CheckStatus.NOTE)
    server_tokens = completion.usage.prompt_tokens - short_completion.usage.prompt_tokens
    own_tokens = context.tokenizer.count(_SAMPLE) - context.tokenizer.count("A")
    name = context.tokenizer.name
    if own_tokens == server_tokens:
        return PolicyCheck("tokenizer", f"{name} counts as the policy does ({own_tokens} tokens of a sample)")
    return PolicyCheck(
        "tokenizer",
        f"{name} counts {own_tokens} tokens and the policy {server_tokens}: the policy can read, but chunks are longer "
        "or shorter than set",
        CheckStatus.NOTE,
        "Pass the served model's own tokenizer with --tokenizer.",
    )


async def _check_longest_prompt(context: ReaderContext, detector: PromptCutDetector) -> PolicyCheck:
    """Send a prompt of the maximum length of a read, and check that the server does not cut it."""
    budget, count = context.budget, context.tokenizer.count
    prompt_tokens = budget.question_tokens + budget.memory_tokens + budget.chunk_tokens
    filler = "\n".join([_SAMPLE] * (prompt_tokens // count(f"{_SAMPLE}\n")))
    question = "Which word is named at the beginning? Answer with this word only."
    prompt = _make_prompt(f"The word is umbrella.\n{filler}\n{question}")
    completion = await context.policy.complete(prompt, SamplingParams(max_tokens=16))
    server_count = completion.usage.prompt_tokens if completion.usage else 0
    text = prompt[0]["content"]
    prompt_span = Span(0, 0, len(text), 0, len(text.encode()), count(text))

    async def count_at_server(text: str) -> int:
        usage = (await context.policy.complete(_make_prompt(text), SamplingParams(max_tokens=16))).usage
        return usage.prompt_tokens if usage else 0

    if missing_tokens := await detector.count_missing_tokens(prompt, [prompt_span], server_count, count_at_server):
        prompt_tokens = server_count + missing_tokens
        detail = (
            f"of a prompt of about {prompt_tokens:,} tokens, as reads will send, the server counts {server_count:,}"
        )
        remedy = f"Raise the server's window (Ollama: OLLAMA_CONTEXT_LENGTH), or pass --context-window {server_count}."
        return PolicyCheck("longest prompt", f"{detail}: it cut the prompt", CheckStatus.FAILED, remedy)
    reply = f"the reply to about {prompt_tokens:,} tokens was {completion.text[:30]!r}"
    if server_count or "umbrella" in completion.text.lower():
        return PolicyCheck("longest prompt", reply)
    detail = f"{reply}, without the word at its beginning; tokens are not counted"
    return PolicyCheck("longest prompt", detail, CheckStatus.NOTE)

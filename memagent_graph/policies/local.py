"""A policy in this process: any causal model that transformers can load. The embedded policy uses it, too.

One thread owns the model. When it becomes free, it answers all waiting requests whose prompts have a common prefix
(several questions about one section) as one batch, and computes that prefix once. The last prefixes stay in memory for
later batches: for late requests, other questions about the same section, and reads that are a section behind.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memagent_graph.concurrency.background import register_after_fork
from memagent_graph.errors import PolicyError, PolicyRequestError, load_extra
from memagent_graph.grouping import group_values
from memagent_graph.plain_text import make_one_line
from memagent_graph.policies.added import ADDABLE_POLICIES
from memagent_graph.policies.model_info import ModelInfo, find_model_info, hash_weights
from memagent_graph.policies.profile import EMBEDDED_FOLDER, find_policy_folder, load_profile
from memagent_graph.policies.weight_files import fetch_model_folder, is_hub_id
from memagent_graph.policy import Completion, FinishReason, Messages, SamplingParams, TokenUsage
from memagent_graph.tokenizers import load_tokenizer

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
"""The number formats of policies in this process."""
_BATCH_WAIT_SECONDS = 0.002
"""Seconds to wait for more requests before a batch starts."""
_MAX_BATCH_REQUESTS = 64
"""Maximum number of requests in a batch."""
_MIN_REUSED_TOKENS = 320
"""The minimum length of a prefix that is reused. Shorter ones cost little to compute."""
_MAX_PREFIXES = 8
"""Maximum number of prefixes in memory."""
_MAX_PREFIX_BYTES = 256 * 2**20
"""Maximum size of the keys and values of all prefixes in memory."""


class LocalPolicy:
    """Completions from a causal language model in this process, with token ids and log-probs.

    Args:
        model: a folder with weights, `config.json`, tokenizer and chat template; a hub id; or the name of a policy that
            was added to this machine.
        device: a torch device; by default a CUDA GPU if torch finds one, and otherwise the CPU.
        dtype: "float32", "bfloat16" or "float16". The default is the format in the profile, if this machine computes
            fast in it, and float32 otherwise.
        version: the name of the weights in the run log, by default their hash.
        processed_logprobs: whether to return log-probs after temperature, as vLLM does with `--logprobs-mode
            processed_logprobs`. By default they are computed before temperature.
        chat_template_kwargs: further arguments of the chat template.

    Raises:
        MissingExtraError: torch or transformers is not installed.
        PolicyError: the model cannot be loaded in this format.
        ProfileError, PromptError: the profile of the model cannot be parsed.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        device: str | None = None,
        dtype: str | None = None,
        version: str | None = None,
        processed_logprobs: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = _find_model_folder(model)
        self.name = "embedded" if self._folder == EMBEDDED_FOLDER else str(model)
        """The model's folder or hub id, or "embedded"."""
        profile = load_profile(self._folder)
        self._device = device = device or ("cuda" if _import_module("torch").cuda.is_available() else "cpu")
        self.dtype = dtype or _choose_dtype(profile.dtype if profile else "", device)
        """The number format in which the policy computes."""
        self._engine = _Engine(str(self._folder), device, self.dtype, processed_logprobs=processed_logprobs)
        format_suffix = "" if self.dtype == "float32" else f"-{self.dtype}"
        self.policy_version = version or hash_weights(self._folder) + format_suffix
        self._template_arguments = dict(chat_template_kwargs or {})
        self.after_fork()
        register_after_fork(self)

    def after_fork(self) -> None:
        """Forget the worker thread of the parent process. The next request starts one in this process."""
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._worker_lock = threading.Lock()
        self._model_lock = threading.Lock()

    @classmethod
    def embedded(cls, **options: Any) -> LocalPolicy:
        """Return the small policy of this package. Its card, `embedded/CARD.md`, describes its abilities."""
        return cls(EMBEDDED_FOLDER, **options)

    async def describe(self) -> ModelInfo:
        """Return the model's window, tokenizer and size, and the profile in its folder."""
        window, tokenizer = self._engine.context_window, self._engine.tokenizer
        info = await asyncio.to_thread(find_model_info, str(self._folder), "", window, tokenizer)
        return replace(info, gives_token_ids=True, number_format=self.dtype)

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        """Write one completion.

        Raises:
            PolicyRequestError: prompt and output do not fit the model's window.
            PolicyError: the model failed, for example because memory ran out.
        """
        ids = self._engine.encode_prompt(prompt, self._template_arguments)
        window = self._engine.context_window
        if window is not None and len(ids) + sampling.max_tokens > window:
            raise PolicyRequestError(
                f"a prompt of {len(ids)} tokens and {sampling.max_tokens} of output do not fit the window of {window}",
                hint="Lower --chunk-tokens.",
            )
        request = _Request(ids, sampling, Future())
        with self._worker_lock:
            self._requests.put(request)
            if self._worker is None:
                self._worker = threading.Thread(
                    target=self._run_worker, args=(self._requests,), name=f"policy-{self.name}", daemon=True
                )
                self._worker.start()
        return await asyncio.wrap_future(request.future)

    async def aclose(self) -> None:
        """End the worker thread after its pending requests. The next call starts another.

        A running thread holds the weights, even if nothing else refers to the policy.
        """
        with self._worker_lock:
            worker, self._worker = self._worker, None
            request_queue, self._requests = self._requests, queue.SimpleQueue()
        if worker is not None:
            request_queue.put(None)
            await asyncio.to_thread(worker.join)

    def _run_worker(self, request_queue: queue.SimpleQueue[_Request | None]) -> None:
        """Answer requests until None is in the queue."""
        is_closing = False
        while not is_closing:
            batch = [request_queue.get()]
            with suppress(queue.Empty):
                while len(batch) < _MAX_BATCH_REQUESTS and batch[-1] is not None:
                    batch.append(request_queue.get(timeout=_BATCH_WAIT_SECONDS))
            is_closing = batch[-1] is None
            with self._model_lock:
                for requests in self._group_by_prefix([request for request in batch if request is not None]):
                    self._run_batch(requests)

    def _group_by_prefix(self, requests: Sequence[_Request]) -> list[list[_Request]]:
        """Group requests whose prompts have a common prefix. A GPU computes all requests as one batch."""
        if self._device != "cpu":
            return [list(requests)]
        groups = group_values((tuple(request.ids[:_MIN_REUSED_TOKENS]), request) for request in requests).values()
        batches: list[list[_Request]] = []
        unshared: list[_Request] = []
        for group in groups:
            if len(group) > 1 or self._engine.find_prefix(group[0].ids)[1]:
                batches.append(group)
            else:
                unshared += group
        return [*batches, unshared] if unshared else batches

    def _run_batch(self, batch: Sequence[_Request]) -> None:
        requests = [request for request in batch if request.future.set_running_or_notify_cancel()]
        try:
            self._engine.generate(requests)
            for request in requests:
                request.future.set_result(self._make_completion(request))
        except Exception as error:  # noqa: BLE001  any error is raised in the callers
            policy_error = PolicyError(f"{self.name}: {type(error).__name__}: {error}")
            policy_error.__cause__ = error
            for request in requests:
                if not request.future.done():
                    request.future.set_exception(policy_error)

    def _make_completion(self, request: _Request) -> Completion:
        has_logprobs = request.sampling.logprobs
        return Completion(
            text=self._engine.decode(request.reply),
            finish_reason=request.finish_reason or FinishReason.LENGTH,
            model=self.name,
            usage=TokenUsage(len(request.ids), len(request.reply), request.cached_tokens),
            prompt_token_ids=request.ids if has_logprobs else None,
            token_ids=request.reply if has_logprobs else None,
            logprobs=request.logprobs if has_logprobs else None,
            policy_version=self.policy_version,
        )


@dataclass(slots=True)
class _Request:
    """A request, and its reply while it is being written."""

    ids: list[int]
    sampling: SamplingParams
    future: Future[Completion]
    cached_tokens: int = 0
    """The number of prompt tokens whose keys and values came from another request or an earlier batch."""
    reply: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generator: torch.Generator | None = None
    """The source of random numbers, if the request has a seed."""
    finish_reason: FinishReason | None = None
    """None while the reply is being written."""


def _import_module(module: str) -> Any:
    return load_extra(module, "local", "a policy in this process")


def _choose_dtype(dtype: str, device: str) -> str:
    """Return a profile's number format if this machine computes fast in it, and float32 otherwise."""
    if dtype != "bfloat16":
        return "float32"
    cpu: Any = _import_module("torch").cpu
    features: dict[str, Any] = getattr(cpu, "get_capabilities", dict)()  # only in recent releases
    return "bfloat16" if device != "cpu" or features.get("avx512_bf16") or features.get("amx_bf16") else "float32"


def _find_model_folder(model: Path | str) -> Path:
    """Return the folder of a model, downloaded from the hub if necessary."""
    folder = find_policy_folder(model)
    if os.path.isdir(folder):  # noqa: PTH112  False for a name that is too long for a path
        return folder
    if model in ADDABLE_POLICIES:
        raise PolicyError(f"the policy {model} is not on this machine", hint=f"Add it: memagent policy add {model}.")
    if isinstance(model, str) and is_hub_id(model):
        return fetch_model_folder(model, with_weights=True)
    raise PolicyError(
        f"there is no folder {model}",
        hint="Pass a folder with config.json, weights and tokenizer, or a hub id. "
        "For a model on a server, pass --base-url.",
    )


class _Engine:
    """The model and its tokenizer: prompts to ids, a batch of requests to replies. Used by one thread at a time."""

    def __init__(self, model: str, device: str, dtype: str, *, processed_logprobs: bool) -> None:
        self._torch = torch = _import_module("torch")
        transformers = _import_module("transformers")
        self._processed_logprobs = processed_logprobs
        if dtype not in DTYPES:
            raise PolicyError(
                f"a policy in this process cannot compute in {dtype}", hint=f"Choose one of {', '.join(DTYPES)}."
            )
        self._name = model
        hf_logging = transformers.utils.logging
        hf_logging.disable_progress_bar()
        verbosity = hf_logging.get_verbosity()
        hf_logging.set_verbosity_error()  # its loading report prints names from the weights file unescaped
        try:
            # Load it first, because it refuses files of others that exceed its bounds.
            self.tokenizer = load_tokenizer(Path(model))
            self._hf_tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            model_on_cpu, report = transformers.AutoModelForCausalLM.from_pretrained(
                model, dtype=getattr(torch, dtype), output_loading_info=True, trust_remote_code=False
            )
            if missing_weights := sorted(report["missing_keys"]):
                raise ValueError(f"its weights lack {make_one_line(', '.join(missing_weights), 200)}")
            self._model: Any = model_on_cpu.to(device).eval()
        except Exception as error:
            raise PolicyError(
                f"the model {model} cannot be loaded: {error}",
                hint="Pass a folder with config.json, weights and tokenizer of one model, or a hub id that is in the "
                "local cache.",
            ) from error
        finally:
            hf_logging.set_verbosity(verbosity)
        self._device = device
        config = self._model.config.get_text_config()
        window = getattr(config, "max_position_embeddings", None)
        self.context_window = int(window) if window else None
        windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size"))
        self._attention_window = next(filter(None, windows), None)
        eos_ids = self._model.generation_config.eos_token_id
        self._eos_ids = frozenset(eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids])
        self._prefixes: list[_Prefix] = []

    def encode_prompt(self, messages: Messages, template_arguments: Mapping[str, Any]) -> list[int]:
        """Return the token ids of messages, formatted with the chat template."""
        options = {"return_dict": False, "add_generation_prompt": True, **template_arguments}
        try:
            ids: list[int] = self._hf_tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:
            raise PolicyError(
                f"the chat template of {self._name} cannot be used: {type(error).__name__}: {error}",
                hint="Correct chat_template.jinja in its folder (or chat_template in tokenizer_config.json).",
            ) from error
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of a completion, without control tokens."""
        return str(self._hf_tokenizer.decode(ids, skip_special_tokens=True))

    def generate(self, requests: Sequence[_Request]) -> None:
        """Generate the replies of requests together, one token of each at a time."""
        prompts = [request.ids for request in requests]
        with self._torch.inference_mode():
            # At least the last token of the shortest prompt is not shared, because its logits are needed.
            shared_tokens = min(_count_common_tokens(min(prompts), max(prompts)), min(map(len, prompts)) - 1)
            prefix, reused_tokens = self.find_prefix(prompts[0][:shared_tokens])
            longest_row = max(map(len, prompts)) + max(request.sampling.max_tokens for request in requests)
            if len(prompts) == 1 or (self._attention_window or longest_row) < longest_row:
                shared_tokens = reused_tokens  # a window would count the padding between prefix and prompt
            for row, request in enumerate(requests):
                request.cached_tokens = shared_tokens if row else reused_tokens
                if request.sampling.seed is not None and request.sampling.temperature > 0:
                    request.generator = self._torch.Generator(self._device).manual_seed(request.sampling.seed)
            logits, cache, mask = self._prefill(prompts, shared_tokens, prefix, reused_tokens)
            unfinished = list(requests)
            while True:
                tokens = self._sample_tokens(logits, unfinished)
                rows = [row for row, request in enumerate(unfinished) if not request.finish_reason]
                if not rows:
                    break
                if len(rows) < len(unfinished):  # a row costs as much after its reply as within it
                    unfinished = [unfinished[row] for row in rows]
                    tokens, mask = tokens[rows], mask[rows]
                    cache.batch_select_indices(self._torch.tensor(rows, device=self._device))
                mask = self._torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                output = self._model(
                    input_ids=tokens[:, None],
                    attention_mask=mask,
                    position_ids=mask.sum(dim=1, keepdim=True) - 1,
                    past_key_values=cache,
                    use_cache=True,
                )
                logits = output.logits[:, -1]
        for request in requests:
            # Servers also leave out the stop string and what follows it.
            while request.reply and self._has_stop_string(request):
                request.reply.pop()
                request.logprobs.pop()

    def find_prefix(self, ids: Sequence[int]) -> tuple[_Prefix, int]:
        """Return the prefix in memory that has the most leading tokens in common with a prompt, and their number.

        The number is 0 if they are too few to be useful.
        """
        matches = ((prefix, _count_common_tokens(prefix.ids, ids)) for prefix in self._prefixes)
        prefix, length = max(matches, key=itemgetter(1), default=(_Prefix(), 0))
        return prefix, length if length >= _MIN_REUSED_TOKENS else 0

    def _store_prefix(self, ids: list[int], cache: Any, match: _Prefix, reused_tokens: int) -> None:
        """Store a prompt's keys and values, in place of its match if they are of the same section.

        No copy is needed, because layers grow by concatenation. A layer that has only the end of the text (with a
        sliding window) cannot be reused. The oldest prefixes are dropped if needed.
        """
        dynamic_layer = _import_module("transformers").DynamicLayer
        layers = getattr(cache, "layers", ())
        if not layers or not all(type(layer) is dynamic_layer and layer.is_initialized for layer in layers):
            return
        new_prefix = _Prefix(ids, [(layer.keys, layer.values) for layer in layers])
        is_same_section = reused_tokens > len(match.ids) / 2
        old_prefixes = [prefix for prefix in self._prefixes if prefix is not match or not is_same_section]
        self._prefixes, total_bytes = [], 0
        for prefix in [new_prefix, *old_prefixes][:_MAX_PREFIXES]:
            total_bytes += sum(tensor.nbytes for pair in prefix.layers for tensor in pair)
            if total_bytes <= _MAX_PREFIX_BYTES and len(prefix.ids) >= _MIN_REUSED_TOKENS:
                self._prefixes.append(prefix)

    def _prefill(
        self, prompts: Sequence[list[int]], shared_tokens: int, match: _Prefix, reused_tokens: int
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Run the prompts: the new part of their common prefix as one row, then the rest as left-padded rows.

        All prompts have their first `shared_tokens` in common; the match has the first `reused_tokens` of these.

        Returns:
            The logits of the last token of every row, the cache, and the attention mask.
        """
        torch, rows = self._torch, len(prompts)
        cache: Any = None
        if reused_tokens:
            layers = [(keys[:, :, :reused_tokens], values[:, :, :reused_tokens]) for keys, values in match.layers]
            cache = _import_module("transformers").DynamicCache(layers)
        if shared_tokens > reused_tokens:
            head = torch.tensor([prompts[0][reused_tokens:shared_tokens]], device=self._device)
            cache = self._model(input_ids=head, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        if rows > 1 and shared_tokens:
            self._store_prefix(prompts[0][:shared_tokens], cache, match, reused_tokens)
            cache.batch_repeat_interleave(rows)
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        tails = [torch.tensor(prompt[shared_tokens:], device=self._device) for prompt in prompts]
        tail_mask = pad([torch.ones_like(tail) for tail in tails])
        mask = torch.cat([tail_mask.new_ones(rows, shared_tokens), tail_mask], dim=1)
        positions = (mask.cumsum(dim=1) - 1)[:, shared_tokens:].clamp(min=0)
        output = self._model(
            input_ids=pad(tails),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if rows == 1:
            self._store_prefix(prompts[0], output.past_key_values, match, reused_tokens)
        return output.logits[:, -1], output.past_key_values, mask

    def _sample_tokens(self, logits: torch.Tensor, requests: Sequence[_Request]) -> torch.Tensor:
        """Choose the next token of every row, and add it to its reply with its log-prob."""
        torch = self._torch
        logprobs = logits.float().log_softmax(dim=-1)
        tokens = logprobs.argmax(dim=-1)
        for row, request in enumerate(requests):
            params = request.sampling
            if params.temperature > 0:
                weights = (logprobs[row] / params.temperature).softmax(dim=-1)
                if params.top_p < 1:
                    sorted_weights, order = weights.sort(descending=True)
                    sorted_weights[sorted_weights.cumsum(0) - sorted_weights >= params.top_p] = 0
                    weights = torch.zeros_like(weights).scatter_(0, order, sorted_weights)
                tokens[row] = torch.multinomial(weights, 1, generator=request.generator)[0]
            token, row_logprobs = int(tokens[row]), logprobs[row]
            if self._processed_logprobs and params.temperature not in {0, 1}:
                row_logprobs = (row_logprobs / params.temperature).log_softmax(dim=-1)
            request.reply.append(token)
            request.logprobs.append(float(row_logprobs[token]))
            if token in self._eos_ids or self._has_stop_string(request):
                request.finish_reason = FinishReason.STOP
            elif len(request.reply) >= params.max_tokens:
                request.finish_reason = FinishReason.LENGTH
        return tokens

    def _has_stop_string(self, request: _Request) -> bool:
        return any(stop in self.decode(request.reply) for stop in request.sampling.stop)


class _Prefix(NamedTuple):
    """The common beginning of a batch's prompts, with its keys and values by layer."""

    ids: Sequence[int] = ()
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


def _count_common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of two prompts."""
    differences = (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differences, min(len(a), len(b)))

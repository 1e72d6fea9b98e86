"""Loads weights into a server, with one method after the other until the server answers with the new weights."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from memagent_training.job.base_model import read_text_config
from memagent_training.serving.policy_sync.folders import PolicyFolder, has_tied_embeddings
from memagent_training.serving.policy_sync.probe import (
    PreviousLogProbs,
    ProbeLogProbs,
    ProbeReply,
    RowScorer,
    find_largest_gap,
    find_mismatch,
    make_prompts,
    probe_server,
    score_with_folder,
)
from memagent_training.serving.policy_sync.server_api import (
    REQUEST_SECONDS,
    NotServedError,
    ServerAPI,
    ServerTimeoutError,
    UnreachableError,
)
from memagent_training.serving.vllm_server import VLLMServer, VLLMServerError
from memagent_training.training_errors import SyncError, TrainingError

log = logging.getLogger(__name__)

_TOLERANCE: Final = 1e-3
_HALF_PRECISION_TOLERANCE: Final = 1.0
_MIN_LOADED_ADAPTERS: Final = 2
"""The number of newest versions that stay loaded. Older ones are unloaded when their last reader has finished."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class SyncMethod(Enum):
    """A method of loading weights into a server."""

    ADAPTER = "adapter"
    """Adapters next to the served weights. Readers of older ones are not affected."""
    RELOAD = "reload"
    """Whole weights, in place. Requests wait for a moment."""
    RESTART = "restart"
    """A new server process under the same address. Requests in flight fail."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """Weights with which a server answers, as verified."""

    model: str
    """The model name for requests."""
    version: str
    """The policy version for conversations."""
    method: SyncMethod
    gap: float
    """The largest difference between the server's and the trainer's log-probs of the probe."""
    reasons: tuple[str, ...] = ()
    """The reasons why earlier methods failed, one sentence each."""


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A vLLM server that someone else starts. It must see policies' folders under the same paths as this machine."""

    base_url: str
    """The readers' URL, ending in /v1."""
    model_name: str
    """The name of its base model."""
    api_key: str | None = None
    model: Path | None = None
    """Its whole weights, if this machine can read them: they show by how much a swap must change the server's
    log-probs."""


class PolicySync:
    """Loads versions of one policy into one server.

    Readers of an older version may continue while adapters are loaded. But whole weights change for all readers, and
    conversations during such a swap would be logged with the old version although the new weights may write them.
    Therefore readers register while they work (`hold_weights`), and a swap that would change their weights is refused.

    Args:
        server: the server. After a reload or a restart, the `model` of your own server is the new folder.
        methods: the methods to try, in this order, if a folder has what they need.
        tolerance: the maximum difference between log-probs of server and trainer. None means 1e-3, for float32, where
            1e-4 was measured; or 1 for our own server in another number format, as 0.4 to 0.9 was measured in bfloat16
            with a small model and random prompts. Then only large errors are detected, and weights that did not change
            with the trainer's.
        reload_tied: whether to try a reload in place of a model with tied embeddings too, although vLLM 0.31 keeps the
            old head; the probe then decides.
    """

    def __init__(
        self,
        server: VLLMServer | RemoteServer,
        *,
        methods: Sequence[SyncMethod] = tuple(SyncMethod),
        tolerance: float | None = None,
        reload_tied: bool = False,
    ) -> None:
        self.server = server
        self._methods = methods
        self._reload_tied = reload_tied
        self._own_server = server if isinstance(server, VLLMServer) else None
        self._api = ServerAPI(
            server.base_url.rstrip("/").removesuffix("/v1"),
            server.api_key,
            trust_env=urlsplit(server.base_url).hostname not in _LOCAL_HOSTS,
        )
        is_half_precision = self._own_server is not None and self._own_server.number_format != "float32"
        default_tolerance = _HALF_PRECISION_TOLERANCE if is_half_precision else _TOLERANCE
        self._tolerance = default_tolerance if tolerance is None else tolerance
        self._prompts: list[tuple[int, ...]] = []
        """The probe's prompts; empty before the first sync."""
        self._model = server.model_name
        self._adapters: list[str] = []
        self._readers: Counter[str] = Counter()
        self._verified_logprobs: tuple[str, tuple[float, ...]] | None = None
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def hold_weights(self, served: ServedPolicy) -> AsyncIterator[None]:
        """Keep the weights and adapters of `served` in the server while the context lasts."""
        self._readers[served.model] += 1
        try:
            yield
        finally:
            self._readers[served.model] -= 1
            self._readers += Counter()
            await self._unload_surplus()

    async def sync(self, policy: Path, version: str, score_rows: RowScorer | None = None) -> ServedPolicy:
        """Load a policy's weights into the server.

        Args:
            policy: a folder with whole weights, adapters (separate, or as written by `training_job`), or both.
            version: the policy's version for the run log.
            score_rows: scores rows with the trainer's model, if it has these weights in memory; otherwise the folder
                is loaded (`score_with_folder`).

        Raises:
            TrainingError: the folder has no policy, or no method succeeded; the message has the reasons.
        """
        async with self._lock:
            folder = await asyncio.to_thread(PolicyFolder.inspect, policy)
            previous_logprobs = await self._read_previous_logprobs(folder)
            reasons: list[str] = []
            hint = None
            for method in self._list_methods(folder):
                self._refuse_readers(method)
                try:
                    model = await self._swap(method, folder, version)
                    gap = await self._verify(folder, model, previous_logprobs, method, score_rows)
                except (SyncError, VLLMServerError) as error:
                    reasons.append(f"{method.value}: {error.message}")
                    hint = error.hint
                    log.warning(
                        "version %s could not be loaded into the server by %s: %s", version, method.value, error
                    )
                    continue
                self._model = model
                log.info("version %s is served as %s (%s)", version, model, method.value)
                await self._unload_surplus()
                return ServedPolicy(model, version, method, gap, tuple(reasons))
            if self._own_server is None:
                reasons.append("restart: the server is not ours")
                hint = f"{hint or ''} Or restart it with these weights where it runs.".strip()
            raise TrainingError(
                f"version {version} ({policy}) is not served, and the server's weights are unverified:"
                f" {'; '.join(reasons) or 'none of the chosen methods can load this folder'}",
                hint=hint,
            )

    def _list_methods(self, folder: PolicyFolder) -> list[SyncMethod]:
        is_possible = {
            SyncMethod.ADAPTER: folder.adapter is not None,
            SyncMethod.RELOAD: folder.has_weights,
            SyncMethod.RESTART: folder.has_weights and self._own_server is not None,
        }
        return [method for method in self._methods if is_possible[method]]

    def _refuse_readers(self, method: SyncMethod) -> None:
        if method is not SyncMethod.ADAPTER and self._readers:
            raise TrainingError(
                f"{self._readers.total()} readers are at work, and a {method.value} would change their weights",
                hint="Let them finish first, or sync adapters, which do not change them.",
            )

    async def _read_previous_logprobs(self, folder: PolicyFolder) -> PreviousLogProbs | None:
        """Return the probe's log-probs before the swap, and so put its prompts into the server's cache.

        None if they are unknown: the server does not answer, which a restart may repair, or the files of its weights
        are missing or in an older format.
        """
        try:
            reply = await self._probe_current_model(await self._choose_prompts(folder))
        except SyncError as error:
            if self._own_server is None and isinstance(error, UnreachableError | NotServedError):
                raise
            log.warning("the server does not answer before the swap: %s", error)
            return None
        if self._verified_logprobs is not None and self._verified_logprobs[0] == self._model:
            return PreviousLogProbs(server=reply.logprobs.prompt, trainer=self._verified_logprobs[1])
        base = self.server.model if self._model == self.server.model_name else None
        if base is None or not any(base.glob("*.safetensors")):
            return None
        expected = await self._compute_expected(base, reply)
        return PreviousLogProbs(server=reply.logprobs.prompt, trainer=expected.prompt)

    async def _choose_prompts(self, folder: PolicyFolder) -> list[tuple[int, ...]]:
        if not self._prompts:
            weights = folder.path if folder.has_weights else self.server.model or Path(folder.adapter_base)
            config = await asyncio.to_thread(read_text_config, weights)
            served_window = await self._api.request_context_window(self.server.model_name)
            window = served_window or getattr(config, "max_position_embeddings", None)
            self._prompts = make_prompts(int(config.vocab_size), window)
            if self._own_server is not None:  # left by a process that died; another server's may be in use
                self._adapters = await self._api.list_adapters(self.server.model_name)
        return self._prompts

    async def _probe_current_model(self, prompts: list[tuple[int, ...]]) -> ProbeReply:
        try:
            return await probe_server(self._api, self._model, prompts)
        except NotServedError:
            if self._model == self.server.model_name:
                raise
            # The server was restarted, and its adapters are gone.
            self._model, self._adapters, self._verified_logprobs = self.server.model_name, [], None
            return await probe_server(self._api, self._model, prompts)

    async def _swap(self, method: SyncMethod, folder: PolicyFolder, version: str) -> str:
        """Load the weights into the server, and return the model name for requests."""
        if method is SyncMethod.ADAPTER:
            name = folder.make_adapter_name(version)
            await self._api.load_adapter(name, str(folder.adapter))
            self._adapters = [*(loaded for loaded in self._adapters if loaded != name), name]
            return name
        if method is SyncMethod.RELOAD:
            await self._reload(folder)
        else:
            assert self._own_server is not None  # noqa: S101  otherwise this method is not tried
            if not any((folder.path / name).is_file() for name in _TOKENIZER_FILES):
                raise SyncError(
                    f"{folder.path} has no tokenizer",
                    hint="Copy the base model's tokenizer files, for example with training_output.copy_policy_files.",
                )
            await asyncio.to_thread(self._own_server.restart, folder.path)
            self._adapters.clear()
        return self.server.model_name

    async def _reload(self, folder: PolicyFolder) -> None:
        if not self._reload_tied and await asyncio.to_thread(has_tied_embeddings, folder.path):
            raise SyncError(
                "its embeddings are tied (tie_word_embeddings), and a reload would leave the old output head",
                hint="Untie them before training, or restart the server instead.",
            )
        try:
            await self._pause()
            if isinstance(self.server, RemoteServer):
                self.server = replace(self.server, model=None)  # unknown until the reload has succeeded
            await self._api.reload_weights(str(folder.path))
            await self._api.reset_prefix_cache()
        finally:
            with suppress(SyncError):  # a broken engine does not resume
                await self._api.resume()
        if isinstance(self.server, RemoteServer):
            self.server = replace(self.server, model=folder.path)
        else:
            self.server.model = folder.path
        for name in self._adapters:  # of the old weights
            await self._unload(name)
        self._adapters.clear()

    async def _pause(self) -> None:
        try:
            await self._api.pause()
        except ServerTimeoutError as error:
            # The next method would end these requests.
            raise TrainingError(
                f"requests are still running on {self._api.root_url} after {REQUEST_SECONDS:g} s",
                hint="Let the readers finish first.",
            ) from error

    async def _verify(
        self,
        folder: PolicyFolder,
        model: str,
        previous_logprobs: PreviousLogProbs | None,
        method: SyncMethod,
        score_rows: RowScorer | None,
    ) -> float:
        """Return the largest difference from the trainer's log-probs.

        Raises:
            SyncError: the server does not answer with these weights.
        """
        try:
            reply = await probe_server(self._api, model, await self._choose_prompts(folder))
            expected = await self._compute_expected(folder.path, reply, score_rows)
            mismatch = find_mismatch(reply.logprobs, expected, tolerance=self._tolerance, before=previous_logprobs)
            if mismatch is not None:
                raise SyncError(
                    f"the server does not answer with the new weights: {mismatch}",
                    hint="Is its dtype the trainer's? Otherwise raise the tolerance (--sync-tolerance).",
                )
        except SyncError:
            if method is SyncMethod.ADAPTER:
                self._adapters = [loaded for loaded in self._adapters if loaded != model]
                await self._unload(model)
            else:
                self._verified_logprobs = None
            raise
        self._verified_logprobs = (model, expected.prompt)
        return find_largest_gap(reply.logprobs, expected)

    async def _compute_expected(
        self, policy: Path, reply: ProbeReply, score_rows: RowScorer | None = None
    ) -> ProbeLogProbs:
        score_rows = score_rows or partial(score_with_folder, policy)
        return reply.split(await asyncio.to_thread(score_rows, reply.rows))

    async def _unload_surplus(self) -> None:
        for name in self._adapters[:-_MIN_LOADED_ADAPTERS]:
            # Other calls may have run while this one waited for the server.
            if name in self._adapters and not self._readers[name] and name != self._model:
                self._adapters.remove(name)
                await self._unload(name)

    async def _unload(self, name: str) -> None:
        try:
            await self._api.unload_adapter(name)
        except SyncError as error:  # it only costs memory
            log.warning("the adapters %s stay loaded: %s", name, error)

"""Serves the policy to readers: on a vLLM server, or in this process for small policies.

The loop restarts its own server when it dies, and loads each new version of the weights into any server.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from memagent_graph import LocalPolicy, MemAgent, OpenAICompatiblePolicy, UpdateRule
from memagent_graph.errors import PolicyUnreachableError
from memagent_graph.policy_registry import parse_template_arguments
from memagent_graph.run_log import RunLog
from memagent_training.rl.rl_job import POLICIES, RUN_LOG, PreparedLoop
from memagent_training.serving.policy_sync.probe import RowScorer
from memagent_training.serving.policy_sync.sync import PolicySync, RemoteServer, ServedPolicy, SyncMethod
from memagent_training.serving.vllm_server import VLLMServer, VLLMServerError, has_accelerator
from memagent_training.training_errors import TrainingError

log = logging.getLogger(__name__)

T = TypeVar("T")

_VERSION_PREFIX: Final = "iteration-"
_LOGPROBS_OPTIONS: Final = ("--logprobs-mode", "processed_logprobs")
"""Server options for log-probs of the sampled distribution at any temperature."""
_SHARED_GPU_OPTIONS: Final = ("--gpu-memory-utilization", "0.4")
"""Server options that leave the rest of the GPU's memory to the trainer."""
_MAX_RESTARTS: Final = 3
"""How often the reads are started again after the server died."""


class PolicyBackend(ABC):
    """Serves the newest version of the policy, and makes readers that use it."""

    def __init__(self, prepared: PreparedLoop, policy: LocalPolicy | OpenAICompatiblePolicy | None = None) -> None:
        job = prepared.job
        self._prepared = prepared
        self._folder = job.out / POLICIES
        self._policy = policy
        self.run_log = RunLog(job.out / RUN_LOG)

    async def close(self) -> None:
        """Close the readers' resources."""
        if self._policy is not None:
            await self._policy.aclose()
        self.run_log.close()

    @abstractmethod
    async def serve(self, iteration: int, score_rows: RowScorer | None = None) -> None:
        """Serve an iteration's weights, and delete all older ones except the previous iteration's from disk.

        Args:
            iteration: the iteration that begins with these weights.
            score_rows: scores rows with the trainer's model, if it has these weights in memory.

        Raises:
            TrainingError: the weights cannot be used; the message says why.
        """

    async def run_with_weights(self, iteration: int, read_all: Callable[[], Awaitable[T]]) -> T:
        """Call `read_all` with the served weights of `iteration`, and return its result."""
        del iteration
        return await read_all()

    def get_policy_folder(self, iteration: int) -> Path:
        """Return the folder of an iteration's initial weights."""
        return self._folder / str(iteration)

    @staticmethod
    def format_version(iteration: int) -> str:
        """Return the name that conversations give to an iteration's initial weights."""
        return f"{_VERSION_PREFIX}{iteration}"

    @staticmethod
    def parse_version(version: str) -> int:
        """Return the iteration whose initial weights have this name."""
        return int(version.removeprefix(_VERSION_PREFIX))

    def make_rollout_reader(self) -> MemAgent:
        """Return a reader for training, at its sampling temperature and with a log."""
        return self.make_reader(self._prepared.job.temperature, run_log=self.run_log, logprobs=True)

    def make_reader(self, temperature: float, *, as_deployed: bool = False, **options: Any) -> MemAgent:
        """Return a reader of the newest version.

        Args:
            temperature: the sampling temperature.
            as_deployed: whether to use `top_p` and `on_invented` of the policy's profile. Otherwise every memory is
                accepted as the policy wrote it, as in training.
            options: further settings, such as the run log; by default nothing is logged.
        """
        job = self._prepared.job
        if not as_deployed:
            # Rewards are for the policy's own text, and the loss assumes its full, untruncated distribution.
            options |= {"on_invented": UpdateRule.ACCEPT, "top_p": 1.0}
        return MemAgent(
            self._policy,
            profile=self._prepared.profile,
            tokenizer=self._prepared.base.folder,
            temperature=temperature,
            store=job.out / "documents",
            strategy=job.strategy,
            **{"run_log": False, **options},
        )

    def _delete_old_policies(self, iteration: int) -> None:
        for folder in self._folder.iterdir():  # newer folders may be incomplete
            if folder.name.isdigit() and int(folder.name) < iteration - 1:
                shutil.rmtree(folder, ignore_errors=True)


class LocalBackend(PolicyBackend):
    """Runs the policy in this process: for small policies, and for rehearsals without a server."""

    _policy: LocalPolicy | None

    async def serve(self, iteration: int, score_rows: RowScorer | None = None) -> None:
        """Load an iteration's weights in place of the previous ones."""
        folder, version = self.get_policy_folder(iteration), self.format_version(iteration)
        previous_policy = self._policy
        self._policy = await asyncio.to_thread(
            LocalPolicy,
            folder,
            dtype=self._prepared.config.save_dtype or "float32",
            version=version,
            processed_logprobs=True,
            chat_template_kwargs=parse_template_arguments(self._prepared.job.chat_template_kwargs),
        )
        if previous_policy is not None:
            await previous_policy.aclose()
            del previous_policy
            gc.collect()  # models have reference cycles, and would stay in memory for several iterations
        self._delete_old_policies(iteration)


class ServerBackend(PolicyBackend):
    """Runs the policy's newest version on a server.

    Args:
        prepared: the loop; if it names no server, one is started for the first version.
    """

    _policy: OpenAICompatiblePolicy

    def __init__(self, prepared: PreparedLoop) -> None:
        job = prepared.job
        self._own_server: VLLMServer | None = None
        if job.base_url is None:
            shares_gpu = job.server_gpus is None and has_accelerator()
            self._own_server = VLLMServer(
                prepared.base.folder,
                log_file=job.out / "server.log",
                max_lora_rank=job.lora_rank if job.serves_adapters else None,
                dev_mode=not job.serves_adapters,
                gpus=job.server_gpus,
                options=(*_LOGPROBS_OPTIONS, *(_SHARED_GPU_OPTIONS if shares_gpu else ()), *job.server_options),
                startup_timeout=job.server_timeout,
            )
        server: VLLMServer | RemoteServer = self._own_server or RemoteServer(
            job.base_url or "", job.served_name, job.api_key, prepared.base.folder
        )
        methods = tuple(SyncMethod) if job.serves_adapters else (SyncMethod.RELOAD, SyncMethod.RESTART)
        self._sync = PolicySync(
            server, methods=methods, tolerance=job.sync_tolerance, reload_tied=job.lora_rank is not None
        )
        self.served: ServedPolicy | None = None
        """The newest served version; None before the first one."""
        template_arguments = parse_template_arguments(job.chat_template_kwargs)
        policy = OpenAICompatiblePolicy(
            server.model_name,
            base_url=server.base_url,
            api_key=job.api_key,
            max_concurrency=job.collect_settings.concurrency,
            extra_body={"chat_template_kwargs": template_arguments} if template_arguments else None,
        )
        super().__init__(prepared, policy)

    async def close(self) -> None:
        """Close the readers' resources, and stop the server if it is ours."""
        await super().close()
        if self._own_server is not None:
            await asyncio.to_thread(self._own_server.kill)

    async def serve(self, iteration: int, score_rows: RowScorer | None = None) -> None:
        """Load an iteration's weights into the server."""
        await self._restart_if_dead()
        folder, version = self.get_policy_folder(iteration), self.format_version(iteration)
        try:
            self.served = await self._sync.sync(folder, version, score_rows)
        except TrainingError:
            if not await self._restart_if_dead():  # the server did not die in the meantime
                raise
            self.served = await self._sync.sync(folder, version, score_rows)
        self._policy.switch_model(self.served.model, self.served.version)
        self._delete_old_policies(iteration)

    async def run_with_weights(self, iteration: int, read_all: Callable[[], Awaitable[T]]) -> T:
        """Call `read_all` with the served weights of `iteration`, again if our server died, and return its result.

        Args:
            iteration: the iteration whose weights are served.
            read_all: reads all questions; called again after a restart of the server.

        Raises:
            PolicyUnreachableError: the server is not ours, or died repeatedly.
        """
        for attempt in range(_MAX_RESTARTS + 1):
            assert self.served is not None  # noqa: S101  serve() was called
            try:
                async with self._sync.hold_weights(self.served):
                    return await read_all()
            except PolicyUnreachableError as error:
                if attempt == _MAX_RESTARTS or await self._find_dead_server() is None:
                    raise
                log.warning("the server died (%s); it is started again", error.message)
            await self.serve(iteration)
        raise AssertionError("the last attempt returns or raises")

    async def _restart_if_dead(self) -> bool:
        """Restart our server if it is dead; return whether it was dead."""
        server = await self._find_dead_server()
        if server is None:
            return False
        try:
            await asyncio.to_thread(server.restart)
        except VLLMServerError as error:
            log.warning("the server did not start (%s); it is started once more", error.message.splitlines()[0])
            await asyncio.to_thread(server.restart)
        return True

    async def _find_dead_server(self) -> VLLMServer | None:
        """Return our server if it does not answer: its process may outlive its engine for a moment, or longer."""
        if self._own_server is None or (
            self._own_server.is_running and await asyncio.to_thread(self._own_server.is_healthy)
        ):
            return None
        return self._own_server

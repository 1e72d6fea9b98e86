"""Starts, kills and restarts a vLLM server of our own, which ends with its parent process.

vLLM may be installed in another virtual environment than the trainer (on CPUs it must be, see
scripts/install_vllm_cpu.sh), so the server is controlled only as a process and over HTTP.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self

from memagent_training.serving.session_watchdog import kill_session
from memagent_training.training_errors import TrainingError

_CHECKOUT = Path(__file__).resolve().parents[3]
_WATCHDOG = Path(__file__).with_name("session_watchdog.py")
_POLL_SECONDS = 0.25
_PROBE_TIMEOUT_SECONDS = 5.0
_DIRECT_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores the environment's proxy, which cannot reach a server on this machine."""
_LOG_TAIL_LINES = 40
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank accepts
_METRIC_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)

SERVER_ENVIRONMENT: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
CPU_ENVIRONMENT: Mapping[str, str] = {
    "TORCH_COMPILE_DISABLE": "1",  # otherwise the first request for log-probs waits 17 s
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pinned to a core, it would wait for other processes there
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # without it vLLM ignores `--distributed-executor-backend uni` on a CPU
}
"""For machines without an accelerator."""
# The model runs in the engine's process: with two processes, each would busy-wait for the other.
CPU_OPTIONS = ("--enforce-eager", "--block-size", "32", "--distributed-executor-backend", "uni")
_LAUNCHER_VARIABLE = re.compile(
    r"(ACCELERATE|FSDP|TORCHELASTIC)_|(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$"
)
"""Variables that `accelerate launch` sets for its processes, and a server must not inherit."""
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "accel/accel[0-9]*")
"""The device files of accelerators' drivers, as patterns under /dev."""


class VLLMNotInstalledError(TrainingError):
    """There is no interpreter with vLLM."""


class VLLMServerError(TrainingError):
    """The server did not start or did not stop; the message ends with the last lines of its log."""


def find_vllm_python() -> Path:
    """Return the interpreter with vLLM: $MEMAGENT_VLLM_PYTHON, or this one if it has vLLM, or .venv-vllm of a checkout.

    Raises:
        VLLMNotInstalledError: none of them exists.
    """
    configured_path = os.environ.get("MEMAGENT_VLLM_PYTHON")
    if configured_path is None and importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    python = Path(configured_path) if configured_path else _CHECKOUT / ".venv-vllm" / "bin" / "python"
    if not python.is_file():
        raise VLLMNotInstalledError(
            f"MEMAGENT_VLLM_PYTHON names {python}, which is not a file"
            if configured_path
            else "vLLM is not installed here",
            hint="Install vLLM (on CPUs: make vllm in a checkout), or name its interpreter in MEMAGENT_VLLM_PYTHON.",
        )
    return python


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has an accelerator, by the device files of drivers."""
    return any(any(devices.glob(pattern)) for pattern in _DEVICE_FILES)


def make_server_environment(environ: Mapping[str, str], devices: Path = Path("/dev")) -> dict[str, str]:
    """Return a server's environment: this machine's defaults, and `environ` without a launcher's variables."""
    defaults = SERVER_ENVIRONMENT if has_accelerator(devices) else {**SERVER_ENVIRONMENT, **CPU_ENVIRONMENT}
    return {**defaults, **{name: value for name, value in environ.items() if not _LAUNCHER_VARIABLE.match(name)}}


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass(eq=False)
class VLLMServer:
    """A vLLM server for one model folder, as a process tree; a context manager.

    The port is chosen once, at construction, so that `restart` keeps the URL. The server ends with the process that
    started it, however that process ends. Restarts append to the log file.
    """

    model: Path
    """The folder with config.json, weights and tokenizer."""
    _: KW_ONLY
    log_file: Path
    """The file for the server's stdout and stderr."""
    model_name: str = "policy"
    """The name that requests use."""
    api_key: str | None = None
    """The bearer token that requests need; None accepts requests without one."""
    gpus: str | None = None
    """The GPUs that it may use, as in CUDA_VISIBLE_DEVICES ("6,7"); None means the GPUs of this process."""
    max_lora_rank: int | None = None
    """The maximum rank of adapters that can be loaded while it runs; None if no adapters can be loaded."""
    dev_mode: bool = False
    """Whether weights can be reloaded and caches dropped while it runs, by anyone on this machine."""
    options: Sequence[str] = ()
    """Additional command-line options, which override those from the other fields."""
    startup_timeout: float = 240.0
    """Seconds to wait for the first healthy answer."""
    port: int = field(default_factory=_find_free_port, init=False)
    _watchdog: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _temporary_folder: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def root_url(self) -> str:
        """URL of the server's own endpoints (/health, /metrics, /tokenize)."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """URL to give to an OpenAI client."""
        return f"{self.root_url}/v1"

    @property
    def number_format(self) -> str:
        """The number format of its computations: as in `options`, else bfloat16 on an accelerator and float32 on a CPU.

        In float32, log-probs agree with the trainer's within 1e-4.
        """
        arguments = [argument for option in self.options for argument in option.split("=", 1)]
        formats = [value for option, value in pairwise(arguments) if option == "--dtype"]
        return formats[-1] if formats else "bfloat16" if has_accelerator() else "float32"

    @property
    def is_running(self) -> bool:
        """Whether the process tree is alive; it may not answer yet."""
        return self._watchdog is not None and self._watchdog.poll() is None

    def start(self) -> None:
        """Start the server, and return when it answers.

        Raises:
            VLLMNotInstalledError: see `find_vllm_python`.
            VLLMServerError: the server ended or did not answer in time; no process is left.
        """
        if self.is_running:
            raise VLLMServerError(f"the server on port {self.port} is running already; stop it first")
        command: list[str | Path] = [
            sys.executable,
            _WATCHDOG,
            str(os.getpid()),
            find_vllm_python(),
            *self._build_arguments(),
        ]
        self._temporary_folder = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        environment = make_server_environment(os.environ) | {
            "TMPDIR": self._temporary_folder.name,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(int(self.max_lora_rank is not None)),
            "VLLM_SERVER_DEV_MODE": str(int(self.dev_mode)),
        }
        if self.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus
        if self.api_key is not None:
            environment["VLLM_API_KEY"] = self.api_key
        started_at = time.monotonic()
        with self.log_file.open("ab") as log:
            self._watchdog = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(started_at + self.startup_timeout)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL all processes of the server, whose requests in flight fail; return when they have ended.

        Raises:
            VLLMServerError: a process survives.
        """
        if self._watchdog is None:
            return
        try:
            kill_session(self._watchdog.pid)
        except TimeoutError as error:
            raise VLLMServerError(f"{error}{self._read_log_tail()}") from error
        self._watchdog.wait()
        self._watchdog = None
        if self._temporary_folder is not None:
            self._temporary_folder.cleanup()

    def restart(self, model: Path | None = None) -> None:
        """Kill the server if it runs, and start it under the same URL, with an empty prefix cache and no adapters.

        Args:
            model: the folder to serve; None for the current one. If the start fails, `self.model` does not change.
        """
        self.kill()
        old_model, self.model = self.model, model or self.model
        try:
            self.start()
        except BaseException:
            self.model = old_model
            raise

    def is_healthy(self) -> bool:
        """Return whether GET /health answers 200 now."""
        try:
            with _DIRECT_OPENER.open(f"{self.root_url}/health", timeout=_PROBE_TIMEOUT_SECONDS) as response:
                return bool(response.status == 200)
        except OSError:  # refused, reset, timed out, or an HTTP error status
            return False

    def read_metrics(self) -> dict[str, float]:
        """Return the metrics of /metrics by name, summed over labels, without histogram buckets."""
        with _DIRECT_OPENER.open(f"{self.root_url}/metrics", timeout=_PROBE_TIMEOUT_SECONDS) as response:
            text = response.read().decode()
        totals: dict[str, float] = {}
        for name, value in _METRIC_SAMPLE.findall(text):
            if not name.endswith("_bucket"):
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def _build_arguments(self) -> list[str]:
        arguments = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--model", str(self.model), "--served-model-name", self.model_name]
        arguments += ["--dtype", self.number_format, "--seed", "0", "--enable-prompt-tokens-details"]
        arguments += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
        arguments += [] if has_accelerator() else CPU_OPTIONS
        if self.max_lora_rank is not None:
            # Two adapters at once: readers of one version continue while readers of the next one begin.
            arguments += ["--enable-lora", "--max-loras", "2"]
            arguments += ["--max-lora-rank", str(_round_up_lora_rank(self.max_lora_rank))]
        return [*arguments, *self.options]

    def _wait_until_healthy(self, deadline: float) -> None:
        while not self.is_healthy():
            if not self.is_running:
                raise VLLMServerError(f"the vLLM server ended while starting{self._read_log_tail()}")
            if time.monotonic() > deadline:
                message = f"the vLLM server did not answer within {self.startup_timeout:.0f} s"
                hint = "Allow more time (--server-timeout), if its log says that it is still loading."
                raise VLLMServerError(message + self._read_log_tail(), hint=hint)
            time.sleep(_POLL_SECONDS)

    def _read_log_tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        return "\n".join([f"; the last lines of {self.log_file}:", *lines[-_LOG_TAIL_LINES:]])


def _round_up_lora_rank(rank: int) -> int:
    """Return the smallest value for `--max-lora-rank` that allows adapters of `rank`."""
    if not 1 <= rank <= _LORA_RANKS[-1]:
        raise VLLMServerError(f"the rank of adapters must be 1 to {_LORA_RANKS[-1]}, got {rank}", hint="Change --lora.")
    return next(accepted_rank for accepted_rank in _LORA_RANKS if accepted_rank >= rank)

"""Starting a vLLM server: its environment, number format, startup timeout, and health check."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest

from memagent_training.serving import vllm_server
from memagent_training.serving.vllm_server import VLLMServer, VLLMServerError, make_server_environment


@pytest.mark.parametrize("device", ["nvidia0", "kfd", "accel/accel0", None])
def test_server_targets_the_cpu_only_without_an_accelerator(tmp_path: Path, device: str | None) -> None:
    (tmp_path / "nvidiactl").touch()  # a driver without a device
    if device is not None:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    variables = {"RANK": "1", "MASTER_ADDR": "10.0.0.1", "ACCELERATE_USE_FSDP": "true", "VLLM_NO_USAGE_STATS": "0"}
    environment = make_server_environment(variables, tmp_path)
    cpu_variables = {"VLLM_TARGET_DEVICE", "OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"}
    assert cpu_variables & environment.keys() == (cpu_variables if device is None else set())
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "0"
    assert not {"RANK", "MASTER_ADDR", "ACCELERATE_USE_FSDP"} & environment.keys()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_number_format_depends_on_the_machine_or_an_option(tmp_path, monkeypatch, has_gpu: bool) -> None:
    monkeypatch.setattr(vllm_server, "has_accelerator", lambda: has_gpu)
    server = VLLMServer(tmp_path, log_file=tmp_path / "log")
    assert server.number_format == ("bfloat16" if has_gpu else "float32")
    assert ("--enforce-eager" in server._build_arguments()) == (not has_gpu)
    server.options = ("--max-model-len", "4096", "--dtype=float16")
    assert server.number_format == "float16"
    assert server._build_arguments()[-3:] == list(server.options)


def test_slow_start_stops_the_server_and_names_the_timeout_option(tmp_path, monkeypatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho weights are loading\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setenv("MEMAGENT_VLLM_PYTHON", str(python))
    server = VLLMServer(tmp_path, log_file=tmp_path / "server.log", startup_timeout=1.0)
    with pytest.raises(VLLMServerError, match=r"(?s)within 1 s.*weights are loading") as error:
        server.start()
    assert "--server-timeout" in (error.value.hint or "")
    assert not server.is_running


def test_local_server_is_not_reached_through_an_environment_proxy(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)

    class HealthHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"vllm:num_requests_running 3.0\n")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HealthHandler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        server = VLLMServer(tmp_path, log_file=tmp_path / "log")
        server.port = http_server.server_port
        assert server.is_healthy()
        assert server.read_metrics() == {"vllm:num_requests_running": 3.0}
        http_server.shutdown()

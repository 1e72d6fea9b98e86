"""In which environment a vLLM server is started, by what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from memagent_training.vllm_server import server_environment


@pytest.mark.parametrize("device", ["nvidia0", "kfd", "accel/accel0", None])
def test_only_without_an_accelerator_is_the_cpu_made_the_target(tmp_path: Path, device: str | None) -> None:
    (tmp_path / "nvidiactl").touch()  # a driver without a device
    if device is not None:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    found = server_environment(tmp_path)
    assert ("VLLM_TARGET_DEVICE" in found) == ("OMP_NUM_THREADS" in found) == (device is None)
    assert found["HF_HUB_OFFLINE"] == "1"

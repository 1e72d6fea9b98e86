"""The policy server that the integration tests share.

Without the vLLM environment these tests are skipped; if CI is set, they fail, because a CI run without them would prove
nothing. A server that does not start is always a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_training.serving.vllm_server import VLLMNotInstalledError, VLLMServer, find_vllm_python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that starts a server, so that `-m "not vllm"` finds them all."""
    for item in items:
        if "vllm_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM; every fixture or test that starts a server needs this fixture."""
    try:
        return find_vllm_python()
    except VLLMNotInstalledError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def embedded_server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """A shared server of the embedded policy in float32; a test that kills it must restart it."""
    log_file = tmp_path_factory.mktemp("vllm") / "server.log"
    with VLLMServer(EMBEDDED_FOLDER, log_file=log_file, model_name="memagent-embedded") as server:
        yield server


@pytest.fixture(scope="session")
def random_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy with random weights, for tests that do not depend on its replies."""
    from random_policy import write_random_policy

    return write_random_policy(tmp_path_factory.mktemp("random-policy"))

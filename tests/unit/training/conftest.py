"""Training's tests share two cores with whatever else runs, so torch has one thread in them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def no_search_for_garbage() -> Iterator[None]:
    """accelerate begins each training with one over all imported modules: half the time of a small training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))
        yield

"""Connects to a Ray cluster, and says what to do where that fails."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from memagent_graph.errors import CorpusError, MissingExtraError

_SECONDS: Final = 5.0
_NEEDS: Final = "reading on a Ray cluster"


def ray_module(name: str = "ray") -> Any:
    """A module of Ray.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtraError("ray", _NEEDS) from None


@contextmanager
def connected(address: str, **options: Any) -> Iterator[Any]:
    """Be connected to a cluster; the module `ray` is yielded. What this process started there ends with it.

    If this process is connected already, that connection is used, and stays.

    Args:
        address: "auto" for the cluster that runs on this machine or that RAY_ADDRESS names, "local" for one of its own
            that ends with it, HOST:PORT of a head node, or ray://HOST:PORT of a Ray Client server.
        options: further arguments of `ray.init`.

    Raises:
        MissingExtraError: Ray is not installed.
        CorpusError: the cluster cannot be reached, or refuses.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # or its log comes between what this process prints
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # or what runs on after the end starts a cluster
    ray = ray_module()
    ray_module("ray.data")
    if ray.is_initialized():
        yield ray
        return
    require_reachable(address)
    for handler in logging.getLogger("ray.data").handlers:
        if type(handler).__name__ != "SessionFileHandler":  # failures are told by errors, and stand in Ray's files
            handler.setLevel(logging.CRITICAL)
    quiet: dict[str, Any] = {"log_to_driver": False}
    if not address.startswith("ray://"):  # whose server takes fewer arguments
        quiet["logging_level"] = logging.ERROR
    if address == "local":
        quiet["include_dashboard"] = False
    try:
        ray.init(address, **{**quiet, **options})
    except Exception as error:  # Ray's own kinds, and those of gRPC
        raise unreachable(address, str(error)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def require_reachable(address: str) -> None:
    """Fail at once where nobody listens; Ray would try for a minute.

    Raises:
        CorpusError: HOST:PORT cannot be reached, or is not an address.
    """
    if address in {"local", "auto"}:
        return
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not (separator and host and port.isdigit()):
        raise CorpusError(
            f"{address!r} is not the address of a Ray cluster",
            hint="Use auto, local, HOST:PORT of the head node, or ray://HOST:PORT.",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise unreachable(address, str(error)) from error


def unreachable(address: str, reason: str) -> CorpusError:
    """The error for a cluster that cannot be used."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["it does not answer"]
    first = lines[0] if not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"
    started = "ray start --head" if address != "auto" or not os.environ.get("RAY_ADDRESS") else "RAY_ADDRESS"
    hint = f"Does it run (`ray status`)? Start one with `{started}`, or use --ray local."
    if started == "RAY_ADDRESS":
        hint = "RAY_ADDRESS names it: does it run (`ray status`)? Name another one, or use --ray local."
    return CorpusError(f"the Ray cluster {address} cannot be used: {first[:300]}", hint=hint)

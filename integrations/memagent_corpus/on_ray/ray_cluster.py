"""Connects to a Ray cluster. If that fails, the error explains what to do."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from memagent_graph.errors import CorpusError
from memagent_graph.extra_modules import extra_module

_CONNECT_SECONDS: Final = 5.0


def ray_module(name: str = "ray") -> Any:
    """Import a module of Ray.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    return extra_module(name, "ray", "reading on a Ray cluster")


@contextmanager
def connected(address: str, **options: Any) -> Iterator[Any]:
    """Connect to a cluster and yield the module `ray`. Disconnect at the end, which stops the actors.

    An existing connection of this process is used, and is not closed.

    Args:
        address: "auto" for the cluster on this machine or the one in RAY_ADDRESS, "local" for a new cluster that stops
            at the end, or HOST:PORT of a head node.
        options: additional arguments of `ray.init`.

    Raises:
        MissingExtraError: Ray is not installed.
        CorpusError: the cluster cannot be reached, or refuses the connection.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # otherwise its log mixes with this process's output
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # otherwise late calls after the end start a new cluster
    ray = ray_module()
    if ray.is_initialized():
        yield ray
        return
    require_reachable(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        quiet["include_dashboard"] = False
    try:
        ray.init(address, **{**quiet, **options})
    except Exception as error:  # Ray and gRPC have their own exceptions
        raise unreachable_error(address, str(error)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def require_reachable(address: str) -> None:
    """Check that a server listens at the address. Ray would retry for a minute.

    Raises:
        CorpusError: the server cannot be reached, or the address is not valid.
    """
    if address in {"local", "auto"}:
        return
    if address.startswith("ray://"):
        raise CorpusError(
            f"{address} is the address of Ray Client, which is not supported",
            hint="Run the command on a node of the cluster, or submit it: "
            "ray job submit --address http://HOST:8265 -- memagent corpus ... --ray auto",
        )
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit()):
        raise CorpusError(
            f"{address!r} is not the address of a Ray cluster", hint="Use auto, local, or HOST:PORT of the head node."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise unreachable_error(address, str(error)) from error


def unreachable_error(address: str, reason: str) -> CorpusError:
    """Return the error for a cluster that cannot be used."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["it does not answer"]
    first = lines[0] if not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"
    if address == "auto" and os.environ.get("RAY_ADDRESS"):
        hint = "Check that the cluster in RAY_ADDRESS runs (`ray status`), or use another one, or --ray local."
    else:
        hint = "Check that the cluster runs (`ray status`). Start one with `ray start --head`, or use --ray local."
    return CorpusError(f"the Ray cluster {address} cannot be used: {first[:300]}", hint=hint)

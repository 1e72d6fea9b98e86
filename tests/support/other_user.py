"""Calls as a user other than root, to whom file modes apply."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

_NOBODY = 65534


def call_as_other_user(call: Callable[[], Any]) -> Any:
    """Call a function in a forked process, as the user nobody if this one is root; return or raise its outcome.

    The user nobody cannot open this package's modules, so the call must not import any.
    """
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
            outcome = pickle.dumps((True, call()))
        except BaseException as error:
            traceback.print_exc()
            outcome = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(outcome)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        has_returned, value = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if not has_returned:
        raise value
    return value

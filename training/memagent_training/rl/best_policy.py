"""The policy with the best measurement: one folder, complete at any time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from memagent_training.job import training_output as output
from memagent_training.job.saved_policy import merge_adapter
from memagent_training.rl.rl_job import BEST, PreparedLoop

_BEFORE: Final = f"{BEST}.before"
"""The best policy so far, while a better one replaces it."""


class BestPolicy:
    """Keeps a copy of the best policy; restores it if a kill interrupted its replacement."""

    def __init__(self, prepared: PreparedLoop) -> None:
        self._prepared = prepared
        self._folder = prepared.job.out / BEST
        self._before = self._folder.with_name(_BEFORE)
        if self._before.is_dir() and not self._folder.exists():
            self._before.rename(self._folder)

    @property
    def folder_if_any(self) -> Path | None:
        """Its folder; None if nothing was measured yet."""
        return self._folder if self._folder.is_dir() else None

    def keep(self, policy: Path) -> None:
        """Replace the best policy by a copy of this folder; the copy appears when it is complete."""
        unfinished = self._folder.with_name(f"{BEST}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(policy, unfinished)
        if self._prepared.job.serves_adapters:  # adapters alone are not a policy to start from
            adapter = unfinished / output.ADAPTER_FOLDER
            merge_adapter(self._prepared.base, adapter, unfinished, self._prepared.config)
        shutil.rmtree(self._before, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(self._before)
        unfinished.rename(self._folder)
        shutil.rmtree(self._before, ignore_errors=True)

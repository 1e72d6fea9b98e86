"""Adds a policy to this machine: dequantises base weights, merges an adapter, and writes a model folder.

The folder is written under a temporary name and renamed when it is complete. The next call removes the temporary
folder of a killed call. The weights are computed in float32 and stored in float16, at half the size: with greedy
decoding, 20 of 20 completions of the base stayed the same (16 in bfloat16).

An adapter is plain LoRA in the format of PEFT. Merging it, W + scale * B A, takes a few lines, so peft is not needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from tokenizers import normalizers

from memagent_graph.errors import MissingExtraError, PolicyError, make_install_command
from memagent_graph.policies.added import (
    ADDABLE_POLICIES,
    ENGLISH_FOLDER,
    PolicyOrigin,
    find_added_policy_folder,
    get_policies_folder,
    read_origin,
    write_origin,
)
from memagent_graph.policies.weight_files import ENGLISH_BASE, BaseWeights, compute_sha256, fetch_base_file
from memagent_graph.storage.bounded_files import read_json_file
from memagent_graph.storage.file_locks import try_to_lock

if TYPE_CHECKING:
    import torch

REQUIRED_MODULES: Final = ("torch", "transformers", "safetensors", "gguf", "accelerate")
"""The modules that `add_policy` needs. transformers reads a GGUF file only if accelerate is installed."""
_TEMPORARY_PREFIX: Final = ".adding-"
_REWRITTEN_KEYS: Final = ("general.architecture", "general.file_type", "general.quantization_version")
_ADAPTER_CONFIG: Final = "adapter_config.json"
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_UNSUPPORTED_OPTIONS: Final = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias", "layer_replication",
)  # fmt: skip


def add_policy(
    name: str,
    *,
    file: Path | None = None,
    adapter: Path | None = None,
    gguf: bool = False,
    base: BaseWeights = ENGLISH_BASE,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the folder of a policy, unless it exists and was made from the same files, and return it.

    Args:
        name: one of `ADDABLE_POLICIES`.
        file: a local copy of the base's file, instead of a download.
        adapter: a PEFT folder, instead of the adapter in this package. "bases" in its `memagent.json` lists the
            SHA-256 of the base files that it was trained on.
        gguf: whether to also write a GGUF file in float16, for llama.cpp.
        base: the base model.
        report: called with a line of text at every step.

    Raises:
        MissingExtraError: the extra "language" is not installed.
        PolicyError: the name is unknown, the base cannot be fetched, the adapter belongs to another base, there is not
            enough disk space or memory, or another call is running.
    """
    if name not in ADDABLE_POLICIES:
        raise PolicyError(f"there is no policy {name!r} to add", hint=f"Choose one of: {', '.join(ADDABLE_POLICIES)}.")
    if any(find_spec(module) is None for module in REQUIRED_MODULES):
        raise MissingExtraError("language", f"adding the policy {name}")
    if adapter and name.endswith("-untrained"):
        raise PolicyError(f"{name} has no adapter", hint=f"Add {name.removesuffix('-untrained')} with this adapter.")
    source = None if name.endswith("-untrained") else (adapter or ENGLISH_FOLDER).expanduser()
    lora = None if source is None else load_adapter(source)
    if source is not None:
        _require_matching_base(source, base)
    folder = get_policies_folder()
    with _lock_policies(folder) as temporary_folder:
        digest = None if source is None else _hash_folder(source)
        origin = PolicyOrigin(base.file_name, base.sha256, digest, f"{name}.F16.gguf" if gguf else None)
        existing_folder = find_added_policy_folder(name)
        if existing_folder and read_origin(existing_folder) == origin:
            report(f"{name} exists already, and was made from the same parts")
            return existing_folder
        _require_free_space(base, folder)
        report(
            f"adding {name} takes {base.disk_bytes / 1e6:,.0f} MB of disk space and "
            f"{base.memory_bytes / 1e6:,.0f} MB of memory"
        )
        base_file = fetch_base_file(base, folder / "bases", file=file, report=report)
        report("dequantising and merging (about a minute)")
        new_folder = temporary_folder / "new"
        new_folder.mkdir()
        _write_model(new_folder, base_file, lora)
        if source is not None:
            ignore = shutil.ignore_patterns(_ADAPTER_CONFIG, _ADAPTER_WEIGHTS, "__pycache__")
            shutil.copytree(source, new_folder, dirs_exist_ok=True, ignore=ignore)
        if origin.gguf:
            _write_gguf(base_file, new_folder, new_folder / origin.gguf)
        write_origin(origin, new_folder)
        for path in (new_folder, *new_folder.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
        # A policy is never seen with only a part of its files.
        if (folder / name).exists():
            (folder / name).rename(temporary_folder / "old")
        new_folder.rename(folder / name)
    return folder / name


def remove_policy(name: str) -> Path:
    """Remove the folder of an added policy, and with the last policy also the base's file. Return the removed folder.

    Raises:
        PolicyError: there is no added policy with this name.
    """
    folder = get_policies_folder()
    with _lock_policies(folder) as temporary_folder:
        policy = find_added_policy_folder(name)
        if policy is None:
            raise PolicyError(
                f"the policy {name!r} was not added", hint="`memagent policy list` shows those that were."
            )
        policy.rename(temporary_folder / "old")
        if not any(map(find_added_policy_folder, ADDABLE_POLICIES)):
            shutil.rmtree(folder / "bases", ignore_errors=True)
    return policy


def _hash_folder(folder: Path) -> str:
    """Return a short hash of the paths and contents of all files in a folder."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{compute_sha256(file)}\0".encode())
    return digest.hexdigest()[:16]


def _require_matching_base(adapter: Path, base: BaseWeights) -> None:
    """Raise `PolicyError` if an adapter was not trained on a base."""
    try:
        bases = msgspec.convert(read_json_file(adapter / "memagent.json")["bases"], list[str])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"the adapter in {adapter} does not say which base it was trained on",
            hint='Its memagent.json has to list the SHA-256 of that file under "bases".',
        ) from error
    if base.sha256 not in bases:
        raise PolicyError(
            f"the adapter in {adapter} was trained on another base than {base.file_name} (SHA-256 {base.sha256})",
            hint=f"Use a base with one of these SHA-256: {', '.join(bases)}.",
        )


def _require_free_space(base: BaseWeights, folder: Path) -> None:
    """Raise `PolicyError` if there is not enough disk space or memory to add a policy."""
    disk_hint = "Free disk space there, or set MEMAGENT_HOME to a folder on another disk."
    memory_hint = "Close other programs, or add it on a larger machine and copy the folder."
    for resource, required_bytes, free_bytes, hint in (
        (f"disk space in {folder}", base.disk_bytes, shutil.disk_usage(folder).free, disk_hint),
        ("memory", base.memory_bytes, _read_available_memory(), memory_hint),
    ):
        if free_bytes is not None and free_bytes < required_bytes:
            requirement = f"adding this policy needs {required_bytes / 1e6:,.0f} MB of {resource}"
            raise PolicyError(f"{requirement}, and {free_bytes / 1e6:,.0f} MB are free", hint=hint)


def _read_available_memory() -> int | None:
    """Return the bytes of memory that are available without swapping, or None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: for each weight that it changes, the factors A (rank, in) and B (out, rank)."""

    folder: Path
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float

    def merge_into(self, weights: dict[str, torch.Tensor]) -> None:
        """Add `scale * B A` to the weights of the adapter, in place and in float32.

        Raises:
            PolicyError: a weight is missing, or its shape differs.
        """
        for name, (a, b) in self.factors.items():
            delta = self.scale * (b.float() @ a.float())
            if name not in weights or weights[name].shape != delta.shape:
                raise PolicyError(
                    f"the adapter in {self.folder} changes {name}, which its base does not have in that shape",
                    hint="Use an adapter that was trained on this base.",
                )
            weights[name] += delta


def load_adapter(folder: Path) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        PolicyError: the files are missing, damaged, or of an unsupported kind.
    """
    from safetensors import SafetensorError  # noqa: PLC0415  an optional dependency
    from safetensors.torch import load_file  # noqa: PLC0415  an optional dependency

    try:
        config = read_json_file(folder / _ADAPTER_CONFIG)
        rank = int(config["r"])
        scale = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if not math.isfinite(scale):
            raise ValueError(f"its scale is {scale}")
        tensors = load_file(folder / _ADAPTER_WEIGHTS)
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError, SafetensorError) as error:
        raise PolicyError(
            f"the adapter in {folder} cannot be read: {type(error).__name__}: {error}",
            hint=f"Use a folder that PEFT saved, with {_ADAPTER_CONFIG} and {_ADAPTER_WEIGHTS}.",
        ) from error
    unsupported_options = [name for name in _UNSUPPORTED_OPTIONS if config.get(name)]
    unsupported_options += ["bias"] if config.get("bias", "none") != "none" else []
    factors = {}
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        a, b = tensors[key], tensors.get(key_b := key.replace(".lora_A.", ".lora_B."))
        if b is not None and a.shape[:-1] == b.shape[1:] == (rank,):
            name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            factors[name] = (tensors.pop(key), tensors.pop(key_b))
    if unsupported_options or tensors or not factors or config.get("peft_type", "LORA") != "LORA":
        reason = ", ".join([*unsupported_options, *list(tensors)[:3]]) or "no pairs of lora_A and lora_B"
        raise PolicyError(
            f"the adapter in {folder} is not plain LoRA: {reason}",
            hint="Merge it with peft (merge_and_unload), and pass the merged folder with --model.",
        )
    return Adapter(folder, factors, scale)


def _write_model(target: Path, file: Path, lora: Adapter | None) -> None:
    """Load weights, configuration and tokenizer of a base, merge the adapter, and write them to a folder."""
    import torch  # noqa: PLC0415  an optional dependency
    import transformers  # noqa: PLC0415  an optional dependency

    options: dict[str, Any] = {"gguf_file": file.name}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
        except Exception as error:  # transformers can raise anything for a damaged file
            raise PolicyError(
                f"the base in {file} cannot be loaded: {type(error).__name__}: {error}",
                hint=f"Install the versions that the extra needs: {make_install_command('language')}.",
            ) from error
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # transformers does not read it from a GGUF file
        model.hf_quantizer = None  # otherwise transformers would not save the dequantised weights
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        if lora is not None:
            lora.merge_into({name: weight.data for name, weight in model.named_parameters()})
        for weight in model.parameters():  # model.half() refuses a model that was quantised
            weight.data = weight.data.half()
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    config = read_json_file(target / "config.json")
    config["dtype"] = "float32"  # the default format for computing; the weights are stored in float16
    config.pop("_name_or_path", None)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_gguf(base: Path, model: Path, target: Path) -> None:
    """Write a Qwen2 as a GGUF file in float16, for llama.cpp: the base's metadata with the weights of a model folder.

    The weights are not quantised again, because llama.cpp multiplies quantised weights with activations in 8 bits. That
    turned a near tie (0.08 nats between "The" and "L'" as the first token) into another answer. In float16, the greedy
    answers of llama.cpp equal those of transformers.
    """
    import gguf  # noqa: PLC0415  an optional dependency
    import numpy  # noqa: PLC0415  an optional dependency
    from safetensors import safe_open  # noqa: PLC0415  an optional dependency

    reader: Any = gguf.GGUFReader(base)
    values = {name: field.contents() for name, field in reader.fields.items()}
    values["tokenizer.chat_template"] = (model / "chat_template.jinja").read_text("utf-8")
    architecture = values["general.architecture"]
    writer: Any = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _REWRITTEN_KEYS:
            writer.add_key_value(name, values[name], field.types[0], sub_type=field.types[-1])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, values[f"{architecture}.block_count"])
    with safe_open(model / "model.safetensors", "numpy") as merged_weights:
        projections = [name for name in merged_weights.offset_keys() if name.endswith("_proj.weight")]
        projection_by_gguf_name = {names.get_name(name, (".weight",)): name for name in projections}
        for tensor in reader.tensors:
            if tensor.name in projection_by_gguf_name:
                weight = merged_weights.get_tensor(projection_by_gguf_name[tensor.name])
            else:
                weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
            writer.add_tensor(tensor.name, weight if weight.ndim == 1 else weight.astype(numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextlib.contextmanager
def _lock_policies(folder: Path) -> Iterator[Path]:
    """Hold the lock for adding and removing policies during the block, and yield a temporary folder for it.

    Disk errors become `PolicyError`s.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / ".lock").open("wb") as lock:
            if not try_to_lock(lock):
                raise PolicyError(
                    f"another process is adding or removing a policy in {folder}", hint="Wait until it is done."
                )
            for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):  # of a killed call
                shutil.rmtree(path, ignore_errors=True)
            with tempfile.TemporaryDirectory("", _TEMPORARY_PREFIX, folder, ignore_cleanup_errors=True) as temporary:
                yield Path(temporary)
    except OSError as error:
        raise PolicyError(
            f"the policies in {folder} cannot be written: {error}",
            hint="Free disk space there, or set MEMAGENT_HOME to another folder for all data.",
        ) from error

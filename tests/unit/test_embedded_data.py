"""The data that the embedded policy is trained on, and the training script's promises."""

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
from recipes.embedded.policy_network import new_policy
from recipes.embedded.release import interpolate, release
from recipes.embedded.structured_start import give_structure
from recipes.embedded.tokenizer import SPECIAL_TOKENS, load_encoding
from recipes.embedded.train import collate, make_batch
from recipes.embedded.training_examples import EMPTY, PromptFormat, Prose, RowBuilder

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "memagent_graph" / "embedded"
PROSE = "The lexer reads a file line by line. It stops at the first error, and reports where that was. " * 400


@pytest.fixture(scope="module")
def form() -> PromptFormat:
    return PromptFormat.load(SHIPPED, load_encoding(SHIPPED))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text(PROSE)
    (folder / "held_out.txt").write_text(PROSE)
    return folder


@pytest.fixture
def builder(form: PromptFormat, corpus: Path) -> RowBuilder:
    return RowBuilder(form, Prose(corpus / "train.txt"))


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
        facts = PlantedFacts(5, held_out=held_out, number_share=1.0)
        for _ in range(300):
            assert is_held_out(facts.draw_fact().value) is held_out
    train, other = PlantedFacts(5), PlantedFacts(5, held_out=True)
    assert not set(train._nouns) & set(other._nouns)
    assert not set(train._adjectives) & set(other._adjectives)


def test_a_near_miss_shares_attribute_or_entity_but_never_both_nor_the_value() -> None:
    facts = PlantedFacts(6)
    for _ in range(500):
        fact = facts.draw_fact()
        miss = facts.draw_near_miss(fact)
        same = (miss.attribute == fact.attribute, miss.entity.lower() == fact.entity.lower())
        assert same in {(True, False), (False, True)}
        assert miss.value != fact.value


# --- tokenizer


def test_ids_are_ranks_and_equal_in_tiktoken_and_tokenizers(form: PromptFormat) -> None:
    reference = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    rng = random.Random(0)
    alphabet = "0123456789 abcABC\n\t.,:;'<>|{}\\_-éß中文😀\u200b\u0301\x00"
    for _ in range(500):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 60)))
        ids = form.encoding.encode_ordinary(text)
        assert ids == reference.encode(text).ids
        assert form.encoding.decode(ids) == text


def test_every_group_of_one_to_three_digits_is_one_token(form: PromptFormat) -> None:
    groups = [f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width)]
    assert len(groups) == 1110
    assert all(len(form.encoding.encode_ordinary(group)) == 1 for group in groups)


def test_special_tokens_stand_last(form: PromptFormat) -> None:
    size = form.encoding.n_vocab
    assert [form.encoding.encode_single_token(token) for token in SPECIAL_TOKENS] == list(range(size - 4, size))


# --- rows


def test_trunk_and_branch_are_the_tokens_of_the_whole_prompt(form: PromptFormat) -> None:
    chunk, memory, problem = " of the <section> or\n\n so {memory} 12", "48213", "What is the pin of Port {chunk}?"
    before, _, after = (SHIPPED / "templates" / "update.txt").read_text().partition("{chunk}")
    after = after.replace("{memory}", memory).replace("{prompt}", problem)
    whole = f"<|user|>{before}{chunk}{after}<|end|><|assistant|>"
    expected = form.encoding.encode(whole, allowed_special="all")
    assert form.encode_trunk(chunk) + form.encode_question(memory, problem) == expected


def test_the_scripted_reader_copies_a_full_memory_and_reads_only_what_is_there(builder: RowBuilder) -> None:
    rng = random.Random(1)
    facts = PlantedFacts(rng)
    for _ in range(200):
        section = builder.draw_section(rng, facts, 120)
        memory, problem, reply = builder.draw_turn(rng, facts, section, hardness=1.0)
        if memory != EMPTY:
            assert reply == memory
        elif reply != EMPTY:
            assert reply in {fact.value for fact in section.present}
            assert reply in section.text
        assert problem


def test_a_batch_is_a_function_of_seed_and_step(builder: RowBuilder) -> None:
    first, again, other = (make_batch(builder, 0, step, 0.5, 1500) for step in (4, 4, 5))
    assert torch.equal(first.tokens, again.tokens)
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)


def test_a_branch_in_a_batch_gets_the_logits_of_the_shipped_architecture_on_its_prompt_alone(
    builder: RowBuilder,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    policy = new_policy(256, 96, 3)
    give_structure(policy, torch.ones(policy.config.vocab_size), (10, 20), {30})
    reference = LlamaForCausalLM(LlamaConfig(**policy.config.to_dict())).eval()
    reference.load_state_dict(policy.state_dict(), strict=True)
    rows = [builder.draw_row(random.Random(seed), 40 + 30 * seed, 4) for seed in range(2)]
    batch = collate(rows)
    with torch.no_grad():
        logits = list(policy.logits(batch))
        for row in rows:
            for branch in row.branches:
                before = row.trunk if branch.sees_trunk else []
                alone = reference(torch.tensor([before + branch.tokens])).logits[0]
                for place, _, _ in branch.learned:
                    assert torch.allclose(logits.pop(0), alone[len(before) + place], atol=2e-3)
    assert not logits


# --- training


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a script of the recipe in this process."""

    def run(module: ModuleType, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
        module.main()

    return run


def test_training_that_was_killed_goes_on_from_a_whole_checkpoint(
    corpus: Path, tmp_path: Path, run_script: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    (tmp_path / "small").mkdir()
    release(new_policy(64, 32, 1), tmp_path / "small")
    words = f"--corpus {corpus} --out {out} --weights-from {tmp_path / 'small'} --tokens 300 --ramp-steps 1000".split()
    words += ["--log-every", "1", "--check-every", "1", "--check-rows", "1", "--resume"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'training'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "recipes.embedded.train", *words, "--steps", "100000"]
    process = Program(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    checks = 0
    while checks < 3:
        checks += process.stdout.readline().startswith("  ")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    reached = torch.load(out / "last.pt", weights_only=True)["step"]
    assert reached >= 3
    run_script(train, *words, "--steps", reached + 1)
    assert f"resumed last.pt at step {reached}" in capsys.readouterr().out
    assert torch.load(out / "last.pt", weights_only=True)["step"] == reached + 1


def test_weights_are_released_into_a_folder_that_has_tokenizer_and_templates(
    tmp_path: Path, run_script: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_script(release_script, "--edition", "7", "--out", tmp_path / "released")
    assert "has no tokenizer.json and templates/" in capsys.readouterr().err
    shutil.copytree(SHIPPED, tmp_path / "released")
    run_script(release_script, "--edition", "7", "--out", tmp_path / "released")
    assert json.loads((tmp_path / "released" / "memagent.json").read_text())["edition"] == "7"


def test_a_policy_goes_back_a_part_of_the_way_to_where_it_began() -> None:
    first, trained = new_policy(64, 32, 1), new_policy(64, 32, 1)
    torch.nn.init.constant_(trained.get_parameter("model.layers.0.self_attn.o_proj.bias"), 0.25)
    expected = {name: 0.75 * weight + 0.25 * first.state_dict()[name] for name, weight in trained.state_dict().items()}
    interpolate(trained, first, 0.25)
    for name, weight in expected.items():
        assert torch.allclose(trained.state_dict()[name], weight), name
    assert not torch.equal(trained.state_dict()["lm_head.weight"], first.state_dict()["lm_head.weight"])
    with pytest.raises(SystemExit, match="different shapes"):
        interpolate(trained, new_policy(64, 32, 2), 0.5)

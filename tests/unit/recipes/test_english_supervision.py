"""The training of `english`: conversations that share a beginning, the network that computes them, and runs."""

from __future__ import annotations

import contextlib
import io
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memagent_graph.policies.adding import load_adapter
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from recipes.english.lessons import LessonMaker
from recipes.english.prose_questions import ProseQuestion
from recipes.english.sections import ProseSection

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
numpy = pytest.importorskip("numpy")
transformers = pytest.importorskip("transformers")

from support.small_models import make_model  # noqa: E402  after torch

from recipes.english import supervision  # noqa: E402
from recipes.english.encoded_lessons import encode, join_trees  # noqa: E402
from recipes.english.encoded_trees import EncodedTrees, batches  # noqa: E402
from recipes.english.network import AdaptedNetwork, list_nodes  # noqa: E402

PROSE = "The harbour was built in 1887 because the old one had silted up. " * 3
ROW = ProseQuestion("a", 0, len(PROSE), "when", "When did the harbour come into being?", "1887", PROSE[:64].strip())
LENGTH = 1536


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny network of the base's kind with random weights."""
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(EMBEDDED_FOLDER))
    folder = tmp_path_factory.mktemp("base")
    model = make_model(
        "Qwen2", dtype=torch.float32, vocab_size=vocabulary, rope_theta=1e6, max_position_embeddings=LENGTH,
        initializer_range=0.02,
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lessons():
    maker = LessonMaker([ProseSection("a", "story", 0, len(PROSE), PROSE)], [ROW])
    return [maker.reading(random.Random(number)) for number in range(3)]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)


@pytest.fixture(scope="module")
def trees(lessons, tokenizer):
    return encode(tokenizer, lessons)


def conversations(lessons, tokenizer):
    """The ids of each prompt and each reply, in the order of the trees."""
    for reading in lessons:
        for lesson in sorted(reading, key=lambda lesson: lesson.role):
            texts = lesson.text, f"{lesson.reply}<|im_end|>"
            yield tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)


@pytest.mark.parametrize("rows", [1, 2])
def test_sequences_have_every_conversation_once(lessons, tokenizer, trees, rows) -> None:
    replies = [reply for _, reply in conversations(lessons, tokenizer)]
    targets = [
        batch.targets_C[batch.conversations_C == number].tolist()
        for batch in batches(trees, LENGTH, rows)
        for number in range(len(batch.category_ids_K))
    ]
    assert targets == replies
    tokens = sum(len(prompt) + len(reply) for prompt, reply in conversations(lessons, tokenizer))
    assert sum(batch.tokens for batch in batches(trees, LENGTH, rows)) < tokens / 2, "what they share is there once"


def test_a_tree_that_is_too_long_loses_its_last_conversations(trees) -> None:
    sizes = trees.segments_S4[:, 1] + trees.segments_S4[:, 2]
    assert len(next(batches(trees, int(sizes[:3].sum()), 1)).category_ids_K) == 2
    assert not list(batches(trees, int(sizes[0]), 1))


def test_the_network_computes_what_transformers_does_for_each_conversation_alone(
    base, lessons, tokenizer, trees, tmp_path
) -> None:
    torch.manual_seed(1)
    network = AdaptedNetwork(base, "cpu", compiled=False)
    for name, weights in network.adapter().items():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.05)
    network.save_adapter(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, str(tmp_path))
    with torch.no_grad():
        own = torch.cat([supervision.score(network, batch)[0] for batch in batches(trees, LENGTH, 2)])
        others = []
        for prompt, reply in conversations(lessons, tokenizer):
            logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
            others.append(logits.log_softmax(-1)[range(len(reply)), reply])
    assert torch.allclose(own, torch.cat(others), atol=0.06), "bfloat16 against float32"
    assert set(load_adapter(tmp_path).factors) == {
        name.replace(".base_layer", "").removeprefix("base_model.model.")
        for name in model.state_dict()
        if name.endswith("base_layer.weight")
    }


def test_a_token_sees_its_conversation_and_what_its_tree_begins_with(trees) -> None:
    batch = next(batches(trees, LENGTH, 2))
    sight = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    for node in list_nodes(batch.trees_BS, batch.branches_BS):
        sight[node.row, node.own, node.trunk] = True
        sight[node.row, node.own, node.own] = torch.ones_like(sight[node.row, node.own, node.own]).tril()
    same_tree = batch.trees_BS[:, :, None] == batch.trees_BS[:, None]
    same_branch = (batch.branches_BS[:, None] == 0) | (batch.branches_BS[:, :, None] == batch.branches_BS[:, None])
    assert torch.equal(sight, (same_tree & same_branch).tril())


def test_files_keep_trees_and_can_be_joined(trees, tmp_path) -> None:
    trees.save(tmp_path / "lessons.npz")
    again = [EncodedTrees.load(tmp_path / "lessons.npz") for _ in range(2)]
    both = join_trees(iter(again))
    assert (both.ids_N[: len(trees.ids_N)] == trees.ids_N).all()
    numbers = both.segments_S4[:, 0].tolist()
    assert all(later - earlier in {0, 1} for earlier, later in pairwise(numbers))
    assert numbers[-1] + 1 == 2 * (int(trees.segments_S4[-1, 0]) + 1)


@pytest.fixture(scope="module")
def train(base, trees, tmp_path_factory):
    """Trains in a folder of its name, as a recipe does; returns the folder and what was kept of the run."""
    folder = tmp_path_factory.mktemp("runs")
    trees.save(folder / "lessons.npz")

    def run(out: str, *more: str) -> tuple[Path, dict[str, Any]]:
        words = ["--base", base, "--lessons", folder / "lessons.npz", "--check", folder / "lessons.npz"]
        words += ["--out", folder / out, "--length", LENGTH, "--rows", "1", "--accumulated", "1", *more]
        supervision.train(supervision.parse_arguments(list(map(str, words))))
        return folder / out, torch.load(folder / f"{out}.pt", weights_only=True)

    return run


STEPS = ("--steps", "3", "--line-steps", "1", "--rate", "0.02")


@pytest.fixture(scope="module")
def whole(train) -> tuple[Path, dict[str, Any], str]:
    """A run of three steps, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        return *train("whole", *STEPS), text.getvalue()


def test_a_run_that_was_cut_off_learns_the_same(train, whole) -> None:
    train("parts", *STEPS, "--until-step", "1")
    (_, parts), (_, run, _) = train("parts", *STEPS), whole
    assert parts["progress"]["step"] == run["progress"]["step"] == 3
    assert parts["progress"]["tokens"] == run["progress"]["tokens"]
    assert all(torch.equal(weight, parts["adapter"][name]) for name, weight in run["adapter"].items())


def test_a_run_lowers_the_loss_and_says_what_it_was_made_of(whole) -> None:
    folder, _, text = whole
    lines = [line.split() for line in text.splitlines() if line.startswith("step")]
    assert float(lines[-1][3]) < float(lines[0][3])
    table = json.loads((folder / "progress.json").read_text("utf-8"))
    assert (table["progress"]["step"], table["rate"], len(table["lessons_sha256"])) == (3, 0.02, 64)
    assert table["held_out"]["all"].endswith("/36")


def test_a_run_begins_with_an_adapter(train, whole) -> None:
    folder, run, _ = whole
    _, later = train("later", "--until-step", "0", "--adapter", str(folder))
    for name, weight in run["adapter"].items():
        assert torch.equal(later["adapter"][name], weight.bfloat16().float()), "adapters are stored in bfloat16"


@pytest.mark.parametrize(("step", "share"), [(0, 0.1), (9, 1.0), (55, 0.525), (100, 0.05), (120, 0.05)])
def test_the_rate_rises_and_falls(step, share) -> None:
    assert supervision.rate_at(step, 100) == pytest.approx(share, abs=0.01)

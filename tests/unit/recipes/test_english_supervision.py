"""The supervised training of `english`: trees of conversations with a common prefix, the network, and runs."""

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
from recipes.english.encoded_trees import EncodedTrees, make_batches  # noqa: E402
from recipes.english.network import AdaptedNetwork, list_nodes  # noqa: E402

PROSE = "The harbour was built in 1887 because the old one had silted up. " * 3
HARBOUR_ROW = ProseQuestion("a", 0, len(PROSE), "when", "When did the harbour arise?", "1887", PROSE[:64].strip())
LENGTH = 1536


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny network of the base model's architecture with random weights."""
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
    maker = LessonMaker([ProseSection("a", "story", 0, len(PROSE), PROSE)], [HARBOUR_ROW])
    return [maker.make_reading(random.Random(number)) for number in range(3)]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)


@pytest.fixture(scope="module")
def trees(lessons, tokenizer):
    return encode(tokenizer, lessons)


def encode_conversations(lessons, tokenizer):
    """Yield the token ids of each prompt and reply, in the order of the trees."""
    for reading in lessons:
        for lesson in sorted(reading, key=lambda lesson: lesson.role):
            texts = lesson.text, f"{lesson.reply}<|im_end|>"
            yield tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)


@pytest.mark.parametrize("row_count", [1, 2])
def test_batches_have_every_conversation_once(lessons, tokenizer, trees, row_count) -> None:
    replies = [reply for _, reply in encode_conversations(lessons, tokenizer)]
    targets = [
        batch.targets_C[batch.conversations_C == number].tolist()
        for batch in make_batches(trees, LENGTH, row_count)
        for number in range(len(batch.category_ids_K))
    ]
    assert targets == replies
    tokens = sum(len(prompt) + len(reply) for prompt, reply in encode_conversations(lessons, tokenizer))
    assert sum(batch.tokens for batch in make_batches(trees, LENGTH, row_count)) < tokens / 2, "prefixes are shared"


def test_tree_that_is_too_long_loses_its_last_conversations(trees) -> None:
    sizes = trees.segments_S4[:, 1] + trees.segments_S4[:, 2]
    assert len(next(make_batches(trees, int(sizes[:3].sum()), 1)).category_ids_K) == 2
    assert not list(make_batches(trees, int(sizes[0]), 1))


def test_network_equals_transformers_on_each_conversation(base, lessons, tokenizer, trees, tmp_path) -> None:
    torch.manual_seed(1)
    network = AdaptedNetwork(base, "cpu", compiled=False)
    for name, weights in network.get_adapter().items():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.05)
    network.save_adapter(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, str(tmp_path))
    with torch.no_grad():
        network_logprobs = torch.cat([supervision.score(network, batch)[0] for batch in make_batches(trees, LENGTH, 2)])
        expected_logprobs = []
        for prompt, reply in encode_conversations(lessons, tokenizer):
            logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
            expected_logprobs.append(logits.log_softmax(-1)[range(len(reply)), reply])
    assert torch.allclose(network_logprobs, torch.cat(expected_logprobs), atol=0.06), "bfloat16 against float32"
    assert set(load_adapter(tmp_path).factors) == {
        name.replace(".base_layer", "").removeprefix("base_model.model.")
        for name in model.state_dict()
        if name.endswith("base_layer.weight")
    }


def test_attention_covers_the_trunk_and_the_own_branch(trees) -> None:
    batch = next(make_batches(trees, LENGTH, 2))
    attention = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    for node in list_nodes(batch.trees_BS, batch.branches_BS):
        attention[node.row, node.own, node.trunk] = True
        attention[node.row, node.own, node.own] = torch.ones_like(attention[node.row, node.own, node.own]).tril()
    same_tree = batch.trees_BS[:, :, None] == batch.trees_BS[:, None]
    same_branch = (batch.branches_BS[:, None] == 0) | (batch.branches_BS[:, :, None] == batch.branches_BS[:, None])
    assert torch.equal(attention, (same_tree & same_branch).tril())


def test_saved_trees_are_equal_after_loading_and_can_be_joined(trees, tmp_path) -> None:
    trees.save(tmp_path / "lessons.npz")
    joined_trees = join_trees(iter([EncodedTrees.load(tmp_path / "lessons.npz") for _ in range(2)]))
    assert (joined_trees.ids_N[: len(trees.ids_N)] == trees.ids_N).all()
    tree_numbers = joined_trees.segments_S4[:, 0].tolist()
    assert all(later - earlier in {0, 1} for earlier, later in pairwise(tree_numbers))
    assert tree_numbers[-1] + 1 == 2 * (int(trees.segments_S4[-1, 0]) + 1)


@pytest.fixture(scope="module")
def train(base, trees, tmp_path_factory):
    """Train in a folder, as a recipe does; return the folder and the saved state of the run."""
    folder = tmp_path_factory.mktemp("runs")
    trees.save(folder / "lessons.npz")

    def run(name: str, *options: str) -> tuple[Path, dict[str, Any]]:
        arguments = ["--base", base, "--lessons", folder / "lessons.npz", "--check", folder / "lessons.npz"]
        arguments += ["--out", folder / name, "--length", LENGTH, "--rows", "1", "--accumulated", "1", *options]
        supervision.train(supervision.parse_arguments(list(map(str, arguments))))
        return folder / name, torch.load(folder / f"{name}.pt", weights_only=True)

    return run


THREE_STEPS = ("--steps", "3", "--line-steps", "1", "--rate", "0.02")


@pytest.fixture(scope="module")
def uninterrupted_run(train) -> tuple[Path, dict[str, Any], str]:
    """A run of three steps, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        return *train("whole", *THREE_STEPS), text.getvalue()


def test_interrupted_run_ends_with_the_same_weights(train, uninterrupted_run) -> None:
    train("parts", *THREE_STEPS, "--until-step", "1")
    (_, resumed_state), (_, state, _) = train("parts", *THREE_STEPS), uninterrupted_run
    assert resumed_state["progress"]["step"] == state["progress"]["step"] == 3
    assert resumed_state["progress"]["tokens"] == state["progress"]["tokens"]
    assert all(torch.equal(weight, resumed_state["adapter"][name]) for name, weight in state["adapter"].items())


def test_run_lowers_the_loss_and_records_its_inputs(uninterrupted_run) -> None:
    folder, _, output = uninterrupted_run
    log_lines = [line.split() for line in output.splitlines() if line.startswith("step")]
    assert float(log_lines[-1][3]) < float(log_lines[0][3])
    record = json.loads((folder / "progress.json").read_text("utf-8"))
    assert (record["progress"]["step"], record["rate"], len(record["lessons_sha256"])) == (3, 0.02, 64)
    assert record["held_out"]["all"].endswith("/36")


def test_run_can_start_from_an_adapter(train, uninterrupted_run) -> None:
    folder, state, _ = uninterrupted_run
    _, later_state = train("later", "--until-step", "0", "--adapter", str(folder))
    for name, weight in state["adapter"].items():
        assert torch.equal(later_state["adapter"][name], weight.bfloat16().float()), "adapters are stored in bfloat16"


@pytest.mark.parametrize(("step", "share"), [(0, 0.1), (9, 1.0), (55, 0.525), (100, 0.05), (120, 0.05)])
def test_learning_rate_warms_up_and_decays(step, share) -> None:
    assert supervision.compute_rate_fraction(step, 100) == pytest.approx(share, abs=0.01)

"""The roles that a small policy is taught beside update and answer: what it is taught is what strategies understand."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from memagent_evaluation.tasks.invented_names import Names
from memagent_evaluation.tasks.multi_hop import draw_chain
from memagent_graph.calls import Writes
from memagent_graph.policies.profile import EMBEDDED_FOLDER, Profile, require_profile
from memagent_graph.roles import Parsed, Role, prompts_for, require_room
from memagent_graph.strategies import load_strategy
from memagent_graph.tokenizers import load_tokenizer
from memagent_graph.words import invented_word
from recipes.embedded.role_examples import Problem, RoleRowBuilder, RoleTurn
from recipes.embedded.role_templates import ROLE_TEMPLATES, write_role_folder
from recipes.embedded.tokenizer import load_encoding
from recipes.embedded.training_examples import PromptFormat, Prose, RowBranch

PROSE = "The lexer reads a file line by line. It stops at the first error, and reports where that was. " * 400
STRATEGIES = ("gated", "gated:stop=yes", "parallel", "map_reduce", "reread", "refine", "segments")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("roles")
    write_role_folder(EMBEDDED_FOLDER, out)
    return out


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    return require_profile(folder)


@pytest.fixture(scope="module")
def builder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RoleRowBuilder:
    path = tmp_path_factory.mktemp("corpus") / "train.txt"
    path.write_text(PROSE)
    return RoleRowBuilder(PromptFormat.load(folder, load_encoding(folder)), Prose(path))


def roles_of(strategy: str) -> dict[str, Role]:
    return {role.name: role for role in load_strategy(strategy).roles}


def taught(builder: RoleRowBuilder, rows: int) -> list[tuple[str, str, str]]:
    """Role, whole prompt and reply of each branch of some rows."""
    decode, rng = builder.form.encoding.decode, random.Random(5)
    found = []
    for _ in range(rows):
        row = builder.row(rng, 120, 14)
        for branch in row.branches:
            start = branch.learned[0][0] + 1
            prompt = (row.trunk if branch.sees_trunk else []) + branch.tokens[:start]
            found.append((branch.kind.split("/")[0], decode(prompt), decode([token for _, token, _ in branch.learned])))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_folder_has_words_and_room_for_every_role_of_every_way_of_reading(strategy: str, profile: Profile) -> None:
    roles = load_strategy(strategy).roles
    prompts = prompts_for(roles, profile.prompts, own_words_only=True)
    require_room(roles, prompts, profile.budget, load_tokenizer("embedded").count)


def test_every_reply_that_is_taught_is_within_the_grammar_of_its_role(
    builder: RoleRowBuilder, profile: Profile
) -> None:
    roles = {name: role for strategy in STRATEGIES for name, role in roles_of(strategy).items()}
    tally: Counter[str] = Counter()
    for name, prompt, reply in taught(builder, 40):
        assert reply.endswith("<|end|>")
        text, role = reply.removesuffix("<|end|>").strip(), roles[name]
        assert isinstance(role.parse(text, profile.prompts), Parsed), (name, text)
        if role.writes is Writes.MEMORY:  # or a reader of this policy would refuse it
            assert invented_word(text, [prompt]) is None, (prompt, text)
        tally[name] += 1
    assert tally.keys() == {"update", "answer", *ROLE_TEMPLATES}


def test_a_prompt_that_is_taught_is_what_the_reader_asks(builder: RoleRowBuilder, profile: Profile) -> None:
    prompts = prompts_for(load_strategy("gated").roles, profile.prompts, own_words_only=True)
    fields = {"memory": "Oddo Ludrey", "chunk": "It rains."}
    (message,) = prompts.messages("gated_update", "Who?", **fields)
    own, shares = builder.form.role_prompt("gated_update", prompt="Who?", **fields)
    assert shares
    encoding = builder.form.encoding
    whole = f"<|user|>{message['content']}<|end|><|assistant|>"
    assert builder.form.trunk("It rains.") + own == encoding.encode(whole, allowed_special="all")


def test_the_second_hop_counts_only_once_the_first_is_known() -> None:
    rng = random.Random(2)
    chain = draw_chain(rng, Names(rng), 2, 0)
    problem, (first, second) = Problem(chain.question, chain.facts), chain.facts
    assert problem.after([], [second]) == []
    assert problem.after([], [first]) == [first.object.bare]
    assert problem.after([first.object.bare], [second]) == [first.object.bare, second.object.bare]
    assert problem.after([], [second, first]) == [first.object.bare, second.object.bare]
    assert problem.next_question([]) is None
    asked = problem.next_question([first.object.bare])
    assert asked is not None
    assert first.object.name in asked
    assert problem.next_question([first.object.bare, second.object.bare]) is None


@pytest.mark.parametrize(
    ("before", "after", "gated", "or_stop", "extract"),
    [
        ((), (), "KEEP", "KEEP", "none"),
        ((), ("A",), "REWRITE\n A", "REWRITE\n A", "A"),
        (("A",), ("A",), "KEEP", "KEEP", "none"),
        (("A",), ("A", "B"), "REWRITE\n A\n B", "STOP\n A\n B", "B"),
        (("A", "B"), ("A", "B"), "KEEP", "STOP", "none"),
    ],
)
def test_the_scripted_reader_says_the_same_step_in_each_role(
    before: tuple[str, ...], after: tuple[str, ...], gated: str, or_stop: str, extract: str
) -> None:
    turn = RoleTurn("Who?", before, after, hops=2)
    roles = ("gated_update", "gated_update_or_stop", "extract")
    assert tuple(map(turn.reply, roles)) == (gated, or_stop, extract)


def test_a_noisy_gate_rewrites_what_it_should_keep_and_nothing_else(builder: RoleRowBuilder) -> None:
    noisy = RoleRowBuilder(builder.form, builder.prose, gate_noise=1.0)
    replies = [reply for role, _, reply in taught(noisy, 20) if role == "gated_update"]
    assert replies
    assert all(reply.startswith(" REWRITE\n") for reply in replies)
    others = [reply for role, _, reply in taught(noisy, 20) if role == "gated_update_or_stop"]
    assert any(reply.startswith(" KEEP") for reply in others)


def test_the_answer_is_the_last_entry(builder: RoleRowBuilder) -> None:
    memory = ("Oddo Ludrey", "Bramthorpe")
    branch: RowBranch = builder._answer(random.Random(1), "In which town does the owner of the punt live?", memory)
    reply = builder.form.encoding.decode([token for _, token, _ in branch.learned])
    assert reply == " \\boxed{ Bramthorpe}<|end|>"

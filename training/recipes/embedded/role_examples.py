"""Training rows for more roles than update and answer: the scripted reader also keeps, stops, extracts and asks.

Its knowledge is a list of entries, one per line: the value of a planted fact, or what the facts of a chain lead to, one
after the other ("Oddo Ludrey", then "Bramthorpe", where the question is in which town the owner of the punt lives). At
a section it adds each next entry whose fact is there, so that a second hop is found only when the first is known. Each
role then writes the same step in its own grammar:

    update                 all entries, or "none"
    gated_update           KEEP where nothing was added, else REWRITE and all entries
    gated_update_or_stop   the same, but STOP once there are as many entries as hops
    extract                the entries that were added, or "none"
    decompose              ANSWER, or ASK and the question for the next hop
    integrate              all entries, the new one from a reread
    answer                 the last entry

Three rows in ten have the sections of `training_examples`, so that needles are not forgotten, the others chains of two
facts, with names from the lists of the multi-hop tasks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memagent_evaluation.planted_facts import PlantedFacts
from memagent_evaluation.tasks.invented_names import Names
from memagent_evaluation.tasks.multi_hop import RELATIONS, Chain, HopFact, draw_chain
from recipes.embedded.training_examples import (
    EMPTY,
    FIRST_WEIGHT,
    PromptFormat,
    Prose,
    Row,
    RowBranch,
    RowBuilder,
    plant,
)

_CHAINS = 0.7
"""The share of rows about chains."""
_UPDATES = (("update", 45), ("gated_update", 20), ("gated_update_or_stop", 15), ("extract", 20))
"""Roles that read a section, with the frequency of each."""
_OTHERS = (("answer", 3), ("decompose", 4), ("integrate", 3))
"""Roles that read none, with the frequency of each."""
_UNREAD = 3
"""The number of these in a row."""


@dataclass(frozen=True)
class Problem:
    """A question, and the facts that lead to its answer."""

    question: str
    chain: tuple[HopFact, ...]

    def after(self, entries: Sequence[str], present: Iterable[HopFact]) -> list[str]:
        """Return what is known after these facts were read: each next hop, as far as they lead."""
        known, there = list(entries), set(present)
        while len(known) < len(self.chain) and self.chain[len(known)] in there:
            known.append(self.chain[len(known)].object.bare)
        return known

    def next_question(self, entries: Sequence[str]) -> str | None:
        """Return the question for the next hop; None if the chain has not begun, or is at its end."""
        if not 0 < len(entries) < len(self.chain):
            return None
        return asked_alone(self.chain[len(entries)])


@dataclass(frozen=True)
class RoleTurn:
    """One reading step: what was known before and after, of how many entries."""

    problem: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    hops: int = 1

    @property
    def added(self) -> tuple[str, ...]:
        """The new entries."""
        return self.after[len(self.before) :]

    def reply(self, role: str) -> str:
        """Return the scripted reader's reply in a role."""
        memory = lines(self.after)
        is_enough = len(self.after) >= self.hops
        if role == "extract":
            return lines(self.added)
        if role.startswith("gated"):
            word = "STOP" if is_enough and role.endswith("stop") else "REWRITE" if self.added else "KEEP"
            return f"{word}\n {memory}" if self.added else word
        return memory


def lines(entries: Sequence[str], separator: str = "\n ") -> str:
    """Entries on separate lines; "none" if there are none. The first token of each is that of the text."""
    return separator.join(entries) or EMPTY


def drawn(rng: random.Random, roles: Sequence[tuple[str, int]], count: int) -> list[str]:
    """Return a number of roles, each as often as its weight says."""
    return rng.choices([role for role, _ in roles], [weight for _, weight in roles], k=count)


def asked_alone(fact: HopFact) -> str:
    """Return the question for one fact."""
    return RELATIONS[fact.relation].question.format(s=fact.subject.name)


class RoleRowBuilder(RowBuilder):
    """Composes rows that teach every role.

    Args:
        form, prose, held_out: as for `RowBuilder`; the format has the words of all roles.
        gate_noise: the share of steps without news at which the scripted gate rewrites the known entries instead of
        KEEP: an imperfect teacher, so that a gate can be learned from rewards.
    """

    def __init__(self, form: PromptFormat, prose: Prose, *, held_out: bool = False, gate_noise: float = 0.0) -> None:
        super().__init__(form, prose, held_out=held_out)
        self.gate_noise = gate_noise

    def row(self, rng: random.Random, section_tokens: int, branches: int, hardness: float = 1.0) -> Row:
        """One section with its branches, and prompts without a section."""
        facts = PlantedFacts(rng, held_out=self.held_out, words=self.words, number_share=1.0)
        if rng.random() < _CHAINS:
            return self._of_chains(rng, section_tokens, branches)
        section = self.section(rng, facts, section_tokens)
        ends: list[RowBranch] = []
        for _ in range(branches):
            memory, problem, reply = self.turn(rng, facts, section, hardness)
            turn = RoleTurn(problem, entries(memory), entries(reply))
            ends.append(self._read(rng, drawn(rng, _UPDATES, 1)[0], section.text, turn))
        for role in drawn(rng, _OTHERS, _UNREAD):
            held = EMPTY if rng.random() < 0.2 else self.memory(rng, facts)
            ends.append(self._unread(rng, role, facts.fact().question, entries(held), facts))
        return Row(self.form.trunk(section.text), ends)

    def _of_chains(self, rng: random.Random, section_tokens: int, branches: int) -> Row:
        names = Names(rng)
        chains = [draw_chain(rng, names, 2, rng.randint(2, 6)) for _ in range(2)]
        present = [fact for chain in chains for fact in chain.facts if rng.random() < 0.6]
        others = [fact for chain in chains for fact in chain.distractors]
        present += rng.sample(others, min(len(others), rng.choice((0, 0, 1, 1, 2, 3))))
        rng.shuffle(present)
        text = self._cut_prose(rng, section_tokens)
        text = plant(rng, text, [fact.text for fact in present])
        ends = []
        for _ in range(branches):
            problem, known = self._problem(rng, chains), rng.random()
            before = [fact.object.bare for fact in problem.chain]
            before = before[: 0 if known < 0.62 else 1 if known < 0.92 else 2]
            turn = RoleTurn(problem.question, tuple(before), tuple(problem.after(before, present)), len(problem.chain))
            ends.append(self._read(rng, drawn(rng, _UPDATES, 1)[0], text, turn))
        for role in drawn(rng, _OTHERS, _UNREAD):
            problem = self._problem(rng, chains, share_of_chains=0.8)
            depth = rng.choices((0, 1, 2), (20, 50, 30))[0]
            ends.append(self._unread_of_chain(rng, role, problem, depth))
        return Row(self.form.trunk(text), ends)

    # Problems and what is shown

    def _problem(self, rng: random.Random, chains: Sequence[Chain], share_of_chains: float = 0.6) -> Problem:
        chain = rng.choice(chains)
        if rng.random() < share_of_chains:
            return Problem(chain.question, chain.facts)
        fact = rng.choice((*chain.facts, *chain.facts, *chain.distractors))
        return Problem(asked_alone(fact), (fact,))

    def _cut_prose(self, rng: random.Random, tokens: int) -> str:
        ids = self.form.encoding.encode_ordinary(self.prose.stretch(rng, int(tokens * 4.6)))
        return self.form.encoding.decode(ids[: max(8, tokens - 40)]).strip("\ufffd")

    # Branches

    def _read(self, rng: random.Random, role: str, chunk: str, turn: RoleTurn) -> RowBranch:
        """Return a step that reads a section."""
        if role == "gated_update" and not turn.added and rng.random() < self.gate_noise:
            reply = f"REWRITE\n {lines(turn.after)}"
        else:
            reply = turn.reply(role)
        memory = lines(turn.before, rng.choice(("\n ", "\n")))
        kind = f"{role}/{'same' if not turn.added else 'new'}{turn.hops if turn.hops > 1 else ''}"
        if role == "update":
            prompt, shares = self.form.question(chunk, memory, turn.problem), self.form.is_section_first
        else:
            prompt, shares = self.form.role_prompt(role, chunk=chunk, memory=memory, prompt=turn.problem)
        return self._weighted(RowBranch.of(prompt, self.form.reply(reply), shares, kind, FIRST_WEIGHT))

    def _weighted(self, branch: RowBranch) -> RowBranch:
        """Give the first token of every entry the weight of a reply's first token: it decides what is written."""
        (line_end,) = self.form.encoding.encode_ordinary("\n")
        before = [None, *(token for _, token, _ in branch.learned)]
        weighed = [
            (place, token, FIRST_WEIGHT if previous == line_end else weight)
            for (place, token, weight), previous in zip(branch.learned, before, strict=False)
        ]
        return replace(branch, learned=weighed)

    def _unread(
        self, rng: random.Random, role: str, problem: str, held: tuple[str, ...], facts: PlantedFacts
    ) -> RowBranch:
        """Return a step without a section, about a planted fact."""
        if role == "decompose":
            return self._ends(role, "ANSWER", memory=lines(held), prompt=problem)
        if role == "integrate":
            value = EMPTY if held else facts.fact().value
            after = held or (value,)
            fields = {"chunk": value, "subquestion": problem, "memory": lines(held)}
            return self._ends(role, lines(after), prompt=problem, **fields)
        return self._answer(rng, problem, held)

    def _unread_of_chain(self, rng: random.Random, role: str, problem: Problem, depth: int) -> RowBranch:
        """Return a step without a section, about a chain with `depth` known entries."""
        known = tuple(fact.object.bare for fact in problem.chain)[:depth]
        memory = lines(known, rng.choice(("\n ", "\n")))
        if role == "decompose":
            question = problem.next_question(known)
            return self._ends(
                role, f"ASK\n {question}" if question else "ANSWER", memory=memory, prompt=problem.question
            )
        if role == "integrate":
            known = known[:1] if len(problem.chain) > 1 else ()
            following = problem.chain[len(known)]
            values = (following.object.bare,) if rng.random() < 0.75 else ()
            fields = {"chunk": lines(values), "subquestion": asked_alone(following), "memory": lines(known)}
            return self._ends(role, lines((*known, *values)), prompt=problem.question, **fields)
        return self._answer(rng, problem.question, known)

    def _answer(self, rng: random.Random, problem: str, held: Sequence[str]) -> RowBranch:
        prompt = self.form.answer_prompt(lines(held, rng.choice(("\n ", "\n"))), problem)
        return RowBranch.of(prompt, self.form.boxed(held[-1] if held else EMPTY), False, "answer", 1.0)

    def _ends(self, role: str, reply: str, **fields: str) -> RowBranch:
        prompt, shares = self.form.role_prompt(role, **fields)
        kind = f"{role}/{reply.split(maxsplit=1)[0]}" if role == "decompose" else role
        return RowBranch.of(prompt, self.form.reply(reply), shares, kind, FIRST_WEIGHT)


def entries(memory: str) -> tuple[str, ...]:
    """Return a memory's entries, one per line."""
    return () if memory == EMPTY else tuple(line.strip() for line in memory.splitlines())

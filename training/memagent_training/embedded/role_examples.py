"""Training rows for every role of every way of reading: the scripted reader also keeps, stops, extracts, asks, recalls.

What it knows is a list of entries, one a line: the value of a planted fact, or what the facts of a chain lead to, one
after the other ("Oddo Ludrey", then "Bramthorpe", where the question is in which town the owner of the punt lives). At
a section it adds each next entry whose fact stands there, so that a second hop is found only once the first is known.
Each role then writes what its grammar says of the same step:

    update                 all entries, or "none"
    gated_update           KEEP where nothing was added, else REWRITE and all entries
    gated_update_or_stop   the same, but STOP once there are as many entries as hops
    extract                the entries that were added, or "none"
    recall_update          all entries; after a new one that is not yet the last, a line that looks it up
    recall_last            all entries, from what was looked up alone
    decompose              ANSWER, or ASK and the question for the next hop
    integrate              all entries, the new one from a reread
    merge                  the findings without those that come twice
    answer                 the last entry

Half of the rows have the sections of `training_examples`, so that needles are not unlearnt, the others chains of two
facts, whose names are drawn from the lists that the multi-hop tasks draw from.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memagent_graph.evaluation.planted_facts import PlantedFacts
from memagent_graph.evaluation.tasks.invented_names import Names
from memagent_graph.evaluation.tasks.multi_hop import RELATIONS, Chain, Fact, draw_chain
from memagent_training.embedded.training_examples import (
    EMPTY,
    FIRST_WEIGHT,
    Branch,
    PromptFormat,
    Prose,
    Row,
    RowBuilder,
    plant,
)

_CHAINS = 0.5
"""The share of rows about chains."""
_UPDATES = (("update", 40), ("gated_update", 16), ("gated_update_or_stop", 14), ("extract", 14), ("recall_update", 16))
"""Roles that read a section, and how often each is asked."""
_OTHERS = ("answer", "answer", "decompose", "decompose", "integrate", "recall_last", "merge")
"""Roles that read none, each with its place in every row."""
NOTHING_RECALLED = "(nothing)"


@dataclass(frozen=True)
class Problem:
    """A question, and the facts that lead to its answer."""

    question: str
    chain: tuple[Fact, ...]

    def after(self, entries: Sequence[str], present: Iterable[Fact]) -> list[str]:
        """What is known once these facts were read: each next hop, as far as they lead."""
        known, there = list(entries), set(present)
        while len(known) < len(self.chain) and self.chain[len(known)] in there:
            known.append(self.chain[len(known)].object.bare)
        return known

    def next_question(self, entries: Sequence[str]) -> str | None:
        """What asks for the next hop alone; None where the chain has not begun, or is at its end."""
        if not 0 < len(entries) < len(self.chain):
            return None
        return asked_alone(self.chain[len(entries)])


@dataclass(frozen=True)
class Turn:
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
        """What the scripted reader says in a role."""
        memory = lines(self.after)
        is_enough = len(self.after) >= self.hops
        if role == "extract":
            return lines(self.added)
        if role == "recall_update" and self.added and not is_enough:
            return f"{memory}\nRECALL: {self.after[-1]}"
        if role.startswith("gated"):
            word = "STOP" if is_enough and role.endswith("stop") else "REWRITE" if self.added else "KEEP"
            return f"{word}\n {memory}" if self.added else word
        return memory


def lines(entries: Sequence[str], separator: str = "\n ") -> str:
    """Entries below each other; "none" if there are none. Of each the first token is that of the text."""
    return separator.join(entries) or EMPTY


def asked_alone(fact: Fact) -> str:
    """The question for one fact."""
    return RELATIONS[fact.relation].question.format(s=fact.subject.name)


class RoleRowBuilder(RowBuilder):
    """Composes rows that teach every role.

    Args:
        form, prose, held_out: as for `RowBuilder`; the format has the words of all roles.
        gate_noise: the share of steps without news at which the scripted gate rewrites what is known in place of KEEP:
            an imperfect teacher, for a gate that is to be learnt from rewards.
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
        ends: list[Branch] = []
        for _ in range(branches):
            memory, problem, reply = self.turn(rng, facts, section, hardness)
            turn = Turn(problem, entries(memory), entries(reply))
            ends.append(self._read(rng, self._role(rng), section.text, turn, self._other_fact(rng, facts)))
        for role in _OTHERS:
            held = EMPTY if rng.random() < 0.2 else self.memory(rng, facts)
            ends.append(self._unread(rng, role, facts.fact().question, entries(held), facts))
        return Row(self.form.trunk(section.text), ends)

    def _of_chains(self, rng: random.Random, section_tokens: int, branches: int) -> Row:
        names = Names(rng)
        chains = [draw_chain(rng, names, 2, rng.randint(2, 6)) for _ in range(2)]
        present = [fact for chain in chains for fact in chain.facts if rng.random() < 0.5]
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
            role = self._role(rng)
            recalled = ""
            readable = list(present)
            if role == "recall_update" and len(before) == 1 and rng.random() < 0.7:
                shown = self._looked_up(rng, problem, others, len(before))
                recalled, readable = self._passages(rng, shown), [*present, *shown]
            after = problem.after(before, readable)
            turn = Turn(problem.question, tuple(before), tuple(after), len(problem.chain))
            ends.append(self._read(rng, role, text, turn, recalled))
        for role in _OTHERS:
            problem = self._problem(rng, chains, share_of_chains=0.8)
            depth = rng.choices((0, 1, 2), (20, 50, 30))[0]
            ends.append(self._unread_of_chain(rng, role, problem, depth, others))
        return Row(self.form.trunk(text), ends)

    # Problems and what is shown

    def _problem(self, rng: random.Random, chains: Sequence[Chain], share_of_chains: float = 0.6) -> Problem:
        chain = rng.choice(chains)
        if rng.random() < share_of_chains:
            return Problem(chain.question, chain.facts)
        fact = rng.choice((*chain.facts, *chain.facts, *chain.distractors))
        return Problem(asked_alone(fact), (fact,))

    @staticmethod
    def _looked_up(rng: random.Random, problem: Problem, others: Sequence[Fact], known: int) -> list[Fact]:
        """Facts that a look-up shows: the next hop's two times in three, and others about the same name."""
        shown = [*problem.chain[known : known + 1]] if rng.random() < 0.66 else []
        subject = problem.chain[known - 1].object
        about = [fact for fact in others if fact.subject == subject]
        shown += about[: rng.randint(0, 2)]
        shown += [problem.chain[known - 1]] if rng.random() < 0.4 else []
        rng.shuffle(shown)
        return shown

    def _passages(self, rng: random.Random, shown: Sequence[Fact]) -> str:
        """Passages as a look-up shows them: a fact with some of the prose around it."""
        passages = []
        for fact in shown:
            words = self.prose.stretch(rng, 90).split()
            before, after = words[: rng.randint(0, 5)], words[5 : 5 + rng.randint(0, 6)]
            passages.append(" ".join([*before, fact.text, *after]))
        return "\n".join(passages)

    def _other_fact(self, rng: random.Random, facts: PlantedFacts) -> str:
        return "" if rng.random() < 0.8 else facts.fact().statement

    def _cut_prose(self, rng: random.Random, tokens: int) -> str:
        ids = self.form.encoding.encode_ordinary(self.prose.stretch(rng, int(tokens * 4.6)))
        return self.form.encoding.decode(ids[: max(8, tokens - 40)]).strip("\ufffd")

    # Branches

    def _role(self, rng: random.Random) -> str:
        return rng.choices([role for role, _ in _UPDATES], [share for _, share in _UPDATES])[0]

    def _read(self, rng: random.Random, role: str, chunk: str, turn: Turn, recalled: str) -> Branch:
        """A step that reads a section."""
        if role == "gated_update" and not turn.added and rng.random() < self.gate_noise:
            reply = f"REWRITE\n {lines(turn.after)}"
        else:
            reply = turn.reply(role)
        memory = lines(turn.before, rng.choice(("\n ", "\n")))
        kind = f"{role}/{'same' if not turn.added else 'new'}{turn.hops if turn.hops > 1 else ''}"
        if role == "update":
            prompt, shares = self.form.question(chunk, memory, turn.problem), self.form.is_section_first
        else:
            fields = {
                "chunk": chunk,
                "memory": memory,
                "prompt": turn.problem,
                "recalled": recalled or NOTHING_RECALLED,
            }
            prompt, shares = self.form.role_prompt(role, **fields)
        return Branch.of(prompt, self.form.reply(reply), shares, kind, FIRST_WEIGHT)

    def _unread(
        self, rng: random.Random, role: str, problem: str, held: tuple[str, ...], facts: PlantedFacts
    ) -> Branch:
        """A step without a section, about a planted fact."""
        if role == "decompose":
            return self._ends(role, "ANSWER", memory=lines(held), prompt=problem)
        if role == "merge":
            return self._merge(rng, problem, [facts.fact().value for _ in range(rng.randint(1, 5))])
        if role == "integrate":
            found = EMPTY if held else facts.fact().value
            after = held or (found,)
            fields = {"chunk": found, "subquestion": problem, "memory": lines(held)}
            return self._ends(role, lines(after), prompt=problem, **fields)
        if role == "recall_last":
            fact = facts.fact()
            shown = fact.statement if rng.random() < 0.5 else ""
            after = held or ((fact.value,) if shown else ())
            fields = {"recalled": shown or NOTHING_RECALLED, "memory": lines(held)}
            return self._ends(role, lines(after), prompt=fact.question, **fields)
        return self._answer(rng, problem, held)

    def _unread_of_chain(
        self, rng: random.Random, role: str, problem: Problem, depth: int, others: Sequence[Fact]
    ) -> Branch:
        """A step without a section, about a chain of which `depth` entries are known."""
        known = tuple(fact.object.bare for fact in problem.chain)[:depth]
        memory = lines(known, rng.choice(("\n ", "\n")))
        if role == "decompose":
            asked = problem.next_question(known)
            return self._ends(role, f"ASK\n {asked}" if asked else "ANSWER", memory=memory, prompt=problem.question)
        if role == "merge":
            findings = [fact.object.bare for fact in rng.sample(others, min(len(others), rng.randint(1, 4)))]
            return self._merge(rng, problem.question, [*known, *findings])
        if role in {"integrate", "recall_last"}:
            known = known[:1] if len(problem.chain) > 1 else ()
            memory = lines(known)
            following = problem.chain[len(known)]
        if role == "integrate":
            found = rng.random() < 0.75
            after = (*known, following.object.bare) if found else known
            chunk = following.object.bare if found else EMPTY
            fields = {"chunk": chunk, "subquestion": asked_alone(following), "memory": memory}
            return self._ends(role, lines(after), prompt=problem.question, **fields)
        if role == "recall_last":
            shown = self._looked_up(rng, problem, others, len(known)) if known else []
            after = tuple(problem.after(known, shown))
            fields = {"recalled": self._passages(rng, shown) or NOTHING_RECALLED, "memory": memory}
            return self._ends(role, lines(after), prompt=problem.question, **fields)
        return self._answer(rng, problem.question, known)

    def _merge(self, rng: random.Random, problem: str, findings: Sequence[str]) -> Branch:
        repeated = [each for each in findings for _ in range(1 + (rng.random() < 0.25))]
        kept = lines(list(dict.fromkeys(findings)))
        return self._ends("merge", kept, chunk="\n".join(repeated), prompt=problem)

    def _answer(self, rng: random.Random, problem: str, held: Sequence[str]) -> Branch:
        prompt = self.form.answer_prompt(lines(held, rng.choice(("\n ", "\n"))), problem)
        return Branch.of(prompt, self.form.boxed(held[-1] if held else EMPTY), False, "answer", 1.0)

    def _ends(self, role: str, reply: str, **fields: str) -> Branch:
        prompt, shares = self.form.role_prompt(role, **fields)
        kind = f"{role}/{reply.split(maxsplit=1)[0]}" if role == "decompose" else role
        return Branch.of(prompt, self.form.reply(reply), shares, kind, FIRST_WEIGHT)


def entries(memory: str) -> tuple[str, ...]:
    """A memory's entries, one a line."""
    return () if memory == EMPTY else tuple(line.strip() for line in memory.splitlines())

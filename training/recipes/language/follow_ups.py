"""Turns after a read: what to ask next, how to add what was found, and whether memory answers.

They see no section, only a memory with some facts of a chain, often among others that do not matter. A part that is
missing is asked for in a question that names its subject.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from memagent_evaluation.english_facts import EnglishFact, EnglishFacts
from recipes.language.real_questions import RealQuestion, paraphrased
from recipes.language.turns import NOT_STATED, NOTHING, LessonTurn, asked, shuffled


def follow_up(rng: random.Random, facts: EnglishFacts, real: Sequence[RealQuestion]) -> LessonTurn:
    """Return a turn of the role "decompose", "integrate", "recall_last" or "answer".

    Args:
        rng: decides everything.
        facts: where new facts come from.
        real: sentences of prose, to be asked about or to be in memory by mistake.
    """
    role = rng.choices(("decompose", "integrate", "recall_last", "answer"), (50, 20, 10, 20))[0]
    if real and rng.random() < 0.1:
        return _on_one_note(rng, role, rng.choice(real))
    chain, question, answer = _chain(rng, facts)
    known = 0 if rng.random() < 0.1 else len(chain)
    if known > 1 and rng.random() < 0.6:
        known = rng.randint(1, len(chain) - 1)
    noise = _noise(rng, facts, chain, real)
    memory = " ".join(shuffled(rng, [*(fact.statement for fact in chain[:known]), *noise]))
    shown = {"memory": memory or rng.choice(("", "none"))}
    if known == len(chain) and role != "decompose":
        role = "answer"
    if role == "answer":
        answer = answer if known == len(chain) else NOT_STATED
        return LessonTurn(role, question, shown, f"\\boxed{{{answer}}}", writes=answer != NOT_STATED)
    if role == "decompose" and known in {0, len(chain)}:
        return LessonTurn(role, question, shown, "ANSWER")
    following = chain[known]
    sub_question = facts.about(following.relation, following.subject)
    if role == "decompose":
        return LessonTurn(role, question, shown, f"ASK\n{sub_question}")
    statement = following.statement if rng.random() < 0.8 else ""
    reply = " ".join(filter(None, (memory, statement))) or "none"
    if role == "integrate":
        fields = {**shown, "chunk": statement or "none", "subquestion": sub_question}
    else:
        fields = {**shown, "recalled": "\n".join(shuffled(rng, [*filter(None, [statement]), *noise])) or NOTHING}
    return LessonTurn(role, question, fields, reply, writes=bool(statement))


def _chain(rng: random.Random, facts: EnglishFacts) -> tuple[list[EnglishFact], str, str]:
    """One to three facts that lead to each other, the question that needs them all, and its answer."""
    hops = rng.choices((1, 2, 3), (20, 60, 20))[0]
    if hops == 1:
        fact = facts.fact()
        question, answer = facts.question(fact)
        return [fact], asked(rng, question), answer
    chain, question = facts.chain(hops)
    return chain, asked(rng, question), chain[-1].value


def _noise(
    rng: random.Random, facts: EnglishFacts, chain: Sequence[EnglishFact], real: Sequence[RealQuestion]
) -> list[str]:
    """Up to two sentences that do not matter, of them often what is asked for, of somebody else."""
    others = [facts.fact(chain[-1].relation).statement, *(question.statement for question in real[:1])]
    return shuffled(rng, others)[: rng.choices((0, 1, 2), (50, 35, 15))[0]]


def _on_one_note(rng: random.Random, role: str, real: RealQuestion) -> LessonTurn:
    """Return a question about a sentence of prose, which is all of memory: nothing is missing."""
    question = asked(rng, paraphrased(rng, real.question))
    if role == "decompose":
        return LessonTurn(role, question, {"memory": real.statement}, "ANSWER")
    return LessonTurn("answer", question, {"memory": real.statement}, f"\\boxed{{{real.statement}}}", writes=True)

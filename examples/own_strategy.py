"""A strategy of your own: ask whether a chunk has anything new, and update the memory only then.

    memagent read book.txt -q "Who built the lighthouse?" --strategy examples/own_strategy.py:OwnGate

Its runs are logged, resumed, edited, shown, exported and trained on like those of the strategies that ship.
"""

from memagent_graph import ANSWER, UPDATE, EventKind, ParsedReply, ParseFailure, Role, SequentialState, Strategy, Writes
from memagent_graph.reading.steps import answer, get_chosen_chunk, overwrite_memory, read_chunk, route_after_read_chunk


def parse_yes_or_no(text, prompts):
    """Return the decision, True for yes. Any reply except yes and no is malformed, and the reader asks again."""
    word = text.strip(" .").casefold()
    if word not in {"yes", "no"}:
        return ParseFailure(EventKind.MALFORMED, f"the gate said {text[:20]!r} and neither yes nor no")
    return ParsedReply(word, word == "yes")


GATE = Role("gate", Writes.DECISION, max_tokens=4, parse=parse_yes_or_no, template="""\
<section>\n{chunk}\n</section>\n
The section above is the next part of a long document. Does it say anything on the problem that the memory lacks?\n
<memory>\n{memory}\n</memory>\n
<problem>\n{prompt}\n</problem>\n
Reply with yes or no:""")  # fmt: skip


class GateState(SequentialState):
    """The state of a sequential strategy, with the gate's decision on the chosen chunk."""

    is_new: bool


class OwnGate(Strategy):
    """A strategy of the steps read_chunk -> ask_gate -> (overwrite_memory) -> read_chunk -> ... -> answer."""

    name, roles, state = "own_gate", (GATE, UPDATE, ANSWER), GateState

    def wire(self, graph):
        """Add the steps of the paper's loop, with the gate between read_chunk and overwrite_memory."""
        for step in (read_chunk, ask_gate, overwrite_memory, answer):
            graph.add_node(step.__name__, step)
        for start, end in (("open_document", "read_chunk"), ("overwrite_memory", "read_chunk"), ("answer", "__end__")):
            graph.add_edge(start, end)
        graph.add_conditional_edges("read_chunk", route_after_read_chunk("ask_gate"), ["ask_gate", "answer", "__end__"])
        graph.add_conditional_edges("ask_gate", route_after_gate, ["overwrite_memory", "read_chunk"])


async def ask_gate(state, step):
    """Ask whether the chosen chunk has anything new; every reply except a clear no counts as yes."""
    span = get_chosen_chunk(state)
    reply = await step.ask(GATE, memory=state["memory"], chunk=step.read_text(span), reads=[span])
    if reply.value is False:
        step.mark_read(span)
    return {"is_new": reply.value is not False}


def route_after_gate(state):
    """Return the next step: overwrite_memory if there is something new, otherwise read_chunk."""
    return "overwrite_memory" if state["is_new"] else "read_chunk"

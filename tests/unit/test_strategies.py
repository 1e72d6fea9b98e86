"""Loading of strategies, refusals of malformed ones, several passes, and resuming between steps."""

from __future__ import annotations

import io
import pickle
from itertools import count
from typing import NotRequired

import pytest
import rich.console
from langgraph.checkpoint.memory import InMemorySaver
from support.scripts import extract, make_document, read_perfectly

from memagent_graph import (
    ANSWER,
    UPDATE,
    Document,
    Overwrite,
    ReaderState,
    Role,
    ScriptedPolicy,
    SequentialState,
    Strategy,
    Writes,
    build_graph,
)  # fmt: skip
from memagent_graph.errors import BudgetError, PromptError, StrategyError
from memagent_graph.reading.steps import answer, get_chosen_chunk, overwrite_memory, read_chunk, route_after_read_chunk
from memagent_graph.strategies import list_strategy_names, load_strategy
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.terminal import render_timeline

TEXT = make_document({0.3: "The key of harbor is 4711."}, words=600)
QUESTION = "What is the key of harbor?"


class PaperLoop(Strategy):
    """The paper's loop under another name."""

    name = "line"
    roles = (UPDATE, ANSWER)
    state = SequentialState
    update = staticmethod(overwrite_memory)

    def wire(self, graph) -> None:
        graph.add_node("read_chunk", read_chunk)
        graph.add_node("update_memory", self.update)
        graph.add_node("answer", answer)
        graph.add_edge("open_document", "read_chunk")
        graph.add_conditional_edges(
            "read_chunk", route_after_read_chunk("update_memory"), ["update_memory", "answer", "__end__"]
        )
        graph.add_edge("update_memory", "read_chunk")
        graph.add_edge("answer", "__end__")


def test_a_strategy_is_loaded_by_name_from_a_class_or_from_a_file(tmp_path) -> None:
    assert type(load_strategy("parallel"))(3) == load_strategy("parallel:passes=3")
    assert pickle.loads(pickle.dumps(UPDATE)) == UPDATE
    assert load_strategy(None) == load_strategy("overwrite") == load_strategy(Overwrite) == Overwrite()
    file = tmp_path / "mine.py"
    file.write_text(
        "from memagent_graph import Overwrite\nclass Mine(Overwrite):\n    name = 'mine'\nother = Mine()\nthing = 3\n"
    )
    assert load_strategy(f"{file}:Mine").name == load_strategy(f"{file}:other").name == "mine"
    assert {"overwrite", "refine", "map_reduce"} <= set(list_strategy_names())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("overwrit", "Did you mean overwrite"),
        ("nothing_like_it", "Choose one of: overwrite, gated, refine, map_reduce, parallel, segments, reread, recall"),
        ("no_such_file.py:Mine", "no_such_file.py"),
        (3, "not a strategy"),
    ],
)
def test_an_unknown_strategy_is_refused(source, words) -> None:
    with pytest.raises(StrategyError) as error:
        load_strategy(source)
    assert words in str(error.value)


def make_strategy(**changes) -> Strategy:
    return type("ChangedLoop", (PaperLoop,), changes)()


def make_one_step_strategy(step, **changes) -> Strategy:

    def wire(self, graph) -> None:
        graph.add_node("only", step)
        graph.add_edge("open_document", "only")
        graph.add_edge("only", "__end__")

    return make_strategy(wire=wire, state=ReaderState, **changes)


def make_gated_strategy(template: str) -> Strategy:
    return make_strategy(roles=(UPDATE, ANSWER, Role("gate", Writes.DECISION, template=template)))


FIELDS = "<b>{memory}</b><c>{prompt}</c>"


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (make_gated_strategy(FIELDS), r"the role gate: the field \{chunk\} is missing"),
        (
            make_gated_strategy("<a>{chunk}</a>" + FIELDS + " very many words" * 300),
            r"the role 'gate' needs \d+ tokens.*Serve the model with a window",
        ),
        (make_strategy(roles=()), "has no roles"),
        (make_strategy(roles=(UPDATE, ANSWER, Role("update"))), "two roles 'update'"),
        (make_strategy(name=""), "has no name"),
        (make_strategy(name="refine"), r"name 'refine'.*Choose another name"),
        (make_strategy(state=dict), "lacks"),
        (make_strategy(roles=(UPDATE, ANSWER, Role("gate"))), "the role 'gate' has no template"),
        (make_strategy(continues_after="nowhere"), "`continues_after` is 'nowhere'"),
        (make_strategy(wire=lambda self, graph: graph.add_edge("open_document", "nowhere")), "is not valid"),
        (make_strategy(wire=lambda self, graph: graph.add_loop("a", read_chunk, "b", answer)), "a begins a loop"),
    ],
)
def test_a_malformed_strategy_is_refused_with_the_remedy(make_reader, strategy, words) -> None:
    with pytest.raises((StrategyError, PromptError, BudgetError), match=words) as error:
        make_reader(strategy=strategy).read(TEXT, QUESTION)
    assert error.value.hint


def test_a_change_of_an_unknown_state_channel_is_refused(make_reader) -> None:
    async def update(state, step):
        return {**await overwrite_memory(state, step), "pages": 3}

    with pytest.raises(StrategyError, match=r"'update_memory' changes 'pages'.*Add it to the state class"):
        make_reader(strategy=make_strategy(update=staticmethod(update))).read(TEXT, QUESTION)

    class PagesState(SequentialState):
        pages: NotRequired[int]

    strategy = make_strategy(update=staticmethod(update), state=PagesState)
    assert make_reader(strategy=strategy).read(TEXT, QUESTION).answer == "4711"


def test_a_call_in_a_role_that_the_strategy_does_not_list_is_refused(make_reader) -> None:
    async def ask(state, step):
        await step.ask(Role("riddle"))

    with pytest.raises(StrategyError, match="the role 'riddle' has no template here"):
        make_reader(strategy=make_one_step_strategy(ask)).read(TEXT, QUESTION)


def follow_link(prompt: str) -> str:
    """Keep the harbor's town, and the town's key once the memory names the town."""
    memory = (extract(prompt, "memory") or extract(prompt, "draft")).removeprefix("(empty)")
    section = extract(prompt, "section")
    if "<section>" not in prompt:
        return "\\boxed{4711}" if "4711" in memory else "\\boxed{unknown}"
    facts = ["The harbor is in Fernley.", *(["The key of Fernley is 4711."] if "in Fernley" in memory else [])]
    return "\n".join(dict.fromkeys([*filter(None, memory.splitlines()), *(fact for fact in facts if fact in section)]))


@pytest.mark.parametrize("name", ["overwrite", "refine"])
def test_a_second_pass_keeps_facts_that_became_relevant_after_they_were_read(make_reader, name) -> None:
    text = make_document({0.1: "The key of Fernley is 4711.", 0.9: "The harbor is in Fernley."}, words=600)
    one_pass, passes = (
        make_reader(ScriptedPolicy(follow_link), strategy=strategy).read(text, QUESTION)
        for strategy in (name, f"{name}:passes=4")
    )
    assert (one_pass.answer, passes.answer) == ("unknown", "4711")
    assert passes.chunks_read == 3 * one_pass.chunks_read, "the third pass changes nothing, so it is the last"
    slots = [call.slot for call in passes.trace.calls if call.reads]
    assert slots == list(range(passes.chunks_read))
    assert [call.chunk_index for call in passes.trace.calls if call.reads] == [*range(one_pass.chunks_read)] * 3
    assert [(quote.quote, quote.chunk_index) for quote in passes.evidence] == [("The key of Fernley is 4711", 0)]
    assert (progress := [update.progress for update in passes.updates]) == sorted(progress), "it never falls"
    console = rich.console.Console(file=io.StringIO(), width=100)
    console.print(render_timeline(build_timeline(passes.view())))
    line = f"chunks 1-{one_pass.chunks_read} (read again): unchanged"
    assert line in console.file.getvalue(), "each pass has its own lines"


def test_no_second_pass_follows_an_empty_memory_or_a_single_chunk(make_reader) -> None:
    one_pass, passes = (
        make_reader(ScriptedPolicy(follow_link), strategy=strategy) for strategy in ("overwrite", "overwrite:passes=2")
    )
    filler = make_document({}, words=600)
    assert passes.read(filler, QUESTION).chunks_read == one_pass.read(filler, QUESTION).chunks_read > 1
    assert passes.read("The harbor is in Fernley.", QUESTION).chunks_read == 1
    with pytest.raises(StrategyError, match="overwrite:passes must be at least 1, got 0"):
        load_strategy("overwrite:passes=0")


def test_a_document_cannot_close_a_field_of_a_strategys_template(make_reader) -> None:
    gate = Role(
        "gate", Writes.DECISION, template="<page>{chunk}</page><kept>{memory}</kept><ask>{prompt}</ask>", max_tokens=4
    )

    async def ask_gate(state, step):
        reply = await step.ask(gate, chunk="x </page> y", memory="")
        assert reply.text == "yes"
        return {"memory": ""}

    policy = ScriptedPolicy(lambda prompt: "yes")
    reader = make_reader(policy, strategy=make_one_step_strategy(ask_gate, roles=(UPDATE, ANSWER, gate)))
    reader.graph().invoke({"question": QUESTION, "document": TEXT})
    assert policy.prompts[0].count("</page>") == 1
    assert "<\\/page>" in policy.prompts[0]


def test_a_step_that_does_not_call_mark_read_is_refused(make_reader) -> None:
    async def update(state, step):
        span = get_chosen_chunk(state)
        reply = await step.ask(UPDATE, memory="", chunk=step.read_text(span), reads=[span], slot=next(slots))
        return {"memory": reply.text}

    slots = count()
    with pytest.raises(StrategyError, match=r"chunk 0 was chosen twice.*step\.mark_read"):
        make_reader(strategy=make_strategy(update=staticmethod(update))).read(TEXT, QUESTION)
    with pytest.raises(StrategyError, match="ran without a chunk"):
        get_chosen_chunk({"span": None})


@pytest.mark.parametrize(("node", "chunk"), [("open_document", None), ("update_memory", 0), ("update_memory", 3)])
async def test_a_run_killed_before_a_step_resumes_and_reads_each_chunk_once(make_reader, node, chunk) -> None:
    """Before the first step only the input is saved; before an update, a chunk is chosen but not read."""
    saver, policy = InMemorySaver(), ScriptedPolicy(read_perfectly)
    reader = make_reader(policy, checkpoints=saver)
    graph = build_graph(await reader.aprepare(), Overwrite(), checkpointer=saver)
    request = {"question": QUESTION, "document": reader.store.add(Document.of(TEXT)), "run_id": "r"}
    async for checkpoint in graph.astream(request, {"configurable": {"thread_id": "r"}}, stream_mode="checkpoints"):
        if checkpoint["next"] == [node] and checkpoint["values"].get("span", {}).get("index") == chunk:
            break
    result = await reader.aresume("r")
    sections = [extract(prompt, "section") for prompt in policy.prompts if "<section>" in prompt]
    assert len(sections) == len(set(sections)) == result.chunks_read
    assert "".join(TEXT.split()) == "".join("".join(sections).split())
    assert result.answer == "4711"

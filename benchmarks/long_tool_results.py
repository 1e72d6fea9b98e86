"""Whether an agent finds a fact in a tool result of 500,000 tokens, depending on what is between tool and model.

`python -m benchmarks.long_tool_results [TRIALS]` prints the table, with this number of trials with the embedded policy
as the reader (none by default: one reads 500,000 tokens in some minutes).

**The task.** Ten results of 500,000 tokens of English prose, one seeded depth each, with one planted fact that is asked
for, one that resembles it, and three others. Every result comes in two forms: as text with one paragraph per line, and
as one line of JSON, as from many services. An answer is right if it is the fact's value.

**The model** is scripted, the same for all, and has a window of 8,192 tokens of which 512 are for its output. Prompt,
tool calls and the schemas of the tools count; what is longer is refused, as by a server, and the trial is lost unless a
middleware handles it. It calls the tool, then answers if a sentence in its prompt states the fact (whatever brought it
there) or if a tool message offers an answer; otherwise it says that it does not know. As a summariser it keeps every
planted fact and every question that it sees. If a result was moved to a file, it searches the file for the question's
entity if it has `grep`, and otherwise reads the first page, of the 100 lines that the notice proposes. It does not read
further pages: 500,000 tokens are more than sixty windows.

If a question's own words are in a line of the result, `grep` is enough, and costs a fortieth. In a result of one line
it is not, for any window: it finds the whole line, and shows its first 80,000 characters.

**The contenders** are configured to act well before the window is full, and tool results may be cleared, summarised or
evicted at once; `create_deep_agent` has its defaults, with eviction, `grep` and summaries after a refused prompt.
MemAgent's reader has a window of 8,192 tokens too, and a scripted policy that misses nothing: the question is whether
the result reaches a model at all. The embedded policy is a real one, with a window of 1,024.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepagents import create_deep_agent
from deepagents.backends import StateBackend
from deepagents.middleware.filesystem import FilesystemMiddleware
from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware, SummarizationMiddleware
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure
from benchmarks.text import prose_of
from langchain_memagent.middleware import MemAgentMiddleware
from langchain_memagent.transcripts import format_transcript
from memagent_evaluation.planted_facts import Fact, PlantedFacts
from memagent_graph import Budget, LocalPolicy, MemAgent, ScriptedPolicy, load_prompts
from memagent_graph.tokenizers import load_tokenizer

TOKENS = 500_000
TRIALS = 10
WINDOW = 8192
OUTPUT = 512
ACTS_ABOVE = 4000
"""Tokens; the threshold of every middleware."""

_TOKENIZER = load_tokenizer("embedded")
_QUESTION = re.compile(r"What is the ([\w ]+?) (?:of|for) ([\w -]+?)(?: mentioned in the provided text)?\?", re.I)
_STATED = re.compile(r"[^.\n\"]*\b(?:of|for) [\w -]+? is:? \w[\w ]*?\.")
_OFFERED = re.compile(r"^Answer: (\S+)$", re.M)
_EVICTED = re.compile(r"saved in the filesystem at this path: (\S+)")
_UNKNOWN = "I do not know."


@dataclass(frozen=True, slots=True)
class Trial:
    """One tool result and its question."""

    fact: Fact
    depth: float
    text: str

    def result(self, form: str) -> str:
        """The result as text, or as one line of JSON."""
        return self.text if form == "text" else json.dumps({"entries": self.text.split("\n\n")})


def trials(number: int = TRIALS, tokens: int = TOKENS) -> Iterator[Trial]:
    """Seeded trials, each with its fact at another random depth."""
    generator = random.Random(4)
    facts = PlantedFacts(generator, held_out=True, number_share=1.0)
    (prose,) = prose_of(tokens)
    for _ in range(number):
        paragraphs, depth = prose.split("\n\n"), generator.random()
        fact = facts.fact()
        distractors = [facts.near_miss(fact), *(facts.fact(exclude=frozenset({fact.entity.lower()})) for _ in range(3))]
        for position, fact_at_depth in sorted(
            [(depth, fact), *((generator.random(), distractor) for distractor in distractors)], key=lambda p: -p[0]
        ):
            paragraphs.insert(int(position * len(paragraphs)), fact_at_depth.statement)
        yield Trial(fact, depth, "\n\n".join(paragraphs))


def stated_value(question: str, text: str) -> str | None:
    """The statement in a text about the entity and attribute of a question."""
    question_match = _QUESTION.search(question)
    if question_match is None:
        return None
    attribute, entity = map(re.escape, question_match.groups())
    match = re.search(rf"\b{attribute}s? (?:of|for) {entity} is:? (\w+)", text, re.I)
    return match[1] if match else None


@dataclass
class Spent:
    """The prompts of one trial's models."""

    largest: int = 0
    tokens: int = 0
    refused: bool = False


class WindowedModel(BaseChatModel):
    """The scripted model; see the module."""

    spent: Spent

    @property
    def _llm_type(self) -> str:
        return "windowed"

    def bind_tools(self, tools: Sequence[Any], **options: Any) -> Runnable[Any, AIMessage]:
        return self.bind(tools=[convert_to_openai_tool(schema) for schema in tools])

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        tools: list[dict[str, Any]] = options.get("tools") or []
        size = sum(_TOKENIZER.count(format_transcript([message])) + 4 for message in messages)
        size += _TOKENIZER.count(json.dumps(tools)) if tools else 0
        self.spent.largest = max(self.spent.largest, size)
        if size > WINDOW - OUTPUT:
            self.spent.refused = True
            raise ContextOverflowError(f"{size} tokens and {OUTPUT} of output do not fit the window of {WINDOW}")
        reply = scripted_reply(messages, frozenset(schema["function"]["name"] for schema in tools))
        self.spent.tokens += size + _TOKENIZER.count(format_transcript([reply]))
        return ChatResult(generations=[ChatGeneration(message=reply)])


def scripted_reply(messages: Sequence[BaseMessage], tools: frozenset[str]) -> AIMessage:
    """The model's reply, from only the prompt."""
    everything = "\n".join(message.text for message in messages)
    if not tools:
        notes = [match[0] for match in (*_QUESTION.finditer(everything), *_STATED.finditer(everything))]
        return AIMessage("\n".join(notes) or "Nothing of note.")
    questions = [message.text for message in messages if isinstance(message, HumanMessage) and "?" in message.text]
    question = questions[-1] if questions else ""
    results = [message for message in messages if isinstance(message, ToolMessage)]
    if value := stated_value(question, "\n".join(message.text for message in messages if message.type != "human")):
        return AIMessage(value)
    if answers := [match[1] for message in results if (match := _OFFERED.search(message.text))]:
        return AIMessage(answers[-1])
    if not results:
        return _call("fetch_archive", {"name": "minutes"})
    path = next((match[1] for message in results if (match := _EVICTED.search(message.text))), None)
    lookups = {message.name for message in results} & {"grep", "read_file"}
    return _look_up(question, path, tools) if path and not lookups else AIMessage(_UNKNOWN)


def _look_up(question: str, path: str, tools: frozenset[str]) -> AIMessage:
    """Search an evicted result, or read its first page if it cannot be searched."""
    match = _QUESTION.search(question)
    if match and "grep" in tools:
        return _call("grep", {"pattern": match[2].removeprefix("the "), "path": path, "output_mode": "content"})
    return _call("read_file", {"file_path": path, "offset": 0, "limit": 100})


def _call(name: str, arguments: dict[str, Any]) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{name}"}])


def perfect_reader(prompt: str) -> str:
    """A policy that keeps what the section states about the question, and answers with it."""
    problem, memory, section = (_part(prompt, tag) for tag in ("problem", "memory", "section"))
    if "<section>" not in prompt:
        return f"\\boxed{{{memory if memory != '(empty)' else 'not stated'}}}"
    return stated_value(problem, section) or memory or "(empty)"


def _part(prompt: str, tag: str) -> str:
    match = re.search(rf"<{tag}>\s*(.*?)\s*</{tag}>", prompt, re.S)
    return match[1] if match else ""


@dataclass(frozen=True)
class Contender:
    """A contender between tool and model: makes an agent from one trial's model and tool."""

    name: str
    agent: Callable[[WindowedModel, BaseTool], Any]
    trials: int = TRIALS


def behind(name: str, middleware: Callable[[WindowedModel], list[Any]], trials: int = TRIALS) -> Contender:
    """A plain agent with these middlewares."""
    return Contender(name, lambda model, fetch: create_agent(model, [fetch], middleware=middleware(model)), trials)


@dataclass
class Score:
    """A contender's score with one form of results."""

    right: int = 0
    trials: int = 0
    largest: int = 0
    tokens: int = 0
    seconds: float = 0.0
    refused: int = 0


def contenders(reader: MemAgent, embedded: MemAgent | None, embedded_trials: int) -> list[Contender]:
    """All that are compared."""
    evict: dict[str, Any] = {"backend": StateBackend(), "tool_token_limit_before_evict": ACTS_ABOVE}
    entries = [
        behind("no middleware", lambda model: []),
        behind(
            "SummarizationMiddleware",
            lambda model: [SummarizationMiddleware(model, trigger=("tokens", ACTS_ABOVE), keep=("messages", 1))],
        ),
        behind(
            "ContextEditingMiddleware",
            lambda model: [ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=ACTS_ABOVE, keep=0)])],
        ),
        behind("deepagents' eviction, read_file", lambda model: [FilesystemMiddleware(**evict, tools=["read_file"])]),
        Contender("create_deep_agent: eviction, grep", lambda model, fetch: create_deep_agent(model, [fetch])),
        behind("MemAgentMiddleware", lambda model: [MemAgentMiddleware(reader, result_tokens=ACTS_ABOVE)]),
    ]
    if embedded is not None:
        entries.append(
            behind(
                "MemAgentMiddleware, embedded policy",
                lambda model: [MemAgentMiddleware(embedded, result_tokens=ACTS_ABOVE)],
                embedded_trials,
            )
        )
    return entries


async def one_trial(contender: Contender, trial: Trial, form: str) -> tuple[bool, Spent]:
    """Run an agent on one result; return whether it was right, and its cost."""

    @tool
    def fetch_archive(name: str) -> str:
        """Fetch an archive as a whole."""
        return trial.result(form)

    model = WindowedModel(spent=Spent())
    agent = contender.agent(model, fetch_archive)
    try:
        state = await agent.ainvoke({"messages": [HumanMessage(trial.fact.question)]}, {"recursion_limit": 50})
    except ContextOverflowError:
        return False, model.spent
    for message in state["messages"]:
        if isinstance(message, ToolMessage) and (metadata := message.response_metadata.get("memagent")):
            model.spent.tokens += metadata["usage"]["total_tokens"]
    return state["messages"][-1].text.strip() == trial.fact.value, model.spent


async def compare(embedded_trials: int = 0, number: int = TRIALS) -> dict[str, dict[str, Score]]:
    """Every contender's score, by name and form."""
    everything = list(trials(number))
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"store": Path(folder), "run_log": False}
        reader = MemAgent(
            ScriptedPolicy(perfect_reader),
            tokenizer=_TOKENIZER,
            budget=Budget(context_window=WINDOW),
            prompts=load_prompts(),
            boundary="sentence",
            **options,
        )
        embedded = MemAgent(LocalPolicy.embedded(), **options) if embedded_trials else None
        scores: dict[str, dict[str, Score]] = {}
        for contender in contenders(reader, embedded, embedded_trials):
            for form in ("text", "JSON"):
                start_time = time.perf_counter()
                selection = everything[: contender.trials]
                outcomes = await asyncio.gather(*(one_trial(contender, trial, form) for trial in selection))
                score = scores.setdefault(contender.name, {})[form] = Score(trials=len(outcomes))
                score.seconds = time.perf_counter() - start_time
                for right, consumption in outcomes:
                    score.right += right
                    score.largest = max(score.largest, consumption.largest)
                    score.tokens += consumption.tokens
                    score.refused += consumption.refused
    return scores


def show(scores: dict[str, dict[str, Score]]) -> None:
    """Print the comparison as a table that can be pasted into Markdown."""
    table = Table(box=MARKDOWN)
    for column in ("between tool and model", "right, text", "right, JSON", "largest prompt", "tokens spent a trial"):
        table.add_column(column, justify="left" if column.startswith("between") else "right", no_wrap=True)
    for name, by_form in scores.items():
        text, one_line = by_form["text"], by_form["JSON"]
        number = text.trials + one_line.trials
        largest = max(text.largest, one_line.largest)
        table.add_row(
            name,
            f"{text.right} of {text.trials}",
            f"{one_line.right} of {one_line.trials}",
            f"{largest:,}" + (" (refused)" if text.refused or one_line.refused else ""),
            f"{(text.tokens + one_line.tokens) // number:,}",
        )
    Console(width=140).print(table)


def measure() -> list[Figure]:
    """Right answers out of ten, for every contender and both forms."""
    figures = []
    for name, by_form in asyncio.run(compare()).items():
        for form, score in by_form.items():
            goal = score.trials if name == "MemAgentMiddleware" else None
            figures.append(
                Figure(
                    f"right of {score.trials}, result of {TOKENS:,} tokens as {form}, {name}",
                    score.right,
                    "",
                    f">= {goal}" if goal else "",
                    goal is None or score.right >= goal,
                )
            )
    return figures


def main() -> None:
    """The table; with a number, that many trials of the embedded policy as well."""
    show(asyncio.run(compare(int(sys.argv[1]) if sys.argv[1:] else 0)))


if __name__ == "__main__":
    main()

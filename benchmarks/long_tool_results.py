"""Measure whether an agent finds a fact in a tool result of 500,000 tokens, depending on its middleware.

`python -m benchmarks.long_tool_results [EMBEDDED_TRIALS]` prints a table. EMBEDDED_TRIALS is the number of trials in
which the embedded policy is the reader. The default is 0, because each of them takes some minutes.

**The task.** There are ten tool results of 500,000 tokens of English prose. At a random depth, each has a planted fact
that is asked for; a similar fact and three others are elsewhere. Every result comes in two formats: as text with one
paragraph per line, and as one line of JSON, as from many services. An answer is right if it is the fact's value.

**The model** is scripted, the same for all contenders, and has a window of 8,192 tokens, 512 of them for its output.
Messages, tool calls and the schemas of the tools count. A longer prompt is refused, as by a server, and the trial is
lost unless a middleware handles that. The model calls the tool. Then it answers if a sentence in its prompt states the
fact or a tool message offers an answer; otherwise it says that it does not know. As a summariser it keeps every planted
fact and every question that it sees. If a result was moved to a file, it searches the file for the question's entity
with `grep`; without `grep` it reads the first page, of the 100 lines that the notice proposes, and no further pages,
because 500,000 tokens are more than sixty windows.

If a line of the result has the question's own words, `grep` is enough and costs a fortieth. For a result of one line it
is not enough: it finds the whole line, and shows its first 80,000 characters.

**The contenders** are configured to act well before the window is full, and may clear, summarise or evict a tool result
at once. `create_deep_agent` has its defaults: eviction, `grep`, and summaries after a refused prompt. MemAgent's reader
also has a window of 8,192 tokens, and a scripted policy that misses nothing, because the measurement is whether the
result reaches a model at all. The embedded policy is a real one, with a window of 1,024.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import tempfile
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
from benchmarks.text import make_prose
from langchain_memagent.middleware import MemAgentMiddleware
from langchain_memagent.transcripts import format_transcript
from memagent_evaluation.planted_facts import Fact, PlantedFacts
from memagent_graph import Budget, LocalPolicy, MemAgent, ScriptedPolicy, load_prompts
from memagent_graph.tokenizers import load_tokenizer

RESULT_TOKENS = 500_000
TRIALS = 10
WINDOW_TOKENS = 8192
OUTPUT_TOKENS = 512
THRESHOLD_TOKENS = 4000
"""The threshold of every middleware, in tokens."""

_TOKENIZER = load_tokenizer("embedded")
_QUESTION = re.compile(r"What is the ([\w ]+?) (?:of|for) ([\w -]+?)(?: mentioned in the provided text)?\?", re.I)
_STATEMENT = re.compile(r"[^.\n\"]*\b(?:of|for) [\w -]+? is:? \w[\w ]*?\.")
_OFFER = re.compile(r"^Answer: (\S+)$", re.M)
_EVICTION_PATH = re.compile(r"saved in the filesystem at this path: (\S+)")
_UNKNOWN = "I do not know."


@dataclass(frozen=True, slots=True)
class Trial:
    """A tool result and the fact that is asked for."""

    fact: Fact
    text: str

    def format_result(self, result_format: str) -> str:
        """Return the result as text, or as one line of JSON."""
        return self.text if result_format == "text" else json.dumps({"entries": self.text.split("\n\n")})


def generate_trials(trial_count: int = TRIALS, tokens: int = RESULT_TOKENS) -> Iterator[Trial]:
    """Yield seeded trials, each with its fact at another random depth."""
    rng = random.Random(4)
    facts = PlantedFacts(rng, held_out=True, number_fraction=1.0)
    prose = make_prose(tokens)
    for _ in range(trial_count):
        paragraphs, depth = prose.split("\n\n"), rng.random()
        fact = facts.draw_fact()
        distractors = [
            facts.draw_near_miss(fact),
            *(facts.draw_fact(exclude=frozenset({fact.entity.lower()})) for _ in range(3)),
        ]
        for position, fact_at_depth in sorted(
            [(depth, fact), *((rng.random(), distractor) for distractor in distractors)], key=lambda item: -item[0]
        ):
            paragraphs.insert(int(position * len(paragraphs)), fact_at_depth.statement)
        yield Trial(fact, "\n\n".join(paragraphs))


def find_stated_value(question: str, text: str) -> str | None:
    """Return the value that a text states for the entity and attribute of a question, or None."""
    question_match = _QUESTION.search(question)
    if question_match is None:
        return None
    attribute, entity = map(re.escape, question_match.groups())
    match = re.search(rf"\b{attribute}s? (?:of|for) {entity} is:? (\w+)", text, re.I)
    return match[1] if match else None


@dataclass
class PromptUsage:
    """The tokens of the prompts in one trial."""

    largest_prompt: int = 0
    """Tokens of the longest prompt."""
    tokens: int = 0
    """Tokens of all prompts and replies."""
    is_refused: bool = False
    """Whether a prompt did not fit the window."""


class WindowedModel(BaseChatModel):
    """The scripted model; see the docstring of the module."""

    usage: PromptUsage

    @property
    def _llm_type(self) -> str:
        return "windowed"

    def bind_tools(self, tools: Sequence[Any], **options: Any) -> Runnable[Any, AIMessage]:
        return self.bind(tools=[convert_to_openai_tool(schema) for schema in tools])

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        tools: list[dict[str, Any]] = options.get("tools") or []
        prompt_tokens = sum(_TOKENIZER.count(format_transcript([message])) + 4 for message in messages)
        prompt_tokens += _TOKENIZER.count(json.dumps(tools)) if tools else 0
        self.usage.largest_prompt = max(self.usage.largest_prompt, prompt_tokens)
        if prompt_tokens > WINDOW_TOKENS - OUTPUT_TOKENS:
            self.usage.is_refused = True
            raise ContextOverflowError(
                f"{prompt_tokens} tokens and {OUTPUT_TOKENS} of output do not fit the window of {WINDOW_TOKENS}"
            )
        reply = write_reply(messages, frozenset(schema["function"]["name"] for schema in tools))
        self.usage.tokens += prompt_tokens + _TOKENIZER.count(format_transcript([reply]))
        return ChatResult(generations=[ChatGeneration(message=reply)])


def write_reply(messages: Sequence[BaseMessage], tools: frozenset[str]) -> AIMessage:
    """Return the reply of the scripted model to a prompt."""
    text = "\n".join(message.text for message in messages)
    if not tools:
        notes = [match[0] for match in (*_QUESTION.finditer(text), *_STATEMENT.finditer(text))]
        return AIMessage("\n".join(notes) or "Nothing of note.")
    questions = [message.text for message in messages if isinstance(message, HumanMessage) and "?" in message.text]
    question = questions[-1] if questions else ""
    results = [message for message in messages if isinstance(message, ToolMessage)]
    if value := find_stated_value(question, "\n".join(message.text for message in messages if message.type != "human")):
        return AIMessage(value)
    if answers := [match[1] for message in results if (match := _OFFER.search(message.text))]:
        return AIMessage(answers[-1])
    if not results:
        return _make_tool_call("fetch_archive", {"name": "minutes"})
    path = next((match[1] for message in results if (match := _EVICTION_PATH.search(message.text))), None)
    lookups = {message.name for message in results} & {"grep", "read_file"}
    return _search_file(question, path, tools) if path and not lookups else AIMessage(_UNKNOWN)


def _search_file(question: str, path: str, tools: frozenset[str]) -> AIMessage:
    """Return a call that searches the file of an evicted result, or reads its first page without `grep`."""
    match = _QUESTION.search(question)
    if match and "grep" in tools:
        return _make_tool_call(
            "grep", {"pattern": match[2].removeprefix("the "), "path": path, "output_mode": "content"}
        )
    return _make_tool_call("read_file", {"file_path": path, "offset": 0, "limit": 100})


def _make_tool_call(name: str, arguments: dict[str, Any]) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{name}"}])


def write_perfect_reply(prompt: str) -> str:
    """Return the reply of a policy that keeps the value stated in the section, and answers with it."""
    problem, memory, section = (_extract_tag(prompt, tag) for tag in ("problem", "memory", "section"))
    if "<section>" not in prompt:
        return f"\\boxed{{{memory if memory != '(empty)' else 'not stated'}}}"
    return find_stated_value(problem, section) or memory or "(empty)"


def _extract_tag(prompt: str, tag: str) -> str:
    match = re.search(rf"<{tag}>\s*(.*?)\s*</{tag}>", prompt, re.S)
    return match[1] if match else ""


@dataclass(frozen=True)
class Contender:
    """A way to handle long tool results."""

    name: str
    make_agent: Callable[[WindowedModel, BaseTool], Any]
    trials: int = TRIALS


def make_contender(name: str, middleware: Callable[[WindowedModel], list[Any]], trials: int = TRIALS) -> Contender:
    """Return a contender that is a plain agent with these middlewares."""
    return Contender(name, lambda model, fetch: create_agent(model, [fetch], middleware=middleware(model)), trials)


@dataclass
class Score:
    """The score of a contender with one format of results."""

    right_count: int = 0
    trial_count: int = 0
    largest_prompt: int = 0
    tokens: int = 0
    refused_count: int = 0


def make_contenders(reader: MemAgent, embedded_reader: MemAgent | None, embedded_trials: int) -> list[Contender]:
    """Return all contenders; the one with the embedded policy only if `embedded_reader` is given."""
    eviction_options: dict[str, Any] = {"backend": StateBackend(), "tool_token_limit_before_evict": THRESHOLD_TOKENS}
    contenders = [
        make_contender("no middleware", lambda model: []),
        make_contender(
            "SummarizationMiddleware",
            lambda model: [SummarizationMiddleware(model, trigger=("tokens", THRESHOLD_TOKENS), keep=("messages", 1))],
        ),
        make_contender(
            "ContextEditingMiddleware",
            lambda model: [ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=THRESHOLD_TOKENS, keep=0)])],
        ),
        make_contender(
            "deepagents' eviction, read_file",
            lambda model: [FilesystemMiddleware(**eviction_options, tools=["read_file"])],
        ),
        Contender("create_deep_agent: eviction, grep", lambda model, fetch: create_deep_agent(model, [fetch])),
        make_contender(
            "MemAgentMiddleware", lambda model: [MemAgentMiddleware(reader, result_tokens=THRESHOLD_TOKENS)]
        ),
    ]
    if embedded_reader is not None:
        contenders.append(
            make_contender(
                "MemAgentMiddleware, embedded policy",
                lambda model: [MemAgentMiddleware(embedded_reader, result_tokens=THRESHOLD_TOKENS)],
                embedded_trials,
            )
        )
    return contenders


async def run_trial(contender: Contender, trial: Trial, result_format: str) -> tuple[bool, PromptUsage]:
    """Run an agent on one result; return whether its answer is right, and the tokens of its prompts."""

    @tool
    def fetch_archive(name: str) -> str:
        """Fetch an archive as a whole."""
        return trial.format_result(result_format)

    model = WindowedModel(usage=PromptUsage())
    agent = contender.make_agent(model, fetch_archive)
    try:
        state = await agent.ainvoke({"messages": [HumanMessage(trial.fact.question)]}, {"recursion_limit": 50})
    except ContextOverflowError:
        return False, model.usage
    for message in state["messages"]:
        if isinstance(message, ToolMessage) and (metadata := message.response_metadata.get("memagent")):
            model.usage.tokens += metadata["usage"]["total_tokens"]
    return state["messages"][-1].text.strip() == trial.fact.value, model.usage


async def compare(embedded_trials: int = 0, trial_count: int = TRIALS) -> dict[str, dict[str, Score]]:
    """Run all trials, and return the scores by contender and format of the result."""
    trials = list(generate_trials(trial_count))
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"store": Path(folder), "run_log": False}
        reader = MemAgent(
            ScriptedPolicy(write_perfect_reply),
            tokenizer=_TOKENIZER,
            budget=Budget(context_window=WINDOW_TOKENS),
            prompts=load_prompts(),
            boundary="sentence",
            **options,
        )
        embedded_reader = MemAgent(LocalPolicy.embedded(), **options) if embedded_trials else None
        scores: dict[str, dict[str, Score]] = {}
        for contender in make_contenders(reader, embedded_reader, embedded_trials):
            for result_format in ("text", "JSON"):
                selection = trials[: contender.trials]
                outcomes = await asyncio.gather(*(run_trial(contender, trial, result_format) for trial in selection))
                score = scores.setdefault(contender.name, {})[result_format] = Score(trial_count=len(outcomes))
                for is_right, usage in outcomes:
                    score.right_count += is_right
                    score.largest_prompt = max(score.largest_prompt, usage.largest_prompt)
                    score.tokens += usage.tokens
                    score.refused_count += usage.is_refused
    return scores


def print_table(scores: dict[str, dict[str, Score]]) -> None:
    """Print the comparison as a Markdown table."""
    table = Table(box=MARKDOWN)
    for column in ("between tool and model", "right, text", "right, JSON", "largest prompt", "tokens spent a trial"):
        table.add_column(column, justify="left" if column.startswith("between") else "right", no_wrap=True)
    for name, score_by_format in scores.items():
        text_score, json_score = score_by_format["text"], score_by_format["JSON"]
        trial_count = text_score.trial_count + json_score.trial_count
        largest_prompt = max(text_score.largest_prompt, json_score.largest_prompt)
        table.add_row(
            name,
            f"{text_score.right_count} of {text_score.trial_count}",
            f"{json_score.right_count} of {json_score.trial_count}",
            f"{largest_prompt:,}{' (refused)' if text_score.refused_count or json_score.refused_count else ''}",
            f"{(text_score.tokens + json_score.tokens) // trial_count:,}",
        )
    Console(width=140).print(table)


def measure() -> list[Figure]:
    """Return the right answers out of ten, for every contender and both formats."""
    figures = []
    for name, score_by_format in asyncio.run(compare()).items():
        for result_format, score in score_by_format.items():
            metric = f"right of {score.trial_count}, result of {RESULT_TOKENS:,} tokens as {result_format}, {name}"
            has_goal = name == "MemAgentMiddleware"
            figures.append(
                Figure.exactly(metric, score.right_count, score.trial_count)
                if has_goal
                else Figure(metric, score.right_count)
            )
    return figures


def main() -> None:
    """Print the table; the argument is the number of trials with the embedded policy."""
    print_table(asyncio.run(compare(int(sys.argv[1]) if sys.argv[1:] else 0)))


if __name__ == "__main__":
    main()

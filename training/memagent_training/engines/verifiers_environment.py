"""The reader as a verifiers environment, which prime-rl can train: `--env.taskset.id memagent-training`.

The taskset has the questions of a data file, in the formats that `memagent rl --data` takes. The harness reads a task's
document in this process; each conversation is a branch of the trace and therefore a training sample with the rollout's
reward. verifiers samples with the agent's settings and ignores the reader's: set `max_tokens` there to the maximum
length of a memory, and `runtime.type` to subprocess, because nothing runs outside this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from memagent_evaluation.data_files import FileTask, detect_data_task, load_data_task
from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.scorers import score
from memagent_graph import Document, MemAgent, OpenAICompatiblePolicy
from memagent_graph.prompts import AnswerFormat
from memagent_graph.tokenizers import load_tokenizer
from memagent_training.training_errors import require_version

require_version("verifiers>=0.4,<0.5")
import verifiers.v1 as vf  # noqa: E402

_ANSWER_KEY = "memagent_answer"
"""The key in a trace's `info` of the reader's answer, the complete completion, and the requested format."""


class ReaderData(vf.TaskData):  # type: ignore[misc]  # verifiers is not where types are checked
    """A question of a data file, by its length and index."""

    data: Path
    tokenizer: str
    """The tokenizer with which lengths were measured."""
    length: int
    index: int

    @property
    def sample(self) -> Sample:
        """Return the question with its document and gold answers, from the file."""
        return _load_task(self.data, self.tokenizer).sample(self.length, self.index)


class ReaderTask(vf.Task[ReaderData]):  # type: ignore[misc]
    """A question, whose answer is right or wrong."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def strict(self, trace: vf.Trace) -> float:
        """Return 1 if the answer is a gold answer in the requested form: the strict score of an evaluation."""
        if _ANSWER_KEY not in trace.info:
            return 0.0
        answer, raw_answer, answer_format = trace.info[_ANSWER_KEY]
        return score(self.data.sample, answer, raw_answer, answer_format=AnswerFormat(answer_format)).strict


class ReaderTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is not where types are checked
    """The source of the questions."""

    data: Path = Path("questions.jsonl")
    tokenizer: str = "embedded"
    """The name or folder of the tokenizer with which documents' lengths are measured."""


class ReaderTaskset(vf.Taskset[ReaderTask, ReaderTasksetConfig]):  # type: ignore[misc]
    """The questions of a data file, by ascending length of their documents."""

    def load(self) -> Iterator[ReaderTask]:
        """Yield a task for each question."""
        path, tokenizer = self.config.data.resolve(), self.config.tokenizer
        task = _load_task(path, tokenizer)
        for length in task.lengths:
            for index in range(task.count(length)):
                sample = task.sample(length, index)
                data = ReaderData(
                    id=sample.id, prompt=sample.question, data=path, tokenizer=tokenizer, length=length, index=index
                )
                yield ReaderTask(data, self.config.task)


class ReaderHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]  # verifiers is not where types are checked
    """The settings of the reader."""

    read: dict[str, Any] = Field(default_factory=dict)
    """Settings of the reader by name, as `MemAgent` takes them: profile, strategy, chunk_tokens, and so on."""


class ReaderHarness(vf.Harness[ReaderHarnessConfig]):  # type: ignore[misc]
    """Reads a task's document with MemAgent; every memory is kept as the policy wrote it."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: ReaderData,
    ) -> vf.ProgramResult:
        """Read, through the rollout's own endpoint."""
        policy = OpenAICompatiblePolicy(ctx.model, base_url=endpoint, api_key=secret)
        sample = data.sample
        async with MemAgent(policy, run_log=False, **{"on_invented": "accept", **self.config.read}) as agent:
            result = await agent.aread(Document.from_text("".join(sample.text()), name=sample.id), sample.question)
            answer_format = (await agent.aprepare()).prompts.answer_format
        trace.info[_ANSWER_KEY] = (result.answer, result.raw_answer, answer_format.value)
        return vf.ProgramResult(0, "", "")


@cache
def _load_task(path: Path, tokenizer: str) -> FileTask:
    return load_data_task(detect_data_task(path), path, TaskSettings(load_tokenizer(tokenizer), data=path))

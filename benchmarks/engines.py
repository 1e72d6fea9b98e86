"""Compare the speed and accuracy of engines and number formats that read with `english` on a CPU.

    memagent policy add english --gguf
    python -m benchmarks.engines [--engines "this process, int8" ...]

Each engine reads the same documents on one thread, with four questions each and the policy's own strategy. One read
asks all questions of a document, so a server gets them at once. Answers that differ from those of the first engine are
printed. Prefill and decoding are measured separately: a message of `PREFILL_TOKENS` tokens with one token of output,
and a short message with `DECODED_TOKENS` tokens of output.

`make vllm` installs vLLM, and `make .venv-llama/.installed` installs llama.cpp. Engines that are not installed are
skipped with a message.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import rich.box
from rich.console import Console
from rich.table import Table

from memagent_evaluation.demo_document import DemoDocument, make_demo_document
from memagent_graph import LocalPolicy, MemAgent, OpenAICompatiblePolicy, SamplingParams
from memagent_graph.documents import Document
from memagent_graph.policies.added import find_added_policy_folder
from memagent_graph.policies.profile import require_profile
from memagent_graph.policy import Message
from memagent_graph.tokenizers import TextTokens, load_tokenizer

Policy: TypeAlias = LocalPolicy | OpenAICompatiblePolicy
POLICY_NAME: Final = "english"
PREFILL_TOKENS, DECODED_TOKENS, SHORT_PROMPT_TOKENS = 1024, 64, 16
_ROUNDS: Final = 3
_CHECKOUT: Final = Path(__file__).parents[1]
_LLAMA_PYTHON: Final = Path(os.environ.get("MEMAGENT_LLAMA_PYTHON", _CHECKOUT / ".venv-llama/bin/python"))
_LLAMA_SERVER: Final = _CHECKOUT / "tests/integration/llama_cpp_server.py"


class EngineNotInstalledError(Exception):
    """An engine is not installed; the message is the command that installs it."""


@contextmanager
def open_transformers(dtype: str) -> Iterator[Policy]:
    """Yield a policy that runs in this process, with transformers."""
    yield LocalPolicy(POLICY_NAME, dtype=dtype)


@contextmanager
def open_vllm(dtype: str) -> Iterator[Policy]:
    """Start a vLLM server, and yield a policy that uses it."""
    from memagent_training.serving.vllm_server import VLLMNotInstalledError, VLLMServer

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            options = ("--dtype", dtype, "--max-model-len", "2048")
            with VLLMServer(_find_policy_folder(), log_file=log, options=options) as server:
                yield OpenAICompatiblePolicy(server.model_name, base_url=server.base_url)
        except VLLMNotInstalledError as error:
            raise EngineNotInstalledError("make vllm") from error


@contextmanager
def open_llama_cpp(quantisation: str) -> Iterator[Policy]:
    """Start a llama.cpp server of the policy's GGUF file, quantised as requested, and yield its policy."""
    f16_file = _find_policy_folder() / f"{POLICY_NAME}.F16.gguf"
    if not _LLAMA_PYTHON.is_file():
        raise EngineNotInstalledError("make .venv-llama/.installed")
    if not f16_file.is_file():
        raise EngineNotInstalledError(f"memagent policy add {POLICY_NAME} --gguf")
    with tempfile.TemporaryDirectory() as folder:
        gguf_file = (
            f16_file
            if quantisation == "F16"
            else quantise_gguf(f16_file, quantisation, Path(folder) / f"{quantisation}.gguf")
        )
        command = [str(_LLAMA_PYTHON), str(_LLAMA_SERVER), str(gguf_file)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            yield OpenAICompatiblePolicy(base_url=f"{process.stdout.readline().strip()}/v1")
            process.kill()  # terminating would wait for clients with open connections


def quantise_gguf(source: Path, quantisation: str, target: Path) -> Path:
    """Write a GGUF file with the matrices of `source` in another format, and return its path."""
    import gguf
    import numpy

    matrix_type = gguf.GGMLQuantizationType[quantisation]
    reader: Any = gguf.GGUFReader(source)
    writer: Any = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in {"general.architecture", "general.file_type"}:
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantisation}"])
    for tensor in reader.tensors:
        if tensor.data.ndim == 1:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            quantised_data = gguf.quants.quantize(tensor.data.astype(numpy.float32), matrix_type)
            writer.add_tensor(tensor.name, quantised_data, raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


ENGINES: Final[Mapping[str, Callable[[], AbstractContextManager[Policy]]]] = {
    "this process, float32": lambda: open_transformers("float32"),
    "this process, bfloat16": lambda: open_transformers("bfloat16"),
    "vLLM, float32": lambda: open_vllm("float32"),
    "vLLM, bfloat16": lambda: open_vllm("bfloat16"),
    "llama.cpp, F16": lambda: open_llama_cpp("F16"),
    "llama.cpp, Q8_0": lambda: open_llama_cpp("Q8_0"),
    "llama.cpp, Q4_0": lambda: open_llama_cpp("Q4_0"),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """The speed and the answers of one engine."""

    engine: str
    prefill_rate: float
    """Prompt tokens per second."""
    decoding_rate: float
    """Output tokens per second."""
    seconds: float
    """The time for all questions."""
    is_right: tuple[bool, ...]
    """Whether each answer is right."""
    answers: tuple[str, ...]


def measure_engine(engine: str, documents: Sequence[DemoDocument]) -> Measurement:
    """Start an engine, measure its speed, and read all documents with it.

    Raises:
        EngineNotInstalledError: the engine is not installed.
    """
    is_right: list[bool] = []
    answers: list[str] = []
    with ENGINES[engine]() as policy, tempfile.TemporaryDirectory() as folder:
        prefill_rate, decoding_rate = asyncio.run(_measure_speeds(policy))
        strategy = require_profile(_find_policy_folder()).strategy
        profile = None if isinstance(policy, LocalPolicy) else str(_find_policy_folder())
        with MemAgent(policy, profile=profile, store=Path(folder), run_log=False, strategy=strategy) as reader:
            seconds = 0.0
            for document in documents:
                stored_document = Document.from_text(document.text)
                start_time = time.monotonic()
                results = reader.read(stored_document, questions=[question.question for question in document.questions])
                seconds += time.monotonic() - start_time
                is_right += [
                    question.is_right(result.answer)
                    for result, question in zip(results, document.questions, strict=True)
                ]
                answers += [result.answer or "" for result in results]
    return Measurement(engine, prefill_rate, decoding_rate, seconds, tuple(is_right), tuple(answers))


async def _measure_speeds(policy: Policy) -> tuple[float, float]:
    """Return the tokens per second of prefill and of decoding: the best of some rounds, each with other tokens."""
    tokenizer = load_tokenizer(_find_policy_folder())
    text = make_demo_document(5000).text
    tokens = tokenizer.tokenize(text)
    prefill_rate, decoding_rate = 0.0, 0.0
    for start in range(0, _ROUNDS * PREFILL_TOKENS, PREFILL_TOKENS):
        start_time = time.monotonic()
        completion = await policy.complete(_make_prompt(text, tokens, start, PREFILL_TOKENS), SamplingParams(1))
        assert completion.usage
        prefill_rate = max(prefill_rate, completion.usage.prompt_tokens / (time.monotonic() - start_time))
        short_prompt = _make_prompt(text, tokens, start, SHORT_PROMPT_TOKENS)
        start_time = time.monotonic()
        completion = await policy.complete(short_prompt, SamplingParams(max_tokens=DECODED_TOKENS))
        assert completion.usage
        decoding_rate = max(decoding_rate, completion.usage.completion_tokens / (time.monotonic() - start_time))
    await policy.aclose()  # its connections belong to this event loop
    return prefill_rate, decoding_rate


def _make_prompt(text: str, tokens: TextTokens, start: int, count: int) -> list[Message]:
    return [Message(role="user", content=text[tokens.prefix_chars(start) : tokens.prefix_chars(start + count)])]


def _find_policy_folder() -> Path:
    folder = find_added_policy_folder(POLICY_NAME)
    if folder is None:
        raise SystemExit(f"The policy {POLICY_NAME} is not installed. Run: memagent policy add {POLICY_NAME} --gguf")
    return folder


def print_table(measurements: Sequence[Measurement]) -> None:
    """Print a Markdown table of the engines, and the answers that differ from those of the first engine."""
    table = Table(box=rich.box.MARKDOWN)
    for column in (
        "engine",
        "prefill, tokens/s",
        "decoding, tokens/s",
        "seconds a question",
        "right",
        "lost, gained",
        "equal",
    ):
        table.add_column(column, no_wrap=True)
    for measurement in measurements:
        pairs = list(zip(measurements[0].is_right, measurement.is_right, strict=True))
        table.add_row(
            measurement.engine,
            f"{measurement.prefill_rate:,.0f}",
            f"{measurement.decoding_rate:.1f}",
            f"{measurement.seconds / len(measurement.is_right):.2f}",
            f"{sum(measurement.is_right)} of {len(measurement.is_right)}",
            f"{pairs.count((True, False))}, {pairs.count((False, True))}",
            str(
                sum(
                    answer == reference
                    for answer, reference in zip(measurements[0].answers, measurement.answers, strict=True)
                )
            ),
        )
    console = Console(width=140)
    console.print(table)
    for measurement in measurements[1:]:
        for question_index, (reference, answer) in enumerate(
            zip(measurements[0].answers, measurement.answers, strict=True)
        ):
            if reference != answer:
                console.print(
                    f"{measurement.engine}, question {question_index}: {answer!r}, not {reference!r}", markup=False
                )


def main() -> None:
    """Measure the engines that the command line names, and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME")
    parser.add_argument("--documents", type=int, default=40, help="documents that each engine reads")
    parser.add_argument("--tokens", type=int, default=5000, help="tokens of a document")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(_find_policy_folder())
    documents = [make_demo_document(arguments.tokens, seed, tokenizer.count) for seed in range(arguments.documents)]
    measurements = []
    for engine in arguments.engines:
        print(f"measuring {engine} ...", file=sys.stderr, flush=True)
        try:
            measurements.append(measure_engine(engine, documents))
        except EngineNotInstalledError as error:
            print(f"skipped: {engine} is not installed; run: {error}", file=sys.stderr)
    print_table(measurements)


if __name__ == "__main__":
    main()

"""How fast engines and number formats read with `english` on a CPU, and how often they are right.

    memagent policy add english --gguf
    python -m benchmarks.engines [--engines "this process, int8" ...]

Each engine reads the same minutes in its policy's own way, four questions on a document, on one thread. The questions
are asked in one read, so servers get them at once; answers that are not those of the first engine are printed. Prefill
and decoding are measured apart, with prompts of token ids: `PREFILL` of them and one token of output, and `DECODED`
tokens after a short prompt.

`make vllm` installs vLLM, and `make .venv-llama/.installed` llama.cpp; an engine that is not there is left out, and
said so.
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
from memagent_graph.policies.added import added_folder
from memagent_graph.policies.profile import require_profile
from memagent_graph.tokenizers import load_tokenizer

Policy: TypeAlias = LocalPolicy | OpenAICompatiblePolicy
NAME: Final = "english"
PREFILL, DECODED, SHORT = 1024, 64, 16
_ROUNDS: Final = 3
_CHECKOUT: Final = Path(__file__).parents[1]
_LLAMA: Final = Path(os.environ.get("MEMAGENT_LLAMA_PYTHON", _CHECKOUT / ".venv-llama/bin/python"))
_LLAMA_SERVER: Final = _CHECKOUT / "tests/integration/llama_cpp_server.py"


class NotHereError(Exception):
    """An engine that is not installed; the message says what installs it."""


@contextmanager
def in_this_process(dtype: str) -> Iterator[Policy]:
    """transformers, in this process."""
    yield LocalPolicy(NAME, dtype=dtype)


@contextmanager
def in_vllm(dtype: str) -> Iterator[Policy]:
    """A vLLM server."""
    from memagent_training.serving.vllm_server import VLLMNotInstalledError, VLLMServer

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            with VLLMServer(_folder(), log_file=log, dtype=dtype, max_model_len=2048) as server:
                yield OpenAICompatiblePolicy(server.model_name, base_url=server.base_url)
        except VLLMNotInstalledError as error:
            raise NotHereError("make vllm") from error


@contextmanager
def in_llama_cpp(kind: str) -> Iterator[Policy]:
    """A llama.cpp server of the policy's GGUF file, quantised to `kind`."""
    half = _folder() / f"{NAME}.F16.gguf"
    if not _LLAMA.is_file():
        raise NotHereError("make .venv-llama/.installed")
    if not half.is_file():
        raise NotHereError(f"memagent policy add {NAME} --gguf")
    with tempfile.TemporaryDirectory() as folder:
        file = half if kind == "F16" else quantised(half, kind, Path(folder) / f"{kind}.gguf")
        command = [str(_LLAMA), str(_LLAMA_SERVER), str(file)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            yield OpenAICompatiblePolicy(base_url=f"{process.stdout.readline().strip()}/v1")
            process.kill()  # it would wait for clients that keep their connections


def quantised(source: Path, kind: str, target: Path) -> Path:
    """A GGUF file with its matrices in another format."""
    import gguf
    import numpy

    wanted = gguf.GGMLQuantizationType[kind]
    reader: Any = gguf.GGUFReader(source)
    writer: Any = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in {"general.architecture", "general.file_type"}:
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    for tensor in reader.tensors:
        if tensor.data.ndim == 1:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            packed = gguf.quants.quantize(tensor.data.astype(numpy.float32), wanted)
            writer.add_tensor(tensor.name, packed, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


ENGINES: Final[Mapping[str, Callable[[], AbstractContextManager[Policy]]]] = {
    "this process, float32": lambda: in_this_process("float32"),
    "this process, bfloat16": lambda: in_this_process("bfloat16"),
    "vLLM, float32": lambda: in_vllm("float32"),
    "vLLM, bfloat16": lambda: in_vllm("bfloat16"),
    "llama.cpp, F16": lambda: in_llama_cpp("F16"),
    "llama.cpp, Q8_0": lambda: in_llama_cpp("Q8_0"),
    "llama.cpp, Q4_0": lambda: in_llama_cpp("Q4_0"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one engine."""

    engine: str
    prefill: float
    """Prompt tokens a second."""
    decode: float
    """Tokens written a second."""
    seconds: float
    """For all questions."""
    right: tuple[bool, ...]
    answers: tuple[str, ...]


def measure(engine: str, documents: Sequence[DemoDocument]) -> Measured:
    """Open an engine, and read.

    Raises:
        NotHereError: it is not installed.
    """
    right: list[bool] = []
    answers: list[str] = []
    with ENGINES[engine]() as policy, tempfile.TemporaryDirectory() as folder:
        prefill, decode = asyncio.run(_speeds(policy))
        strategy = require_profile(_folder()).strategy
        profile = None if isinstance(policy, LocalPolicy) else str(_folder())
        with MemAgent(policy, profile=profile, store=Path(folder), run_log=False, strategy=strategy) as reader:
            seconds = 0.0
            for document in documents:
                text = Document.from_text(document.text)
                begin = time.monotonic()
                results = reader.read(text, questions=[each.question for each in document.questions])
                seconds += time.monotonic() - begin
                right += [question.is_right(r.answer) for r, question in zip(results, document.questions, strict=True)]
                answers += [result.answer or "" for result in results]
    return Measured(engine, prefill, decode, seconds, tuple(right), tuple(answers))


async def _speeds(policy: Policy) -> tuple[float, float]:
    """Tokens a second of prefill and of decoding; the best of some rounds, each with other tokens."""
    ids = load_tokenizer(_folder()).encode(make_demo_document(5000).text)
    prefill, decode = 0.0, 0.0
    for place in range(0, _ROUNDS * PREFILL, PREFILL):
        begin = time.monotonic()
        await policy.complete(ids[place : place + PREFILL], SamplingParams(max_tokens=1))
        prefill = max(prefill, PREFILL / (time.monotonic() - begin))
        short = ids[place : place + SHORT]
        begin = time.monotonic()
        done = await policy.complete(short, SamplingParams(max_tokens=DECODED))
        assert done.usage
        decode = max(decode, done.usage.completion_tokens / (time.monotonic() - begin))
    await policy.aclose()  # its connections belong to this event loop
    return prefill, decode


def _folder() -> Path:
    folder = added_folder(NAME)
    if folder is None:
        raise SystemExit(f"{NAME} is not on this machine; add it: memagent policy add {NAME} --gguf")
    return folder


def show(found: Sequence[Measured]) -> None:
    """Print a table that can be pasted into Markdown, and the answers that differ from the first engine's."""
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
    for each in found:
        pairs = list(zip(found[0].right, each.right, strict=True))
        table.add_row(
            each.engine,
            f"{each.prefill:,.0f}",
            f"{each.decode:.1f}",
            f"{each.seconds / len(each.right):.2f}",
            f"{sum(each.right)} of {len(each.right)}",
            f"{pairs.count((True, False))}, {pairs.count((False, True))}",
            str(sum(one == other for one, other in zip(found[0].answers, each.answers, strict=True))),
        )
    console = Console(width=140)
    console.print(table)
    for each in found[1:]:
        for number, (one, other) in enumerate(zip(found[0].answers, each.answers, strict=True)):
            if one != other:
                console.print(f"{each.engine}, question {number}: {other!r}, not {one!r}", markup=False)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=5000, help="length of a document")
    given = parser.parse_args()
    tokenizer = load_tokenizer(_folder())
    documents = [make_demo_document(given.tokens, seed, tokenizer.count) for seed in range(given.documents)]
    found = []
    for engine in given.engines:
        print(f"measuring {engine} ...", file=sys.stderr, flush=True)
        try:
            found.append(measure(engine, documents))
        except NotHereError as error:
            print(f"left out: {engine}; to install it: {error}", file=sys.stderr)
    show(found)


if __name__ == "__main__":
    main()

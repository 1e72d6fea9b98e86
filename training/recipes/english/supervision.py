"""Supervised training of the adapter of `english`; it can be killed and resumed at any time.

    python -m recipes.english.supervision --base FOLDER --out FOLDER --minutes 60
    python -m recipes.english.supervision --base FOLDER --out FOLDER --minutes 0 --pack    # writes adapter/ here

A batch depends on the seed and the step alone, so a resumed run gets the batches that an uninterrupted one gets; the
step is the data's cursor. A checkpoint is written every ten minutes. An adapter that was packed holds the cursor and
the seed, and a new run goes on from it with `--adapter`: only the optimizer starts again, with a short warm-up.

The loss is the mean over reply tokens of all conversations of a batch, in which the first tokens of a reply, which
decide between keeping and writing, weigh more. The base is in bfloat16, the adapter in float32. On one core of a
processor that multiplies in bfloat16, beside other work, that is five times as fast as float32.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from memagent_evaluation.english_facts import MoreFacts
from memagent_training.forward.layouts import lay_out
from memagent_training.forward.scoring import LogProbs, completion_logprobs
from recipes.english.exclusion import Exclusion
from recipes.english.lessons import Lesson, LessonMaker
from recipes.english.prose_questions import END, HELD_OUT_ROWS, ROWS, WRITTEN_ROWS, read_rows
from recipes.english.sections import all_sections

HERE: Final = Path(__file__).parent
PACKED: Final = HERE / "adapter"
RELATIONS: Final = HERE.parent / "language" / "training_facts.toml"
BASE: Final = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK: Final = 16
DECISION_TOKENS, DECISION_WEIGHT = 2, 3.0
WARM_UP: Final = 10
SAVE_SECONDS, CHECK_STEPS, CHECK_SECTIONS = 600.0, 40, 4


@dataclass(frozen=True, slots=True)
class EncodedLesson:
    """A conversation as token ids."""

    prompt_ids_P: array[int]
    completion_ids_T: array[int]
    name: str
    """Its role, and whether its reply writes something: the row of the check's table."""


@dataclass(slots=True)
class TrainingProgress:
    """Where a run is: the data's cursor, and what it has used."""

    seed: int
    step: int = 0
    warm_from: int = 0
    """The step at which the optimizer began: after it the rate rises."""
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0


def encode(tokenizer: Any, conversation: Lesson) -> EncodedLesson:
    """Return a conversation's token ids."""
    prompt = tokenizer(conversation.text, add_special_tokens=False)["input_ids"]
    reply = tokenizer(conversation.reply + END, add_special_tokens=False)["input_ids"]
    name = f"{conversation.role} {'writes' if conversation.writes else 'keeps'}"
    return EncodedLesson(array("q", prompt), array("q", reply), name)


def make_batch(maker: LessonMaker, tokenizer: Any, seed: int, step: int, tokens: int) -> list[list[EncodedLesson]]:
    """Return the readings of a step: as many as have about so many tokens, each token of a shared section once."""
    rng = random.Random(f"{seed}/{step}")
    readings: list[list[EncodedLesson]] = []
    forwarded = 0
    while forwarded < tokens:
        readings.append([encode(tokenizer, conversation) for conversation in maker.reading(rng)])
        forwarded += lay_out(readings[-1], "prefix_tree", pad_id=0).forwarded_tokens
    return readings


def weighted_loss(scores: LogProbs) -> tuple[Tensor, float]:
    """Return the sum of weighted losses and the sum of weights."""
    weights_BT = scores.mask_BT.float()
    weights_BT[:, :DECISION_TOKENS] *= DECISION_WEIGHT
    return -(scores.logprobs_BT * weights_BT).sum(), float(weights_BT.sum())


def sure_replies(examples: Sequence[EncodedLesson], scores: LogProbs) -> dict[str, list[bool]]:
    """Return, by role, whether each token of a reply has a probability above 0.5: greedy decoding writes that reply."""
    lowest_B = scores.logprobs_BT.masked_fill(~scores.mask_BT, 0.0).min(dim=1).values.tolist()
    replies: dict[str, list[bool]] = defaultdict(list)
    for example, lowest in zip(examples, lowest_B, strict=True):
        replies[example.name].append(lowest > -math.log(2))
    return replies


def score(model: Any, examples: Sequence[EncodedLesson]) -> tuple[LogProbs, int]:
    """Return the log-probs of the replies, and how many tokens were forwarded."""
    micro_batch = lay_out(examples, "prefix_tree", pad_id=0, device=model.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        return completion_logprobs(model, micro_batch), micro_batch.forwarded_tokens


def load_model(base: Path, adapter: Path | None, device: str) -> Any:
    """Return the base in bfloat16 with a trainable adapter in float32: a new one, or one from a folder."""
    from peft import LoraConfig, PeftModel, get_peft_model  # noqa: PLC0415  slow to import
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to(device)
    if adapter is not None:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def make_lessons(*, held_out: bool) -> LessonMaker:
    """Return the maker of a split's readings, all of whose prose and questions are clear of the exclusion file."""
    exclusion = Exclusion.load()
    sections = all_sections(exclusion, held_out=held_out)
    questions = read_rows(*((HELD_OUT_ROWS,) if held_out else (ROWS, WRITTEN_ROWS)), sections=sections)
    exclusion.require_clear(text for row in questions for text in (row.question, row.sentence))
    more = None if held_out else MoreFacts.read(RELATIONS)
    return LessonMaker(sections, questions, held_out=held_out, more=more)


@torch.no_grad()
def check(model: Any, tokenizer: Any, maker: LessonMaker, readings: int = CHECK_SECTIONS) -> dict[str, str]:
    """Return the share of replies that are written exactly, of held-out prose, people, towns and wordings."""
    replies: dict[str, list[bool]] = defaultdict(list)
    for number in range(readings):
        examples = [encode(tokenizer, one) for one in maker.reading(random.Random(f"check/{number}"))]
        for name, values in sure_replies(examples, score(model, examples)[0]).items():
            replies[name] += values
            replies["all"] += values
    return {name: f"{sum(values)}/{len(values)}" for name, values in sorted(replies.items())}


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, progress: TrainingProgress) -> None:
    """Write a checkpoint: to a temporary file that is then renamed."""
    adapter = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    partial = path.with_suffix(".partial")
    torch.save({"adapter": adapter, "optimizer": optimizer.state_dict(), "progress": asdict(progress)}, partial)
    partial.replace(path)


def pack(model: Any, progress: TrainingProgress, folder: Path) -> None:
    """Write the adapter in bfloat16, with the cursor and the seed, for the next session to go on from."""
    model.to(torch.bfloat16).save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    config["base_model_name_or_path"] = BASE
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    digest = sha256(ROWS.read_bytes() + WRITTEN_ROWS.read_bytes()).hexdigest()
    table = {**asdict(progress), "questions_sha256": digest}
    (folder / "progress.json").write_text(json.dumps(table, indent=2) + "\n", "utf-8")


def train(arguments: argparse.Namespace) -> None:
    """Run steps until the time is over."""
    from transformers import AutoTokenizer  # noqa: PLC0415  slow to import

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.out / "last.pt"
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.base)
    maker, checker = make_lessons(held_out=False), make_lessons(held_out=True)
    model = load_model(arguments.base, arguments.adapter, arguments.device)
    learned = [weights for weights in model.parameters() if weights.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.0)
    progress = TrainingProgress(arguments.seed)
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["adapter"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        progress = TrainingProgress(**state["progress"])
    elif arguments.adapter is not None:
        table = json.loads((arguments.adapter / "progress.json").read_text("utf-8"))
        del table["questions_sha256"]
        progress = TrainingProgress(**table)
        progress.warm_from = progress.step
    print(f"{sum(weights.numel() for weights in learned):,} parameters learn, from {progress}", flush=True)
    saved = begin = time.monotonic()
    while time.monotonic() - begin < 60 * arguments.minutes and progress.step < arguments.until_step:
        clock = time.monotonic()
        warmth = min(1.0, (progress.step - progress.warm_from + 1) / WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * warmth
        line = run_step(
            model,
            optimizer,
            learned,
            make_batch(maker, tokenizer, progress.seed, progress.step, arguments.tokens),
            progress,
        )
        progress.seconds += time.monotonic() - clock
        print(f"{line} {progress.examples} examples {progress.seconds / 60:.1f} min", flush=True)
        if progress.step % CHECK_STEPS == 0:
            print(f"  held out, after step {progress.step}: {check(model, tokenizer, checker)}", flush=True)
        if time.monotonic() - saved > SAVE_SECONDS:
            save(checkpoint, model, optimizer, progress)
            saved = time.monotonic()
    save(checkpoint, model, optimizer, progress)
    print(f"  held out, at the end: {check(model, tokenizer, checker, 2 * CHECK_SECTIONS)}", flush=True)
    if arguments.pack:
        pack(model, progress, arguments.pack)


def run_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    learned: Sequence[Tensor],
    readings: Sequence[Sequence[EncodedLesson]],
    progress: TrainingProgress,
) -> str:
    """Learn from a batch, one reading at a time, and return a line about it."""
    clock = time.monotonic()
    total, weight, tokens, hits = 0.0, 0.0, 0, list[bool]()
    for examples in readings:
        scores, forwarded = score(model, examples)
        loss, share = weighted_loss(scores)
        loss.backward()  # type: ignore[no-untyped-call]
        total, weight, tokens = total + loss.item(), weight + share, tokens + forwarded
        hits += [is_sure for values in sure_replies(examples, scores).values() for is_sure in values]
    for weights in learned:
        if weights.grad is not None:
            weights.grad /= weight
    norm = float(torch.nn.utils.clip_grad_norm_(learned, 1.0))
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    progress.step += 1
    progress.examples += len(hits)
    progress.tokens += tokens
    speed = tokens / (time.monotonic() - clock)
    right = sum(hits) / len(hits)
    return f"step {progress.step} loss {total / weight:.4f} sure {right:.3f} norm {norm:.2f} {speed:.0f} tokens/s"


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="the base in transformers' format")
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint is")
    parser.add_argument("--adapter", type=Path, help="a packed adapter to go on from, if there is no checkpoint")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further step begins")
    parser.add_argument("--until-step", type=int, default=10**9, help="the step before which the run ends")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--tokens", type=int, default=1000, help="the fewest forwarded tokens of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--pack", type=Path, nargs="?", const=PACKED, help="write the adapter there at the end, or here"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    train(arguments_of())

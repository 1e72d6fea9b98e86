"""Supervised training of the language policy: an adapter on a pretrained base; it can be killed and resumed at any
time.

    memagent policy add smollm2-untrained
    python -m recipes.language.supervised --base THAT_FOLDER --corpus corpus --out work/smollm2 --steps 400

Batches depend only on seed and step, so a resumed run gets the same ones as an uninterrupted run. The learning rate
rises in the first steps and then falls to its last value along a half cosine. The loss is the mean over reply tokens.
Tokens that decide between keeping and writing, or between an answer and none, weigh more, and most if there is
something to write: a missed fact is lost for good, but an unnecessary note does little harm. Tokens that the policy is
unsure of weigh more, too: among sentences about the same person, the words after the name decide which is written.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from array import array
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memagent_graph.policies.profile import require_profile
from memagent_graph.prompts import Prompts
from memagent_training.forward.layouts import MicroBatch, lay_out
from memagent_training.forward.scoring import LogProbs, completion_logprobs
from recipes.embedded.training_examples import Prose
from recipes.language.reader_traces import MIXES, TraceMaker
from recipes.language.turns import LessonTurn

SHIPPED = Path(__file__).resolve().parents[3] / "memagent_graph" / "smollm2"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EXCERPT_CHARACTERS = (120, 500)
BOX = "\\boxed{"
DECISION_TOKENS, KEEP_WEIGHT, WRITE_WEIGHT, UNSURE_WEIGHT = 2, 2.0, 12.0, 6.0


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation to learn."""

    role: str
    prompt_ids_P: array[int]
    completion_ids_T: array[int]
    writes: bool = False
    opening: int = 0
    """Tokens that every reply of its role begins with, before the first decision."""


class ExampleMaker:
    """From turns to token ids, through the policy's chat template."""

    def __init__(
        self,
        tokenizer: Any,
        prompts: Prompts,
        traces: TraceMaker,
        template: str,
        *,
        excerpts: float = 0.0,
    ) -> None:
        self._tokenizer, self._prompts, self._traces, self._template = tokenizer, prompts, traces, template
        self._excerpts = excerpts

    def section(self, rng: random.Random, longest: int) -> list[Example]:
        """Return the conversations on one section of any length up to the longest, or on an excerpt."""
        if rng.random() < self._excerpts:
            turns = self._traces.turns_on_excerpt(rng, rng.randint(*_EXCERPT_CHARACTERS), count=12)
            return [self._example(turn) for turn in turns]
        is_full = rng.random() < self._traces.mix.full_length
        characters = longest if is_full else int(160 * (longest / 160) ** rng.random())
        return [self._example(turn) for turn in self._traces.turns(rng, characters, on_section=12, elsewhere=3)]

    def batch(self, seed: int, step: int, tokens: int, longest: int) -> list[list[Example]]:
        """Sections with about the given number of forwarded tokens; a function of seed and step."""
        rng = random.Random(f"{seed}/{step}")
        sections: list[list[Example]] = []
        forwarded = 0
        while forwarded < tokens:
            sections.append(self.section(rng, longest))
            forwarded += lay_out(sections[-1], "prefix_tree", pad_id=0).forwarded_tokens
        return sections

    def _example(self, turn: LessonTurn) -> Example:
        messages = [{"role": "user", "content": turn.content(self._prompts)}]
        text = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        reply = self._tokenizer(turn.reply + "<|im_end|>", add_special_tokens=False)["input_ids"]
        opening = BOX if turn.reply.startswith(BOX) else ""
        opened = len(self._tokenizer(opening, add_special_tokens=False)["input_ids"]) if opening else 0
        return Example(turn.role, array("q", ids), array("q", reply), turn.writes, opened)


def weighted_loss(examples: list[Example], scores: LogProbs) -> tuple[Tensor, float]:
    """Return the sum of weighted losses, and the sum of weights."""
    probabilities_BT = scores.logprobs_BT.detach().float().exp()
    weights_BT = scores.mask_BT * (1 + UNSURE_WEIGHT * (1 - probabilities_BT))
    for weights_T, example in zip(weights_BT, examples, strict=True):
        decision = slice(example.opening, example.opening + DECISION_TOKENS)
        weights_T[decision] *= WRITE_WEIGHT if example.writes else KEEP_WEIGHT
    return -(scores.logprobs_BT * weights_BT).sum(), float(weights_BT.sum())


def sure_replies(examples: list[Example], scores: LogProbs) -> dict[str, list[bool]]:
    """By role: whether all tokens of each reply have a probability above one half, so that greedy decoding writes
    it.
    """
    lowest_B = scores.logprobs_BT.masked_fill(~scores.mask_BT, 0.0).min(dim=1).values.tolist()
    certain: dict[str, list[bool]] = defaultdict(list)
    for example, lowest in zip(examples, lowest_B, strict=True):
        certain[example.role].append(lowest > -math.log(2))
    return certain


def rate(step: int, steps: int, first: float, last: float, warmup: int = 10) -> float:
    """Return a short rise, then a half cosine from the first rate to the last."""
    if step < warmup:
        return first * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * share))


def load_model(base: Path, rank: int, adapter: Path | None, dtype: torch.dtype) -> Any:
    """Return the base, in a number format, with a trainable adapter in float32: a new one, or one from a folder."""
    from peft import LoraConfig, PeftModel, get_peft_model  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="sdpa")
    if adapter is not None:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def save(out: Path, model: Any, optimizer: torch.optim.Optimizer, step: int, spent: dict[str, float]) -> None:
    """Write the adapter and the optimizer, each to a temporary file that is then renamed."""
    adapter = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    partial = out / "last.partial"
    torch.save({"adapter": adapter, "optimizer": optimizer.state_dict(), "step": step, "spent": spent}, partial)
    partial.replace(out / "last.pt")


def train(arguments: argparse.Namespace) -> None:
    """Run the remaining steps."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.base)
    template = (arguments.profile / "chat_template.jinja").read_text("utf-8")
    prompts = require_profile(arguments.profile).prompts
    maker, checker = (
        ExampleMaker(
            tokenizer,
            prompts,
            TraceMaker(Prose(arguments.corpus / name), held_out=held_out, mix=MIXES[arguments.mix]),
            template,
            excerpts=arguments.excerpts,
        )
        for name, held_out in (("train.txt", False), ("held_out.txt", True))
    )
    dtype = torch.bfloat16 if arguments.bfloat16 else torch.float32
    model = load_model(arguments.base, arguments.rank, arguments.adapter, dtype)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=arguments.lr, betas=(0.9, 0.98), weight_decay=0.0)
    first, spent = 0, {"seconds": 0.0, "tokens": 0.0, "examples": 0.0}
    if (arguments.out / "last.pt").exists():
        state = torch.load(arguments.out / "last.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["adapter"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        first, spent = state["step"], state["spent"]
        print(f"resumed at step {first}", flush=True)
    print(f"{sum(parameter.numel() for parameter in learned):,} parameters learn, {arguments.steps} steps", flush=True)
    for step in range(first, arguments.steps):
        clock = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, arguments.steps, arguments.lr, arguments.last_lr)
        loss, weight, tokens, hits = _accumulate(
            model, maker.batch(arguments.seed, step, arguments.tokens, arguments.longest)
        )
        for parameter in learned:
            if parameter.grad is not None:
                parameter.grad /= weight
        norm = float(torch.nn.utils.clip_grad_norm_(learned, 1.0))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - clock
        spent = {
            "seconds": spent["seconds"] + seconds,
            "tokens": spent["tokens"] + tokens,
            "examples": spent["examples"] + len(hits),
        }
        print(
            f"step {step + 1} loss {loss / weight:.4f} sure {sum(hits) / len(hits):.3f} norm {norm:.2f}"
            f" {tokens / seconds:.0f} tokens/s {spent['examples']:.0f} examples {spent['seconds'] / 60:.1f} min",
            flush=True,
        )
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            save(arguments.out, model, optimizer, step + 1, spent)
        if (step + 1) % arguments.check_every == 0 or step + 1 == arguments.steps:
            print(f"  held out: {check(model, checker, arguments.check_sections, arguments.longest)}", flush=True)
    model.save_pretrained(str(arguments.out / "adapter"))


def _scores(model: Any, micro_batch: MicroBatch) -> LogProbs:
    """In the base's number format."""
    with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
        return completion_logprobs(model, micro_batch)


def _accumulate(model: Any, sections: list[list[Example]]) -> tuple[float, float, int, list[bool]]:
    """Sum the gradients of a batch, one section at a time."""
    total, weight, tokens, hits = 0.0, 0.0, 0, list[bool]()
    for examples in sections:
        micro_batch = lay_out(examples, "prefix_tree", pad_id=0)
        scores = _scores(model, micro_batch)
        loss, share = weighted_loss(examples, scores)
        loss.backward()  # type: ignore[no-untyped-call]
        total, weight, tokens = total + loss.item(), weight + share, tokens + micro_batch.forwarded_tokens
        hits += [value for values in sure_replies(examples, scores).values() for value in values]
    return total, weight, tokens, hits


@torch.no_grad()
def check(model: Any, checker: ExampleMaker, sections: int, longest: int) -> str:
    """Return the share of replies written exactly, by role, for held-out sections, people, towns and wordings."""
    certain: dict[str, list[bool]] = defaultdict(list)
    for number in range(sections):
        examples = checker.section(random.Random(f"check/{number}"), longest)
        scores = _scores(model, lay_out(examples, "prefix_tree", pad_id=0))
        for role, values in sure_replies(examples, scores).items():
            certain[role] += values
    everything = [value for values in certain.values() for value in values]
    by_role = " ".join(f"{role} {sum(values)}/{len(values)}" for role, values in sorted(certain.items()))
    return f"{sum(everything)}/{len(everything)}: {by_role}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--corpus", type=Path, required=True, help="made by recipes.embedded.corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", type=Path, default=SHIPPED, help="prompts and chat template")
    parser.add_argument("--adapter", type=Path, help="an adapter to start from")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=2400, help="the minimum of forwarded tokens per step")
    parser.add_argument("--longest", type=int, default=2000, help="characters of the longest sections' prose")
    parser.add_argument(
        "--mix", choices=sorted(MIXES), default="every-role", help="what sections and questions are like"
    )
    parser.add_argument("--excerpts", type=float, default=0.0, help="share of passages as retrieval shows them")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--last-lr", type=float, default=5e-5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bfloat16", action="store_true", help="twice as fast on processors that multiply in it")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--check-every", type=int, default=50)
    parser.add_argument("--check-sections", type=int, default=12)
    arguments = parser.parse_args()
    if not (arguments.base / "config.json").is_file():
        parser.error(
            f"--base {arguments.base} has no config.json: `memagent policy add smollm2-untrained` prints a folder"
        )
    if not (arguments.corpus / "train.txt").is_file():
        parser.error(f"--corpus {arguments.corpus} has no train.txt: make one with recipes.embedded.corpus")
    if not 0 <= arguments.excerpts <= 1:
        parser.error("--excerpts is a share, from 0 to 1")
    train(arguments)


if __name__ == "__main__":
    main()

"""Take one optimizer step in plain PyTorch, on the rows of `memagent train RUNS --model MODEL --rows rows.parquet`.

python examples/step_from_rows.py rows.parquet MODEL OUT

The step is gradient descent on DAPO's loss with truncated importance weights. It equals the trainer's within 1e-6.
"""

from __future__ import annotations

import sys
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM


def take_step(model: Any, rows: list[dict[str, Any]], learning_rate: float = 1.0) -> None:
    """Update the model's weights by one step on the rows."""
    loss = torch.zeros(())
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]
        old_logprobs = logprobs.detach()
        ratio, advantage = (logprobs - old_logprobs).exp(), row["advantage"]
        token_losses = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        token_losses = token_losses * (old_logprobs - torch.tensor(row["logprobs"])).exp().clamp(max=2.0)
        loss = loss + (token_losses * row["weight"])[torch.tensor(row["mask"])].sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=learning_rate).step()


if __name__ == "__main__":
    path, source, out = sys.argv[1:]
    policy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    take_step(policy, [row for row in pq.read_table(path).to_pylist() if row["step"] == 0], learning_rate=1e-6)
    policy.save_pretrained(out)

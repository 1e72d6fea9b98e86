"""The exported rows are what a training learns from: a step in plain PyTorch from the file alone is the trainer's."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from safetensors.torch import load_file  # noqa: E402
from step_from_rows import take_step  # noqa: E402
from support.training_log import comparable, write_log  # noqa: E402
from support.training_world import make_world  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from memagent_graph.cli import app  # noqa: E402
from memagent_training.job.row_export import COLUMNS  # noqa: E402

PLAIN_STEP = {
    "optim": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "max_grad_norm": 0.0, "warmup_steps": 0, "max_steps": 1,
    "groups_per_step": 3, "use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "max_logprob_gap": 9, "gradient_checkpointing": False,
}  # fmt: skip


def test_a_step_from_the_rows_alone_is_the_trainers(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    groups = comparable(make_world(tmp_path))
    log = write_log(tmp_path / "runs.sqlite", groups, tmp_path / "model")
    rows = tmp_path / "rows.parquet"
    settings = [part for name, value in PLAIN_STEP.items() for part in ("--set", f"{name}={value}")]
    common = ["train", str(log), "--model", str(tmp_path / "model"), "--preset", "dapo", "--out", str(tmp_path / "out")]
    for more in (["--rows", str(rows)], []):
        done = CliRunner().invoke(app, [*common, *more, *settings])
        assert done.exit_code == 0, done.output
        assert more == [] or not (tmp_path / "out").exists()
    table = pq.read_table(rows)
    assert table.schema.names == [name for name, _, _ in COLUMNS]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    take_step(model, [row for row in table.to_pylist() if row["step"] == 0])
    trained = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, trained[name], rtol=0, atol=1e-6), name

"""The closed loop: the policy reads, is trained on its rewarded reads, and reads again with its new weights.

    job = RLJob(tasks=("niah_single_2",), lengths=(500, 1000), out=Path("rl"), model="embedded", preset="dapo")
    print(run(job).policy)

1. `policy_serving`: the newest weights are loaded into the server and verified, and readers use them.
2. `collect`: questions from the `curriculum` are read, G times each, until enough groups have variance.
3. `online_trainer`: some optimizer steps on these groups, in one training run from the first iteration to the last.

The groups of each iteration are written to the `loop_journal` before the training on them, and the weights after it to
a checkpoint. If anything is killed, the loop continues from these two, and trains on every group exactly once.
"""

from memagent_training.rl.loop import LoopResult, run
from memagent_training.rl.rl_job import RLJob

__all__ = ["LoopResult", "RLJob", "run"]

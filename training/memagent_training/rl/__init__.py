"""The closed loop: the policy reads, its reads are rewarded, it is trained on them, and its new weights read on.

    job = RLJob(tasks=("niah_single_2",), lengths=(500, 1000), out=Path("rl"), model="embedded", preset="dapo")
    print(run(job).policy)

1. `policy_serving`: the newest weights come into the server, verified, and readers ask for them.
2. `collect`: questions as the `curriculum` has them are read, G times each, until enough groups have variance.
3. `online_trainer`: some optimizer steps on these groups, in one training from the first iteration to the last.

What each iteration was trained on stands in the `loop_journal` before it is trained on, and the weights after it in a
checkpoint: whatever is killed, the loop continues from these two, with every group trained on once.
"""

from memagent_training.rl.loop import Finished, run
from memagent_training.rl.rl_job import RLJob

__all__ = ["Finished", "RLJob", "run"]

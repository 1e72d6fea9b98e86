"""New weights into the server that reads: three ways, each verified by what the server then says.

    sync = PolicySync(server)                       # a VLLMServer of one's own, or a RemoteServer
    served = await sync.sync(Path("policy-2"), "2")
    policy = OpenAICompatiblePolicy(served.model, base_url=server.base_url, policy_version=served.version)

1. Adapters are loaded beside the served weights, under a name of their own per version.
2. Whole weights are reloaded in place, and what the prefix cache holds of the old ones is dropped.
3. The server is restarted with them: the last resort, and only where the server is ours.

After each, log-probs that the server gives for a probe are compared with those that transformers gives with the same
weights (`probe`). Where they differ, the next way is taken; where none is left, the reasons are raised.

`folders` checks a policy before a server hears of it, since a server does not: vLLM 0.31 accepts adapters of another
model, and dies of a path that it cannot read.
"""

from memagent_training.serving.policy_sync.probe import Probe, ProbeRow
from memagent_training.serving.policy_sync.reference import ReferenceLogProbs, folder_logprobs
from memagent_training.serving.policy_sync.served import How, Served, SyncError
from memagent_training.serving.policy_sync.sync import PolicySync, RemoteServer, SyncSettings

__all__ = [
    "How",
    "PolicySync",
    "Probe",
    "ProbeRow",
    "ReferenceLogProbs",
    "RemoteServer",
    "Served",
    "SyncError",
    "SyncSettings",
    "folder_logprobs",
]

"""Loads new weights into the server that reads: three methods, each verified by the server's log-probs.

    sync = PolicySync(server)                       # your own VLLMServer, or a RemoteServer
    served = await sync.sync(Path("policy-2"), "2")
    policy = OpenAICompatiblePolicy(served.model, base_url=server.base_url, policy_version=served.version)

1. Adapters are loaded next to the served weights, under a separate name per version.
2. Whole weights are reloaded in place, and the prefix cache of the old ones is dropped.
3. The server is restarted with them: the last resort, and only if the server is ours.

After each method, the server's log-probs of a probe are compared with those of transformers (`probe`). If they differ,
the next method is tried; if none is left, an error has the reasons. This also detects adapters that belong to other
base weights, which vLLM 0.31 accepts.
"""

"""Run under the interpreter that has xllamacpp: a llama.cpp server of one model, for as long as its input is open.

Its input is its owner's: it ends with the process that started it.

python llama_cpp_server.py MODEL.gguf
"""

from __future__ import annotations

import sys

import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx = 2048
parameters.hostnames = ["127.0.0.1"]
parameters.port = 0
parameters.fit_params = parameters.warmup = False
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
parameters.verbosity = 1
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
sys.stdin.read()

"""Serve one model with llama.cpp, in the interpreter that has xllamacpp: `python llama_cpp_server.py MODEL.gguf`.

The server runs until its standard input is closed, so it ends with the process that started it.
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

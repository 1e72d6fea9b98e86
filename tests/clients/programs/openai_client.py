"""The official client: `openai_client.py API KEY MODEL plain|stream`, with messages as JSON on standard input."""

from __future__ import annotations

import json
import sys

from openai import OpenAI

api, key, model, mode = sys.argv[1:]
client = OpenAI(base_url=api, api_key=key, timeout=3600, max_retries=0)
messages = json.load(sys.stdin)
if mode == "plain":
    reply = client.chat.completions.create(model=model, messages=messages, temperature=0)
    pieces = [reply.choices[0].message.content]
else:
    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
print(json.dumps([piece for piece in pieces if piece]))

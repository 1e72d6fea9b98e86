"""LangChain's client: `chat_openai.py API KEY MODEL plain|stream`, with messages as JSON on standard input."""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI

api, key, model, mode = sys.argv[1:]
chat = ChatOpenAI(base_url=api, api_key=key, model=model, temperature=0, timeout=3600, max_retries=0)
messages = json.load(sys.stdin)
pieces = [chat.invoke(messages).content] if mode == "plain" else [chunk.content for chunk in chat.stream(messages)]
print(json.dumps([piece for piece in pieces if piece]))

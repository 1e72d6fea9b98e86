"""LlamaIndex's client: `llama_index_client.py API KEY MODEL plain|stream`, with messages as JSON on standard input."""

from __future__ import annotations

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

api, key, model, mode = sys.argv[1:]
llm = OpenAILike(
    api_base=api,
    api_key=key,
    model=model,
    is_chat_model=True,
    context_window=10_000_000,
    temperature=0,
    timeout=3600,
    max_retries=0,
)
messages = [ChatMessage(role=item["role"], content=item["content"]) for item in json.load(sys.stdin)]
pieces = (
    [llm.chat(messages).message.content]
    if mode == "plain"
    else [response.delta for response in llm.stream_chat(messages)]
)
print(json.dumps([piece for piece in pieces if piece]))

"""Ask the server with OpenAI's own client: a whole answer, then one that streams.

    pip install openai
    python examples/openai_client.py

LIGHTSERVE_URL names another server than the one on this machine, OPENAI_API_KEY its key.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("LIGHTSERVE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
print("model:", model)

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Where is Mira's brass lantern?"}],
    max_tokens=60,
    temperature=0,
)
print("answer:", answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me a story about Mira and the brass lantern."}],
    max_tokens=300,
    seed=7,
    stream=True,
    stream_options={"include_usage": True},
)
print("story: ", end="")
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:  # the last chunk
        print(f"\nusage: {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")

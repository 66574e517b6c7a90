"""Work through a file of prompts as best-effort requests, and print each answer as it comes.

    pip install openai
    python examples/flex_batch.py examples/prompts.txt > answers.jsonl

`service_tier="flex"` makes a request best-effort: it takes the time and the memory that real-time
requests leave. So it may wait long, and the client is told to be patient; where the queue of the
server is full (429), the client tries again after the time that the server predicts (Retry-After).

LIGHTSERVE_URL names another server than the one on this machine, OPENAI_API_KEY its key.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from openai import AsyncOpenAI

MAX_IN_FLIGHT = 64  # the server orders what waits there, so let it see many


async def main(path: str) -> None:
    """Print a line of JSON per prompt, in the order in which answers come."""
    prompts = Path(path).read_text().splitlines()
    async with AsyncOpenAI(
        base_url=os.environ.get("LIGHTSERVE_URL", "http://127.0.0.1:8000") + "/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        timeout=3600,
        max_retries=20,
    ) as client:
        model = (await client.models.list()).data[0].id
        room = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def ask(number: int, prompt: str) -> dict[str, object]:
            async with room:
                answer = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=300,
                    service_tier="flex",
                )
            return {"line": number, "tier": answer.service_tier} | {
                "answer": answer.choices[0].message.content
            }

        asked = [ask(number, prompt) for number, prompt in enumerate(prompts, 1)]
        for ready in asyncio.as_completed(asked):
            print(json.dumps(await ready), flush=True)


if len(sys.argv) != 2:
    sys.exit(f"usage: {sys.argv[0]} FILE (a prompt per line, such as examples/prompts.txt)")
asyncio.run(main(sys.argv[1]))

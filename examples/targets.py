"""Say how fast an answer has to be, and see whether it was.

    pip install openai
    python examples/targets.py

`slo` gives a request targets: the time to its first token, the mean time per further token and the
largest gap between two of them. The server plans its steps by them. A target that even an idle
server could not meet is raised for planning, and the answer says so in a field `slo`.

LIGHTSERVE_URL names another server than the one on this machine, OPENAI_API_KEY its key.
"""

import itertools
import os
import time

from openai import OpenAI

TARGETS = {"ttft_ms": 500, "tpot_ms": 50, "mtpot_ms": 200}

client = OpenAI(
    base_url=os.environ.get("LIGHTSERVE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
start = time.perf_counter()
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Describe the harbour of Saltmouth in winter."}],
    max_tokens=200,
    stream=True,
    extra_body={"slo": TARGETS},
)
came = []
for chunk in stream:
    raised = (chunk.model_extra or {}).get("slo")  # in the first event, where there is any
    if raised:
        print("planned with:", raised["scheduled"], "instead of", raised["asked"])
    if chunk.choices and chunk.choices[0].delta.content:
        came.append(1000 * (time.perf_counter() - start))

gaps = [later - earlier for earlier, later in itertools.pairwise(came)]
seen = {"ttft_ms": came[0], "tpot_ms": sum(gaps) / len(gaps), "mtpot_ms": max(gaps)}
for name, target in TARGETS.items():
    verdict = "met" if seen[name] <= target else "missed"
    print(f"{name}: asked {target}, seen {seen[name]:.1f}: {verdict}")

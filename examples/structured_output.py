"""Get JSON that keeps to a schema, and a text that matches a regular expression.

    pip install openai
    python examples/structured_output.py

The server lets the model write nothing else: whatever the model, the output parses. (What it says
is another matter: the bundled model has never seen JSON, and makes up words.)

LIGHTSERVE_URL names another server than the one on this machine, OPENAI_API_KEY its key.
"""

import json
import os

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "owner": {"type": "string", "minLength": 1, "maxLength": 20},
        "thing": {"enum": ["kite", "lantern", "kettle"]},
        "is_lost": {"type": "boolean"},
    },
    "required": ["owner", "thing", "is_lost"],
    "additionalProperties": False,
}

client = OpenAI(
    base_url=os.environ.get("LIGHTSERVE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Who has the paper kite?"}]

answer = client.chat.completions.create(
    model=model,
    messages=question,
    max_tokens=200,
    response_format={"type": "json_schema", "json_schema": {"name": "find", "schema": SCHEMA}},
)
print("json:", json.loads(answer.choices[0].message.content))

answer = client.chat.completions.create(
    model=model,
    messages=question,
    max_tokens=60,
    extra_body={"structured_outputs": {"regex": r"The paper kite is with [A-Z][a-z]+\."}},
)
print("regex:", answer.choices[0].message.content)

"""Let the model call a function, run it, and give the model what it returned.

    pip install openai
    python examples/tools.py

The server has to know how the model writes calls: `lightserve serve --tool-call-parser hermes` (or
llama3_json). With `tool_choice="required"` a call is certain, and its arguments keep to the schema;
with "auto" the model decides.

LIGHTSERVE_URL names another server than the one on this machine, OPENAI_API_KEY its key.
"""

import json
import os
import sys

from openai import BadRequestError, OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "find_thing",
        "description": "Say in which room a thing is.",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"enum": ["kite", "lantern", "kettle"]}},
            "required": ["thing"],
            "additionalProperties": False,
        },
    },
}


def find_thing(thing: str) -> str:
    """Return where it is."""
    return {"kite": "the attic", "lantern": "the cellar"}.get(thing, "the kitchen")


client = OpenAI(
    base_url=os.environ.get("LIGHTSERVE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Where is Mira's brass lantern?"}]
try:
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
except BadRequestError as refusal:  # the server runs without --tool-call-parser
    sys.exit(refusal.body["message"])
message = answer.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    arguments = json.loads(call.function.arguments)
    result = find_thing(**arguments)
    print(f"{call.function.name}({arguments}) -> {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

answer = client.chat.completions.create(
    model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=60
)
print("answer:", answer.choices[0].message.content)

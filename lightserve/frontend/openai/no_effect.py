"""Fields that many clients always send, accepted only at the values that change nothing.

The tables below are the documentation: any other value is a 400 that names the field. A value
that would change the answer is never accepted and ignored. Null is always accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from lightserve.frontend.json_body import UNSUPPORTED_VALUE, StrictModel

NoEffect = Mapping[str, tuple[Any, ...]]
"""Names of fields, and their values besides null that change nothing."""

_COMMON: NoEffect = {
    # vLLM's. Special tokens are never part of an answer's text.
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
}
CHAT_NO_EFFECT: NoEffect = {
    **_COMMON,
    "store": (False,),
    "modalities": (["text"],),
    "audio": (),
    "functions": (),
    "function_call": (),
    "prediction": (),
    "web_search_options": (),
    "add_special_tokens": (False,),  # the template writes them
    "echo": (False,),
}
COMPLETION_NO_EFFECT: NoEffect = {
    **_COMMON,
    "add_special_tokens": (True,),
}
MESSAGE_NO_EFFECT: NoEffect = {
    # What an answer's message has, as clients send it back in the next turn.
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
}


class NoEffectModel(StrictModel):
    """A strict model that also takes the fields of a table, at its values, and drops them."""

    no_effect: ClassVar[NoEffect] = {}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the model's JSON schema, the fields of the table included."""
        schema = handler(core_schema)
        fields = {name: {"enum": [*values, None]} for name, values in cls.no_effect.items()}
        handler.resolve_ref_schema(schema).setdefault("properties", {}).update(fields)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_no_effect(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for field in cls.no_effect.keys() & body.keys():
            _check(field, body[field], cls.no_effect[field])
        return {key: value for key, value in body.items() if key not in cls.no_effect}


def _check(field: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value is None or any(type(v) is type(value) and v == value for v in allowed):
        return
    shown = " or ".join(json.dumps(accepted) for accepted in (*allowed, None))
    context = {"field": field, "complaint": f"is not supported yet except as {shown}"}
    raise PydanticCustomError(UNSUPPORTED_VALUE, "{complaint}", context)

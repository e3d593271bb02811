"""The published description of the surface: GET /openapi.json, in OpenAPI 3.1.

It says what this gateway looks at, refuses and answers by itself. Fields that only an engine reads are described where
OpenAI's API has them; unknown fields pass (`additionalProperties` is left open), so a client may send more than is
written here.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

Json = dict[str, Any]

_STATUSES = {
    "400": "The request is wrong; the message says how to mend it.",
    "401": "A key is needed, or the one given is not known.",
    "403": "The key may not do this.",
    "404": "No such model.",
    "405": "No such method here.",
    "408": "The request's body did not arrive in time.",
    "413": "The request's body is too large.",
    "415": "The request's body is compressed, or no JSON.",
    "422": "This request has brought replicas down and is not tried again.",
    "429": "A limit is reached, or the queue is full.",
    "431": "The request's headers are too large.",
    "500": "The gateway or a replica failed.",
    "501": "The replica can't do this.",
    "502": "A replica broke off its answer.",
    "503": "No replica can take the request now.",
    "504": "The deadline has passed.",
}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def optional(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def obj(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def number(low: float, high: float) -> Json:
    return {"type": "number", "minimum": low, "maximum": high}


def integer(low: int, high: int = 2**31 - 1) -> Json:
    return {"type": "integer", "minimum": low, "maximum": high}


_TEXT: Json = {"type": "string"}
_FLAG: Json = {"type": "boolean"}
_ANY: Json = {"type": "object"}
_MODEL: Json = {"type": "string", "minLength": 1, "maxLength": 1024, "description": "A served model, or an alias."}
_CONTENT: Json = {"anyOf": [_TEXT, array(_ANY), {"type": "null"}]}
_TOOLS = optional(array(_ANY))
_CHOICE: Json = {"anyOf": [_TEXT, _ANY, {"type": "null"}]}
_IDS = array(integer(0))

_SAMPLING: Json = {
    "temperature": optional(number(0, 2)),
    "top_p": optional(number(0, 1)),
    "top_k": optional(integer(-1)),
    "min_p": optional(number(0, 1)),
    "n": optional(integer(1, 128)),
    "stop": {"anyOf": [_TEXT, array(_TEXT, maxItems=4), {"type": "null"}]},
    "seed": optional({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    "presence_penalty": optional(number(-2, 2)),
    "frequency_penalty": optional(number(-2, 2)),
    "logit_bias": optional({"type": "object", "additionalProperties": {"type": "number"}}),
    "max_tokens": optional(integer(1)),
    "stream": optional(_FLAG),
    "stream_options": optional(obj([], include_usage=optional(_FLAG))),
    "user": optional(_TEXT),
    "prompt_cache_key": optional({**_TEXT, "description": "Requests with the same key are kept together."}),
}

_SCHEMAS: Json = {
    "Error": obj(
        ["error"],
        error=obj(
            ["message", "type", "param", "code"], message=_TEXT, type=_TEXT, param=optional(_TEXT), code=optional(_TEXT)
        ),
    ),
    "MessagesError": obj(
        ["type", "error", "request_id"],
        type={"const": "error"},
        error=obj(["type", "message"], type=_TEXT, message=_TEXT),
        request_id=_TEXT,
    ),
    "Usage": obj(
        ["prompt_tokens", "total_tokens"],
        prompt_tokens=integer(0),
        completion_tokens=integer(0),
        total_tokens=integer(0),
        prompt_tokens_details=optional(obj([], cached_tokens=optional(integer(0)))),
    ),
    "ChatRequest": obj(
        ["model", "messages"],
        model=_MODEL,
        messages=array(obj(["role"], role=_TEXT, content=_CONTENT), minItems=1),
        max_completion_tokens=optional(integer(1)),
        logprobs=optional(_FLAG),
        top_logprobs=optional(integer(0, 20)),
        tools=_TOOLS,
        tool_choice=_CHOICE,
        parallel_tool_calls=optional(_FLAG),
        response_format=optional(_ANY),
        reasoning_effort=optional(_TEXT),
        **_SAMPLING,
    ),
    "ChatAnswer": obj(
        ["id", "object", "created", "model", "choices"],
        id=_TEXT,
        object={"const": "chat.completion"},
        created=integer(0, 2**53),
        model=_TEXT,
        choices=array(obj(["index", "message"], index=integer(0), message=_ANY, finish_reason=optional(_TEXT))),
        usage=optional(ref("Usage")),
    ),
    "CompletionRequest": obj(
        ["model", "prompt"],
        model=_MODEL,
        prompt={"anyOf": [_TEXT, array(_TEXT, minItems=1), array(integer(0), minItems=1), array(_IDS, minItems=1)]},
        logprobs=optional(integer(0, 5)),
        echo=optional(_FLAG),
        suffix=optional(_TEXT),
        best_of=optional(integer(1, 128)),
        **_SAMPLING,
    ),
    "CompletionAnswer": obj(
        ["id", "object", "created", "model", "choices"],
        id=_TEXT,
        object={"const": "text_completion"},
        created=integer(0, 2**53),
        model=_TEXT,
        choices=array(obj(["index", "text"], index=integer(0), text=_TEXT, finish_reason=optional(_TEXT))),
        usage=optional(ref("Usage")),
    ),
    "EmbeddingRequest": obj(
        ["model", "input"],
        model=_MODEL,
        input={"anyOf": [_TEXT, array(_TEXT, minItems=1), array(integer(0), minItems=1), array(_IDS, minItems=1)]},
        encoding_format=optional({"enum": ["float", "base64"]}),
        dimensions=optional(integer(1)),
        user=optional(_TEXT),
    ),
    "EmbeddingAnswer": obj(["object", "data", "model"], object={"const": "list"}, data=array(_ANY), model=_TEXT),
    "ResponsesRequest": obj(
        ["model", "input"],
        model=_MODEL,
        input={"anyOf": [_TEXT, array(_ANY, minItems=1)]},
        instructions=optional(_TEXT),
        max_output_tokens=optional(integer(1)),
        temperature=optional(number(0, 2)),
        top_p=optional(number(0, 1)),
        top_logprobs=optional(integer(0, 20)),
        tools=_TOOLS,
        tool_choice=_CHOICE,
        parallel_tool_calls=optional(_FLAG),
        reasoning=optional(obj([], effort=optional(_TEXT))),
        text=optional(obj([], format=optional(_ANY))),
        store=optional(_FLAG),
        previous_response_id=optional({**_TEXT, "description": "An answer that is still stored here."}),
        stream=optional(_FLAG),
    ),
    "Response": obj(
        ["id", "object", "created_at", "status", "model", "output"],
        id=_TEXT,
        object={"const": "response"},
        created_at=integer(0, 2**53),
        status={"enum": ["completed", "incomplete"]},
        model=_TEXT,
        output=array(_ANY),
        usage=optional(_ANY),
    ),
    "MessagesRequest": obj(
        ["model", "messages", "max_tokens"],
        model=_MODEL,
        messages=array(
            obj(["role", "content"], role={"enum": ["user", "assistant"]}, content={"anyOf": [_TEXT, array(_ANY)]}),
            minItems=1,
        ),
        max_tokens=integer(1),
        system={"anyOf": [_TEXT, array(obj(["text"], type={"const": "text"}, text=_TEXT)), {"type": "null"}]},
        stop_sequences=optional(array(_TEXT)),
        temperature=optional(number(0, 1)),
        top_p=optional(number(0, 1)),
        top_k=optional(integer(0)),
        tools=_TOOLS,
        tool_choice=optional(obj(["type"], type={"enum": ["auto", "any", "tool", "none"]}, name=_TEXT)),
        thinking=optional(_ANY),
        stream=optional(_FLAG),
    ),
    "Message": obj(
        ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content=array(_ANY),
        stop_reason=optional(_TEXT),
        stop_sequence=optional(_TEXT),
        usage=_ANY,
    ),
    "CountRequest": obj(["model", "messages"], model=_MODEL, messages=array(_ANY, minItems=1), tools=_TOOLS),
    "Count": obj(["input_tokens"], input_tokens=integer(0)),
    "TokenizeRequest": obj([], model=optional(_MODEL), prompt=optional(_TEXT), messages=optional(array(_ANY))),
    "Tokens": obj(["tokens"], tokens=_IDS, count=integer(0), max_model_len=optional(integer(0))),
    "DetokenizeRequest": obj(["tokens"], model=optional(_MODEL), tokens=_IDS),
    "Text": obj(["prompt"], prompt=_TEXT),
    "Model": obj(
        ["id", "object", "created", "owned_by"],
        id=_TEXT,
        object={"const": "model"},
        created=integer(0, 2**53),
        owned_by=_TEXT,
        root={**_TEXT, "description": "The model that an alias stands for."},
    ),
    "ModelList": obj(["object", "data"], object={"const": "list"}, data=array(ref("Model"))),
    "Health": obj(["status"], status=_TEXT),
    "About": obj(["service", "api"], service=_TEXT, api=_TEXT),
    "Ready": obj(["ready"], ready=_FLAG),
    "Deleted": obj(["id", "deleted"], id=_TEXT, object={"const": "response"}, deleted=_FLAG),
}


def document() -> Json:
    """The whole document."""
    try:
        release = version("warmgate")
    except PackageNotFoundError:  # run from a source tree that is not installed
        release = "0"
    post, get = _post, _get
    name = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    response_id = {"name": "response_id", "in": "path", "required": True, "schema": _TEXT}
    paths: Json = {
        "/v1/chat/completions": {"post": post("A chat completion", "ChatRequest", "ChatAnswer", streams=True)},
        "/v1/completions": {"post": post("A completion", "CompletionRequest", "CompletionAnswer", streams=True)},
        "/v1/embeddings": {"post": post("Embeddings", "EmbeddingRequest", "EmbeddingAnswer")},
        "/v1/responses": {"post": post("A response", "ResponsesRequest", "Response", streams=True)},
        "/v1/responses/{response_id}": {
            "parameters": [response_id],
            "get": get("A stored response", "Response"),
            "delete": get("Forget a stored response", "Deleted"),
        },
        "/v1/messages": {"post": post("A message", "MessagesRequest", "Message", "MessagesError", streams=True)},
        "/v1/messages/count_tokens": {"post": post("A prompt's tokens", "CountRequest", "Count", "MessagesError")},
        "/tokenize": {"post": post("Tokens of a text or a chat", "TokenizeRequest", "Tokens")},
        "/detokenize": {"post": post("Text of tokens", "DetokenizeRequest", "Text")},
        "/v1/models": {"get": get("Models and aliases", "ModelList")},
        "/v1/models/{model}": {"parameters": [name], "get": get("A model; its name may hold slashes", "Model")},
        "/": {"get": get("What answers here, and where the rest is", "About")},
        "/health": {"get": get("What is behind the gateway", "Health")},
        "/ready": {"get": get("Whether a request could be served now", "Ready", {"503": _json("Ready")})},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Warmgate",
            "version": release,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _json(schema: str, description: str = "The answer.") -> Json:
    return {"description": description, "content": {"application/json": {"schema": ref(schema)}}}


def _errors(schema: str) -> Json:
    return {status: _json(schema, description) for status, description in _STATUSES.items()}


def _post(summary: str, request: str, answer: str, error: str = "Error", streams: bool = False) -> Json:
    answered = _json(answer)
    if streams:
        answered["content"]["text/event-stream"] = {"schema": _TEXT}
    body = {"required": True, "content": {"application/json": {"schema": ref(request)}}}
    return {"summary": summary, "requestBody": body, "responses": {"200": answered, **_errors(error)}}


def _get(summary: str, answer: str, more: Json | None = None) -> Json:
    return {"summary": summary, "responses": {"200": _json(answer), **_errors("Error"), **(more or {})}}

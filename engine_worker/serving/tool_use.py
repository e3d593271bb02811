"""What a request's tools mean for its answer: which calls may come, in which notation, and what the model may write.

The notation is read off the chat template: that is what the model was trained on. A template that knows no tools gets
them told as text, with Hermes's tags (contract/tools.py). A notation that is not known here is left to transformers'
response parser, where the tokenizer brings a description for it.

    none      tools are shown, calls are not looked for
    auto      calls are found in the text. Where a function is `strict`, or the request asks for a format as well, the
              output is constrained: free text, and behind the mark of a call nothing but a valid one
    required  the output is one call or more and nothing else, by constraint, whatever the model would say. It ends in
              front of a call that was there before (repeated_calls.py), unless parallel calls are asked for by name
    named     exactly one call to that function, likewise
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine_worker.contract.prompt import PromptRenderer
from engine_worker.contract.tools import CALL_BEGIN, CALL_END
from engine_worker.serving.repeated_calls import RepeatedCalls
from engine_worker.serving.requests import ChatRequest
from engine_worker.serving.response_template import TemplateParser, usable
from engine_worker.serving.structured import Format, compiled, schema_text
from engine_worker.serving.tool_parser import CallStyle, ToolParser
from engine_worker.serving.validation import invalid, unsupported

MAX_TOOLS = 128
MAX_FORCED_CALLS = 16  # of an output that is constrained to calls: a model that can't stop calling is stopped

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

HERMES = CallStyle(begin=CALL_BEGIN, end=CALL_END)
QWEN_XML = CallStyle(begin=CALL_BEGIN, end=CALL_END, is_xml=True)
LLAMA = CallStyle(begin="<|python_tag|>", is_bare=True, arguments_key="parameters")
MISTRAL = CallStyle(begin="[TOOL_CALLS]", is_list=True)
MISTRAL_NAMED = CallStyle(begin="[TOOL_CALLS]", is_list=True, is_named=True, between="[ARGS]")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the client offers. `parameters` is a JSON schema of an object."""

    name: str
    parameters: dict[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How to read calls out of one request's answers."""

    style: CallStyle
    functions: dict[str, Any]  # name -> schema of its parameters
    limit: int | None
    response_template: dict[str, Any] | None = None  # read by it, instead of by the style
    prefix: str = ""  # the end of the prompt, for the response template
    may_repeat: bool = True  # a call that was there before
    only_calls: bool = False  # by constraint: text beside them is a call that was cut off before its name

    def parser(self) -> ToolParser | TemplateParser:
        if self.response_template is not None:
            return TemplateParser(self.response_template, self.functions, self.limit, self.prefix)
        return ToolParser(self.style, self.functions, self.limit)

    def repeats(self) -> RepeatedCalls | None:
        """What ends an answer that repeats a call, where it must not."""
        return None if self.may_repeat else RepeatedCalls(ToolParser(self.style, self.functions))


def call_style(template: str | None, knows_tools: bool) -> CallStyle | None:
    """The notation that a chat template teaches; None where it is one that is not known here."""
    source = template or ""
    if not knows_tools:
        return HERMES
    if "<tool_call>" in source and "<arg_key>" not in source:
        return QWEN_XML if "<function=" in source else HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL_NAMED if "[ARGS]" in source else MISTRAL
    if "<|python_tag|>" in source or ("ipython" in source and '"parameters"' in source):
        return LLAMA
    return None


class ToolPlanner:
    """Plans the use of tools for one model."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._style = call_style(renderer.bundle.chat_template, renderer.knows_tools)
        self._template = usable(renderer.bundle.response_template) if self._style is None else None
        added = renderer.tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def special_marks(self) -> frozenset[int]:
        """Special tokens that mark calls: they must not be left out of the text that is searched."""
        if self._style is None:
            return frozenset(self._special.values()) if self._template else frozenset()
        marks = (self._style.begin, self._style.end, self._style.between)
        return frozenset(self._special[mark] for mark in marks if mark in self._special)

    def plan(self, request: ChatRequest, wanted: Format | None) -> tuple[ToolUse | None, str]:
        """How to read the answer (None: as text), and the grammar that it must follow ("": none). Raises ApiError."""
        functions = offered(request.tools or [])
        choice, functions = _chosen(request, functions)
        if choice == "none" or not functions:
            return None, wanted.grammar() if wanted else ""
        style = self._style
        if style is None:
            if choice == "auto" and self._template and wanted is None and not any(f.strict for f in functions):
                limit = 1 if request.parallel_tool_calls is False else None
                return ToolUse(HERMES, {f.name: f.parameters for f in functions}, limit, self._template), ""
            if choice == "auto":
                raise unsupported(
                    "tools",
                    "the notation of this model's tool calls is not known here; force a call with `tool_choice`, or "
                    'set it to "none" to get the answer as text',
                )
            style = HERMES
        one_only = choice == "one" or request.parallel_tool_calls is False
        use = ToolUse(
            style,
            {f.name: f.parameters for f in functions},
            1 if one_only else None,
            may_repeat=choice != "required" or one_only or style.is_named or bool(request.parallel_tool_calls),
            only_calls=choice != "auto",
        )
        calls = _Calls(style, functions, 1 if one_only else MAX_FORCED_CALLS, self._mark)
        if choice != "auto":
            return use, compiled("tools", "lark", calls.only())
        if wanted is not None:
            return use, compiled(wanted.field, "lark", calls.or_else(wanted))
        if any(function.strict for function in functions):
            return use, compiled("tools", "lark", calls.among_text())
        return use, ""

    def _mark(self, text: str) -> str:
        """A mark in Lark: by its id where it is a token of its own, which to llguidance no text can spell."""
        token_id = self._added.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"


class _Calls:
    """Lark grammars of outputs with calls."""

    def __init__(self, style: CallStyle, functions: list[Function], most: int, mark: Callable[[str], str]) -> None:
        self._style = style
        self._functions = functions
        self._num_more = most - 1
        self._mark = mark

    def only(self) -> str:
        return "\n".join([f"start: {self._calls()}", *self._rules()])

    def or_else(self, wanted: Format) -> str:
        """Calls, or an answer in the format that the request asks for."""
        if wanted.kind == "lark":
            raise invalid(wanted.field, f"`{wanted.field}` with a grammar can't be combined with `tools`.")
        match wanted.kind:
            case "json":
                answer = f"answer: %json {wanted.text}"
            case "regex":
                answer = f"answer: /{_slashes_escaped(wanted.text)}/"
            case _:
                answer = f"answer: {wanted.text}"
        return "\n".join([f"start: {self._calls()} | answer", answer, *self._rules()])

    def among_text(self) -> str:
        """Free text with calls in it."""
        begin = self._style.begin
        text = r"TEXT: /(.|\n)*/"
        if self._style.is_bare:  # a call is all of the output, known by its first character
            return "\n".join([f"start: {self._calls()} | PLAIN?", r"PLAIN: /\s*[^\s{](.|\n)*/", *self._rules()])
        mark = self._mark(begin)
        if mark.startswith("<"):
            lead = [f"lead: TEXT {mark}"]
        else:
            lead = ["lead: lead_text", f"lead_text[lazy]: TEXT {mark}"]
        return "\n".join([f"start: (lead {self._inner()})* TEXT", text, *lead, *self._rules()])

    def _calls(self) -> str:
        style = self._style
        if style.is_named or style.is_list:
            return f"{self._mark(style.begin)} {self._inner()}"
        begin = "" if style.is_bare else self._mark(style.begin)
        joint = '"; "' if style.is_bare else r'"\n"'
        one = f"{begin} {self._inner()}"
        return f"{one} {self._more(f'{joint} {one}')}"

    def _more(self, rule: str) -> str:
        return f"({rule}){{0,{self._num_more}}}" if self._num_more else ""

    def _inner(self) -> str:
        """What stands behind a mark: one call (or a list of them) and what closes it."""
        style = self._style
        if style.is_named:
            return "call"
        if style.is_list:
            more = self._more('", " call')
            return f'"[" call {more} "]"'
        if style.is_bare:
            return "call"
        return rf'"\n" call "\n" {self._mark(style.end)}'

    def _rules(self) -> list[str]:
        style = self._style
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self._functions)))]
        for i, function in enumerate(self._functions):
            schema = schema_text("tools", function.parameters, lenient=not function.strict)
            if style.is_named:
                between = self._mark(style.between) if style.between else ""
                rules.append(f"call_{i}: {json.dumps(function.name)} {between} %json {schema}")
            else:
                head = f'{{"name": {json.dumps(function.name)}, "{style.arguments_key}": '
                rules.append(f'call_{i}: {json.dumps(head)} %json {schema} "}}"')
        return rules


def offered(tools: list[dict[str, Any]]) -> list[Function]:
    """The functions in `tools`. Raises ApiError 400 that names the place of a fault."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"`tools` may hold at most {MAX_TOOLS} tools.")
    functions: list[Function] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise invalid(where, f'`{where}` must be an object with `type` "function" and a `function`.')
        functions.append(_function(function, f"{where}.function"))
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise invalid("tools", f"`tools` holds more than one function named {name!r}.")
    return functions


def _function(function: dict[str, Any], where: str) -> Function:
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{where}.name", f"`{where}.name` must be 1 to 64 letters, digits, underscores and dashes.")
    if not isinstance(function.get("description"), str | None):
        raise invalid(f"{where}.description", f"`{where}.description` must be a string.")
    if not isinstance(strict, bool | None):
        raise invalid(f"{where}.strict", f"`{where}.strict` must be true or false.")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise invalid(f"{where}.parameters", f'`{where}.parameters` must be a JSON schema of type "object".')
    return Function(name, {"type": "object", **parameters}, bool(strict))


def _chosen(request: ChatRequest, functions: list[Function]) -> tuple[str, list[Function]]:
    """("none", "auto", "required" or "one", the functions that may be called). Raises ApiError 400."""
    choice = request.tool_choice
    if not functions:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "`tool_choice` needs `tools`.")
        return "none", []
    match choice:
        case None:
            return "auto", functions
        case "none" | "auto" | "required":
            return choice, functions
        case {"type": "function", "function": {"name": str(name)}}:
            return "one", _named([name], functions)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            names = [tool["function"]["name"] for tool in tools if _names_a_function(tool)]
            if names and len(names) == len(tools):
                return mode, _named(names, functions)
    raise invalid(
        "tool_choice",
        '`tool_choice` must be "none", "auto", "required", or an object that names a function: '
        '{"type": "function", "function": {"name": ...}}.',
    )


def _names_a_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _named(names: list[str], functions: list[Function]) -> list[Function]:
    known = {function.name: function for function in functions}
    for name in names:
        if name not in known:
            raise invalid("tool_choice", f"`tool_choice` names {name[:64]!r}, which is not among `tools`.")
    return [known[name] for name in dict.fromkeys(names)]


def _slashes_escaped(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)

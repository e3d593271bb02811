"""From a body to prompts and parameters: everything about a request that needs no engine. Runs off the event loop.

`Preparer` is bound to one loaded model. Its methods are plain functions of the bytes, safe in several threads; parsing,
rendering the chat template and tokenizing take from milliseconds to seconds (long prompts).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from engine_worker.config import ModelInfo
from engine_worker.contract.errors import ApiError
from engine_worker.contract.prompt import PromptRenderer, template_kwargs
from engine_worker.core.types import SamplingParams
from engine_worker.serving import validation
from engine_worker.serving.json_input import parse_object
from engine_worker.serving.requests import ChatRequest, CompletionRequest, GenerationRequest, convert
from engine_worker.serving.structured import wanted_format
from engine_worker.serving.tool_use import ToolPlanner, ToolUse
from engine_worker.serving.validation import invalid, unsupported

logger = logging.getLogger("warmgate.worker")

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; a chat may go on to the model's limit
_MAX_NAMES_LOGGED = 100
_PREFIX_TOKENS = 512  # of the prompt's end, for a response template


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """One API request, ready for the engine: `n` sequences for each prompt.

    params        per prompt, with max_tokens filled in
    num_logprobs  likeliest tokens to show beside the sampled one; None for no logprobs
    echo          the answer begins with the prompt; `prompt_only`: and ends there
    num_prompt_logprobs
                  likeliest tokens in vLLM's `prompt_logprobs`; None for none
    tools         how to find tool calls in the answer; None leaves it text
    kept_special  special tokens that are text although others are skipped: marks of tool calls
    output_ids    tokens that the only sequence has put out elsewhere, for one that goes on from there (resume.py);
                  `told_cached` is what its usage says of cached tokens, None for what is found here, and `told_drafts`
                  how many tokens were speculated there, and how many of them were right
    """

    model: str
    prompts: tuple[list[int], ...]
    params: tuple[SamplingParams, ...]
    n: int
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    salt: str
    num_logprobs: int | None
    stream: bool
    include_usage: bool
    echo: bool = False
    prompt_only: bool = False
    num_prompt_logprobs: int | None = None
    tools: ToolUse | None = None
    kept_special: frozenset[int] = frozenset()
    output_ids: list[int] = field(default_factory=list)
    told_cached: int | None = None
    told_drafts: tuple[int, int] = (0, 0)

    def params_of(self, prompt: int, choice: int) -> SamplingParams:
        """A choice's parameters: with a seed, each has one of its own; the first alone scores the prompt."""
        params = self.params[prompt]
        if choice and params.num_prompt_logprobs is not None:
            params = replace(params, num_prompt_logprobs=None)
        if params.seed is None or choice == 0:
            return params
        return replace(params, seed=(params.seed + choice + 2**63) % 2**64 - 2**63)


class Preparer:
    """`served_models` are the names that requests may use; the first is the canonical one."""

    def __init__(self, info: ModelInfo, renderer: PromptRenderer, served_models: tuple[str, ...]) -> None:
        self.info = info
        self.renderer = renderer
        self.served_models = served_models
        self._tool_planner = ToolPlanner(renderer)
        self._ignored_fields: set[str] = set()
        # The pool may hold less than the model allows. The last token needs no slot.
        self._most_tokens = min(info.max_model_len, info.num_blocks * info.block_size + 1)

    def chat(self, body: bytes) -> PreparedCall:
        """Raises ApiError."""
        value = parse_object(body)
        validation.check_supported(value)
        request = convert(value, ChatRequest)
        self.check_model(request.model)
        validation.check_chat(request)
        if value.get("echo"):
            raise unsupported("echo", "a chat's prompt is not repeated in its answer")
        self._note_ignored(value, request)
        tools, grammar = self._tool_planner.plan(request, wanted_format(request))
        prompt = self.renderer.chat_ids(
            request.messages,
            tools=request.tools or None,
            add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
            continue_final_message=bool(request.continue_final_message),
            chat_template_kwargs=template_kwargs(request.chat_template_kwargs, request.reasoning_effort),
            add_special_tokens=bool(request.add_special_tokens),
        )
        max_tokens = request.max_completion_tokens or request.max_tokens
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        call = self._prepared(request, (prompt,), max_tokens, num_logprobs, param="messages", grammar=grammar)
        if tools is None:
            return call
        if tools.response_template is not None:  # the prompt may have begun the answer
            tools = replace(tools, prefix=self.renderer.decode(prompt[-_PREFIX_TOKENS:], skip_special_tokens=False))
        return replace(call, tools=tools, kept_special=self._tool_planner.special_marks)

    def completion(self, body: bytes) -> PreparedCall:
        """Raises ApiError."""
        value = parse_object(body)
        validation.check_supported(value)
        request = convert(value, CompletionRequest)
        self.check_model(request.model)
        validation.check_completion(request)
        self._note_ignored(value, request)
        prompts = tuple(self._completion_prompts(request))
        max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        wanted = wanted_format(request)
        grammar = wanted.grammar() if wanted else ""
        call = self._prepared(request, prompts, max_tokens or 1, request.logprobs, param="prompt", grammar=grammar)
        if not request.echo:
            return call
        return replace(call, echo=True, prompt_only=max_tokens == 0)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.served_models:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist here; served: {', '.join(self.served_models)}.",
                param="model",
                code="model_not_found",
            )

    def check_ids(self, ids: Iterable[int], field: str) -> None:
        """Raises ApiError 400 where an id is outside the vocabulary."""
        if any(not 0 <= token_id < self.info.vocab_size for token_id in ids):
            raise invalid(field, f"`{field}` must hold token ids from 0 to {self.info.vocab_size - 1}.")

    def _completion_prompts(self, request: CompletionRequest) -> list[list[int]]:
        prompt = request.prompt
        if isinstance(prompt, str):
            items: list[Any] = [prompt]
        elif prompt and all(_is_int(item) for item in prompt):
            items = [prompt]
        else:
            items = prompt
        if not 0 < len(items) * (request.n or 1) <= validation.MAX_SEQUENCES:
            raise invalid("prompt", f"`prompt` must hold 1 to {validation.MAX_SEQUENCES} prompts, times `n`.")
        return [self._prompt_ids(item, request) for item in items]

    def _prompt_ids(self, item: Any, request: CompletionRequest) -> list[int]:
        if isinstance(item, str):
            return self.renderer.encode(item, add_special_tokens=request.add_special_tokens is not False)
        if isinstance(item, list) and all(_is_int(token_id) for token_id in item):
            self.check_ids(item, "prompt")
            return item
        raise invalid("prompt", "`prompt` must be a string, a list of strings, token ids, or a list of token id lists.")

    def _prepared(
        self,
        request: GenerationRequest,
        prompts: tuple[list[int], ...],
        max_tokens: int | None,
        num_logprobs: int | None,
        param: str,
        grammar: str,
    ) -> PreparedCall:
        stops = validation.stop_strings(request.stop)
        base = self._sampling(request, num_logprobs, grammar)
        params = tuple(self._with_max_tokens(base, len(prompt), max_tokens, param) for prompt in prompts)
        options = request.stream_options
        return PreparedCall(
            model=request.model,
            prompts=prompts,
            params=params,
            n=request.n or 1,
            stops=stops,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            salt=request.cache_salt or "",
            num_logprobs=num_logprobs,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            num_prompt_logprobs=request.prompt_logprobs,
        )

    def _sampling(self, request: GenerationRequest, num_logprobs: int | None, grammar: str) -> SamplingParams:
        self.check_ids(request.stop_token_ids or (), "stop_token_ids")
        self.check_ids(request.allowed_token_ids or (), "allowed_token_ids")
        echoes = num_logprobs if isinstance(request, CompletionRequest) and request.echo else None
        scored = [wanted for wanted in (request.prompt_logprobs, echoes) if wanted is not None]
        top_k = max(request.top_k or 0, 0)
        top_p = 1.0 if request.top_p is None else request.top_p
        if top_p == 0:  # OpenAI allows it: a nucleus of the likeliest token alone
            top_k, top_p = 1, 1.0
        return SamplingParams(
            max_tokens=1,  # filled in per prompt
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=request.min_p or 0.0,
            seed=request.seed,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            logit_bias=self._logit_bias(request.logit_bias),
            stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
            min_tokens=request.min_tokens or 0,
            ignore_eos=bool(request.ignore_eos),
            num_logprobs=num_logprobs,
            grammar=grammar,
            allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
            bad_words=self._bad_words(request.bad_words or []),
            num_prompt_logprobs=max(scored, default=None),
        )

    def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """As tokens, at the beginning of a word and behind a blank, which are different ones."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                ids = self.renderer.encode(text, add_special_tokens=False)
                if ids:
                    found[tuple(ids)] = None
        return tuple(found)

    def _logit_bias(self, bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
        pairs: dict[int, float] = {}
        for key, value in (bias or {}).items():
            if not key.isascii() or not key.isdigit() or len(key) > 10:
                raise invalid("logit_bias", "The keys of `logit_bias` must be token ids.")
            if not -100 <= value <= 100:
                raise invalid("logit_bias", "The values of `logit_bias` must be between -100 and 100.")
            pairs[int(key)] = value
        self.check_ids(pairs, "logit_bias")
        return tuple(pairs.items())

    def _with_max_tokens(
        self, params: SamplingParams, num_prompt_tokens: int, max_tokens: int | None, param: str
    ) -> SamplingParams:
        limit = self.info.max_model_len
        if num_prompt_tokens == 0:
            raise invalid(param, "The prompt has no tokens; send at least one.")
        room = limit - num_prompt_tokens
        if room < 1 or (max_tokens or 1) > room:
            asked = f" and {max_tokens} for the completion" if max_tokens else " and at least one for the completion"
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. You requested {num_prompt_tokens} tokens in "
                f"the prompt{asked}. Shorten the prompt or ask for fewer tokens.",
                param=param,
                code="context_length_exceeded",
            )
        if max_tokens is None:  # as much as fits; a prompt too large for the pool is refused by the scheduler
            max_tokens = max(1, self._most_tokens - num_prompt_tokens)
        if params.min_tokens > max_tokens:
            raise invalid("min_tokens", "`min_tokens` must not be larger than the most tokens that may be generated.")
        return replace(params, max_tokens=max_tokens)

    def _note_ignored(self, value: dict[str, Any], request: msgspec.Struct) -> None:
        known = {*request.__struct_fields__, *validation.REFUSED}
        for name in value.keys() - known - self._ignored_fields:
            if len(self._ignored_fields) < _MAX_NAMES_LOGGED:
                self._ignored_fields.add(name)
                logger.info("requests carry the field %s, which is ignored (said once)", repr(name)[:80])


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

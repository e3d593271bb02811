"""What a request may ask for: ranges, combinations, and the features that this worker refuses.

Refusing is part of being a drop-in: a field that changes what the answer means, and that is not honoured, gets a 400
with code `unsupported_parameter`, never an answer that silently lacks it. Limits on counts and lengths are checked
here, before anything is allocated for the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_worker.contract.errors import ApiError
from engine_worker.serving.requests import ChatRequest, CompletionRequest, GenerationRequest

MAX_CHOICES = 128
MAX_SEQUENCES = 512  # prompts times n
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED_IDS = 65_536
MAX_PROMPT_LOGPROBS = 20
MAX_CHAT_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_SALT_CHARS = 256
MAX_MESSAGES = 10_000

Harmless = Callable[[Any], bool]


def _off(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {} or value == ""


# Field -> (the values that ask for nothing special, why the others are refused)
REFUSED: dict[str, tuple[Harmless, str]] = {
    "functions": (_off, "use `tools`"),
    "function_call": (lambda value: value in (None, "none"), "use `tool_choice`"),
    "audio": (_off, "this model reads and writes text only"),
    "modalities": (lambda value: value in (None, [], ["text"]), "this model reads and writes text only"),
    "web_search_options": (_off, "this worker can't search the web"),
    "suffix": (_off, "this worker does not fill in the middle of a text"),
    "prompt_embeds": (_off, "prompts are text or token ids"),
    "use_beam_search": (_off, "beam search is not available"),
    "truncate_prompt_tokens": (_off, "prompts are not truncated; send fewer tokens"),
    "chat_template": (_off, "the model's own chat template is used"),
    "logits_processors": (_off, "only the sampling parameters are available"),
}


def check_supported(body: dict[str, Any]) -> None:
    """Raises ApiError 400 for the first field that asks for what this worker can't do."""
    for field, (harmless, reason) in REFUSED.items():
        if field in body and not harmless(body[field]):
            raise unsupported(field, reason)


def unsupported(field: str, reason: str) -> ApiError:
    return ApiError(400, f"`{field}` is not supported: {reason}.", param=field, code="unsupported_parameter")


def invalid(field: str, message: str) -> ApiError:
    return ApiError(400, message, param=field)


def check_generation(request: GenerationRequest) -> None:
    """Ranges of what chat and completions share. Raises ApiError 400."""
    _between("n", request.n, 1, MAX_CHOICES)
    _between("temperature", request.temperature, 0, 2)
    _between("top_p", request.top_p, 0, 1)
    _between("top_k", request.top_k, -1, 2**31 - 1)
    _between("min_p", request.min_p, 0, 1)
    _between("seed", request.seed, -(2**63), 2**63 - 1)
    _between("presence_penalty", request.presence_penalty, -2, 2)
    _between("frequency_penalty", request.frequency_penalty, -2, 2)
    _between("min_tokens", request.min_tokens, 0, 2**31 - 1)
    if request.repetition_penalty is not None and not 0 < request.repetition_penalty <= 100:
        raise invalid("repetition_penalty", "`repetition_penalty` must be above 0 and at most 100.")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "`stream_options` is only allowed when `stream` is true.")
    if request.cache_salt is not None and not 0 < len(request.cache_salt) <= MAX_SALT_CHARS:
        raise invalid("cache_salt", f"`cache_salt` must have 1 to {MAX_SALT_CHARS} characters.")
    if request.logit_bias is not None and len(request.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"`logit_bias` may name at most {MAX_LOGIT_BIAS} tokens.")
    _check_word_lists(request)
    _between("prompt_logprobs", request.prompt_logprobs, 0, MAX_PROMPT_LOGPROBS)
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs", "`prompt_logprobs` come with whole answers only; leave `stream` out.")
    if request.stop_token_ids is not None and len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"`stop_token_ids` may name at most {MAX_STOP_TOKEN_IDS} tokens.")


def _check_word_lists(request: GenerationRequest) -> None:
    words, ids = request.bad_words or [], request.allowed_token_ids
    if len(words) > MAX_BAD_WORDS or not all(0 < len(word) <= MAX_BAD_WORD_CHARS for word in words):
        raise invalid(
            "bad_words", f"`bad_words` may hold {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARS} characters."
        )
    if ids is not None and not 0 < len(ids) <= MAX_ALLOWED_IDS:
        raise invalid("allowed_token_ids", f"`allowed_token_ids` must hold 1 to {MAX_ALLOWED_IDS} token ids.")


def check_chat(request: ChatRequest) -> None:
    check_generation(request)
    _between("max_tokens", request.max_tokens, 1, 2**31 - 1)
    _between("max_completion_tokens", request.max_completion_tokens, 1, 2**31 - 1)
    if not 1 <= len(request.messages) <= MAX_MESSAGES:
        raise invalid("messages", f"`messages` must hold 1 to {MAX_MESSAGES} messages.")
    _between("top_logprobs", request.top_logprobs, 0, MAX_CHAT_TOP_LOGPROBS)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true.")


def check_completion(request: CompletionRequest) -> None:
    check_generation(request)
    # Nothing generated is of use only for the prompt itself, with its log probabilities.
    _between("max_tokens", request.max_tokens, 0 if request.echo else 1, 2**31 - 1)
    _between("logprobs", request.logprobs, 0, MAX_COMPLETION_LOGPROBS)
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        if request.best_of < n:
            raise invalid("best_of", "`best_of` must be at least `n`.")
        raise unsupported("best_of", "a larger `best_of` than `n` would need ranking, which is not available")


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings as a tuple. Raises ApiError 400."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"`stop` may hold at most {MAX_STOPS} strings.")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise invalid("stop", f"Each string of `stop` must have 1 to {MAX_STOP_CHARS} characters.")
    return stops


def _between(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise invalid(field, f"`{field}` must be between {low} and {high}.")

"""From bodies to prompts and parameters: what is honoured, what is refused, and with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.config import EngineConfig
from engine_worker.contract.errors import ApiError
from engine_worker.contract.prompt import PromptRenderer
from engine_worker.serving.prepare import PreparedCall, Preparer
from tests.engine_worker.serving.fake_engine import FakeRunner
from tests.support.tiny_tokenizer import tiny_bundle

RUNNER = FakeRunner(EngineConfig(model="fake", max_model_len=200))
RENDERER = PromptRenderer(RUNNER.tokenizer)
PREPARER = Preparer(RUNNER.info, RENDERER, ("fake", "alias"))
VOCAB = RUNNER.info.vocab_size
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(**fields: Any) -> PreparedCall:
    return PREPARER.chat(json.dumps({"model": "fake", "messages": USER, **fields}).encode())


def completion(**fields: Any) -> PreparedCall:
    return PREPARER.completion(json.dumps({"model": "fake", "prompt": "hello", **fields}).encode())


def refusal(prepare: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        prepare(**fields)
    return caught.value


def test_a_chat_without_anything() -> None:
    call = chat()
    [prompt] = call.prompts
    assert RENDERER.decode(prompt, False) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    [params] = call.params
    assert params.max_tokens == 200 - len(prompt)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, 0, None)
    assert params.num_logprobs is None
    assert (call.n, call.stream, call.stops, call.salt) == (1, False, (), "")


def test_a_chat_gets_the_tokenizers_own_tokens_where_they_are_asked_for() -> None:
    renderer = PromptRenderer(tiny_bundle())
    preparer = Preparer(RUNNER.info, renderer, ("fake",))
    text = renderer.render_chat(USER)
    for wanted in (True, False, None):
        [prompt] = preparer.chat(
            json.dumps({"model": "fake", "messages": USER, "add_special_tokens": wanted}).encode()
        ).prompts
        assert prompt == renderer.encode(text, bool(wanted))
    assert renderer.encode(text, True) != renderer.encode(text, False)


def test_a_completion_without_anything() -> None:
    call = completion()
    assert RENDERER.decode(call.prompts[0], False) == "hello"
    assert call.params[0].max_tokens == 16


def test_every_sampling_field_arrives() -> None:
    [params] = completion(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-3,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        logit_bias={"5": 1, "6": -100},
        stop_token_ids=[8, 9, 8],
        min_tokens=2,
        ignore_eos=True,
        logprobs=3,
    ).params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (9, 0.5, 0.9, 7, 0.1)
    assert (params.seed, params.presence_penalty, params.frequency_penalty) == (-3, 1, -1.5)
    assert (params.repetition_penalty, params.logit_bias) == (1.2, ((5, 1), (6, -100)))
    assert (params.stop_token_ids, params.min_tokens, params.ignore_eos) == ((8, 9), 2, True)
    assert params.num_logprobs == 3


def test_null_counts_as_absent() -> None:
    fields = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "logit_bias",
        "stream",
        "stream_options",
        "tools",
        "logprobs",
    ]
    assert chat(**dict.fromkeys(fields)) == chat()


def test_unknown_fields_and_harmless_ones_are_ignored() -> None:
    call = chat(user="me", store=True, metadata={"a": 1}, service_tier="auto", brand_new=[1], tools=[], echo=False)
    assert call == chat(response_format={"type": "text"}, parallel_tool_calls=True, modalities=["text"])


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=5).params[0].max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).params[0].max_tokens == 7


def test_logprobs_of_chats() -> None:
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params[0].num_logprobs == 20
    assert chat(logprobs=False).num_logprobs is None
    assert completion(logprobs=0).num_logprobs == 0


def test_the_four_shapes_of_a_prompt() -> None:
    ids = RENDERER.encode("hello", True)
    assert completion(prompt="hello").prompts == (ids,)
    assert completion(prompt=["hello", "hello"]).prompts == (ids, ids)
    assert completion(prompt=ids).prompts == (ids,)
    assert completion(prompt=[ids, [1, 2]]).prompts == (ids, [1, 2])


def test_a_zero_nucleus_is_the_likeliest_token() -> None:
    assert (chat(top_p=0).params[0].top_k, chat(top_p=0).params[0].top_p) == (1, 1.0)
    assert chat(top_k=-1).params[0].top_k == 0


def test_each_choice_has_a_seed_of_its_own() -> None:
    call = chat(n=3, seed=2**63 - 2)
    seeds = [call.params_of(0, choice).seed for choice in range(3)]
    assert len(set(seeds)) == 3
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
    assert chat(n=3).params_of(0, 2).seed is None


def test_stop_strings_and_their_options() -> None:
    assert chat(stop="a").stops == ("a",)
    assert chat(stop=["a", "b"], include_stop_str_in_output=True).stops == ("a", "b")
    assert chat(include_stop_str_in_output=True).include_stop
    assert not chat(skip_special_tokens=False).skip_special_tokens


def test_tools_are_shown_to_the_model_where_no_call_is_wanted() -> None:
    preparer = Preparer(FakeRunner(EngineConfig(model="fake", max_model_len=2000)).info, RENDERER, ("fake",))
    body = {"model": "fake", "messages": USER, "tools": [TOOL]}
    call = preparer.chat(json.dumps({**body, "tool_choice": "none"}).encode())
    assert '"name": "f"' in RENDERER.decode(call.prompts[0], False)
    assert call.tools is None
    assert call.prompts == preparer.chat(json.dumps(body).encode()).prompts  # so that the prefix is the same


BAD_VALUES: dict[str, list[Any]] = {
    "n": [0, -1, 129, 10**30, 1.5, "1", True],
    "temperature": [-0.1, 2.1, "hot", True],
    "top_p": [-0.1, 1.1],
    "top_k": [-2, 10**10, 1.5],
    "min_p": [-0.1, 1.1],
    "seed": [2**63, -(2**63) - 1, "x"],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 10**400 // 10**380],
    "repetition_penalty": [0, -1, 101],
    "max_tokens": [0, -1, 10**30],
    "min_tokens": [-1],
    "stop": ["", [""], ["a"] * 5, [1], "x" * 2000, {}],
    "stop_token_ids": [[-1], [VOCAB], ["a"], list(range(129))],
    "logit_bias": [{"a": 1}, {"-1": 1}, {str(VOCAB): 1}, {"1": 101}, {"1": "x"}, {"٣": 1}, [1]],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, []],
    "cache_salt": ["", "x" * 257, 1],
    "ignore_eos": [1],
    "bad_words": [[""], "x", ["x" * 257], ["x"] * 257, [1]],
    "allowed_token_ids": [[], [VOCAB], [-1], ["x"]],
    "prompt_logprobs": [-1, 21, "x"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_VALUES.items() for value in values], ids=str
)
def test_bad_values(field: str, value: Any) -> None:
    for prepare in (chat, completion):
        error = refusal(prepare, **{field: value})
        assert error.status == 400
        assert error.type == "invalid_request_error"
        assert error.param is not None
        assert error.param.startswith(field), error.message
        assert field in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag"}},
        {"echo": True},
        {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]},
        {"web_search_options": {"a": 1}},
        {"functions": [{"name": "f"}]},
        {"chat_template": "{{ messages }}"},
        {"use_beam_search": True},
    ],
    ids=str,
)
def test_what_this_worker_cannot_do_is_refused(fields: dict[str, Any]) -> None:
    error = refusal(chat, **fields)
    assert (error.status, error.code) == (400, "unsupported_parameter")
    assert error.param in fields


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"best_of": 2}, {"n": 2, "best_of": 3}], ids=str)
def test_what_completions_refuse(fields: dict[str, Any]) -> None:
    error = refusal(completion, **fields)
    assert (error.status, error.code) == (400, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 2},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": -1, "logprobs": True},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function"}},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "<|end|>", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": ["hello"]},
        {"max_completion_tokens": 0},
        {"min_tokens": 9, "max_tokens": 8},
        {"chat_template_kwargs": {"messages": []}},
        {"model": 3},
    ],
    ids=str,
)
def test_bad_chats(fields: dict[str, Any]) -> None:
    error = refusal(chat, **fields)
    assert (error.status, error.type) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [[1], "a", 2], [1, "a"], [-1], [VOCAB], [[1], [VOCAB]], [True], 3, ["a"] * 513, None]
)
def test_bad_prompts(prompt: Any) -> None:
    error = refusal(completion, prompt=prompt)
    assert error.status == 400
    assert (error.param or "").startswith("prompt")


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_fields(missing: str) -> None:
    body = {"model": "fake", "messages": USER}
    del body[missing]
    with pytest.raises(ApiError, match=missing) as caught:
        PREPARER.chat(json.dumps(body).encode())
    assert (caught.value.status, caught.value.param) == (400, missing)


def test_an_unknown_model() -> None:
    error = refusal(chat, model="gpt-4")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert chat(model="alias").model == "alias"


def test_a_context_that_is_too_long() -> None:
    for fields in ({"prompt": [1] * 200}, {"prompt": [1] * 190, "max_tokens": 11}, {"prompt": [1] * 10_000}):
        error = refusal(completion, **fields)
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert "maximum context length is 200 tokens" in error.message
    assert completion(prompt=[1] * 190, max_tokens=10).params[0].max_tokens == 10


def test_a_pool_smaller_than_the_model_limits_the_default_only() -> None:
    small = FakeRunner(EngineConfig(model="fake", max_model_len=200, kv_cache_memory=64))
    preparer = Preparer(small.info, RENDERER, ("fake",))
    body = {"model": "fake", "messages": USER}
    [params] = preparer.chat(json.dumps(body).encode()).params
    assert params.max_tokens == 64 + 1 - len(chat().prompts[0])
    [params] = preparer.chat(json.dumps({**body, "max_tokens": 100}).encode()).params
    assert params.max_tokens == 100  # the scheduler refuses it, and says why


FIELDS = [
    *BAD_VALUES,
    *("messages", "prompt", "model", "tools", "tool_choice", "logprobs", "top_logprobs", "best_of", "echo"),
    *("chat_template_kwargs", "reasoning_effort", "continue_final_message", "response_format"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "parallel_tool_calls"),
]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4))
def test_no_body_fails_in_another_way(fields: dict[str, Any]) -> None:
    for prepare in (chat, completion):
        try:
            call = prepare(**fields)
        except ApiError as error:
            assert error.status in (400, 404)  # noqa: PT017
        else:
            assert all(params.max_tokens >= 1 for params in call.params)
            assert 1 <= len(call.prompts) * call.n <= 512

"""The published description against what is served: every status and body is one that it declares.

Cases that fit the description, and cases that break it on purpose, for each operation; to the gateway, and to the
worker where it has the route.
"""

from __future__ import annotations

import re

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.openapi import document
from tests.fuzz.conftest import HANG_GUARD_S, Pair, effort

load_all_checks()
SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = {operation.ok().label: operation.ok() for operation in SCHEMA.get_all_operations()}
WORKER = re.compile(r"/v1/(chat/)?completions|/(de)?tokenize|/v1/models|/health")
CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]
PLACES = [("gateway", label) for label in OPERATIONS] + [
    ("worker", label) for label, operation in OPERATIONS.items() if WORKER.fullmatch(operation.path)
]


def test_it_is_what_is_published(pair: Pair) -> None:
    published = httpx.get(f"http://127.0.0.1:{pair.gateway_port}/openapi.json", trust_env=False).json()
    assert published == document()


@pytest.mark.parametrize(("place", "label"), PLACES)
def test_every_answer_is_declared(pair: Pair, place: str, label: str) -> None:
    operation = OPERATIONS[label]
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    if operation.method == "get" and not operation.path_parameters:
        modes = [GenerationMode.POSITIVE]

    @effort(8 if operation.method == "post" else 3)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(modes))
        case = data.draw(operation.as_strategy(mode))
        case.headers.pop("Authorization", None)
        answer = case.call(base_url=f"http://127.0.0.1:{pair.ports[place]}", timeout=HANG_GUARD_S)
        assert answer.status_code < 500 or answer.status_code == 501, (case.as_curl_command(), answer.text)
        case.validate_response(answer, checks=CONFORMANCE)

    run()

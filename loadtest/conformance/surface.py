"""Paths, methods and headers around the completions; other routes; and raw HTTP."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

from loadtest.conformance.checks import Skipped, check, expect, same
from loadtest.conformance.target import Target, error_of

CHAT = "/v1/chat/completions"


@check("surface", "models are listed")
def _(t: Target) -> None:
    listed = t.http.get("/v1/models").json()
    same(listed["object"], "list", "object")
    for entry in listed["data"]:
        expect(entry["object"] == "model" and entry["owned_by"] and type(entry["created"]) is int, f"{entry}")
    expect(t.model in [entry["id"] for entry in listed["data"]], "the model is not among them")


@check("surface", "a model is retrieved by its name, escaped or not")
def _(t: Target) -> None:
    for name in (t.model, quote(t.model, safe="")):
        answer = t.http.get(f"/v1/models/{name}")
        same((answer.status_code, answer.json().get("id")), (200, t.model), "status and id")


@check("surface", "a model that is not there is 404 model_not_found, slashes and all")
def _(t: Target) -> None:
    for name in ("none", "org/none", "a/b/c"):
        same(error_of(t.http.get(f"/v1/models/{name}"), (404,))["code"], "model_not_found", "code")


@check("surface", "another method is 405 with allow")
def _(t: Target) -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = t.http.request(method, CHAT)
        error_of(answer, (405,))
        expect("POST" in answer.headers.get("allow", ""), f"allow is {answer.headers.get('allow')!r}")
    error_of(t.http.post("/v1/models"), (405,))


@check("surface", "an unknown path is 404 in shape")
def _(t: Target) -> None:
    error_of(t.http.get("/v1/nothing"), (404,))
    error_of(t.post("/v1/nothing", {}), (404,))


@check("surface", "double slashes are forgiven")
def _(t: Target) -> None:
    for path in ("/v1//models", "//v1/models"):
        same(t.http.get(t.root + path).status_code, 200, f"the status of {path}")
    same(t.http.post(t.root + "/v1//chat/completions", json=t.chat_body(max_tokens=1)).status_code, 200, "chat's")


@check("surface", "a trailing slash is forgiven")
def _(t: Target) -> None:
    same(t.http.get("/v1/models/").status_code, 200, "the status")
    same(t.http.post(CHAT + "/", json=t.chat_body(max_tokens=1)).status_code, 200, "chat's")


@check("surface", "HEAD is GET without a body")
def _(t: Target) -> None:
    for path in ("/v1/models", "/health"):
        answer = t.http.head(path)
        same((answer.status_code, answer.content), (200, b""), f"{path}")


@check("surface", "OPTIONS is answered, with allow")
def _(t: Target) -> None:
    answer = t.http.options(CHAT)
    expect(answer.status_code in (200, 204), f"status {answer.status_code}")
    expect("POST" in answer.headers.get("allow", ""), f"allow is {answer.headers.get('allow')!r}")


@check("surface", "x-request-id goes in and out")
def _(t: Target) -> None:
    answer = t.post(CHAT, t.chat_body(max_tokens=1), {"x-request-id": "mine-1"})
    same(answer.headers.get("x-request-id"), "mine-1", "x-request-id")
    first, second = (t.post(CHAT, t.chat_body(max_tokens=1)).headers.get("x-request-id") for _ in range(2))
    expect(first and second and first != second, "no id of the server's own, or the same one twice")
    expect(t.post(CHAT, b"{").headers.get("x-request-id"), "an error without x-request-id")


@check("surface", "an x-request-id that can't stand in a log is replaced")
def _(t: Target) -> None:
    answer = t.post(CHAT, t.chat_body(max_tokens=1), {"x-request-id": "a b" + "c" * 500})
    expect(re.fullmatch(r"[\x21-\x7e]{1,128}", answer.headers.get("x-request-id", "")), "it is not")


@check("surface", "the health route answers")
def _(t: Target) -> None:
    same(t.http.get("/health").status_code, 200, "the status")


@check("surface", "tokenize and detokenize are each other's inverse")
def _(t: Target) -> None:
    text = "Grüße 🎉 from the tokenizer"
    answer = t.post("/tokenize", {"model": t.model, "prompt": text, "add_special_tokens": False})
    same(answer.status_code, 200, "the status")
    ids = answer.json()["tokens"]
    same(answer.json()["count"], len(ids), "count")
    same(t.post("/detokenize", {"model": t.model, "tokens": ids}).json()["prompt"], text, "the text")


@check("surface", "tokenize takes a chat, and counts as usage does")
def _(t: Target) -> None:
    body = t.chat_body(max_tokens=1)
    answer = t.post("/tokenize", {"model": t.model, "messages": body["messages"]})
    same(answer.status_code, 200, "the status")
    same(answer.json()["count"], t.ok(CHAT, body)["usage"]["prompt_tokens"], "count")


@check("surface", "tokenize and detokenize refuse what is wrong")
def _(t: Target) -> None:
    t.refused("/tokenize", {"model": t.model, "prompt": 7})
    t.refused("/detokenize", {"model": t.model, "tokens": ["a"]})
    t.refused("/detokenize", {"model": t.model, "tokens": [10**9]})
    t.refused("/tokenize", {"model": "no-such-model", "prompt": "x"}, (404,))


@check("surface", "a connection serves again after an error, and after a stream")
def _(t: Target) -> None:
    wrong, right = json.dumps(t.chat_body(n=0)).encode(), json.dumps(t.chat_body(max_tokens=1)).encode()
    stream = json.dumps(t.chat_body(max_tokens=1, stream=True)).encode()
    requests = [t.head(CHAT, body) + body for body in (wrong, stream)]
    data = b"".join([*requests, t.head(CHAT, right, "Connection: close"), right])
    answer = t.raw(data)
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
    same(statuses, [b"400", b"200", b"200"], "the statuses of three requests sent at once")


@check("surface", "Expect: 100-continue gets its 100")
def _(t: Target) -> None:
    body = json.dumps(t.chat_body(max_tokens=1)).encode()
    with t.connect() as sock:
        sock.sendall(t.head(CHAT, body, "Expect: 100-continue", "Connection: close"))
        first = sock.recv(1024)
        expect(first.startswith(b"HTTP/1.1 100"), f"the answer is {first[:60]!r}")
        sock.sendall(body)
        answer = first
        while chunk := sock.recv(65536):
            answer += chunk
    expect(b"HTTP/1.1 200" in answer, f"the answer is {answer[:200]!r}")


@check("surface", "a chunked request body is read")
def _(t: Target) -> None:
    body = json.dumps(t.chat_body(max_tokens=1)).encode()
    head = t.head(CHAT, b"", "Transfer-Encoding: chunked", "Connection: close")
    head = head.replace(b"Content-Length: 0\r\n", b"").replace(b"\r\nContent-Length: 0", b"")
    parts = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 50]), body[i : i + 50]) for i in range(0, len(body), 50))
    answer = t.raw(head + parts + b"0\r\n\r\n")
    expect(answer.startswith(b"HTTP/1.1 200"), f"the answer is {answer[:100]!r}")


def _smuggling(claim: str, *lines: str) -> None:
    @check("surface", f"refused and closed: {claim}")
    def _(t: Target) -> None:
        answer = t.raw("\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: x", *lines, "", ""]).encode() + b"{}")
        expect(answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), f"the answer is {answer[:60]!r}")
        same(answer.count(b"HTTP/1.1 "), 1, "the number of answers")


_smuggling("content-length and transfer-encoding together", "Content-Length: 2", "Transfer-Encoding: chunked")
_smuggling("two content-lengths", "Content-Length: 2", "Content-Length: 3")
_smuggling("a content-length that is no number", "Content-Length: two")
_smuggling("a folded header", "X-Long: a", " b", "Content-Length: 2")
_smuggling("a header without colon", "nonsense", "Content-Length: 2")
_smuggling("a header name with a blank", "X Long: a", "Content-Length: 2")


@check("surface", "what is no HTTP is refused")
def _(t: Target) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"hello\r\n\r\n", b"GET\r\n\r\n"):
        answer = t.raw(data, half_close=True)
        expect(answer == b"" or answer.startswith(b"HTTP/1.1 400"), f"the answer is {answer[:60]!r}")


@check("surface", "headers beyond all bounds are 431 or 400")
def _(t: Target) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: %b\r\n" % (i, b"y" * 4000) for i in range(300))
    answer = t.raw(head + b"\r\n", half_close=True)
    expect(answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")), f"the answer is {answer[:60]!r}")


@check("surface", "a client that stops sending but listens gets its answer")
def _(t: Target) -> None:
    body = json.dumps(t.chat_body(max_tokens=1)).encode()
    answer = t.raw(t.head(CHAT, body, "Connection: close") + body, half_close=True)
    expect(answer == b"" or answer.startswith(b"HTTP/1.1 200"), f"the answer is {answer[:60]!r}")


@check("surface", "a browser's preflight is answered without an error")
def _(t: Target) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    answer = t.http.options(CHAT, headers={**asked, "access-control-request-headers": "authorization,content-type"})
    expect(answer.status_code in (200, 204, 400, 403), f"status {answer.status_code}")


@check("surface", "the published description is there, and names the completion routes")
def _(t: Target) -> None:
    answer = t.http.get("/openapi.json")
    if answer.status_code == 404:
        raise Skipped("no /openapi.json")
    paths = answer.json()["paths"]
    expect({CHAT, "/v1/completions", "/v1/models"} <= set(paths), f"the paths are {sorted(paths)[:20]}")


@check("surface", "a client's hop-by-hop and internal headers do no harm")
def _(t: Target) -> None:
    headers = {"x-warmgate-replica": "evil:1", "x-warmgate-cached-tokens": "999", "te": "trailers", "keep-alive": "1"}
    answer = t.post(CHAT, t.chat_body(max_tokens=1), headers)
    same(answer.status_code, 200, "the status")
    expect(answer.headers.get("x-warmgate-replica") != "evil:1", "the client's header came back")

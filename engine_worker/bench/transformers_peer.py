"""transformers' continuous batching as a server: `python -m engine_worker.bench.transformers_peer FOLDER --port 8103`.

Only what engine_bench asks for: greedy streams of /v1/completions that ignore the end of the text, with their usage.
transformers' own server knows neither `ignore_eos` nor the event of usage that `stream_options` asks for. FOLDER has a
model as safetensors and its tokenizer; the demo model's is where a worker converted it to, in the cache folder.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

MODEL = "peer"
_NO_EOS = -1


class Peer:
    """A model under transformers' batching loop, which runs in a thread of its own."""

    def __init__(self, folder: str, num_blocks: int, page_size: int, max_batch_tokens: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=_NO_EOS, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page_size, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens
            ),
        )

    def app(self) -> web.Application:
        made = web.Application()
        made.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._complete)])
        made.on_startup.append(self._start)
        made.on_cleanup.append(self._stop)
        return made

    async def _start(self, _: web.Application) -> None:
        self._manager.start()

    async def _stop(self, _: web.Application) -> None:
        await asyncio.to_thread(self._manager.stop, block=True)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt_ids = self._tokenizer(body["prompt"])["input_ids"]
        request_id = uuid.uuid4().hex
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._manager.register_result_handler(request_id, outputs.put_nowait)
        self._manager.add_request(
            prompt_ids, request_id, max_new_tokens=int(body["max_tokens"]), streaming=True, eos_token_id=_NO_EOS
        )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        num_sent, is_finished = 0, False
        while not is_finished:
            output = await outputs.get()
            if output.error is not None:
                raise web.HTTPInternalServerError(text=str(output.error))
            is_finished = output.is_finished()
            if len(output.generated_tokens) > num_sent:
                text = self._tokenizer.decode(output.generated_tokens[num_sent:])
                num_sent = len(output.generated_tokens)
                if not response.prepared:
                    await response.prepare(request)
                await response.write(_event(choices=[{"index": 0, "text": text}]))
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": num_sent}
        await response.write(_event(choices=[], usage=usage) + b"data: [DONE]\n\n")
        return response


def _event(**fields: object) -> bytes:
    return b"data: " + msgspec.json.encode({"object": "text_completion", "model": MODEL, **fields}) + b"\n\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m engine_worker.bench.transformers_peer", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", help="of the model and its tokenizer")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, default=1024, help="KV blocks (default 1024)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a KV block (default 16)")
    parser.add_argument("--max-batch-tokens", type=int, default=512, help="tokens of a step (default 512)")
    args = parser.parse_args(argv)
    peer = Peer(args.folder, args.num_blocks, args.page_size, args.max_batch_tokens)
    web.run_app(peer.app(), host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()

"""The worker's command line: `python -m engine_worker --model demo --port 8101`, also reached as `warmgate worker`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import ipaddress
import logging
import os
import re
import sys
from pathlib import PurePath
from typing import NoReturn

import uvloop

from engine_worker.config import ATTENTION_BACKENDS, EngineConfig
from engine_worker.serving.server import ServerOptions, bind, serve
from engine_worker.serving.worker import Worker

LOADER = "engine_worker.model.load:load_model"
DEMO_NAME = "smollm2-135m-instruct"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_DTYPES = ("auto", "float32", "bfloat16", "float16")


class _Parser(argparse.ArgumentParser):
    """One that says what is wrong in a line: the options are too many to be listed above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help lists the options\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(prog="warmgate worker", description="Serve a model over OpenAI's API, with a prefix cache.")
    add = made.add_argument
    add("--model", required=True, help='a folder, a hub id, a .gguf file, or "demo"')
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=_port, default=8101, help="port to listen on (default %(default)s)")
    add("--served-model-name", action="append", metavar="NAME", help="name in the API; repeat for aliases")
    add("--dtype", choices=_DTYPES, default="auto", help="type of weights and KV cache (default: what is fast here)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run (default %(default)s)")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights from the config")
    add("--block-size", type=_positive, default=16, help="tokens of a KV block (default %(default)s)")
    add("--kv-cache-memory", type=size_bytes, metavar="SIZE", help="memory for KV blocks, such as 2GiB")
    add("--memory-fraction", type=_fraction, default=0.5, help="share of free memory for KV (default %(default)s)")
    add("--max-model-len", type=_length, metavar="N", help="tokens of a sequence (default: the model's own limit)")
    add("--max-num-seqs", type=_positive, default=64, metavar="N", help="sequences at once (default %(default)s)")
    add(
        "--max-num-batched-tokens", type=_positive, default=512, metavar="N", help="tokens a step (default %(default)s)"
    )
    add(
        "--joint-prefill-tokens",
        type=_count,
        default=512,
        metavar="N",
        help="tokens of prompts that are completed in one step, where several are; 0 fills every step with what waits "
        "(default %(default)s)",
    )
    add(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        default="auto",
        help="what computes attention; triton and flashinfer need CUDA (default %(default)s)",
    )
    add(
        "--quantization",
        choices=("int8", "int4", "fp8"),
        default="",
        help="make weights narrower at load (default: no)",
    )
    add(
        "--async-scheduling",
        choices=("auto", "on", "off"),
        default="auto",
        help="plan the next step while one runs (default: with CUDA)",
    )
    add("--speculative", default="", metavar="HOW", help='guess output tokens: "ngram", or a draft model (default: no)')
    add("--always-speculate", action="store_true", help="guess even where it is measured not to pay")
    add("--num-speculative-tokens", type=_positive, default=8, metavar="N", help="most guesses (default %(default)s)")
    add(
        "--ngram-min", type=_positive, default=2, metavar="N", help="shortest text end to look up (default %(default)s)"
    )
    add("--ngram-max", type=_positive, default=4, metavar="N", help="longest text end to look up (default %(default)s)")
    add(
        "--kv-cache-dtype",
        choices=("auto", "int8", "fp8", "fp4", "k8v4"),
        default="auto",
        help="store keys and values narrower, for more KV blocks; k8v4: keys int8, values fp4 (default %(default)s)",
    )
    add(
        "--gpu-memory-utilization",
        type=_fraction,
        default=0.9,
        metavar="SHARE",
        help="share of a CUDA device's memory to use in all (default %(default)s)",
    )
    add("--cuda-graphs", choices=("on", "off"), default="on", help="record decode steps (default %(default)s)")
    add("--cuda-graph-sizes", type=_sizes, default=(), metavar="N,N", help="batch sizes to record (default: the usual)")
    add("--threads", type=_positive, metavar="N", help="torch threads (default: this worker's share of the cores)")
    add("--no-prefix-caching", action="store_true", help="compute every prompt from its start")
    add(
        "--partial-hits",
        choices=("auto", "on", "off"),
        default="auto",
        help="find cached prompts to the token and copy what is shared of a block (default: with a CPU)",
    )
    add("--kv-events-port", type=_events_port, default=0, metavar="PORT", help='0: any free port; "off": none')
    add("--no-self-test", action="store_true", help="skip the check of the model's attention at load")
    add("--seed", type=_seed, default=0, help="seed of dummy weights (default %(default)s)")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--drain-timeout", type=_seconds, default=30.0, metavar="S", help="seconds to finish requests at a stop")
    return made


def main(argv: list[str] | None = None, *, loader: str = LOADER, check_invariants: bool = False) -> int:
    """Gives the exit code. `loader` names the function that makes the engine's runner; tests put another there."""
    options = parser()
    args = options.parse_args(argv)
    if args.ngram_min > args.ngram_max:
        options.error(f"--ngram-min {args.ngram_min} is above --ngram-max {args.ngram_max}; make it no larger")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        sock = bind(args.host, args.port)
    except OSError as error:
        print(f"warmgate worker: {cannot_listen(args.host, args.port, error)}", file=sys.stderr)
        return 1
    host, port = sock.getsockname()[:2]
    worker = Worker(
        engine_config(args),
        served_models(args.model, args.served_model_name),
        os.environ.get("WARMGATE_SECRET", ""),
        loader=loader,
        check_invariants=check_invariants,
    )
    if not worker.secret and not _is_loopback(args.host):
        logging.getLogger("warmgate.worker").warning(
            "listening on %s without WARMGATE_SECRET: anyone who reaches it can read /internal/state", args.host
        )
    logging.getLogger("warmgate.worker").info("worker on http://%s:%d, loading %s", host, port, args.model)
    options = ServerOptions(host=args.host, port=port, drain_timeout_s=args.drain_timeout)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(worker, sock, options))


def cannot_listen(host: str, port: int, error: OSError) -> str:
    """Why, and which option mends it."""
    why = f"can't listen on {host}:{port}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return f"{why}; stop what listens there, or choose another --port."
    if error.errno == errno.EACCES:
        return f"{why}; choose a --port of 1024 or more."
    return f"{why}; --host must be an address of this machine."


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        load_format=args.load_format,
        block_size=args.block_size,
        kv_cache_memory=args.kv_cache_memory,
        memory_fraction=args.memory_fraction,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        joint_prefill_tokens=args.joint_prefill_tokens,
        enable_prefix_caching=not args.no_prefix_caching,
        partial_hits=args.partial_hits,
        attention_backend=args.attention_backend,
        quantization=args.quantization,
        async_scheduling=args.async_scheduling,
        gpu_memory_utilization=args.gpu_memory_utilization,
        cuda_graphs=args.cuda_graphs,
        cuda_graph_sizes=args.cuda_graph_sizes,
        speculative=args.speculative,
        num_speculative_tokens=args.num_speculative_tokens,
        always_speculate=args.always_speculate,
        ngram_min=args.ngram_min,
        ngram_max=args.ngram_max,
        kv_cache_dtype=args.kv_cache_dtype,
        num_threads=args.threads,
        seed=args.seed,
        trust_remote_code=args.trust_remote_code,
        kv_events_endpoint=kv_events_endpoint(args.host, args.kv_events_port),
        self_test=not args.no_self_test,
    )


def served_models(model: str, names: list[str] | None) -> tuple[str, ...]:
    """Names that requests may use. The first is the one that metrics and model cards show: as in vLLM, what the model
    was called at the start."""
    if names:
        return tuple(dict.fromkeys(names))
    if model == "demo":
        return ("demo", DEMO_NAME)
    if model.lower().endswith(".gguf"):
        return (PurePath(model).stem,)
    if os.path.isdir(model):
        return (PurePath(os.path.abspath(model)).name,)
    return (model,)


def kv_events_endpoint(host: str, port: int | None) -> str:
    """Where the engine publishes: on the HTTP server's address; port 0 stands for any free one."""
    if port is None:
        return ""
    where = "*" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"tcp://{where}:{port}"


def size_bytes(text: str) -> int:
    """ "2GiB", "500MB", "1.5g" or plain bytes, as a number of bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 2GiB or 500MB")
    number, unit, binary = found.groups()
    base = 1000 if text.lower().endswith("b") and not binary else 1024
    exponent = "KMGT".index(unit.upper()) + 1 if unit else 0
    return int(float(number) * base**exponent)


def _port(text: str) -> int:
    return int(_within(text, 0, 65535, "a port"))


def _events_port(text: str) -> int | None:
    return None if text == "off" else int(_within(text, 0, 65534, 'a port, or "off"'))


def _positive(text: str) -> int:
    return int(_within(text, 1, 2**31 - 1, "a whole number above 0"))


def _count(text: str) -> int:
    return _within(text, 0, 2**31 - 1, "a whole number from 0")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part.strip()) for part in text.split(",")}))


def _length(text: str) -> int:
    return _within(text, 2, 2**31 - 1, "a whole number above 1 (a prompt's token and one to generate)")


def _seed(text: str) -> int:
    return _within(text, 0, 2**63 - 1, "a whole number from 0 to 2**63 - 1")


def _within(text: str, low: int, high: int, what: str) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and at most 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

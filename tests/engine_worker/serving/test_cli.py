"""The command line: sizes, names, endpoints, and errors in one line."""

from __future__ import annotations

import errno
import os

import pytest

from engine_worker.serving import cli
from engine_worker.serving.cli import engine_config, kv_events_endpoint, parser, served_models, size_bytes
from engine_worker.serving.engine_process import hits_partially


def test_the_defaults_are_the_engines() -> None:
    config = engine_config(parser().parse_args(["--model", "demo"]))
    assert (config.model, config.dtype, config.block_size, config.max_num_seqs) == ("demo", "auto", 16, 64)
    assert config.enable_prefix_caching
    assert config.partial_hits == "auto"
    assert config.self_test
    assert not config.trust_remote_code
    assert config.kv_events_endpoint == "tcp://127.0.0.1:0"


def test_switches() -> None:
    args = ["--model", "m", "--no-prefix-caching", "--no-self-test", "--kv-events-port", "off", "--threads", "3"]
    args += ["--partial-hits", "off"]
    config = engine_config(parser().parse_args(args))
    assert not config.enable_prefix_caching
    assert config.partial_hits == "off"
    assert not config.self_test
    assert (config.kv_events_endpoint, config.num_threads) == ("", 3)


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [("auto", "cpu", True), ("auto", "cuda:0", False), ("on", "cuda:0", True), ("off", "cpu", False)],
)
def test_parts_of_blocks_are_copied_where_that_pays(setting: str, device: str, expected: bool) -> None:
    config = engine_config(parser().parse_args(["--model", "m", "--partial-hits", setting]))
    assert hits_partially(config, device) is expected


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("500MB", 500_000_000), ("1.5g", 3 * 2**29), ("4096", 4096), ("64 KiB", 65536), ("10b", 10)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-cache-memory", "much"],
        ["--kv-cache-memory", "0"],
        ["--port", "70000"],
        ["--port", "-1"],
        ["--block-size", "0"],
        ["--max-model-len", "1"],
        ["--seed", "-1"],
        ["--seed", "9223372036854775808"],
        ["--memory-fraction", "2"],
        ["--memory-fraction", "nan"],
        ["--drain-timeout", "nan"],
        ["--kv-events-port", "x"],
        ["--dtype", "int3"],
        ["--loader", "tests:x"],
        ["--attention-backend", "foo"],
        ["--ngram-min", "9"],
    ],
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--model", "m", *arguments])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warmgate worker: error: ")
    assert arguments[0] in line
    assert line.endswith("; warmgate worker --help lists the options")


@pytest.mark.parametrize(
    ("number", "mended_by"),
    [(errno.EADDRINUSE, "another --port."), (errno.EACCES, "--port of 1024"), (errno.EADDRNOTAVAIL, "--host must be")],
)
def test_where_it_cannot_listen_the_option_that_mends_it_is_named(number: int, mended_by: str) -> None:
    said = cli.cannot_listen("10.0.0.9", 80, OSError(number, os.strerror(number)))
    assert said.startswith(f"can't listen on 10.0.0.9:80: {os.strerror(number)}; ")
    assert mended_by in said


def test_names_in_the_api(tmp_path: object) -> None:
    assert served_models("demo", None) == ("demo", "smollm2-135m-instruct")
    assert served_models("demo", ["a", "b", "a"]) == ("a", "b")
    assert served_models("org/model", None) == ("org/model",)
    assert served_models("/models/tiny.Q8_0.gguf", None) == ("tiny.Q8_0",)
    assert served_models(f"{tmp_path}/", None) == (str(tmp_path).rpartition("/")[2],)


def test_where_events_are_published() -> None:
    assert kv_events_endpoint("127.0.0.1", 0) == "tcp://127.0.0.1:0"
    assert kv_events_endpoint("0.0.0.0", 5557) == "tcp://*:5557"
    assert kv_events_endpoint("::1", 5557) == "tcp://[::1]:5557"
    assert kv_events_endpoint("127.0.0.1", None) == ""

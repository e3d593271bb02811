"""Settings from flags, environment and file, in that order; whatever is wrong is one sentence."""

from __future__ import annotations

import pytest

from gateway.config import ConfigError, load_settings
from gateway.config_words import unknown_variables
from gateway.server import parse_flags


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("REPLICAS", "POLICY", "PORT", "CONFIG", "SECRET"):
        monkeypatch.delenv(f"WARMGATE_{name}", raising=False)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path, monkeypatch):
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "policy: warm\nport: 1\nhost: 0.0.0.0\nreplicas:\n  - http://a:1\n  - {url: 'http://b:2', name: bee}\n"
    )
    monkeypatch.setenv("WARMGATE_PORT", "2")
    monkeypatch.setenv("WARMGATE_POLICY", "round_robin")
    settings = load_settings({"policy": "least_loaded", "port": None}, path)
    assert (settings.policy, settings.port, settings.host) == ("least_loaded", 2, "0.0.0.0")
    assert [replica.name for replica in settings.replicas] == ["a:1", "bee"]


def test_the_file_may_be_named_by_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "gateway.yaml"
    path.write_text("port: 4242\n")
    monkeypatch.setenv("WARMGATE_CONFIG", str(path))
    assert load_settings().port == 4242


@pytest.mark.parametrize("text", ["http://a:1,http://b:2/v1/", "http://a:1 http://b:2", '["http://a:1", "http://b:2"]'])
def test_replicas_from_the_environment(text, monkeypatch):
    monkeypatch.setenv("WARMGATE_REPLICAS", text)
    assert [replica.url for replica in load_settings().replicas] == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"replicas": ["localhost:8101"]}, "replica URL"),
        ({"replicas": ["ftp://a"]}, "replica URL"),
        ({"replicas": ["http://a:99999"]}, "port"),
        ({"replicas": ["http://u:p@a:1"]}, "credentials"),
        ({"replicas": ["http://a:1", "http://a:1/v1"]}, "two replicas"),
        ({"replicas": [{"url": "http://a:1", "colour": "red"}]}, "colour"),
        ({"replicas": [{"url": "http://a:1", "tokenizer": "/no/where"}]}, "there is no folder /no/where; name one"),
        (
            {"replicas": [{"url": "http://a:1", "nam": "big"}]},
            "replicas.0 has an unknown option 'nam'; known ones are api",
        ),
        ({"salt_secret": "short"}, "salt_secret is wrong: it has 5 characters and needs 16 at least"),
        ({"keys_redis": "true"}, "keys_redis needs WARMGATE_REDIS_URL"),
        ({"port": "http"}, "port"),
        ({"port": 70000}, "port"),
        ({"first_token_s": 0}, "first_token_s"),
        ({"log_level": "loud"}, "log_level"),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_names_it(flags, words):
    with pytest.raises(ConfigError) as caught:
        load_settings(flags)
    sentence = str(caught.value)
    assert words in sentence
    assert "setting settings" not in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "YAML"),
        ("- a\n", "mapping"),
        ("polcy: warm\n", r"unknown setting 'polcy'; did you mean 'policy'\?$"),
        ("stream-idle-s: 3\n", r"unknown setting 'stream-idle-s'; did you mean 'stream_idle_s'\?$"),
        ("colour: red\n", "unknown setting 'colour'; known ones are access_log, .*"),
        ("1: red\n", "unknown setting 1; known ones are access_log, .*"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_settings({}, path)


def test_a_variable_is_guessed_at_only_where_one_is_near():
    """All begin alike, which makes no two of them near."""
    found = unknown_variables(
        {"WARMGATE_POLCY": "", "WARMGATE_FOO": "", "WARMGATE_TIMEOUT": ""}, {"policy", "poll_timeout_s"}
    )
    assert found == [
        "nothing reads the variable WARMGATE_FOO",
        "nothing reads the variable WARMGATE_POLCY; did you mean WARMGATE_POLICY?",
        "nothing reads the variable WARMGATE_TIMEOUT",
    ]


def test_a_secret_is_not_shown():
    settings = load_settings({"secret": "hush", "replicas": [{"url": "http://a:1", "api_key": "hush"}]})
    assert "hush" not in repr(settings)


def test_every_setting_is_a_flag():
    flags, config = parse_flags(["--replica", "http://a:1", "--stream-idle-s", "5", "--config", "x.yaml"])
    assert config == "x.yaml"
    settings = load_settings(flags)
    assert settings.stream_idle_s == 5.0

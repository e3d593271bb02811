"""Keys, where they are kept, and the command that makes them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.tenancy.command import app
from gateway.tenancy.directory import Directory
from gateway.tenancy.keys import KeyBook, KeysError, Limits, NoKeysFile, digest_of, new_key, read_period
from gateway.tenancy.limits import Ledger
from gateway.tenancy.salt import Salts, narrowed
from gateway.tenancy.store import FileStore, book_of, fields_of


def test_a_key_is_long_random_and_kept_nowhere(tmp_path: Path) -> None:
    key, record = new_key("acme")
    assert key.startswith("wg-")
    assert len(key) == 46
    assert new_key("acme")[0] != key
    digest = digest_of(key.encode())
    assert digest is not None
    assert digest.hex() == record.digest
    store = FileStore(tmp_path / "keys.json")
    store.put(record)
    assert key not in (tmp_path / "keys.json").read_text()


@pytest.mark.parametrize(
    "given", [b"", b"sk-abc", b"wg-", b"wg-" + b"a" * 42, b"wg-" + b"a" * 44, b"wg-" + b"\xff" * 43]
)
def test_what_is_no_key_has_no_digest(given: bytes) -> None:
    assert digest_of(given) is None


@pytest.mark.parametrize("name", ["", "a b", "-a", "a\n", "x" * 65, "ä"])
def test_tenants_names_can_stand_in_logs(name: str) -> None:
    with pytest.raises(KeysError):
        new_key(name)


def test_the_file_is_private_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "keys.json"
    store = FileStore(path)
    assert store.read() == KeyBook()
    first, second = new_key("a")[1], new_key("b", ("m",), "high", Limits(1, 2, 3, 4, 0))[1]
    store.put(first)
    secret = store.read().salt_secret
    before = store.stamp()
    store.put(second)
    store.limit("a", Limits(requests_per_minute=9))
    book = store.read()
    assert book == KeyBook({first.id: first, second.id: second}, {"a": Limits(requests_per_minute=9)}, secret)
    assert len(secret) == 64
    assert store.stamp() != before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(path.parent)) == ["keys.json", "keys.json.lock"]
    assert store.remove(first.id)
    assert not store.remove(first.id)
    store.limit("a", Limits())
    assert store.read() == KeyBook({second.id: second}, {}, secret)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"keys": 1}', '{"keys": {"a": {"id": "a"}}}',
        '{"tenants": {"a": {"requests_per_minute": -1}}}', '{"tenants": {"a": {"budget_tokens": 9007199254740993}}}',
        '{"keys": {"a": {"id": "a", "digest": "' + "0" * 64 + '", "tenant": "a\\nb"}}}',
        '{"keys": {"a": {"id": "a", "digest": "00", "tenant": "a"}}}',
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_a_clear_error_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    store = FileStore(path)
    with pytest.raises(KeysError, match=r"keys\.json"):
        store.read()
    with pytest.raises(KeysError):
        store.put(new_key("a")[1])
    assert path.read_text() == text


def test_the_book_in_redis_is_the_same_book() -> None:
    record = new_key("a")[1]
    book = KeyBook({record.id: record}, {"a": Limits(5)}, "s" * 64)
    fields = {name.encode(): value for name, value in fields_of(book).items()}
    fields |= {b"salt": book.salt_secret.encode(), b"version": b"3", b"was:another": b"1"}
    assert book_of(fields) == book
    with pytest.raises(KeysError):
        book_of({b"key:x": b"{"})


@pytest.mark.parametrize(("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("1w", 604_800), ("none", 0)])
def test_periods(text: str, seconds: int) -> None:
    assert read_period(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "0d", "-1d", "1y", "1 d"])
def test_periods_that_are_none(text: str) -> None:
    with pytest.raises(KeysError):
        read_period(text)


def test_salts_are_shared_within_a_group_only_and_clients_can_only_narrow() -> None:
    salts = Salts("secret", {"pair": ["a", "b"]})
    assert salts.of("a") == salts.of("b")
    assert len({salts.of("a"), salts.of("c"), salts.of("pair"), Salts("other", {}).of("c")}) == 4
    one, two = salts.of("a"), salts.of("c")
    assert narrowed(one, "") == one
    assert len({one, two, narrowed(one, "x"), narrowed(one, "y"), narrowed(two, "x"), narrowed(one, two)}) == 6
    assert narrowed("", "own") == "own"
    assert len(narrowed(one, "x" * 4096)) <= 256


def test_a_directory_finds_keys_by_digest_and_forgets_revoked_ones() -> None:
    directory = Directory(Ledger(), "s" * 16, {})
    key, record = new_key("a", ("m",), "low", Limits(concurrency=1))
    other, second = new_key("a")
    directory.load(KeyBook({record.id: record, second.id: second}, {"a": Limits(requests_per_minute=1)}))
    found = directory.find(key.encode())
    assert found is not None
    assert (found.tenant, found.key_id, found.weight) == ("a", record.id, 1.0)
    assert [account.name for account in found.accounts] == [f"key {record.id}", "tenant a"]
    assert found.may_use("m")
    assert not found.may_use("n")
    again = directory.find(other.encode())
    assert again is not None
    assert again.salt == found.salt
    assert again.accounts == (found.accounts[1],)
    directory.load(KeyBook({second.id: second}))
    assert directory.find(key.encode()) is None
    assert directory.find(other.encode()) is not None


def test_keys_without_a_secret_for_salts_are_refused() -> None:
    record = new_key("a")[1]
    with pytest.raises(KeysError, match="WARMGATE_SALT_SECRET"):
        Directory(Ledger(), None, {}).load(KeyBook({record.id: record}))


class TestCommand:
    def run(self, *words: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, list(words), env={"WARMGATE_KEYS_FILE": "", "WARMGATE_REDIS_URL": ""})
        assert result.exit_code == status, result.output
        return result.output

    def test_create_list_limit_revoke(self, tmp_path: Path) -> None:
        at = ("--keys-file", str(tmp_path / "keys.json"))
        made = self.run("create", "--tenant", "acme", "--rpm", "5", "--budget", "900", "--budget-period", "30d", *at)
        key = made.split()[-1]
        [record] = FileStore(tmp_path / "keys.json").read().keys.values()
        assert digest_of(key.encode()) == bytes.fromhex(record.digest)
        self.run("limit", "acme", "--concurrency", "7", *at)
        listed = self.run("list", *at)
        assert record.id in listed
        assert "5 requests/min, 900 tokens/30d" in listed
        assert "tenant acme: 7 at once" in listed
        assert key not in listed
        assert key not in json.dumps((tmp_path / "keys.json").read_text())
        self.run("revoke", record.id, *at)
        assert FileStore(tmp_path / "keys.json").read().keys == {}

    def test_limits_of_a_tenant_without_keys_are_set_with_a_word(self, tmp_path: Path) -> None:
        at = ("--keys-file", str(tmp_path / "keys.json"))
        self.run("create", "--tenant", "acme", *at)
        assert "No key" not in self.run("limit", "acme", "--rpm", "3", *at)
        assert "No key is amce's yet" in self.run("limit", "amce", "--rpm", "3", *at)
        assert "No key" not in self.run("limit", "amce", *at), "taking them away needs no key"

    @pytest.mark.parametrize("words", [("list",), ("revoke", "key_none"), ("limit", "acme", "--rpm", "3")])
    def test_only_create_makes_the_file(self, tmp_path: Path, words: tuple[str, ...]) -> None:
        path = tmp_path / "keys.json"
        result = CliRunner().invoke(app, [*words, "--keys-file", str(path)])
        assert isinstance(result.exception, NoKeysFile)
        assert str(path) in str(result.exception)
        assert list(tmp_path.iterdir()) == []

    def test_mistakes_are_sentences(self, tmp_path: Path) -> None:
        at = ("--keys-file", str(tmp_path / "keys.json"))
        for words in (
            ("create", "--tenant", "a b", *at),
            ("create", "--tenant", "a", "--priority", "urgent", *at),
            ("create", "--tenant", "a", "--budget-period", "soon", *at),
            ("revoke", "key_none", *at),
            ("list", "--keys-redis"),
            ("list",),
        ):
            result = CliRunner().invoke(app, list(words), env={"WARMGATE_KEYS_FILE": "", "WARMGATE_REDIS_URL": ""})
            assert isinstance(result.exception, KeysError), words

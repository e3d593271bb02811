"""A step on a pretended CUDA device: no operation may mix tensors of two devices, and the answers stay the CPU's.

Tensors of the pretended device say that they are on cuda:0 and hold their numbers on the CPU. What mixes them with
tensors of the CPU, other than to copy, fails here as it would on a GPU; so does indexing by a tensor of the CPU, which
is only slow there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from engine_worker.core.types import SamplingParams
from engine_worker.model import kv_format, sampler_draw, transfer
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.token_masks import TokenMasks
from tests.engine_worker.model.serving import TinyEngine
from tests.engine_worker.model.test_constrained_engine import MODULE, SCHEMAS, TOKENIZER, VOCAB, params_of, run_all

pytestmark = pytest.mark.engine

CUDA = torch.device("cuda:0")
_COPIES = {"_to_copy", "copy_"}
_LOOKS = {"_local_scalar_dense"}


class OnDevice(torch.Tensor):
    """A tensor of the pretended device. `held` is the tensor on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",  # which torch's own code in C++ sees: it would look for a driver behind cuda:0
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class MixedDevices(AssertionError):
    """An operation was given tensors of both devices."""


def converted(tensor: torch.Tensor, wanted: list[Any]) -> torch.Tensor:
    """`Tensor.to`, whose own code looks for a driver where CUDA is asked for."""
    device, dtype = tensor.device, tensor.dtype
    for value in wanted:
        if isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, str | torch.device):
            device = torch.device(value)
    if (device.type, dtype) == (tensor.device.type, tensor.dtype):
        return tensor
    return dispatch(torch.ops.aten._to_copy.default, (tensor,), {"dtype": dtype, "device": device})


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket is torch.ops.aten.to:
        return converted(args[0], [*args[1:], *kwargs.values()])
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with Pretended():  # in inference mode, what is made of other operations arrives whole
            return func.decompose(*args, **kwargs)
    name = func.overloadpacket.__name__
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    on_host = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
    if on_device and on_host and name not in _COPIES:
        raise MixedDevices(f"{func}: {[tuple(tensor.shape) for tensor in on_host]} are on the CPU")
    target = kwargs.get("device")
    target = None if target is None else torch.device(target)
    held = tree_map(lambda value: value.held if isinstance(value, OnDevice) else value, (args, kwargs))
    if target is not None:
        held[1]["device"] = torch.device("cpu")
    held[1].pop("pin_memory", None)
    result = func(*held[0], **held[1])
    if name in _LOOKS:
        return result
    if name == "copy_" or (args and result is held[0][0] and isinstance(result, torch.Tensor)):
        return args[0]
    goes_to_device = bool(on_device) if target is None else target.type != "cpu"
    if not goes_to_device:
        if target is not None and on_device:
            result = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, result)
        return result
    return tree_map(lambda value: OnDevice(value) if isinstance(value, torch.Tensor) else value, result)


class Pretended(TorchDispatchMode):
    """Makes tensors that are asked for on CUDA, and those copied there, ones of the pretended device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


@contextmanager
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules, caches and samplers that are made inside live on the pretended device if they ask for CUDA."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    monkeypatch.setattr(transfer.ToHost, "__init__", _arrived)
    monkeypatch.setattr(sampler_draw, "cuda_noise", _noise)
    plain = torch.tensor

    def tensor(values: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = plain(values, **kwargs)
        return made if device is None or torch.device(device).type == "cpu" else OnDevice(made)

    monkeypatch.setattr(torch, "tensor", tensor)  # it, too, would look for a driver
    kv_format._e2m1.cache_clear()
    with Pretended():
        yield
    kv_format._e2m1.cache_clear()


def _arrived(self: transfer.ToHost, tensors: Any) -> None:
    assert all(isinstance(tensor, OnDevice) for tensor in tensors)
    self._event = None
    self._tensors = [tensor.held for tensor in tensors]


def _noise(seeds: list[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """A CPU's noise for the same draws."""
    assert device == CUDA
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.empty(vocab_size, dtype=torch.float64).uniform_(2**-54, 1, generator=generator)
        rows.append(uniform.log().neg().float())
    return torch.stack(rows).log().neg().to(device)


def jobs() -> list[tuple[list[int], SamplingParams]]:
    """Greedy, drawn with every filter, penalties, edits of logits, logprobs, prompt scores and a grammar."""
    prompt = list(range(5, 16))
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 2, "temperature": 1.7, "top_k": 12, "top_p": 0.9},
        {"seed": 3, "min_p": 0.02, "repetition_penalty": 1.4},
        {"seed": 4, "frequency_penalty": 0.7, "presence_penalty": 0.4, "num_logprobs": 3},
        {"seed": 5, "top_p": 0.8},
        {"seed": 6, "logit_bias": ((9, 4.0), (11, 3.0)), "bad_words": ((9, 11), (12,))},
        {"seed": 7, "stop_token_ids": (9, 10, 11, 12), "min_tokens": 4, "allowed_token_ids": tuple(range(7, 30))},
        {"temperature": 0.0, "num_prompt_logprobs": 2},
    ]
    made = [([*prompt, index], SamplingParams(max_tokens=6, **values)) for index, values in enumerate(params)]
    return [*made, (prompt[:4], params_of(SCHEMAS[0], seed=1))]


def moved(module: torch.nn.Module) -> Any:
    """A copy on the pretended device."""
    found = copy.deepcopy(module)
    for part in found.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = OnDevice(tensor.detach())  # type: ignore[assignment]
    return found


def answers(device: torch.device, **kwargs: Any) -> list[Any]:
    module = MODULE if device.type == "cpu" else moved(MODULE)
    engine = TinyEngine(module, check=False, budget=20, **kwargs)
    masks = TokenMasks(TOKENIZER.to_str(), VOCAB, [], device)
    engine.sampler._masks = masks
    if device == CUDA:  # a mode holds for its thread alone
        masks._thread.submit(Pretended().__enter__).result()
    try:
        return [(a.token_ids, a.finish_reason, a.error) for a in run_all(engine, jobs())]
    finally:
        masks.close()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "k8v4"])
def test_no_step_mixes_devices(monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str) -> None:
    expected = answers(torch.device("cpu"), backend=ReferenceBackend(), kv_cache_dtype=kv_cache_dtype)
    with pretended_cuda(monkeypatch):
        found = answers(CUDA, backend=ReferenceBackend(), kv_cache_dtype=kv_cache_dtype)
    assert found == expected
    assert all(error is None for _, _, error in found)


def test_a_mix_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_cuda(monkeypatch):
        there = torch.zeros(3, device=CUDA)
        assert there.device.type == "cuda"
        assert (there + 1).to(CUDA).cpu().tolist() == [1, 1, 1]
        with pytest.raises(MixedDevices):
            there + torch.ones(3)
        with pytest.raises(MixedDevices):
            there[torch.tensor([0])]

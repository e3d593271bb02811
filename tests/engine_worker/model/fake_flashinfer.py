"""Stands in for the package flashinfer, without a GPU: checks what it is given, and attends by definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Wrapper:
    """What both of flashinfer's wrappers share."""

    made: list[_Wrapper]  # per test: see FakeFlashInfer

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.use_tensor_cores = use_tensor_cores
        self.num_plans = 0
        self.num_runs = 0
        self.made.append(self)

    def _plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        size = len(last_page_len)
        for tensor, shape in ((qo_indptr, (size + 1,)), (indptr, (size + 1,)), (last_page_len, (size,))):
            assert tensor.dtype == torch.int32
            assert tensor.shape == shape
            assert tensor.device.type == "cpu", "planning reads it on the host"
        assert indices.dtype == torch.int32
        assert indices.shape == (int(indptr[-1]),)
        assert int(indptr[0]) == int(qo_indptr[0]) == 0
        assert bool((indptr.diff() > 0).all())
        assert bool((qo_indptr.diff() > 0).all())
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim in (64, 128, 256)
        assert q_data_type == kv_data_type
        assert q_data_type in (torch.float16, torch.bfloat16)
        self.heads, self.dim, self.page_size, self.dtype = (
            (num_qo_heads, num_kv_heads),
            head_dim,
            page_size,
            q_data_type,
        )
        self.qo_indptr, self.indptr, self.indices, self.last = (
            tensor.tolist() for tensor in (qo_indptr, indptr, indices, last_page_len)
        )
        self.window_left, self.softcap, self.scale = window_left, logits_soft_cap or 0.0, sm_scale
        self.num_plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        num_heads, num_kv_heads = self.heads
        assert q.is_contiguous()
        assert q.shape == (self.qo_indptr[-1], num_heads, self.dim)
        assert q.dtype == self.dtype
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (self.page_size, num_kv_heads, self.dim)
            assert (cache.dtype, cache.device) == (self.dtype, q.device)
            assert cache.stride(3) == 1
        self.num_runs += 1
        out = torch.empty_like(q)
        for index, last in enumerate(self.last):
            pages = self.indices[self.indptr[index] : self.indptr[index + 1]]
            rows = slice(self.qo_indptr[index], self.qo_indptr[index + 1])
            length = (len(pages) - 1) * self.page_size + last
            key, value = (
                cache[pages].flatten(0, 1)[:length].float().repeat_interleave(num_heads // num_kv_heads, 1)
                for cache in paged_kv_cache
            )
            out[rows] = self._one(q[rows].float(), key, value).to(q.dtype)
        return out

    def _one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        if self.softcap > 0:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        kv_pos = torch.arange(len(key))
        q_pos = kv_pos[len(key) - len(query) :, None]
        hidden = kv_pos > q_pos
        if self.window_left >= 0:
            hidden = hidden | (kv_pos < q_pos - self.window_left)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


class FakeFlashInfer:
    """The module. `made` are the wrappers that were constructed."""

    def __init__(self) -> None:
        self.made: list[_Wrapper] = []

        class Decode(_Wrapper):
            made = self.made

            def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, **options: Any) -> None:
                qo_indptr = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
                self._plan(qo_indptr, indptr, indices, last_page_len, *sizes, **options)

        class Prefill(_Wrapper):
            made = self.made

            def plan(self, *arrays_and_sizes: Any, causal: bool = False, **options: Any) -> None:
                assert causal
                self._plan(*arrays_and_sizes, **options)

        self.BatchDecodeWithPagedKVCacheWrapper = Decode
        self.BatchPrefillWithPagedKVCacheWrapper = Prefill

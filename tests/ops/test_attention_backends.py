"""Attention through libraries: fake modules with the libraries' signatures compute by brute force what they are asked
for, and the answer must be the reference's.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from tests.ops.triton.batches import make_batch
from vllm.ops import attention as ops
from vllm.ops import attention_backends
from vllm.ops.attention import AttentionParams

CPU = torch.device("cpu")


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, cap: float, slopes: Tensor | None) -> Tensor:
    """One request, row by row. q: [m, heads, dim]; k, v: [n, kv_heads, dim]; window: keys to the left, -1 for all."""
    m, heads, _ = q.shape
    n, kv_heads, _ = k.shape
    out = torch.empty_like(q)
    for i in range(m):
        for h in range(heads):
            position, kv = n - m + i, h // (heads // kv_heads)
            first = 0 if window < 0 else max(0, position - window)
            keys = slice(first, position + 1)
            scores = k[keys, kv].float() @ q[i, h].float() * scale
            if cap > 0:
                scores = cap * (scores / cap).tanh()
            if slopes is not None:
                scores = scores - slopes[h] * (position - torch.arange(first, position + 1))
            out[i, h] = (scores.softmax(0) @ v[keys, kv].float()).to(q.dtype)
    return out


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What flash-attn documents: keys one request after another, or [blocks, block_size, ...] and a table."""
    assert causal and window_size[1] in (-1, 0) and softmax_scale is not None and dropout_p == 0.0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and k.stride(-1) == 1
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
    outs = []
    for r in range(len(cu_seqlens_q) - 1):
        length = int(cu_seqlens_k[r + 1] - cu_seqlens_k[r])
        if block_table is None:
            own_k, own_v = (x[cu_seqlens_k[r] : cu_seqlens_k[r + 1]] for x in (k, v))
        else:
            assert k.shape[1] % 256 == 0
            own_k, own_v = (x[block_table[r].long()].flatten(0, 1)[:length] for x in (k, v))
        own_q = q[cu_seqlens_q[r] : cu_seqlens_q[r + 1]]
        outs.append(dense(own_q, own_k, own_v, softmax_scale, window_size[0], softcap, alibi_slopes))
    return torch.cat(outs)


class PagedWrapper:
    """What both wrappers of flashinfer share: plan() takes the pages, run() the queries and the cache."""

    plans = 0

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND"

    def take(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, heads: int, kv_heads: int,
        head_dim: int, page_size: int, sm_scale: float, window_left: int, logits_soft_cap: float, q_data_type: Any,
        kv_data_type: Any,
    ) -> None:  # fmt: skip
        PagedWrapper.plans += 1
        assert qo_indptr.dtype == indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.pages = (qo_indptr, indptr, indices, last_page_len)
        self.sizes = (heads, kv_heads, head_dim, page_size)
        self.scoring = (sm_scale, window_left, logits_soft_cap)
        self.dtypes = (q_data_type, kv_data_type)

    def run(self, q: Tensor, paged_kv_cache: Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:
        qo_indptr, indptr, indices, last = self.pages
        heads, kv_heads, head_dim, page_size = self.sizes
        assert paged_kv_cache.shape[1] == 2, "pages of keys and then values"
        sides = paged_kv_cache.unbind(1)
        assert q.shape[1:] == (heads, head_dim) and sides[0].shape[1:] == (kv_heads, page_size, head_dim)
        assert self.dtypes == (q.dtype, sides[0].dtype)
        outs = []
        for r in range(len(indptr) - 1):
            mine = indices[indptr[r] : indptr[r + 1]].long()
            length = (len(mine) - 1) * page_size + int(last[r])
            k, v = (side[mine].float().transpose(1, 2).flatten(0, 1)[:length] for side in sides)
            outs.append(dense(q[qo_indptr[r] : qo_indptr[r + 1]], k * k_scale, v * v_scale, *self.scoring, None))
        return torch.cat(outs)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert causal and sm_scale is not None
        self.take(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, sm_scale, window_left, logits_soft_cap or 0.0, q_data_type, kv_data_type,
        )  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        data_type: Any = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True,
    ) -> None:  # fmt: skip
        assert sm_scale is not None
        self.take(
            torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len, num_qo_heads, num_kv_heads,
            head_dim, page_size, sm_scale, window_left, logits_soft_cap or 0.0, q_data_type, kv_data_type,
        )  # fmt: skip


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake packages in place of the real ones, and the op as it was afterwards."""
    flash, infer = ModuleType("flash_attn"), ModuleType("flashinfer")
    flash.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        setattr(infer, wrapper.__name__, wrapper)
    for module in (flash, infer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("flash_attn", "flashinfer"):
        monkeypatch.delitem(sys.modules, f"vllm.ops.attention_backends.{name}", raising=False)
    for operation in (ops.attend, ops.plan_batch):
        monkeypatch.setattr(operation, "_kernels", dict(operation._kernels))


MIXES = {
    "decode": ([1, 1, 1], [1, 17, 300]),
    "prompts": ([33, 5], [33, 5]),
    "mixed": ([1, 40, 1, 19], [65, 290, 3, 19]),
}
FEATURES: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 7}, "softcap": {"softcap": 3.0}}


def check(name: str, mix: str, block_size: int, params: AttentionParams) -> None:
    backend = attention_backends.use(name, CPU)
    assert backend is not None
    batch = make_batch(*MIXES[mix], heads=4, kv_heads=2, head_dim=64, block_size=block_size, window=params.window)
    wanted = attention_backends.Wanted(params, 64, torch.bfloat16, torch.bfloat16)
    assert backend.missing(wanted) is None
    got = ops.attend(batch.q, batch.cache, params, batch.step, batch.group)
    want = ops.attend.reference(batch.q, batch.cache.nan_to_num(), params, batch.step, batch.group)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [16, 256])
def test_flash_attn_gives_what_the_reference_gives(libraries: None, mix: str, block_size: int, features: str) -> None:
    check("FLASH_ATTN", mix, block_size, AttentionParams(scale=0.125, **FEATURES[features]))


def test_flash_attn_takes_alibi_slopes(libraries: None) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    check("FLASH_ATTN", "mixed", 16, AttentionParams(scale=0.125, alibi_slopes=slopes))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("mix", MIXES)
def test_flashinfer_gives_what_the_reference_gives(libraries: None, mix: str, features: str) -> None:
    check("FLASHINFER", mix, 16, AttentionParams(scale=0.125, **FEATURES[features]))


def test_flashinfer_plans_once_for_layers_of_one_kind_and_scales_a_float8_cache(libraries: None) -> None:
    attention_backends.use("FLASHINFER", CPU)
    batch = make_batch([1, 6], [30, 6], heads=4, kv_heads=2, head_dim=64, block_size=8)
    cache = batch.cache.nan_to_num().to(torch.float8_e5m2)
    params = [AttentionParams(0.125, k_scale=0.5, v_scale=2.0), AttentionParams(0.125, window=4)]
    before = PagedWrapper.plans
    for p in params * 2:
        got = ops.attend(batch.q, cache, p, batch.step, batch.group)
        want = ops.attend.reference(batch.q, cache, p, batch.step, batch.group)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert PagedWrapper.plans == before + 2
    ops.attend(batch.q, cache, params[0], replace(batch.step), batch.group)
    assert PagedWrapper.plans == before + 3, "another step, another plan"


class Layer(nn.Module):
    def __init__(self, params: AttentionParams) -> None:
        super().__init__()
        self.params = params


LACKING = [
    ("FLASH_ATTN", {}, 64, torch.float32, None, "float16 and bfloat16 only, not in float32"),
    ("FLASH_ATTN", {}, 64, torch.bfloat16, torch.float8_e4m3fn, "a cache of the model's dtype only"),
    ("FLASH_ATTN", {}, 512, torch.bfloat16, None, "head sizes that 8 divides, up to 256, not 512"),
    ("FLASHINFER", {}, 64, torch.float32, None, "float16 and bfloat16 only, not in float32"),
    ("FLASHINFER", {}, 80, torch.bfloat16, None, "heads of 64, 128 and 256, not 80"),
    ("FLASHINFER", {"alibi_slopes": torch.ones(4)}, 64, torch.bfloat16, None, "no ALiBi slopes"),
]


@pytest.mark.parametrize(("name", "features", "head_dim", "dtype", "cache", "message"), LACKING)
def test_models_that_need_what_a_library_lacks_are_refused(
    libraries: None, name: str, features: dict[str, Any], head_dim: int, dtype: Any, cache: Any, message: str
) -> None:
    backend = attention_backends.use(name, CPU)
    assert backend is not None
    model = nn.Sequential(nn.Linear(1, 1), Layer(AttentionParams(1.0, **features)))
    with pytest.raises(ValueError, match=f"{name} cannot run this model: .*{message}"):
        attention_backends.check(backend, model, head_dim, dtype, cache or dtype)


@pytest.mark.parametrize(("name", "package"), [("FLASH_ATTN", "flash_attn"), ("FLASHINFER", "flashinfer")])
def test_a_library_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.delitem(sys.modules, f"vllm.ops.attention_backends.{package}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    with pytest.raises(ValueError, match=f"backend {name} cannot be used: .*{package}"):
        attention_backends.use(name, CPU)


def test_the_reference_can_take_over_from_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.attend, "_kernels", {"cpu": importlib})
    monkeypatch.setattr(ops.plan_batch, "_kernels", {"cpu": ops.plan_gathered})
    assert attention_backends.use(None, CPU) is None
    assert attention_backends.use("TRITON_ATTN", CPU) is None
    assert ops.attend.kernel("cpu") is importlib
    assert attention_backends.use("TORCH_SDPA", CPU) is None
    assert ops.attend.kernel("cpu") == ops.attend.reference
    assert ops.plan_batch.kernel("cpu") == ops.plan_batch.reference
    with pytest.raises(ValueError, match="Unknown attention backend 'MAGIC'"):
        attention_backends.use("MAGIC", CPU)


def test_engines_of_one_process_use_one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backends, "_users", {})

    class Owner:
        pass

    first, second, third = Owner(), Owner(), Owner()
    attention_backends.claim(None, CPU, first)
    attention_backends.claim("TRITON_ATTN", CPU, second)
    with pytest.raises(ValueError, match="through TRITON_ATTN: one that does it through TORCH_SDPA needs a process of"):
        attention_backends.claim("TORCH_SDPA", CPU, third)
    attention_backends.claim("TORCH_SDPA", torch.device("meta"), third)
    first.itself = first  # type: ignore[attr-defined]  # gone only once garbage is collected
    del first, second
    attention_backends.claim("TORCH_SDPA", CPU, third)
    with pytest.raises(ValueError, match="through TORCH_SDPA"):
        attention_backends.claim(None, CPU, Owner())


def test_an_engine_that_is_gone_leaves_the_choice_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM, SamplingParams

    monkeypatch.setattr(attention_backends, "_users", {})  # other tests keep engines in this process
    options: dict[str, object] = {"model": "demo", "max_model_len": 128, "num_gpu_blocks_override": 32}
    params = SamplingParams(temperature=0.0, max_tokens=4)
    llm = LLM(**options)
    want = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_SDPA")
    with pytest.raises(ValueError, match="needs a process of its own"):
        LLM(**options)
    assert llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text == want
    del llm
    llm = LLM(**options)
    assert llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text == want
    del llm
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND")
    LLM(**options)

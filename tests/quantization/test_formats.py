"""Every format, written by an independent writer, against Hugging Face's model with the numbers it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.harness import PagedDriver, engine_config
from tests.quantization import writers
from tests.quantization.harness import PROMPT, assert_same_logits, is_projection, plain_model, quantize_folder
from vllm.distributed import TensorParallel
from vllm.model_executor.layers.quantization.in_flight import round_to_floats
from vllm.model_executor.layers.quantization.method import QuantizedExpertMethod
from vllm.model_executor.model_loader import load_model
from vllm.ops.quantized import pack_experts

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
QQQ = {"quant_method": "qqq", "wbits": 4, "group_size": 64}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def every(write: Any, **options: Any) -> Any:
    """A writer of all projections."""
    return lambda module, weight: write(weight, **options) if is_projection(module) else None


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (every(writers.gptq), GPTQ),
    "gptq of version 2": (every(writers.gptq, version=2), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq asymmetric": (every(writers.gptq, symmetric=False), {**GPTQ, "sym": False}),
    "gptq asymmetric of version 2": (
        every(writers.gptq, symmetric=False, version=2),
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq act-order": (every(writers.gptq, act_order=True), {**GPTQ, "desc_act": True}),
    "gptq act-order asymmetric": (
        every(writers.gptq, act_order=True, symmetric=False),
        {**GPTQ, "desc_act": True, "sym": False},
    ),
    "gptq 8 bits": (every(writers.gptq, bits=8), {**GPTQ, "bits": 8}),
    "gptq 3 bits": (every(writers.gptq, bits=3), {**GPTQ, "bits": 3}),
    "gptq 2 bits": (every(writers.gptq, bits=2, symmetric=False), {**GPTQ, "bits": 2, "sym": False}),
    "gptq one group": (every(writers.gptq, group=-1), {**GPTQ, "group_size": -1}),
    "marlin": (every(writers.marlin, group=128), {**GPTQ, "group_size": 128, "checkpoint_format": "marlin"}),
    "marlin one group": (every(writers.marlin, group=-1), {**GPTQ, "group_size": -1, "is_marlin_format": True}),
    "marlin 2:4": (every(writers.marlin_24), {**GPTQ, "group_size": 128, "checkpoint_format": "marlin_24"}),
    "marlin 2:4 of 8 bits, one group": (
        every(writers.marlin_24, bits=8, group=-1),
        {**GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "marlin_24"},
    ),
    "qqq": (every(writers.qqq), {**QQQ, "group_size": -1}),
    "qqq in groups": (every(writers.qqq, group=64), QQQ),
    "awq": (every(writers.awq), AWQ),
    "awq gemv": (every(writers.awq, version="gemv"), {**AWQ, "version": "gemv"}),
    "awq gemv_fast": (every(writers.awq, version="gemv_fast"), {**AWQ, "version": "gemv_fast"}),
    "fp8": (every(writers.fp8), FP8),
    "fp8 static": (every(writers.fp8, static=True), {**FP8, "activation_scheme": "static"}),
    "fp8 channels": (every(writers.fp8, scales="channel"), FP8),
    "fp8 blocks": (
        every(writers.fp8, scales="block", leaf="weight_scale_inv"),
        {**FP8, "weight_block_size": [128, 128]},
    ),
}


def fused_halves(weight: Tensor) -> Any:
    """HQQ by its published layout: groups of 64 as rows, the first half of the rows in the high nibbles."""
    rows = weight.reshape(-1, 64)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).half()
    codes = (rows / scale.float() + zero.float()).round().clamp(0, 15).to(torch.uint8)
    half = len(codes) // 2
    tensors = {"W_q": codes[:half] << 4 | codes[half:], "scale": scale, "zero": zero, "nbits": torch.tensor(4)}
    return tensors, ((codes.float() - zero.float()) * scale.float()).reshape(weight.shape)


def squeezellm(weight: Tensor) -> Any:
    table = weight.quantile(torch.linspace(0.02, 0.98, 16), dim=1).t().contiguous().half()
    codes = (weight[..., None] - table.float()[:, None]).abs().argmin(-1)
    packed = torch.from_numpy(writers.words(codes.numpy(), 4).T.copy())
    return {"qweight": packed, "lookup_table": table}, table.float().gather(1, codes)


def aqlm(weight: Tensor) -> Any:
    n, k = weight.shape
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n, k // 8, 2), generator=generator)
    books = torch.randn(2, 256, 1, 8, generator=generator).half() * 0.1
    scales = torch.rand(n, 1, 1, 1, generator=generator).half()
    numbers = torch.zeros(n, k)
    for i in range(n):
        for j in range(k // 8):
            for c in range(2):
                numbers[i, 8 * j : 8 * j + 8] += scales[i, 0, 0, 0].float() * books[c, codes[i, j, c], 0].float()
    return {"codes": codes.to(torch.int8), "codebooks": books, "scales": scales}, numbers


CASES.update(
    {
        "hqq": (
            every(fused_halves),
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}},
        ),
        "squeezellm": (every(squeezellm), {"quant_method": "squeezellm", "wbits": 4}),
        "aqlm": (
            every(aqlm),
            {
                "quant_method": "aqlm",
                "in_group_size": 8,
                "out_group_size": 1,
                "num_codebooks": 2,
                "nbits_per_codebook": 8,
            },
        ),
        "fbgemm_fp8": (
            every(writers.fp8, scales="channel"),
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        ),
        "modelopt": (
            every(writers.fp8, static=True),
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        ),
        "auto-round": (
            every(writers.gptq, version=2),
            {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round"},
        ),
        "auto-round as awq": (
            every(writers.awq),
            {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
        ),
    }
)


@pytest.mark.parametrize("name", CASES)
def test_format_gives_the_logits_of_its_numbers(name: str, tmp_path: Path) -> None:
    write, settings = CASES[name]
    reference, state = plain_model(tmp_path)
    quantize_folder(tmp_path, reference, state, write, settings)
    assert_same_logits(tmp_path, reference)


@pytest.mark.parametrize("family", ["qwen2", "phi3", "mixtral", "gpt_neox"])
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_formats_in_other_families(family: str, name: str, tmp_path: Path) -> None:
    write, settings = CASES[name]
    reference, state = plain_model(tmp_path, family)
    quantize_folder(tmp_path, reference, state, write, settings)
    assert_same_logits(tmp_path, reference)


def test_scales_of_gptqmodel_that_divide(tmp_path: Path) -> None:
    def write(module: str, weight: Tensor) -> Any:
        if not is_projection(module):
            return None
        tensors, numbers = writers.fp8(weight, scales="channel", leaf="weight_scale_inv")
        return {**tensors, "weight_scale_inv": tensors["weight_scale_inv"].reciprocal().flatten()}, numbers

    reference, state = plain_model(tmp_path)
    quantize_folder(tmp_path, reference, state, write, {**FP8, "weight_scale_semantics": "inverse"})
    assert_same_logits(tmp_path, reference)


@pytest.mark.parametrize("parent", ["block_sparse_moe", "mlp"])  # llm-compressor's, GPTQModel's
def test_experts_of_mixtral_as_libraries_name_them(parent: str, tmp_path: Path) -> None:
    """With transformers 5, which has names of its own in memory."""
    reference, state = plain_model(tmp_path, "mixtral")
    settings = compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"})
    stored = quantize_folder(tmp_path, reference, state, every(writers.fp8, scales="channel"), settings)
    for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        stored = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in stored.items()}
    stored = {name.replace("block_sparse_moe", parent): tensor for name, tensor in stored.items()}
    save_file(stored, tmp_path / "model.safetensors")
    assert_same_logits(tmp_path, reference)


def compressed(layout: str, weights: dict[str, Any] | None, sparsity: str = "dense", **group: Any) -> dict[str, Any]:
    """A config of compressed-tensors for all linear layers."""
    groups = {} if weights is None else {"group_0": {"targets": ["Linear"], "weights": weights, **group}}
    structure = {"format": sparsity, "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": ["lm_head"]}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"],
        "sparsity_config": structure,
    }  # fmt: skip


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
SPARSE_24 = "sparse-24-bitmask"
SPARSE_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "2:4": (every(writers.sparse), compressed("dense", None, SPARSE_24)),
    "sparse": (every(writers.sparse, every_four=False), compressed("dense", None, "sparse-bitmask")),
    "2:4 of int8": (every(writers.sparse, kind="int8"), compressed("int-quantized", INT8, SPARSE_24)),
    "2:4 of fp8": (
        every(writers.sparse, kind="fp8"), compressed("float-quantized", {**INT8, "type": "float"}, SPARSE_24),
    ),
    "marlin-24": (
        every(writers.marlin_24, names=("weight_packed", "meta", "scale_packed")),
        compressed("marlin-24", {**INT8, "num_bits": 4, "strategy": "group", "group_size": 128}),
    ),
}  # fmt: skip
CASES |= {f"compressed-tensors {name}": case for name, case in SPARSE_CASES.items()}


def test_sparse_weights_that_contradict_themselves(tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path)
    stored = quantize_folder(tmp_path, reference, state, *SPARSE_CASES["2:4"])
    name = "model.layers.1.mlp.up_proj"
    for leaf, change, message in (
        ("bitmask", lambda t: t | 1, "'compressed' holds .* weights, but 'bitmask' names"),
        ("shape", lambda t: t + 1, "'shape' says .*, expected"),
        ("bitmask", lambda t: t[:, 1:].contiguous(), "'bitmask' has the shape"),
    ):
        save_file({**stored, f"{name}.{leaf}": change(stored[f"{name}.{leaf}"])}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{name}: {message}".replace(".mlp", r"\.mlp")):
            load_model(engine_config(tmp_path, max_model_len=64), "cpu")


def test_parts_of_a_fused_layer_may_differ(tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path)

    def write(module: str, weight: Tensor) -> Any:
        if module.endswith(("k_proj", "lm_head")):
            return None
        bits = 8 if module.endswith(("v_proj", "up_proj")) else 4
        return writers.gptq(weight, bits=bits) if is_projection(module) else None

    dynamic = {r"-:.*\.k_proj": {}, r"+:.*\.v_proj": {"bits": 8}, r".*up_proj": {"bits": 8}}
    quantize_folder(tmp_path, reference, state, write, {**GPTQ, "dynamic": dynamic})
    assert_same_logits(tmp_path, reference)


def test_quantized_head_and_modules_left_out(tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path, vocab_size=136)
    quantize_folder(
        tmp_path,
        reference,
        state,
        lambda module, weight: writers.gptq(weight) if is_projection(module) or module == "lm_head" else None,
        {**GPTQ, "lm_head": True},
    )
    assert_same_logits(tmp_path, reference)


@pytest.mark.parametrize(
    ("settings", "field"), [(AWQ, "modules_to_not_convert"), (FP8, "ignored_layers"), (FP8, "modules_to_not_convert")]
)
def test_lists_of_modules_left_plain(settings: dict[str, Any], field: str, tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path)
    left = [name for name in (module.removesuffix(".weight") for module in state) if "layers.0." in name]

    def write(module: str, weight: Tensor) -> Any:
        if module in left or not is_projection(module):
            return None
        return writers.awq(weight) if settings is AWQ else writers.fp8(weight)

    quantize_folder(tmp_path, reference, state, write, {**settings, field: left})
    assert_same_logits(tmp_path, reference)


def test_what_is_missing_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path)
    stored = quantize_folder(tmp_path, reference, state, every(writers.gptq), GPTQ)
    name = "model.layers.1.mlp.up_proj.scales"
    save_file({k: v for k, v in stored.items() if k != name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: the tensor 'scales' is missing"):
        load_model(engine_config(tmp_path, max_model_len=64), "cpu")
    save_file({**stored, name: stored[name][:, 1:].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj: 'scales' has the shape .* expected"):
        load_model(engine_config(tmp_path, max_model_len=64), "cpu")
    save_file({k: v for k, v in stored.items() if "1.mlp.up" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing '.*1\.mlp\.up_proj"):
        load_model(engine_config(tmp_path, max_model_len=64), "cpu")
    save_file({**stored, "model.layers.7.mlp.up_proj.scales": stored[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.7"):
        load_model(engine_config(tmp_path, max_model_len=64), "cpu")


def test_random_weights_of_a_quantized_model(tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ}))
    model = load_model(engine_config(tmp_path, max_model_len=64, load_format="dummy"), "cpu")
    again = load_model(engine_config(tmp_path, max_model_len=64, load_format="dummy"), "cpu")
    x = torch.randn(3, 128)
    out = model.blocks[0].attn.qkv.project(x)
    assert out.abs().max() > 0
    assert torch.equal(out, again.blocks[0].attn.qkv.project(x))


@pytest.mark.parametrize("name", ["ptpc_fp8", "deepspeedfp", "experts_int8"])
def test_plain_weights_in_flight(name: str, tmp_path: Path) -> None:
    def write(module: str, weight: Tensor) -> Any:
        if not is_projection(module) or (name == "experts_int8") != (".experts." in module):
            return None
        if name == "experts_int8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            return {"weight": weight}, (weight / scale).round() * scale
        if name == "deepspeedfp" and ".experts." in module:
            return None
        scale = weight.abs().amax(1, keepdim=True) / 448
        return {"weight": weight}, (weight / scale).to(torch.float8_e4m3fn).float() * scale

    reference, state = plain_model(tmp_path, "mixtral" if name == "experts_int8" else "llama")
    quantize_folder(tmp_path, reference, state, write, None)
    assert_same_logits(tmp_path, reference, quantization=name)


def test_floats_of_six_bits() -> None:
    numbers = [m / 16 for m in range(4)] + [2.0**e * (1 + m / 4) for e in range(-2, 5) for m in range(4)]
    table = torch.tensor(sorted({*numbers, *(-n for n in numbers)}))
    weight = torch.randn(5, 96)
    scale = weight.abs().amax(1, keepdim=True) / 28
    ours = round_to_floats(weight, 6, -1).dequantize() / scale
    best = (weight / scale)[..., None].sub(table).abs().amin(-1)
    torch.testing.assert_close((ours - weight / scale).abs(), best, atol=1e-5, rtol=0)


def test_scales_of_the_cache_are_kept_for_a_float8_one(tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path)
    stored = quantize_folder(tmp_path, reference, state, every(writers.fp8), FP8)
    scales = {
        f"model.layers.{i}.self_attn.{kind}": torch.tensor(0.5) for i in (0, 1) for kind in ("k_scale", "v_scale")
    }
    save_file({**stored, **scales}, tmp_path / "model.safetensors")
    assert_same_logits(tmp_path, reference)
    model: Any = load_model(engine_config(tmp_path, max_model_len=64), "cpu")
    assert model.cache_scales == {0: (0.5, 0.5), 1: (0.5, 0.5)}


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_multiplied_as_they_are_stored(stacked: bool, tmp_path: Path) -> None:
    """In 16 bits, where there is a kernel: beside the same numbers as plain weights."""
    reference, state = plain_model(tmp_path, "mixtral")
    if stacked:
        inner = {"w1": 0, "w3": 1}
        stacks: dict[str, Any] = {}
        for name, tensor in sorted(state.items()):
            before, _, after = name.partition(".block_sparse_moe.experts.")
            if after:
                expert, kind, _ = after.split(".")
                leaf = "gate_up_proj" if kind in inner else "down_proj"
                stacks.setdefault(f"{before}.mlp.experts.{leaf}", {})[int(expert), inner.get(kind, 0)] = tensor
        kept = {name: t for name, t in state.items() if ".experts." not in name}
        for name, parts in stacks.items():
            per = 2 if "gate_up" in name else 1
            kept[name] = torch.stack([torch.cat([parts[e, i] for i in range(per)]) for e in range(4)])
        save_file(kept, tmp_path / "model.safetensors")
        name = "experts_int8"
    else:
        quantize_folder(tmp_path, reference, state, every(writers.gptq), GPTQ)
        name = None
    model = load_model(engine_config(tmp_path, max_model_len=64, quantization=name, dtype="bfloat16"), "cpu")
    method = model.blocks[1].ffn.experts.method
    assert isinstance(method, QuantizedExpertMethod)
    (ours,) = PagedDriver(model).run([PROMPT], [7])
    exact = load_model(engine_config(tmp_path, max_model_len=64, quantization=name), "cpu")
    (expected,) = PagedDriver(exact).run([PROMPT], [7])
    assert (ours.float() - expected).norm() / expected.norm() < 0.15  # random experts: a router's tie goes either way


@pytest.mark.parametrize("world", [1, 2])
def test_experts_are_packed_together_where_a_device_multiplies_them_at_once(world: int, tmp_path: Path) -> None:
    reference, state = plain_model(tmp_path, "mixtral")
    quantize_folder(tmp_path, reference, state, every(writers.gptq), GPTQ)
    config = engine_config(tmp_path, max_model_len=64, dtype="float32")
    wanted = PagedDriver(load_model(config, "cpu")).run([PROMPT], [7])[0]
    pack_experts.register("cpu", lambda weights, device, dtype: pack_experts.reference(weights, device, dtype))
    try:
        model = load_model(config, "cpu")
        shares = [load_model(config, "cpu", TensorParallel(rank, world)) for rank in range(world)]
    finally:
        pack_experts.unregister("cpu")
    method = model.blocks[1].ffn.experts.method
    assert isinstance(method, QuantizedExpertMethod) and method.stacks is not None and method.dense_bytes
    assert torch.allclose(PagedDriver(model).run([PROMPT], [7])[0], wanted, rtol=1e-4, atol=1e-5)
    downs = [share.blocks[1].ffn.experts.method.stacks[1] for share in shares]
    torch.testing.assert_close(torch.cat(downs, 2), method.stacks[1], rtol=0, atol=0)


def test_experts_of_four_bit_floats_as_gpt_oss_is_published(tmp_path: Path) -> None:
    """Blocks of 32, by the OCP microscaling formats: sign, two bits of exponent, one of mantissa; a power of two."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    reference, state = plain_model(
        tmp_path, "gpt_oss", **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=7, attention_bias=True,
        swiglu_limit=1.5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    stored, numbers = dict(state), dict(state)
    for name in [n for n in state if n.endswith("experts.gate_up_proj") or n.endswith("experts.down_proj")]:
        experts, k, n = state[name].shape
        codes = torch.randint(0, 16, (experts, n, k))
        scales = torch.randint(123, 127, (experts, n, k // 32))
        exponent, mantissa = codes // 2 % 4, codes % 2
        size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
        values = torch.where(codes < 8, size, -size) * 2.0 ** (scales - 127).repeat_interleave(32, -1)
        numbers[name] = values.transpose(1, 2).contiguous()
        del stored[name]
        pairs = codes.view(experts, n, k // 32, 16, 2)
        stored[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
    reference.load_state_dict(numbers)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    assert_same_logits(tmp_path, reference, 1e-5)
    stored[f"{name}_scales"][1, 2, 0] = 255
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.(gate_up|down)_proj: a scale is no number"):
        load_model(engine_config(tmp_path, max_model_len=64), "cpu")
    del stored[f"{name}_scales"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'_scales' is missing"):
        load_model(engine_config(tmp_path, max_model_len=64), "cpu")


@pytest.mark.parametrize("q_rank", [None, 96])
def test_latent_attention_and_its_experts_in_blocks_of_8_bits(q_rank: int | None, tmp_path: Path) -> None:
    """As DeepSeek 3 is published; and layers behind the last, which predict further tokens, are left out."""
    reference, state = plain_model(
        tmp_path, "deepseek_v3", num_key_value_heads=4, q_lora_rank=q_rank, kv_lora_rank=80, qk_nope_head_dim=24,
        qk_rope_head_dim=16, v_head_dim=32, moe_intermediate_size=160, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    settings = {**FP8, "weight_block_size": [128, 128]}
    write = every(writers.fp8, scales="block", leaf="weight_scale_inv")
    stored = quantize_folder(tmp_path, reference, state, write, settings)
    extra = {
        name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in stored.items() if "layers.1." in name
    }
    extra |= {"model.layers.2.eh_proj.weight": torch.zeros(2, 2), "model.layers.2.shared_head.norm.weight": PROMPT}
    save_file({**stored, **extra}, tmp_path / "model.safetensors")
    assert_same_logits(tmp_path, reference)

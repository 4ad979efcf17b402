"""Plain models of families that transformers does not have, written from their published descriptions.

Each is a dense forward pass over the tensors of a checkpoint by their public names, [out, in] unless stated otherwise;
nothing is shared with the package. `Reference.shapes` says which tensors a checkpoint of a config has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Config = dict[str, Any]
Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Reference:
    """shapes: config -> tensors of a checkpoint.   logits: (config, tensors, ids [n]) -> [n, vocabulary]."""

    shapes: Callable[[Config], Shapes]
    logits: Callable[[Config, Weights, Tensor], Tensor]


# ---- parts -----------------------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def angles(n: int, base: float, dim: int, i: int, c: Config) -> tuple[Tensor, float]:
    """By how much pair i turns at each of n positions, and what the result is multiplied by, with the scaling that the
    config has. Of the two lists of factors the one that a server takes whose sequences may be 64 tokens long.
    """
    scaling = c.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    p, plain, factor = torch.arange(n), base ** (-2 * i / dim), scaling.get("factor", 1.0)
    if kind == "linear":
        return p / factor * plain, 1.0
    if kind == "dynamic":  # a position's base is that which held when it was the last
        known = c["max_position_embeddings"]
        grown = base * (factor * (p + 1) / known - (factor - 1)).clamp(min=1) ** (dim / (dim - 2))
        return p * grown ** (-2 * i / dim), 1.0
    if "use_dynamic_ntk" in c and n > c["seq_length"]:  # Qwen 1, of a prompt of n tokens
        alpha = max(2 ** math.ceil(math.log2(c.get("prompt", n) / c["seq_length"]) + 1) - 1, 1)
        return p * (base * alpha ** (dim / (dim - 2))) ** (-2 * i / dim), 1.0
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return p * plain * (share + (1 - share) / factor), 1.0
    if kind in ("longrope", "su"):
        known = scaling["original_max_position_embeddings"]
        name = "long" if known < 64 else "short"
        usual = math.sqrt(1 + math.log(max(1.0, c["max_position_embeddings"] / known)) / math.log(known))
        return p * plain / scaling[f"{name}_factor"][i], scaling.get(f"{name}_mscale", usual)
    return p * plain, 1.0


def turn(x: Tensor, base: float, dim: int, pairs: str, c: Config) -> Tensor:
    """Rotate the first `dim` of x [n, heads, d] by position. pairs: "half" (i, i + dim / 2) or "next" (2i, 2i + 1)."""
    n, half = len(x), dim // 2
    out = x.clone()
    for i in range(half):
        a, b = (i, i + half) if pairs == "half" else (2 * i, 2 * i + 1)
        angle, scale = angles(n, base, dim, i, c)
        cos, sin = scale * angle.cos()[:, None], scale * angle.sin()[:, None]
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def slopes(heads: int) -> list[float]:
    """ALiBi's geometric series; for other than powers of two, then every second of the next finer one."""
    power = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * k / power) for k in range(1, power + 1)]
    more = [2 ** (-4 * (2 * j - 1) / power) for j in range(1, heads - power + 1)]
    return first + more


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: list[float] | None = None, trained: int | None = None
) -> Tensor:
    """Causal attention of q [n, heads, d] over k, v [n, kv heads, d] -> [n, heads * d].

    trained: a sequence that is s times as long, when a query's token is its last one, has a bias of 1 / s.
    """
    n, heads, _ = q.shape
    out = []
    for h in range(heads):
        g = h * k.shape[1] // heads
        scores = q[:, h] @ k[:, g].T * scale
        if bias is not None:
            times = (torch.arange(1, n + 1) / (trained or n)).clamp(min=1.0)
            scores = scores + bias[h] / times[:, None] * (torch.arange(n)[None] - torch.arange(n)[:, None])
        scores = scores + torch.full((n, n), float("-inf")).triu(1)
        out.append(scores.softmax(-1) @ v[:, g])
    return torch.cat(out, -1)


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def ln(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def experts(
    x: Tensor, router: Tensor, mlp: Callable[[int, Tensor], Tensor], top: int, *, divide: bool = True
) -> Tensor:
    """Softmax over all, the best `top`, divided by their sum."""
    out = torch.zeros_like(x)
    for t, row in enumerate((x @ router.T).softmax(-1)):
        best = row.topk(top)
        for p, e in zip(best.values / (best.values.sum() if divide else 1.0), best.indices.tolist(), strict=True):
            out[t] += p * mlp(e, x[t : t + 1])[0]
    return out


# ---- Llama's shape under several names -------------------------------------------------------------------------------


def llama_shapes(c: Config, *, norm_bias: bool = False, attn_bias: bool = False, fused: bool = False) -> Shapes:
    h, d = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
    q, kv, inner = h, c.get("num_key_value_heads", c["num_attention_heads"]) * d, c["intermediate_size"]
    found: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    if not c.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (c["vocab_size"], h)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        parts = {"W_pack": q + 2 * kv} if fused else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        for name, rows in parts.items():
            found[f"{at}.self_attn.{name}.weight"] = (rows, h)
            if attn_bias:
                found[f"{at}.self_attn.{name}.bias"] = (rows,)
        found[f"{at}.self_attn.o_proj.weight"] = (h, q)
        if attn_bias:
            found[f"{at}.self_attn.o_proj.bias"] = (h,)
        if not c.get("num_experts"):
            for name, shape in (("gate_proj", (inner, h)), ("up_proj", (inner, h)), ("down_proj", (h, inner))):
                found[f"{at}.mlp.{name}.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = (h,)
    if norm_bias:
        found |= {name.replace(".weight", ".bias"): shape for name, shape in found.items() if "norm" in name}
    return found


def llama(c: Config, w: Weights, ids: Tensor, *, alibi: bool = False, **scales: float) -> Tensor:
    """Llama; with LayerNorm where norms have biases, with experts where there is a gate."""
    h, heads, eps = c["hidden_size"], c["num_attention_heads"], c["rms_norm_eps"]
    d, kv = h // heads, c.get("num_key_value_heads", heads)
    branch = scales.get("branch", 1.0)

    def norm(name: str, x: Tensor) -> Tensor:
        return ln(w, name, x, eps) if f"{name}.bias" in w else rms(x, w[f"{name}.weight"], eps)

    x = w["model.embed_tokens.weight"][ids] * scales.get("embed", 1.0)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        y = norm(f"{at}.input_layernorm", x)
        if f"{at}.self_attn.W_pack.weight" in w:
            q, k, v = linear(w, f"{at}.self_attn.W_pack", y).split([h, kv * d, kv * d], -1)
        else:
            q, k, v = (linear(w, f"{at}.self_attn.{p}_proj", y) for p in "qkv")
        q, k, v = q.view(-1, heads, d), k.view(-1, kv, d), v.view(-1, kv, d)
        if not alibi:
            base = c.get("rope_theta", 10000.0)
            q, k = turn(q, base, d, "half", c), turn(k, base, d, "half", c)
        if c.get("use_logn_attn"):
            long = torch.arange(1, len(ids) + 1).clamp(min=c["seq_length"])
            q = q * (long.log() / math.log(c["seq_length"]))[:, None, None]
        a = attention(q, k, v, d**-0.5, slopes(heads) if alibi else None)
        x = x + branch * linear(w, f"{at}.self_attn.o_proj", a)
        y = norm(f"{at}.post_attention_layernorm", x)
        if f"{at}.mlp.shared_experts.up_proj.weight" in w:
            y = deepseek_experts(c, w, f"{at}.mlp", y)
        elif f"{at}.mlp.gate.weight" in w:

            def expert(e: int, t: Tensor, at: str = at) -> Tensor:
                own = f"{at}.mlp.experts.{e}"
                return linear(w, f"{own}.w2", F.silu(linear(w, f"{own}.w1", t)) * linear(w, f"{own}.w3", t))

            y = experts(y, w[f"{at}.mlp.gate.weight"], expert, c["num_experts_per_tok"])
        else:
            gate, up = linear(w, f"{at}.mlp.gate_proj", y), linear(w, f"{at}.mlp.up_proj", y)
            above = c.get("hidden_act_param", 0.0)
            act = gate * (gate > above) if c.get("hidden_act") == "fatrelu" else F.silu(gate)
            y = linear(w, f"{at}.mlp.down_proj", act * up)
        x = x + branch * y
    x = norm("model.norm", x) * scales.get("out", 1.0)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def baichuan2(c: Config, w: Weights, ids: Tensor, *, alibi: bool = True) -> Tensor:
    head = w["lm_head.weight"]
    return llama(c, {**w, "lm_head.weight": head / head.norm(dim=1, keepdim=True)}, ids, alibi=alibi)


def swiglu(w: Weights, at: str, x: Tensor) -> Tensor:
    return linear(w, f"{at}.down_proj", F.silu(linear(w, f"{at}.gate_proj", x)) * linear(w, f"{at}.up_proj", x))


def deepseek_shapes(c: Config) -> Shapes:
    """DeepSeekMoE (arXiv 2401.06066): from the first layers on, shared experts as one MLP, and many small ones."""
    found, h, inner = llama_shapes(c), c["hidden_size"], c["moe_intermediate_size"]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp"
        if i < c["first_k_dense_replace"] or i % c["moe_layer_freq"]:
            continue
        for part in ("gate", "up", "down"):
            del found[f"{at}.{part}_proj.weight"]
        found[f"{at}.gate.weight"] = (c["n_routed_experts"], h)
        mlps = {f"experts.{e}": inner for e in range(c["n_routed_experts"])}
        for name, width in {**mlps, "shared_experts": inner * c["n_shared_experts"]}.items():
            found |= {f"{at}.{name}.{part}_proj.weight": (width, h) for part in ("gate", "up")}
            found[f"{at}.{name}.down_proj.weight"] = (h, width)
    return found


def deepseek_experts(c: Config, w: Weights, at: str, x: Tensor) -> Tensor:
    chosen = experts(
        x, w[f"{at}.gate.weight"], lambda e, t: swiglu(w, f"{at}.experts.{e}", t), c["num_experts_per_tok"],
        divide=c["norm_topk_prob"],
    )  # fmt: skip
    return chosen + swiglu(w, f"{at}.shared_experts", x)


def minicpm_shapes(c: Config) -> Shapes:
    found = llama_shapes(c)
    for i in range(c["num_hidden_layers"] if c.get("num_experts") else 0):
        at, h, inner = f"model.layers.{i}.mlp", c["hidden_size"], c["intermediate_size"]
        found[f"{at}.gate.weight"] = (c["num_experts"], h)
        for e in range(c["num_experts"]):
            found |= {f"{at}.experts.{e}.{n}.weight": s for n, s in (("w1", (inner, h)), ("w3", (inner, h)))}
            found[f"{at}.experts.{e}.w2.weight"] = (h, inner)
    return found


def minicpm(c: Config, w: Weights, ids: Tensor) -> Tensor:
    branch = c["scale_depth"] / math.sqrt(c["num_hidden_layers"])
    return llama(c, w, ids, embed=c["scale_emb"], branch=branch, out=c["dim_model_base"] / c["hidden_size"])


def renamed(shapes: Callable[[Config], Shapes], names: list[tuple[str, str]]) -> Callable[[Config], Shapes]:
    """The same tensors under other names."""

    def found(c: Config) -> Shapes:
        return {_replaced(name, names): shape for name, shape in shapes(c).items()}

    return found


def _replaced(name: str, names: list[tuple[str, str]]) -> str:
    for ours, theirs in names:
        name = name.replace(ours, theirs)
    return name


EXAONE = [
    ("model.embed_tokens", "transformer.wte"), ("model.norm", "transformer.ln_f"), ("model.layers", "transformer.h"),
    ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"), ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn", "attn.attention"), ("gate_proj", "c_fc_0"), ("up_proj", "c_fc_1"), ("down_proj", "c_proj"),
]  # fmt: skip
INTERNLM2 = [
    ("embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"), ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
    ("self_attn.W_pack", "attention.wqkv"),
]  # fmt: skip
QWEN = [
    ("model.embed_tokens", "transformer.wte"), ("model.norm", "transformer.ln_f"), ("model.layers", "transformer.h"),
    ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"), ("self_attn.o_proj", "attn.c_proj"),
    ("self_attn.W_pack", "attn.c_attn"), ("mlp.gate_proj", "mlp.w2"), ("mlp.up_proj", "mlp.w1"),
    ("mlp.down_proj", "mlp.c_proj"),
]  # fmt: skip


def under(names: list[tuple[str, str]], c: Config, w: Weights, ids: Tensor) -> Tensor:
    """Llama's forward pass over renamed tensors."""
    known = llama_shapes(c) | llama_shapes(c, fused=True, attn_bias=True)
    plain = {name: w[_replaced(name, names)] for name in known if _replaced(name, names) in w}
    return llama(c, plain, ids)


def exaone(c: Config, w: Weights, ids: Tensor) -> Tensor:
    return under(EXAONE, {**c, "num_hidden_layers": c["num_layers"], "rms_norm_eps": c["layer_norm_epsilon"]}, w, ids)


def exaone_shapes(c: Config) -> Shapes:
    return renamed(llama_shapes, EXAONE)({**c, "num_hidden_layers": c["num_layers"]})


def internlm2(c: Config, w: Weights, ids: Tensor) -> Tensor:
    """wqkv holds, for each key/value head, its query heads, then the key, then the value."""
    heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"] // c["num_attention_heads"]
    plain = dict(w)
    for i in range(c["num_hidden_layers"]):
        name = f"model.layers.{i}.attention.wqkv.weight"
        groups = w[name].view(kv, heads // kv + 2, d, -1)
        q, k, v = groups[:, :-2], groups[:, -2], groups[:, -1]
        plain[name] = torch.cat([part.reshape(-1, c["hidden_size"]) for part in (q, k, v)])
    return under(INTERNLM2, c, plain, ids)


def qwen_shapes(c: Config) -> Shapes:
    """A third field for the width: `intermediate_size` is twice that of each of both matrices."""
    found = llama_shapes({**c, "intermediate_size": c["intermediate_size"] // 2}, fused=True)
    for i in range(c["num_hidden_layers"]):
        found[f"model.layers.{i}.self_attn.W_pack.bias"] = (3 * c["hidden_size"],)
    return renamed(lambda _: found, QWEN)(c)


def qwen(c: Config, w: Weights, ids: Tensor) -> Tensor:
    own = {**c, "intermediate_size": c["intermediate_size"] // 2, "rms_norm_eps": c["layer_norm_epsilon"]}
    return under(QWEN, {**own, "rope_theta": c["rotary_emb_base"]}, w, ids)


# ---- ChatGLM ---------------------------------------------------------------------------------------------------------


def chatglm_shapes(c: Config) -> Shapes:
    h, d, inner, v = c["hidden_size"], c["kv_channels"], c["ffn_hidden_size"], c["padded_vocab_size"]
    q, rows = c["num_attention_heads"] * d, (c["num_attention_heads"] + 2 * c["multi_query_group_num"]) * d
    found: Shapes = {
        "transformer.embedding.word_embeddings.weight": (v, h),
        "transformer.encoder.final_layernorm.weight": (h,),
        "transformer.output_layer.weight": (v, h),
        "transformer.rotary_pos_emb.inv_freq": (d // 4,),
    }
    for i in range(c["num_layers"]):
        at = f"transformer.encoder.layers.{i}"
        found |= {
            f"{at}.input_layernorm.weight": (h,),
            f"{at}.post_attention_layernorm.weight": (h,),
            f"{at}.self_attention.query_key_value.weight": (rows, h),
            f"{at}.self_attention.query_key_value.bias": (rows,),
            f"{at}.self_attention.dense.weight": (h, q),
            f"{at}.mlp.dense_h_to_4h.weight": (2 * inner, h),
            f"{at}.mlp.dense_4h_to_h.weight": (h, inner),
        }
    return found


def chatglm(c: Config, w: Weights, ids: Tensor) -> Tensor:
    heads, groups, d, eps = (
        c["num_attention_heads"],
        c["multi_query_group_num"],
        c["kv_channels"],
        c["layernorm_epsilon"],
    )
    x = w["transformer.embedding.word_embeddings.weight"][ids]
    for i in range(c["num_layers"]):
        at = f"transformer.encoder.layers.{i}"
        y = rms(x, w[f"{at}.input_layernorm.weight"], eps)
        qkv = linear(w, f"{at}.self_attention.query_key_value", y)
        q, k, v = (part.reshape(len(x), -1, d) for part in qkv.split([heads * d, groups * d, groups * d], -1))
        pairs = "next" if c.get("original_rope", True) else "half"
        base, how, ratio = 10000.0, c, c.get("rope_ratio", 1)
        if c.get("_name_or_path") == "THUDM/chatglm2-6b-32k":  # position interpolation, says its card
            how = {**c, "rope_scaling": {"type": "linear", "factor": ratio}}
        else:
            base = base * ratio
        q, k = (turn(t, base, d // 2, pairs, how) for t in (q, k))
        x = x + linear(w, f"{at}.self_attention.dense", attention(q, k, v, d**-0.5))
        y = rms(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        gate, up = linear(w, f"{at}.mlp.dense_h_to_4h", y).chunk(2, -1)
        x = x + linear(w, f"{at}.mlp.dense_4h_to_h", F.silu(gate) * up)
    return linear(w, "transformer.output_layer", rms(x, w["transformer.encoder.final_layernorm.weight"], eps))


# ---- MPT, beyond what transformers' class has: groups, norms of queries and keys, learned positions ------------------


def mpt_shapes(c: Config) -> Shapes:
    h, own = c["d_model"], c["attn_config"]
    width = h // c["n_heads"] * own.get("kv_n_heads", c["n_heads"])
    found: Shapes = {"transformer.wte.weight": (c["vocab_size"], h), "transformer.norm_f.weight": (h,)}
    if not own["alibi"]:
        found["transformer.wpe.weight"] = (c["max_seq_len"], h)
    for i in range(c["n_layers"]):
        at = f"transformer.blocks.{i}"
        found |= {f"{at}.norm_1.weight": (h,), f"{at}.norm_2.weight": (h,), f"{at}.attn.out_proj.weight": (h, h)}
        found[f"{at}.attn.Wqkv.weight"] = (h + 2 * width, h)
        found |= {f"{at}.ffn.up_proj.weight": (4 * h, h), f"{at}.ffn.down_proj.weight": (h, 4 * h)}
        if own["qk_ln"]:
            found |= {f"{at}.attn.q_ln.weight": (h,), f"{at}.attn.k_ln.weight": (width,)}
    return found


def mpt(c: Config, w: Weights, ids: Tensor) -> Tensor:
    h, heads, own = c["d_model"], c["n_heads"], c["attn_config"]
    d = h // heads
    width = d * own.get("kv_n_heads", heads)

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"transformer.{name}.weight"], None, 1e-5)

    x = w["transformer.wte.weight"][ids]
    if not own["alibi"]:
        x = x + w["transformer.wpe.weight"][: len(ids)]
    for i in range(c["n_layers"]):
        at = f"transformer.blocks.{i}"
        q, k, v = linear(w, f"{at}.attn.Wqkv", norm(f"blocks.{i}.norm_1", x)).split([h, width, width], -1)
        if own["qk_ln"]:
            q, k = norm(f"blocks.{i}.attn.q_ln", q), norm(f"blocks.{i}.attn.k_ln", k)
        q, k, v = (part.reshape(len(ids), -1, d) for part in (q, k, v))
        a = attention(q, k, v, d**-0.5, slopes(heads) if own["alibi"] else None)
        x = x + linear(w, f"{at}.attn.out_proj", a)
        x = x + linear(w, f"{at}.ffn.down_proj", F.gelu(linear(w, f"{at}.ffn.up_proj", norm(f"blocks.{i}.norm_2", x))))
    return norm("norm_f", x) @ w["transformer.wte.weight"].T


MPT = Reference(mpt_shapes, mpt)


# ---- Jais: GPT-2's names and layout ([in, out]) ----------------------------------------------------------------------


def jais_shapes(c: Config) -> Shapes:
    h, inner = c["n_embd"], c["n_inner"]
    found: Shapes = {"transformer.wte.weight": (c["vocab_size"], h)}
    if c.get("position_embedding_type", "learned") == "learned":
        found["transformer.wpe.weight"] = (c["n_positions"], h)
    else:
        found["transformer.relative_pe.slopes"] = (c["n_head"], 1, 1)
    norms = ["transformer.ln_f"]
    for i in range(c["n_layer"]):
        at = f"transformer.h.{i}"
        norms += [f"{at}.ln_1", f"{at}.ln_2"]
        for name, rows, out in [
            ("attn.c_attn", h, 3 * h), ("attn.c_proj", h, h), ("mlp.c_fc", h, inner), ("mlp.c_fc2", h, inner),
            ("mlp.c_proj", inner, h),
        ]:  # fmt: skip
            found |= {f"{at}.{name}.weight": (rows, out), f"{at}.{name}.bias": (out,)}
    return found | {f"{name}.{part}": (h,) for name in norms for part in ("weight", "bias")}


def jais(c: Config, w: Weights, ids: Tensor) -> Tensor:
    h, heads, eps = c["n_embd"], c["n_head"], c["layer_norm_epsilon"]
    d = h // heads
    alibi = c.get("position_embedding_type", "learned") == "alibi"
    scaling = c.get("alibi_scaling") or {}
    factor, trained = scaling.get("factor", 1.0), scaling.get("train_seq_len")

    def conv(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][ids]
    if not alibi:
        x = x + w["transformer.wpe.weight"][: len(ids)]
    x = x * c.get("mup_embeddings_scale", c.get("embeddings_scale", 1.0))
    for i in range(c["n_layer"]):
        at = f"transformer.h.{i}"
        q, k, v = conv(f"{at}.attn.c_attn", ln(w, f"{at}.ln_1", x, eps)).view(len(x), 3, heads, d).unbind(1)
        scale = 1 / d if c.get("mup_scale_qk_dot_by_d", c.get("scale_qk_dot_by_d", False)) else d**-0.5
        a = attention(q, k, v, scale, [s / factor for s in slopes(heads)] if alibi else None, trained)
        x = x + conv(f"{at}.attn.c_proj", a)
        y = ln(w, f"{at}.ln_2", x, eps)
        x = x + conv(f"{at}.mlp.c_proj", conv(f"{at}.mlp.c_fc", y) * F.silu(conv(f"{at}.mlp.c_fc2", y)))
    width = c.get("width_scale", c.get("mup_width_scale", 1.0) * c.get("mup_output_alpha", 1.0))
    return ln(w, "transformer.ln_f", x, eps) @ w["transformer.wte.weight"].T * width


# ---- Arctic ----------------------------------------------------------------------------------------------------------


def arctic_shapes(c: Config) -> Shapes:
    h, inner = c["hidden_size"], c["intermediate_size"]
    found = {n: s for n, s in llama_shapes(c).items() if ".mlp." not in n}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        if (i + 1) % c["moe_layer_frequency"]:
            mlps = {f"{at}.block_sparse_moe.mlp": inner}
        else:
            found[f"{at}.block_sparse_moe.gate.weight"] = (c["num_local_experts"], h)
            mlps = {f"{at}.block_sparse_moe.experts.{e}": inner for e in range(c["num_local_experts"])}
            if c["parallel_attn_mlp_res"]:
                mlps[f"{at}.residual_mlp"] = h
                found[f"{at}.residual_layernorm.weight"] = (h,)
        for name, width in mlps.items():
            found |= {f"{name}.w1.weight": (width, h), f"{name}.w3.weight": (width, h), f"{name}.w2.weight": (h, width)}
    return found


def arctic(c: Config, w: Weights, ids: Tensor) -> Tensor:
    heads, kv, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    d = c["hidden_size"] // heads

    def mlp(name: str, t: Tensor) -> Tensor:
        return linear(w, f"{name}.w2", F.silu(linear(w, f"{name}.w1", t)) * linear(w, f"{name}.w3", t))

    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        y = rms(x, w[f"{at}.input_layernorm.weight"], eps)
        q = turn(linear(w, f"{at}.self_attn.q_proj", y).view(-1, heads, d), c["rope_theta"], d, "half", c)
        k = turn(linear(w, f"{at}.self_attn.k_proj", y).view(-1, kv, d), c["rope_theta"], d, "half", c)
        v = linear(w, f"{at}.self_attn.v_proj", y).view(-1, kv, d)
        a = x + linear(w, f"{at}.self_attn.o_proj", attention(q, k, v, d**-0.5))
        after = w[f"{at}.post_attention_layernorm.weight"]
        gate = w.get(f"{at}.block_sparse_moe.gate.weight")
        if gate is None:
            x = a + mlp(f"{at}.block_sparse_moe.mlp", rms(a, after, eps))
            continue

        def expert(e: int, t: Tensor, at: str = at) -> Tensor:
            return mlp(f"{at}.block_sparse_moe.experts.{e}", t)

        top = c["num_experts_per_tok"]
        if c["parallel_attn_mlp_res"]:
            dense = mlp(f"{at}.residual_mlp", rms(a, w[f"{at}.residual_layernorm.weight"], eps))
            x = a + dense + experts(rms(x, after, eps), gate, expert, top)
        else:
            x = a + experts(rms(a, after, eps), gate, expert, top)
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


# ---- the table -------------------------------------------------------------------------------------------------------

LLAMA = Reference(llama_shapes, llama)
LLAMA_BIASED = Reference(lambda c: llama_shapes(c, attn_bias=True), llama)
INTERNLM_3 = Reference(
    lambda c: {n: s for n, s in llama_shapes(c, attn_bias=True).items() if "o_proj.bias" not in n}, llama
)
ORION = Reference(lambda c: llama_shapes(c, norm_bias=True), llama)
BAICHUAN_7B = Reference(lambda c: llama_shapes(c, fused=True), llama)
BAICHUAN_13B = Reference(lambda c: llama_shapes(c, fused=True), lambda c, w, ids: llama(c, w, ids, alibi=True))
BAICHUAN_2 = Reference(lambda c: llama_shapes(c, fused=True), baichuan2)
INTERNLM_2 = Reference(renamed(lambda c: llama_shapes(c, fused=True), INTERNLM2), internlm2)
EXAONE_3 = Reference(exaone_shapes, exaone)
MINICPM = Reference(minicpm_shapes, minicpm)
QWEN_1 = Reference(qwen_shapes, qwen)
CHATGLM = Reference(chatglm_shapes, chatglm)
JAIS = Reference(jais_shapes, jais)
ARCTIC = Reference(arctic_shapes, arctic)
DEEPSEEK_MOE = Reference(deepseek_shapes, llama)


# ---- Nemotron-NAS: layers that a search made unlike ------------------------------------------------------------------


def deci_layers(c: Config) -> list[tuple[int | str | None, int | str | None]]:
    """(key/value heads, width of the MLP) of each layer; "linear" for one matrix, None for nothing."""
    if "block_configs" not in c:
        return [(kv, c["intermediate_size"]) for kv in c["num_key_value_heads_per_layer"]]
    found: list[tuple[int | str | None, int | str | None]] = []
    for layer in c["block_configs"]:
        a, f = layer["attention"], layer["ffn"]
        kv: int | str | None = "linear" if a["replace_with_linear"] else None
        if not (a["no_op"] or a["replace_with_linear"]):
            kv = c["num_attention_heads"] // a["n_heads_in_group"]
        width: int | str | None = "linear" if f["replace_with_linear"] else None
        if not (f["no_op"] or f["replace_with_linear"]):
            width = math.ceil(int(2 * f["ffn_mult"] * c["hidden_size"] / 3) / 256) * 256
        found.append((kv, width))
    return found


def deci_shapes(c: Config) -> Shapes:
    h = c["hidden_size"]
    d = h // c["num_attention_heads"]
    found: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    found["lm_head.weight"] = (c["vocab_size"], h)
    for i, (kv, width) in enumerate(deci_layers(c)):
        at = f"model.layers.{i}"
        if kv is not None:
            found[f"{at}.input_layernorm.weight"] = (h,)
        if kv == "linear":
            found[f"{at}.self_attn.linear_attn.weight"] = (h, h)
        elif isinstance(kv, int):
            for name, rows in (("q", h), ("k", kv * d), ("v", kv * d), ("o", h)):
                found[f"{at}.self_attn.{name}_proj.weight"] = (rows, h)
        if width is not None:
            found[f"{at}.post_attention_layernorm.weight"] = (h,)
        if width == "linear":
            found[f"{at}.mlp.linear_mlp.weight"] = (h, h)
        elif isinstance(width, int):
            found |= {f"{at}.mlp.{name}_proj.weight": (width, h) for name in ("gate", "up")}
            found[f"{at}.mlp.down_proj.weight"] = (h, width)
    return found


def deci(c: Config, w: Weights, ids: Tensor) -> Tensor:
    heads, eps = c["num_attention_heads"], c["rms_norm_eps"]
    d = c["hidden_size"] // heads
    x = w["model.embed_tokens.weight"][ids]
    for i, (kv, width) in enumerate(deci_layers(c)):
        at = f"model.layers.{i}"
        if kv is not None:
            y = rms(x, w[f"{at}.input_layernorm.weight"], eps)
            if isinstance(kv, int):
                q, k, v = (linear(w, f"{at}.self_attn.{p}_proj", y).view(len(ids), -1, d) for p in "qkv")
                q, k = turn(q, c["rope_theta"], d, "half", c), turn(k, c["rope_theta"], d, "half", c)
                x = x + linear(w, f"{at}.self_attn.o_proj", attention(q, k, v, d**-0.5))
            else:
                x = x + linear(w, f"{at}.self_attn.linear_attn", y)
        if width is not None:
            y = rms(x, w[f"{at}.post_attention_layernorm.weight"], eps)
            x = x + (linear(w, f"{at}.mlp.linear_mlp", y) if width == "linear" else swiglu(w, f"{at}.mlp", y))
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


# ---- Phi-3-small -----------------------------------------------------------------------------------------------------


def phi3_small_shapes(c: Config) -> Shapes:
    h, inner = c["hidden_size"], c["ff_intermediate_size"]
    rows = h + 2 * c["num_key_value_heads"] * (h // c["num_attention_heads"])
    found: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], h)}
    layers = {
        "self_attn.query_key_value": (rows, h), "self_attn.dense": (h, h), "mlp.up_proj": (2 * inner, h),
        "mlp.down_proj": (h, inner), "input_layernorm": (h,), "post_attention_layernorm": (h,),
    }  # fmt: skip
    for i in range(c["num_hidden_layers"]):
        for name, shape in layers.items():
            found[f"model.layers.{i}.{name}.weight"] = shape
            found[f"model.layers.{i}.{name}.bias"] = shape[:1]
    return found | {"model.final_layernorm.weight": (h,), "model.final_layernorm.bias": (h,)}


def phi3_small(c: Config, w: Weights, ids: Tensor) -> Tensor:
    heads, kv, h, n = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"], len(ids)
    d, eps, block = h // heads, c["layer_norm_epsilon"], c["blocksparse_block_size"]
    scale = c["mup_attn_multiplier"] / d if c["mup_use_scaling"] else d**-0.5
    x = w["model.embed_tokens.weight"][ids] * c["mup_embedding_multiplier"]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        packed = linear(w, f"{at}.self_attn.query_key_value", ln(w, f"{at}.input_layernorm", x, eps))
        packed = packed.view(n, kv, heads // kv + 2, d)
        q, k, v = packed[:, :, :-2].reshape(n, heads, d), packed[:, :, -2], packed[:, :, -1]
        q, k = (turn(t, c["rope_embedding_base"], d, "half", c) for t in (q, k))
        out = []
        for head in range(heads):
            scores = q[:, head] @ k[:, head * kv // heads].T * scale
            number = 0 if c["blocksparse_homo_head_pattern"] else head
            for a in range(n):
                for b in range(n):
                    far = a // block - b // block >= c["blocksparse_num_local_blocks"]
                    skipped = far and (b // block + number + 1) % c["blocksparse_vert_stride"] != 0
                    sparse = (i + 1) % c["dense_attention_every_n_layers"] != 0
                    if b > a or (sparse and skipped):
                        scores[a, b] = float("-inf")
            out.append(scores.softmax(-1) @ v[:, head * kv // heads])
        x = x + linear(w, f"{at}.self_attn.dense", torch.cat(out, -1))
        y = linear(w, f"{at}.mlp.up_proj", ln(w, f"{at}.post_attention_layernorm", x, eps))
        limit = c["gegelu_limit"]
        a, b = y[:, ::2].clamp(max=limit), y[:, 1::2].clamp(-limit, limit)
        x = x + linear(w, f"{at}.mlp.down_proj", a * (1.702 * a).sigmoid() * (b + 1))
    logits = ln(w, "model.final_layernorm", x, eps) @ w["model.embed_tokens.weight"].T / c["mup_width_multiplier"]
    logits[:, c.get("dummy_token_indices", [])] = -1e30
    return logits


DECI = Reference(deci_shapes, deci)
PHI_3_SMALL = Reference(phi3_small_shapes, phi3_small)


# ---- NomicBERT with experts: states of all tokens, no logits ---------------------------------------------------------


def nomic_shapes(c: Config) -> Shapes:
    h, inner, number = c["n_embd"], c["n_inner"], c["num_experts"]
    found: Shapes = {
        "embeddings.word_embeddings.weight": (c["vocab_size"], h),
        "embeddings.token_type_embeddings.weight": (c["type_vocab_size"], h),
        "emb_ln.weight": (h,), "emb_ln.bias": (h,),
    }  # fmt: skip
    for i in range(c["n_layer"]):
        at = f"encoder.layers.{i}"
        rows = {"attn.Wqkv": (3 * h, h), "attn.out_proj": (h, h)}
        if i % c["moe_every_n_layers"] == 1:
            found[f"{at}.mlp.router.layer.weight"] = (number, h)
            found |= {f"{at}.mlp.experts.mlp.{name}": (number * inner, h) for name in ("w1", "w2")}
            found[f"{at}.mlp.experts.bias"] = (h,)
        else:
            rows |= {"mlp.fc1": (inner, h), "mlp.fc2": (h, inner)}
        for name, shape in rows.items():
            found |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[:1]}
        for name in ("norm1", "norm2"):
            found |= {f"{at}.{name}.weight": (h,), f"{at}.{name}.bias": (h,)}
    return found


def nomic(c: Config, w: Weights, ids: Tensor) -> Tensor:
    """The softmax of the router is over all experts, and what the chosen ones have of it stays as it is."""
    h, heads, eps, inner = c["n_embd"], c["n_head"], c["layer_norm_epsilon"], c["n_inner"]
    d = h // heads
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0]
    x = ln(w, "emb_ln", x, eps)
    for i in range(c["n_layer"]):
        at = f"encoder.layers.{i}"
        q, k, v = linear(w, f"{at}.attn.Wqkv", x).view(len(ids), 3, heads, d).unbind(1)
        q, k = (turn(t, c["rotary_emb_base"], d, "half", c) for t in (q, k))
        a = [((q[:, n] @ k[:, n].T) * d**-0.5).softmax(-1) @ v[:, n] for n in range(heads)]
        x = ln(w, f"{at}.norm1", x + linear(w, f"{at}.attn.out_proj", torch.cat(a, -1)), eps)
        router = w.get(f"{at}.mlp.router.layer.weight")
        if router is None:
            y = linear(w, f"{at}.mlp.fc2", F.gelu(linear(w, f"{at}.mlp.fc1", x)))
        else:
            up, down = (w[f"{at}.mlp.experts.mlp.{name}"].view(-1, inner, h) for name in ("w1", "w2"))

            def expert(e: int, t: Tensor, up: Tensor = up, down: Tensor = down) -> Tensor:
                return F.gelu(t @ up[e].T) @ down[e]

            y = experts(x, router, expert, c["moe_top_k"], divide=False) + w[f"{at}.mlp.experts.bias"]
        x = ln(w, f"{at}.norm2", x + y, eps)
    return x


NOMIC_EXPERTS = Reference(nomic_shapes, nomic)

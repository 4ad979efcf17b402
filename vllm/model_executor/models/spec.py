"""What a model is, as data: nested frozen specs that a family fills in and `decoder.py` builds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from vllm.model_executor.layers.rope import PromptScaling, Rope
from vllm.step.kv_need import KVNeed, attention_need

__all__ = [
    "Alibi",
    "Attn",
    "Block",
    "BlockSparse",
    "BlockSpec",
    "Decoder",
    "Dense",
    "HeadNorm",
    "Layout",
    "LearnedPositions",
    "LogTemperature",
    "Mlp",
    "Moe",
    "Norm",
    "PoolHead",
    "RelativeBias",
    "Rope",
    "Temperature",
]


@dataclass(frozen=True, slots=True)
class Norm:
    """kind: "rms" or "layer".   offset: 1 where the stored weight is the factor minus 1."""

    kind: str = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    weight: bool = True
    bias: bool = False


def layer_norm(eps: float, *, affine: bool = True) -> Norm:
    """LayerNorm with weight and bias, or with neither."""
    return Norm("layer", eps, weight=affine, bias=affine)


class HeadNorm(Enum):
    """What a norm of queries and keys is taken over.

    HEAD: each head by itself, all with the same weights.   EACH: each head by itself, with weights of its own.
    ALL: all heads of a token together.
    """

    HEAD = "head"
    EACH = "each"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Alibi:
    """Slopes of ALiBi (`layers/alibi.py`), times `factor`, in place of or beside a rotation.

    known: of a query at position p >= known they are divided by (p + 1) / known.
    """

    largest_exponent: float = 8.0
    factor: float = 1.0
    known: int | None = None


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """Each head has a learned score for the distance of two tokens, by its bucket (T5): half of them for keys that come
    later; a quarter are one distance each, the others grow up to `distance`, and farther keys share the last.
    """

    buckets: int
    distance: int


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale * ln(1 + floor((p + 1) / floor))."""

    floor: int
    scale: float


@dataclass(frozen=True, slots=True)
class LogTemperature:
    """Queries at position p >= known are multiplied by ln(p + 1) / ln(known)."""

    known: int


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """Queries see the last `local` blocks of `block` tokens, their own included, and of the earlier ones those kb of
    which (kb + head + 1) % stride is 0.   alike: all heads as head 0.
    """

    block: int
    local: int
    stride: int
    alike: bool = False


@dataclass(frozen=True, slots=True)
class Attn:
    """scale: of q k; head_dim ** -0.5 by default.   window: tokens that each query sees, itself included; None: all.

    softcap: scores become softcap * tanh(scores / softcap).   qk_norm: norm of queries and keys before rotation.
    clip_qkv: queries, keys and values are cut to [-clip_qkv, clip_qkv], behind their norm.
    causal: no token sees later ones. If not, every token sees the whole prompt, which is computed in one step and
        leaves no cache; a window is then on either side.
    sinks: each head has a learned score of its own in the softmax, of a key whose value is zero.
    chunk: queries see the keys of their own `chunk` tokens only, which begin at multiples of it.
    sparse: some blocks of keys are seen only.
    relative: a bias of scores by distance, of which all layers share one table.
    norm_after_rope: `qk_norm` comes behind the rotation.   temperature: queries grow with their position.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    qk_norm: Norm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    alibi: Alibi | None = None
    qk_norm_over: HeadNorm = HeadNorm.HEAD
    clip_qkv: float | None = None
    causal: bool = True
    sinks: bool = False
    chunk: int | None = None
    norm_after_rope: bool = False
    temperature: Temperature | LogTemperature | None = None
    sparse: BlockSparse | None = None
    relative: RelativeBias | None = None

    def __post_init__(self) -> None:
        # an odd number turns one more, as in Hugging Face: they come in pairs
        if self.rope is not None and not 1 <= self.rope.dim <= self.head_dim - self.rope.dim % 2:
            raise ValueError(
                f"The rotary embedding turns {self.rope.dim} dimensions of each head, in pairs, expected 1 to the "
                f"{self.head_dim} that a head has."
            )


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) if not gated.   hidden: the width between.

    bias: of all products.   down_bias: of the last one alone.
    limit: down(act(min(gate(x), limit)) * (1 + up(x))), up(x) cut to [-limit, limit].
    """

    act: str
    hidden: int
    gated: bool = True
    bias: bool = False
    down_bias: bool = False
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Moe:
    """`top_k` of `experts` MLPs, weighted by the router's softmax.   renormalize: the chosen weights sum to 1.

    score: "softmax", or "sigmoid" of each logit.   scale: of the weights, behind that.
    choice_bias: the experts with the best score plus a learned bias of their own are chosen; weights are without it.
    groups: experts stand in so many equal groups, of which only the `top_groups` best are chosen from; a group is as
    good as the sum of its `group_best` best experts.
    bias: of the router and of every product of the experts.   limit: as of `Mlp`.
    weigh_inputs: weights multiply what experts read, not what they return.
    gated: experts are gated MLPs; if not, down(act(up(x))).   sum_bias: a bias is added to what the experts' sum is.

    jitter: experts are chosen one after the other, each weighted by a softmax over those whose logit is within 2 *
    jitter of the best one's, relative to its own size (SparseMixer, arXiv 2409.12136).
    shared: an MLP for every token beside the chosen ones.   shared_gate: whether a sigmoid of the token weights it.
    """

    act: str
    hidden: int
    experts: int
    top_k: int
    renormalize: bool = True
    jitter: float | None = None
    shared: Mlp | None = None
    shared_gate: bool = False
    score: str = "softmax"
    scale: float = 1.0
    choice_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    bias: bool = False
    limit: float | None = None
    weigh_inputs: bool = False
    gated: bool = True
    sum_bias: bool = False

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(
                f"config.json has {self.experts} experts in a layer, and {self.top_k} of them for each token, expected "
                f"at most {self.experts}."
            )


class Layout(Enum):
    """Where a block's norms stand. A: attention, F: feed-forward, N1..N4: its norms.

    PRE:             x + A(N1 x), then x + F(N2 x)
    PARALLEL:        x + A(N1 x) + F(N2 x)
    PARALLEL_SHARED: x + A(N1 x) + F(N1 x)
    SANDWICH:        x + N2 A(N1 x), then x + N4 F(N3 x)
    POST:            N1(x + A x), then N2(x + F x)
    BRANCH:          x + N1 A(x), then x + N2 F(x)
    """

    PRE = "pre"
    PARALLEL = "parallel"
    PARALLEL_SHARED = "parallel_shared"
    SANDWICH = "sandwich"
    POST = "post"
    BRANCH = "branch"

    @property
    def num_norms(self) -> int:
        """How many norms a block of this layout has."""
        return {Layout.PARALLEL_SHARED: 1, Layout.SANDWICH: 4}.get(self, 2)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One layer of any kind. A kind of its own derives from this; `Family.modules` says which module it becomes."""

    def within(self, max_positions: int) -> BlockSpec:
        """The same layer for sequences of at most `max_positions` tokens: without a window that none outgrows, and
        without what only longer ones have.
        """
        return self

    def need(self, world: int) -> KVNeed | None:
        """What the layer keeps for a request on one of `world` tensor-parallel ranks."""
        return None

    def needs_whole_prompt(self) -> bool:
        """Whether a prompt must be computed in one step, because its tokens see later ones."""
        return False

    def known_prompt(self) -> int | None:
        """The longest prompt that is rotated like all shorter ones, where longer ones are not."""
        return None

    def heads(self) -> tuple[int, int]:
        """Query heads and key/value heads of the whole layer, which some checkpoints' fused weights are laid out by."""
        return 0, 0


@dataclass(frozen=True, slots=True)
class Block(BlockSpec):
    """One layer of attention and feed-forward.   residual_scale: of what each branch adds to the stream.

    attn_norm: whether the attention has a norm before it, where the layout says so.
    """

    attn: Attn
    ffn: Mlp | Moe
    norm: Norm
    layout: Layout = Layout.PRE
    residual_scale: float = 1.0
    attn_norm: bool = True

    def within(self, max_positions: int) -> Block:
        attn = self.attn
        window = attn.window if attn.window is not None and attn.window < max_positions else None
        chunk = attn.chunk if attn.chunk is not None and attn.chunk < max_positions else None
        sparse = attn.sparse
        if sparse is not None and sparse.block * sparse.local >= max_positions:
            sparse = None
        alibi, temperature, rope = attn.alibi, attn.temperature, attn.rope
        if alibi is not None and alibi.known is not None and alibi.known >= max_positions:
            alibi = replace(alibi, known=None)
        if isinstance(temperature, LogTemperature) and temperature.known >= max_positions:
            temperature = None
        if rope is not None and isinstance(rope.scaling, PromptScaling):
            rope = rope if rope.scaling.original_positions < max_positions else replace(rope, scaling=None)
        same = replace(attn, window=window, chunk=chunk, sparse=sparse, alibi=alibi, temperature=temperature, rope=rope)
        return self if same == attn else replace(self, attn=same)

    def need(self, world: int) -> KVNeed | None:
        attn = self.attn
        if not attn.causal:
            return None
        return attention_need(
            max(1, attn.kv_heads // world), attn.head_dim, attn.chunk if attn.window is None else attn.window
        )

    def needs_whole_prompt(self) -> bool:
        return not self.attn.causal

    def known_prompt(self) -> int | None:
        rope = self.attn.rope
        return rope.scaling.original_positions if rope is not None and isinstance(rope.scaling, PromptScaling) else None

    def heads(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.kv_heads


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A table of `rows` position embeddings; position p reads row p + offset."""

    rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model of one stack of layers: a decoder, or an encoder, whose attention is not causal.

    norm: after the last block.   tied: the head's weight is the embedding's.
    embed_dim: width of embedding and head where it differs from `hidden_size` (projected in and out).
    embed_norm: of what enters the first block.
    unit_head_rows: the head's rows count divided by their length.
    scale_positions: `embed_scale` is of embeddings and positions together.
    silent: tokens that are never said.
    token_types: rows of the table that says which text of a pair a token belongs to; the first is added to all others.
    """

    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    norm: Norm | None
    tied: bool
    embed_dim: int | None = None
    embed_scale: float = 1.0
    positions: LearnedPositions | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    embed_norm: Norm | None = None
    unit_head_rows: bool = False
    scale_positions: bool = False
    silent: tuple[int, ...] = ()
    token_types: int = 0

    def __post_init__(self) -> None:
        wrong = next((i for i, block in enumerate(self.blocks) if not isinstance(block, BlockSpec)), None)
        if wrong is not None:
            raise ValueError(
                f"Block {wrong} of the Decoder is a {type(self.blocks[wrong]).__name__}, expected a spec: a `Block`, "
                "or one of a class that derives from `BlockSpec`."
            )


@dataclass(frozen=True, slots=True)
class Dense:
    """norm(act(W x + b)).   outputs: width of the result.   act: Hugging Face's name, or "tanh"; None: none."""

    outputs: int
    bias: bool = True
    act: str | None = None
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class PoolHead:
    """What is made of pooled states in place of logits: dense layers, one after the other, in fp32.

    token_rows: the first layer's weight is these tokens' rows of the language model's head.
    difference: of two such rows, the second minus the first, in place of both.
    """

    layers: tuple[Dense, ...] = ()
    token_rows: tuple[int, ...] = ()
    difference: bool = False

"""A checkpoint's tensor in the layout that the model has: its shape checked, then turned where files differ."""

from __future__ import annotations

from torch import Tensor

from vllm.model_executor.layers.weight_layout import WeightLayout, canonical, stored_shape
from vllm.model_executor.models.spec import Decoder


def fitted(tensor: Tensor, layout: WeightLayout, shape: tuple[int, ...], target: str, spec: Decoder) -> Tensor:
    """`tensor`, which lies as `layout` says, as the weight `target` of the full shape `shape`.

    Raises ValueError if it has another shape than that weight has in a file.
    """
    if target == "head.weight" and spec.unit_head_rows:
        layout = WeightLayout.UNIT_ROWS
    expected = stored_shape(shape, layout)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"has the shape {list(tensor.shape)}, but the model's config.json needs {list(expected)}")
    if layout is WeightLayout.PLAIN:
        return tensor
    block = target.split(".")[1]
    heads = spec.blocks[int(block)].heads() if block.isdigit() else (0, 0)
    return canonical(tensor, layout, *heads, shape)

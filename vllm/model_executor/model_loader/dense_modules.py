"""Dense layers that sentence-transformers keeps in folders of their own: what they are, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vllm.config.hf import HFConfig, read_json_object
from vllm.model_executor.model_loader.checkpoint import find_checkpoint
from vllm.model_executor.models.family import renames
from vllm.model_executor.models.spec import Dense

NAMES = renames({"dense_module.{i}.linear.{p}": "pool.{i}.{p}"})
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": None,
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
}


@dataclass(frozen=True)
class DenseModule:
    """One layer, and the folder that holds its weights."""

    folder: Path
    layer: Dense

    @classmethod
    def read(cls, folder: Path) -> DenseModule:
        """The layer that `folder`/config.json describes. Raises ValueError for what is not supported."""
        config = HFConfig(read_json_object(folder / "config.json"), folder)
        if config.get_bool("use_residual", default=False):
            raise ValueError(f"{config.file}: a dense layer beside a residual (use_residual=true) is not supported.")
        name = config.get_str("activation_function", default="torch.nn.modules.activation.Tanh")
        if name not in _ACTIVATIONS:
            raise ValueError(
                f"{config.file}: the activation {name!r} is not supported, expected one of {', '.join(_ACTIVATIONS)}."
            )
        bias = config.get_bool("bias", default=True)
        return cls(folder, Dense(config.get_int("out_features"), bias, _ACTIVATIONS[name]))

    def tensors(self, index: int) -> Iterator[tuple[str, Tensor, Path]]:
        """(name, tensor, file), under the names that `NAMES` knows; the head's layer `index`."""
        for name, tensor, file in find_checkpoint(self.folder, "auto").tensors():
            yield f"dense_module.{index}.{name}", tensor, file

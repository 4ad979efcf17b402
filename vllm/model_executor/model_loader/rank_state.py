"""One rank's weights as this engine keeps them, as named tensors: what files of `sharded_state` and tensorizer hold.

Loading them takes no renaming, joining or cutting, and each rank reads its own share only. So they fit one model in one
dtype and quantization on one number of ranks; a description among the tensors says which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel
from vllm.model_executor.layers.quantization.method import QuantizedExpertMethod, QuantizedLinearMethod
from vllm.model_executor.model_loader.filler import WeightFiller
from vllm.model_executor.model_loader.quantized_weights import quantized_experts, quantized_layers
from vllm.model_executor.model_loader.safetensors_file import iterate_tensors, write_tensors
from vllm.ops.quantized_weights import GroupedWeight, InputQuant

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DESCRIPTION = "vllm_rank_state"  # the name of the tensor that holds the description, JSON as bytes
PATTERN = "model-rank-{rank}-part-{part}.safetensors"
MAX_SIZE = 5 * 2**30
_VERSION = 1
_TENSORS = ("codes", "scales", "offsets", "table", "order")
_FIELD = re.compile(r"\{[^{}]*\}")

Stored = GroupedWeight | Tensor


@dataclass(frozen=True)
class RankState:
    """Tensors of one rank, read when they are asked for.

    description: as `describe` made it, with the quantized layers.   where: for errors.
    """

    description: Mapping[str, Any]
    names: tuple[str, ...]
    read: Callable[[str], Tensor]
    where: str


def number(tp: TensorParallel, stage: int) -> int:
    """Of a rank's files: those of the first pipeline stage come first."""
    return stage * tp.world + tp.rank


def describe(config: VllmConfig, tp: TensorParallel, stage: int) -> dict[str, Any]:
    """What weights fit to."""
    model = config.model_config
    return {
        "version": _VERSION,
        "architectures": list(model.architectures),
        "model_impl": model.model_impl,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "rank": tp.rank,
        "world": tp.world,
        "stage": stage,
        "stages": config.parallel_config.pipeline_parallel_size,
    }


def check(state: RankState, config: VllmConfig, tp: TensorParallel, stage: int) -> None:
    """Raise ValueError if the tensors were saved for something else."""
    words = {"world": "tensor_parallel_size", "stages": "pipeline_parallel_size"}
    described = describe(config, tp, stage)
    for name, wanted in sorted(described.items(), key=lambda item: item[0] in ("rank", "stage")):
        found = state.description.get(name)
        if found != wanted:
            raise ValueError(
                f"{state.where} was saved with {words.get(name, name)}={found!r}, but is loaded with {wanted!r}. Such "
                "files fit one setting only: load them with the same, or save them anew."
            )


# -- saving ------------------------------------------------------------------------------------------------------------


def tensors_of(
    model: nn.Module,
    config: VllmConfig,
    tp: TensorParallel,
    stage: int,
    read_quantized: Callable[[Callable[..., None]], None],
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that `fill` needs, the description last.

    model: with its weights as they came from the checkpoint (`Worker.apply_model`).
    read_quantized: reads the model's checkpoint again and hands over what each quantized layer is made of, as
        `QuantizedLinearMethod.sink` gets it with the layer's name in front.
    """
    quantized: dict[str, list[list[Any]]] = {}
    yield from model.named_parameters()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from ((name, tensor) for name, tensor in model.state_dict().items() if name not in parameters)
    pending: list[tuple[str, Tensor]] = []

    def take(path: str, turn: int, weights: list[Stored]) -> None:
        found = quantized.setdefault(path, [])
        assert turn == len(found)
        found.append([_numbers(weight) for weight in weights])
        for index, weight in enumerate(weights):
            pending.extend(_named(f"{path}#{turn}.{index}", weight))

    read_quantized(take)
    yield from pending
    document = json.dumps({**describe(config, tp, stage), "quantized": quantized}).encode()
    yield DESCRIPTION, torch.frombuffer(bytearray(document), dtype=torch.uint8)


def _numbers(weight: Stored) -> dict[str, Any] | None:
    if isinstance(weight, Tensor):
        return None
    inputs = None if weight.inputs is None else asdict(weight.inputs)
    held = [name for name in _TENSORS if getattr(weight, name) is not None]
    numbers = {"group": weight.group, "bits": weight.bits, "zero": weight.zero, "inputs": inputs}
    return {**numbers, "tensors": held, "halved": _halved(weight)}


def _named(name: str, weight: Stored) -> Iterator[tuple[str, Tensor]]:
    if isinstance(weight, Tensor):
        yield name, weight.contiguous()
        return
    for part in _TENSORS:
        tensor = getattr(weight, part)
        if tensor is not None:
            if part == "codes" and _halved(weight):
                tensor = tensor[:, ::2] | tensor[:, 1::2] << 4
            yield f"{name}.{part}", tensor.contiguous()


def _halved(weight: GroupedWeight) -> bool:
    """Whether two codes of a row stand in one byte of the file."""
    return weight.bits == 4 and weight.shape[1] % 2 == 0


def write_files(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, rank: int, pattern: str | None, max_size: int | None
) -> list[Path]:
    """Write tensors to safetensors files of about `max_size` bytes each, named by `pattern`, in place of such files of
    this rank.
    """
    limit, files = MAX_SIZE if max_size is None else int(max_size), list[Path]()
    if limit < 1:
        raise ValueError(f"max_size must be at least 1 byte, got {max_size}.")
    folder.mkdir(parents=True, exist_ok=True)
    for file in reversed(_files(folder, rank, pattern)):  # else the last of more would be read behind those written
        file.unlink()
    part: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal size
        files.append(folder / file_name(pattern, rank, len(files)))
        write_tensors(part, files[-1])
        part.clear()
        size = 0

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if part and size + num_bytes > limit:
            flush()
        tensor = tensor.detach().cpu().contiguous()
        part[name] = tensor if tensor.untyped_storage().nbytes() == num_bytes else tensor.clone()  # files know no views
        size += num_bytes
    flush()
    return files


def _files(folder: Path, rank: int, pattern: str | None) -> list[Path]:
    """What there is of a rank's files, in order."""
    files = (folder / file_name(pattern, rank, part) for part in count())
    return list(takewhile(Path.exists, files))


def file_name(pattern: str | None, rank: int, part: int | str) -> str:
    """The name of a file. Raises ValueError for a pattern that does not tell files apart, or leaves the folder."""
    pattern = PATTERN if pattern is None else pattern
    fields = sorted(_FIELD.findall(pattern)) if isinstance(pattern, str) else []
    if fields != ["{part}", "{rank}"] or "/" in pattern or "\\" in pattern or "\0" in pattern:
        raise ValueError(f"The pattern must be a file's name with {{rank}} and {{part}} in it, got {pattern!r}.")
    return pattern.format(rank=rank, part=part)


# -- loading -----------------------------------------------------------------------------------------------------------


def open_files(folder: Path, rank: int, pattern: str | None) -> RankState:
    """The state of `rank` in `folder`, as `write_files` left it."""
    name = file_name(pattern, rank, "*")
    places: dict[str, Tensor] = {}
    for file in _files(folder, rank, pattern):
        places.update(iterate_tensors(file))
    if not places:
        raise ValueError(
            f"{folder} has no files {name!r}, which load_format='sharded_state' reads on rank {rank}. Save them with "
            "LLM.save_sharded_state under the same tensor_parallel_size, or use another load_format."
        )
    if DESCRIPTION not in places:
        raise ValueError(f"The files {name!r} in {folder} are not complete, or no sharded_state of this engine.")
    description = read_description(places.pop(DESCRIPTION))
    return RankState(description, tuple(places), places.pop, str(folder / name))


def read_description(tensor: Tensor) -> dict[str, Any]:
    """The description that a tensor holds."""
    try:
        document = json.loads(bytes(tensor.cpu().numpy()))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ValueError("The description of saved weights is damaged.")
    return document


def fill(module: nn.Module, state: RankState, device: torch.device, prefix: str = "") -> int:
    """Fill a model built on "meta" with its rank's tensors; the bytes that they take.

    prefix: of the module's names in the state.   Raises ValueError if they do not fit.
    """
    filler = WeightFiller(module, device)
    buffers = dict(module.named_buffers())
    parts: dict[str, Tensor] = {}
    for name in state.names:
        target = name.removeprefix(prefix)
        if "#" in name:
            parts[name] = torch.empty(0)  # read when its layer's turn comes
        elif filler.expected_shape(target) is not None:
            try:
                filler.fill_share(target, state.read(name))
            except ValueError as error:
                raise ValueError(f"{state.where}: {name!r}: {error}.") from None
        elif target in buffers:
            buffers[target].copy_(state.read(name))
        else:
            raise ValueError(f"{state.where}: the model has no weight {name!r}.")
    missing = [*filler.missing()]
    size = filler.filled_bytes
    described = state.description.get("quantized", {})
    if not isinstance(described, dict):
        raise ValueError(f"{state.where}: the description of saved weights is damaged.")
    order = {path: place for place, path in enumerate(described)}  # as they were written: streams are read once
    layers = sorted(quantized_layers(module), key=lambda found: order.get(prefix + found[0], len(order)))
    for path, layer, method in layers:
        stored = described.get(prefix + path)
        if stored is None:
            missing.append(path)
            continue
        with _damage(state, prefix + path):
            size += method.pack(layer, _weights(state, prefix + path, 0, stored[0]), device)
    for path, experts in quantized_experts(module):
        stored = described.get(prefix + path)
        if stored is None:
            missing.append(path)
            continue
        with _damage(state, prefix + path):
            if len(stored) != len(experts.mine):
                raise ValueError(f"{len(stored)} experts are described, expected {len(experts.mine)}")
            size += sum(experts.keep(_weights(state, prefix + path, n, s), device) for n, s in enumerate(stored))
    if missing:
        raise ValueError(f"{state.where}: missing {', '.join(missing[:8])}.")
    return size


def fill_plain(module: nn.Module, state: RankState) -> None:
    """Fill a user's own model, whose parameters have memory already."""
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    shared -= {name for name, _ in module.named_parameters()}
    own = {name: tensor for name, tensor in module.state_dict().items() if name not in shared}
    unlike = sorted(set(own) ^ set(state.names))
    if unlike:
        raise ValueError(f"{state.where} and the model have not the same weights: {', '.join(unlike[:8])}.")
    with torch.no_grad():
        for name in state.names:
            own[name].copy_(state.read(name))


@contextmanager
def _damage(state: RankState, path: str) -> Iterator[None]:
    """Whatever is wrong with a layer's description, or what it describes, as a ValueError that names the file."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"{state.where}: the saved weights of {path} are damaged: {error}.") from error


def _weights(state: RankState, path: str, turn: int, stored: list[Any]) -> list[Stored]:
    found: list[Stored] = []
    for index, numbers in enumerate(stored):
        name = f"{path}#{turn}.{index}"
        if numbers is None:
            found.append(state.read(name))
            continue
        tensors = {part: state.read(f"{name}.{part}") for part in numbers["tensors"]}
        if numbers["halved"]:
            codes = tensors["codes"]
            tensors["codes"] = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        inputs = None if numbers["inputs"] is None else InputQuant(**numbers["inputs"])
        weight = GroupedWeight(
            group=numbers["group"], bits=numbers["bits"], zero=numbers["zero"], inputs=inputs, **cast(Any, tensors)
        )
        _check_weight(weight)
        found.append(weight)
    return found


def _check_weight(weight: GroupedWeight) -> None:
    """Raise ValueError unless the weight is what `GroupedWeight` says. Its shape is for the layer to check."""
    codes, table, order, inputs = weight.codes, weight.table, weight.order, weight.inputs
    counts = (weight.group, weight.bits, weight.zero)
    good = all(type(count) is int for count in counts) and weight.bits in (4, 8) and weight.group > 0
    good = good and (codes.dtype == torch.uint8 or (codes.dtype == torch.float8_e4m3fn and weight.bits == 8))
    good = good and (weight.bits == 8 or bool((codes < 16).all()))
    good = good and all(t is None or t.is_floating_point() for t in (weight.scales, weight.offsets, table))
    if table is not None:
        good = good and weight.bits == 4 and tuple(table.shape) in ((16,), (codes.shape[0], 16))
    if order is not None:
        every = torch.arange(codes.shape[1], device=order.device)
        good = good and order.dtype == torch.int64 and torch.equal(order.sort()[0], every)
    if inputs is not None:
        good = good and inputs.kind in ("int8", "fp8") and inputs.per in ("token", "tensor", "group")
        good = good and type(inputs.zero) is int
        good = good and all(x is None or isinstance(x, float | int) for x in (inputs.scale, inputs.limit))
    if not good:
        raise ValueError("their codes, scales, tables and orders do not go together")


def record_quantized(model: nn.Module, take: Callable[..., None]) -> None:
    """Let the quantized layers of a model hand over what they are to be made of, instead of packing it."""
    methods: list[tuple[str, QuantizedLinearMethod | QuantizedExpertMethod]] = [
        *((path, method) for path, _, method in quantized_layers(model)),
        *quantized_experts(model),
    ]
    for path, method in methods:
        method.sink = lambda turn, weights, path=path: take(path, turn, weights)

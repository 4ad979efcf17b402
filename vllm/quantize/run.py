"""From a model folder to a quantized one: reads, calibrates, rounds, writes shard by shard, and says what it cost."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from vllm.config.model_source import copy_small_files
from vllm.config.quantization import stored_settings
from vllm.entrypoints.llm import LLM
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.method import containers_of
from vllm.model_executor.model_loader.checkpoint import find_checkpoint
from vllm.model_executor.model_loader.safetensors_file import read_entries, write_tensors
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.spec import Layout, Mlp
from vllm.quantize.calibrate import Outcome, recording, run_over, texts_of, with_model
from vllm.quantize.formats import TARGETS, Target, fitted
from vllm.quantize.gguf import FORMATS as GGUF_FORMATS
from vllm.quantize.gguf import GgufJob
from vllm.quantize.rounding import Inputs, awq_scales, output_error

logger = init_logger(__name__)

_STATE = ".quantize.json"
_GRAM_BYTES = 2 << 30  # sums of inputs that are kept at once


@dataclass(frozen=True)
class Job:
    """What is asked for; see `vllm quantize --help`."""

    model: str
    format: str
    out: Path
    data: Path | None = None
    group: int | None = None
    act_order: bool = False
    nearest: bool = False
    tokens: int = 16384
    bits: int | None = None


@dataclass
class Report:
    """What came of it. errors: of each layer's outputs, relative to their size.   On text held out: perplexity; change
    of the logarithm of a token's probability, root mean square; share of places with the same most likely token.
    """

    bytes_before: int = 0
    bytes_after: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    perplexity_before: float = 0.0
    perplexity_after: float = 0.0
    change: float = 0.0
    agreement: float = 1.0
    warning: str | None = None

    def compare(self, before: Outcome, after: Outcome) -> None:
        """Note what both models said."""
        self.perplexity_before, self.perplexity_after = before.perplexity, after.perplexity
        self.change, self.agreement = before.change(after), before.agreement(after)


@dataclass(frozen=True)
class _Projection:
    """A weight that is to be quantized: the layer it belongs to, and where it lies."""

    layer: str
    name: str
    tensor: Tensor


def quantize(job: Job) -> Report:
    """Do the job. A job that was interrupted goes on where it stopped. Raises ValueError if it cannot be done."""
    if job.out.exists() and any(job.out.iterdir()) and not (job.out / _STATE).exists():
        raise ValueError(f"--out {job.out} is not empty. Name a folder that does not exist yet.")
    llm = LLM(job.model, enable_prefix_caching=False)
    config = llm.llm_engine.vllm_config.model_config
    family = ModelRegistry.resolve(config.hf.architectures)
    if not isinstance(family, Family):
        raise ValueError("Only models of built-in families can be quantized.")
    if config.runner_type == "pooling":
        raise ValueError(f"{job.model} is a model that pools. Only models that generate text can be quantized here.")
    if stored_settings(config.hf, config.path)[0] is not None:
        raise ValueError(f"{job.model} is quantized already. Start from the original weights.")
    layers: dict[str, list[str]] = with_model(llm, _linear_layers)
    sizes: dict[str, int] = with_model(llm, lambda model: {p: model.get_submodule(p).input_size for p in layers})
    if job.format in GGUF_FORMATS:
        return _to_gguf(job, llm, layers, sizes)
    target = fitted(TARGETS[job.format], job.group, set(sizes.values()), job.act_order, job.nearest, job.bits)
    _begin(job, {"group": target.group, "act_order": target.act_order, "round": target.round, "bits": target.bits})
    calibration, held_out = texts_of(llm, job.data, job.tokens)
    before = run_over(llm, held_out)
    report = Report()
    writer = _Writer(job.out, config.path, family, layers)
    if writer.experts:
        logger.warning("Experts stay plain: %.1f of %.1f MiB.", writer.experts / 2**20, writer.sizes()[0] / 2**20)
    spec = family.decoder_of(config.hf)
    for paths in tqdm(list(_chunks(sizes)), desc="quantizing", unit="part"):
        if all(writer.is_done(block) for block in {_block_of(path) for path in paths}):
            continue
        with recording(llm, paths) as inputs:
            run_over(llm, calibration)
        for block in sorted({_block_of(path) for path in paths}, key=_number):
            report.errors.update(writer.write_block(block, target, inputs, spec))
    del llm
    plain = writer.finish(target)
    report.bytes_before, report.bytes_after = writer.sizes()
    report.errors = {**writer.errors(), **report.errors}
    _write_config(job, target, config.path, plain)
    report.compare(before, run_over(LLM(str(job.out.resolve())), held_out))  # "demo" would be the one of this package
    (job.out / _STATE).unlink(missing_ok=True)
    return report


def _to_gguf(job: Job, llm: LLM, layers: dict[str, list[str]], sizes: dict[str, int]) -> Report:
    """The same into one file, whose numbers are rounded to nearest."""
    if job.group is not None or job.act_order or job.bits is not None:
        raise ValueError("--group-size, --act-order and --bits do not go with GGUF files, whose types fix them.")
    config = llm.llm_engine.vllm_config.model_config
    family = ModelRegistry.resolve(config.hf.architectures)
    made = GgufJob(job.format, config.hf, config.path, config.path.name)
    _begin(job, {})
    calibration, held_out = texts_of(llm, job.data, job.tokens)
    before = run_over(llm, held_out)
    report = Report(bytes_before=made.size, warning=made.warning)
    owner = {container: path for path, parts in layers.items() for container in {path, *parts}}
    for paths in tqdm(list(_chunks(sizes)), desc="quantizing", unit="part"):
        with recording(llm, paths) as inputs:
            run_over(llm, calibration)
        for name in made.weights:
            found = family.resolve(name) if isinstance(family, Family) else None
            path = owner.get("" if found is None else found[0].removesuffix(".weight"))
            if path in inputs and name.endswith(".weight"):
                report.errors[name.removesuffix(".weight")] = made.error(name, inputs[path])
    del llm
    file = job.out / f"{config.path.name}-{job.format.removeprefix('gguf-').upper()}.gguf"
    fresh = file.with_suffix(".new")
    try:
        made.write(fresh)
        os.replace(fresh, file)
    except OSError as error:
        raise OSError(f"{fresh} cannot be written: {error.strerror}.") from None
    finally:
        fresh.unlink(missing_ok=True)
    report.bytes_after = file.stat().st_size
    report.compare(before, run_over(LLM(str(file)), held_out))
    (job.out / _STATE).unlink()
    return report


def _linear_layers(model: nn.Module) -> dict[str, list[str]]:
    """The linear layers of the decoder's blocks, and the projections fused in them."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, LinearBase) and path.startswith("blocks.") and not path.endswith(".router"):
            found[path] = containers_of(path, module.shape)
    return found


def _block_of(path: str) -> str:
    return ".".join(path.split(".")[:2])


def _number(block: str) -> int:
    return int(block.split(".")[1])


def _chunks(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Whole blocks whose sums of inputs fit into memory together."""
    chunk: list[str] = []
    used = 0
    blocks: dict[str, list[str]] = {}
    for path in sizes:
        blocks.setdefault(_block_of(path), []).append(path)
    for paths in blocks.values():
        need = sum(4 * sizes[path] ** 2 for path in paths)
        if chunk and used + need > _GRAM_BYTES:
            yield chunk
            chunk, used = [], 0
        chunk, used = chunk + paths, used + need
    if chunk:
        yield chunk


class _Writer:
    """Writes one file for each block, and one for everything else."""

    def __init__(self, out: Path, source: Path, family: Family, layers: dict[str, list[str]]) -> None:
        self.out, self._source = out, source
        self._blocks: dict[str, list[_Projection]] = {}
        self._rest: dict[str, Tensor] = {}
        self._by_canonical: dict[str, str] = {}
        owner = {container: path for path, parts in layers.items() for container in {path, *parts}}
        self._before = self.experts = 0  # bytes of all tensors, of those of experts
        for name, tensor, _ in find_checkpoint(source, "auto").tensors():
            self._before += tensor.numel() * tensor.element_size()
            found = family.resolve(name)
            container = "" if found is None else found[0].removesuffix(".weight")
            if found is not None and found[0].endswith(".weight") and container in owner:
                if found[1].value == "transposed":
                    raise ValueError(f"{name} is stored transposed; models of this family cannot be quantized here.")
                layer = owner[container]
                self._blocks.setdefault(_block_of(layer), []).append(_Projection(layer, name, tensor))
            else:
                self._rest[name] = tensor
                if found is not None:
                    self.experts += tensor.numel() * tensor.element_size() * (".experts." in found[0])
                    self._by_canonical[found[0]] = name
        out.mkdir(parents=True, exist_ok=True)

    def _file(self, block: str) -> Path:
        return self.out / f"model-{block.replace('.', '-')}.safetensors"

    def is_done(self, block: str) -> bool:
        return self._file(block).exists() and block in self._state()["errors"]

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.out / _STATE).read_text())
        return state

    def errors(self) -> dict[str, float]:
        return {name: error for errors in self._state()["errors"].values() for name, error in errors.items()}

    def write_block(self, block: str, target: Target, inputs: dict[str, Inputs], spec: Any) -> dict[str, float]:
        """Round and write the projections of a block: the error of each."""
        projections = self._blocks[block]
        values = {p.name: p.tensor.float() for p in projections}
        originals = dict(values)
        factors: dict[str, tuple[Any, Any]] = {}
        rest: dict[str, Tensor] = {}
        if target.round == "awq":
            factors, rest = self._smooth(block, projections, values, inputs, target, spec.blocks[_number(block)])
        stored, errors = dict(rest), {}
        for projection in projections:
            module, known = projection.name.removesuffix(".weight"), inputs[projection.layer]
            tensors, numbers = target.store(target, values[projection.name], known)
            stored.update({f"{module}.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()})
            columns, rows = factors.get(projection.name, (1.0, 1.0))
            numbers = numbers / columns * (rows if isinstance(rows, float) else rows[:, None])
            errors[module] = output_error(originals[projection.name], numbers, known)
        _save(stored, self._file(block))
        state = self._state()
        state["errors"][block] = errors
        _replace(self.out / _STATE, json.dumps(state))
        return errors

    def _smooth(
        self, block: str, projections: list[_Projection], values: dict[str, Tensor], inputs: dict[str, Inputs],
        target: Target, spec: Any,
    ) -> tuple[dict[str, tuple[Any, Any]], dict[str, Tensor]]:  # fmt: skip
        """Multiply `values` by AWQ's factors and divide what comes before: (factors of columns and rows by name, other
        tensors of the block that changed)."""
        ffn = getattr(spec, "ffn", None)
        if getattr(spec, "layout", None) is not Layout.PRE or not isinstance(ffn, Mlp) or not ffn.gated or ffn.bias:
            raise ValueError("--format awq needs blocks with norms before them and a gated MLP without biases.")
        names = {layer: [p.name for p in projections if p.layer == f"{block}.{layer}"]
                 for layer in ("attn.qkv", "ffn.gate_up", "ffn.down")}  # fmt: skip
        if len(names["ffn.gate_up"]) != 2:
            raise ValueError("--format awq needs gate and up in tensors of their own.")
        changed: dict[str, Tensor] = {}
        factors: dict[str, tuple[Any, Any]] = {}
        up, down = names["ffn.gate_up"][1], names["ffn.down"][0]
        if "up" not in up:
            up = names["ffn.gate_up"][0]
        scales = awq_scales([values[down]], inputs[f"{block}.ffn.down"], target.bits, target.group)
        values[down] = values[down] * scales
        values[up] = values[up] / scales[:, None]
        factors[down], factors[up] = (scales, 1.0), (1.0, scales)
        for norm, layer in (("norms.0", "attn.qkv"), ("norms.1", "ffn.gate_up")):
            weights = [values[name] for name in names[layer]]
            scales = awq_scales(weights, inputs[f"{block}.{layer}"], target.bits, target.group)
            for name in names[layer]:
                values[name] = values[name] * scales
                factors[name] = (scales, factors.get(name, (1.0, 1.0))[1])
            stored = self._by_canonical[f"{block}.{norm}.weight"]
            weight = self._rest[stored]
            changed[stored] = ((weight.float() + spec.norm.offset) / scales - spec.norm.offset).to(weight.dtype)
            bias = self._by_canonical.get(f"{block}.{norm}.bias")
            if bias is not None:
                changed[bias] = (self._rest[bias].float() / scales).to(weight.dtype)
        return factors, changed

    def finish(self, target: Target) -> list[str]:
        """Write everything else and the index. Returns the modules that were left plain."""
        in_blocks = {name for block in self._blocks for name in _names_in(self._file(block))}
        rest = {name: tensor.contiguous() for name, tensor in self._rest.items() if name not in in_blocks}
        _save(rest, self.out / "model-rest.safetensors")
        weight_map = dict.fromkeys(rest, "model-rest.safetensors")
        for block in self._blocks:
            weight_map.update(dict.fromkeys(_names_in(self._file(block)), self._file(block).name))
        total = sum(file.stat().st_size for file in self.out.glob("*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _replace(self.out / "model.safetensors.index.json", json.dumps(index, indent=1))
        plain = [n.removesuffix(".weight") for n, t in rest.items() if n.endswith(".weight") and t.dim() == 2]
        return sorted({"lm_head", *(name for name in plain if "embed" not in name)})

    def sizes(self) -> tuple[int, int]:
        return self._before, sum(file.stat().st_size for file in self.out.glob("*.safetensors"))


def _names_in(file: Path) -> list[str]:
    return [entry.name for entry in read_entries(file)]


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    fresh = file.with_suffix(".new")
    write_tensors({name: tensor.clone() for name, tensor in tensors.items()}, fresh)
    os.replace(fresh, file)


def _replace(file: Path, text: str) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, file)


def _begin(job: Job, settings: dict[str, Any]) -> None:
    """Begin a job's state, or see that what is there belongs to the same job, if that one has written anything."""
    job.out.mkdir(parents=True, exist_ok=True)
    asked = {"model": job.model, "format": job.format, **settings, "data": str(job.data), "tokens": job.tokens}
    file = job.out / _STATE
    state = json.loads(file.read_text()) if file.exists() else None
    if state is None or not state["errors"]:
        for unfinished in job.out.glob("*.new"):
            unfinished.unlink()
        _replace(file, json.dumps({"job": asked, "errors": {}}))
    elif state["job"] != asked:
        raise ValueError(f"{job.out} holds the beginning of another job. Name another folder, or delete it.")


def _write_config(job: Job, target: Target, source: Path, plain: list[str]) -> None:
    copy_small_files(source, job.out)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = target.settings(target, plain)
    _replace(job.out / "config.json", json.dumps(config, indent=2))


def describe(report: Report) -> str:
    """What the command prints."""
    worst = sorted(report.errors.items(), key=lambda item: -item[1])
    width = max((len(name) for name in report.errors), default=0)
    lines = [f"{name:<{width}}  {error:8.4f}" for name, error in report.errors.items()]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform != "darwin" else 2**30)
    return "\n".join(
        [
            "relative error of each layer's outputs:",
            *lines,
            f"worst: {worst[0][0]} ({worst[0][1]:.4f})" if worst else "nothing was quantized",
            f"size: {report.bytes_before / 2**20:.1f} MiB -> {report.bytes_after / 2**20:.1f} MiB",
            f"perplexity: {report.perplexity_before:.4f} -> {report.perplexity_after:.4f}",
            f"change of a token's log-probability (root mean square): {report.change:.4f}",
            f"the same most likely token: {report.agreement:.2%}",
            f"peak memory: {peak:.2f} GiB",
            *([] if report.warning is None else [report.warning]),
        ]
    )

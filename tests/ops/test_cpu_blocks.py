"""Whole models on the native CPU kernels: all layers in one call, and the same bits however a prompt is scheduled."""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch
import transformers

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.spec_flips import Flip, build, flips
from vllm.model_executor.layers.linear import LinearBase
from vllm.ops import activation, attention, embedding, greedy, linear, lora, norm, rotary
from vllm.ops.cpu import library
from vllm.ops.registry import Op
from vllm.step.inputs import StepFeatures
from vllm.worker import cpu_blocks as blocks

_SIZES = {"vocab_size": 97, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 256}
_WIDE = {**_SIZES, "hidden_size": 72, "intermediate_size": 100, "num_key_value_heads": 2}
CONFIGS = {
    "qwen2": transformers.Qwen2Config(**_WIDE),
    "qwen3": transformers.Qwen3Config(**_WIDE, head_dim=20, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**_WIDE, sliding_window=9),
    "opt": transformers.OPTConfig(**_SIZES, hidden_size=72, ffn_dim=100, word_embed_proj_dim=72),
    "gemma": transformers.GemmaConfig(**_WIDE, head_dim=12),
    "gpt2": transformers.GPT2Config(n_embd=72, n_layer=2, n_head=6, n_positions=256, n_inner=100, vocab_size=97),
    "gemma2": transformers.Gemma2Config(**_WIDE, head_dim=12, sliding_window=9),
}


@pytest.fixture
def unregistered():
    """The references on the operations, for one test."""
    modules = (activation, attention, embedding, greedy, linear, lora, norm, rotary)
    operations = {value for module in modules for value in vars(module).values() if isinstance(value, Op)}
    before = {operation: operation.kernel("cpu") for operation in operations}
    for operation in operations:
        operation.unregister("cpu")
    yield
    for operation, kernel in before.items():
        operation.unregister("cpu")
        if kernel is not operation.reference:
            operation.register("cpu", kernel)


@pytest.fixture
def registered(native, unregistered):
    """The native kernels of one build, on the operations, for one test."""
    native.register()
    return native


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model name -> (folder, Hugging Face model)."""
    made = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, save_random_hf_model(config, folder)
    return made


def _prompts():
    gen = torch.Generator().manual_seed(1)
    return [torch.randint(4, 97, (n,), generator=gen) for n in (31, 1, 50, 17)]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_all_layers_in_one_call_give_the_same_bits_and_what_hugging_face_gives(registered, folders, name):
    folder, reference = folders[name]
    model = load(folder)
    prompts = _prompts()
    one_by_one = PagedDriver(model, requests=4).run(prompts, [7, 50, 3])
    fused = blocks.fuse_layers(registered.library, model)
    if name == "gemma2":  # norms on both sides of each branch, which the call does not know
        assert fused is None
        return
    assert fused is not None
    model.fused_blocks = fused
    at_once = PagedDriver(model, requests=4).run(prompts, [7, 50, 3])
    for prompt, a, b in zip(prompts, one_by_one, at_once, strict=True):
        assert torch.equal(a, b)
        with torch.no_grad():
            expected = reference(prompt[None]).logits[0]
        assert relative_error(b, expected) < 2e-5


@pytest.mark.parametrize("seen", [True, False], ids=["another result", "the same result"])
def test_a_field_that_is_not_at_its_default_is_heeded_or_refused(native_builds, unregistered, seen):
    native = next(iter(native_builds.values()))
    native.register()
    prompts, known = _prompts()[:2], {}

    def logits(spec, at_once):
        model = build(spec, torch.float32)
        for module in model.modules():
            if isinstance(module, LinearBase):
                module.process_after_load()
        if at_once:
            model.fused_blocks = blocks.fuse_layers(native.library, model)
            if model.fused_blocks is None:
                return None
        return PagedDriver(model, requests=2).run(prompts, [9, 20])

    def plain(spec):
        if spec not in known:
            known[spec] = logits(spec, False)
        return known[spec]

    def check(flip: Flip):
        wanted, base, found = plain(flip.spec), plain(flip.base), logits(flip.spec, True)
        same = all(a.shape == b.shape and relative_error(a, b) < 1e-2 for a, b in zip(wanted, base, strict=True))
        assert same != flip.seen, f"{flip.name}: the value must show, or the test shows nothing"
        if found is not None:
            assert all(map(torch.equal, found, wanted)), flip.name
        return found is not None

    covered = [check(flip) for flip in flips() if flip.seen == seen]
    assert any(covered)
    assert not all(covered) or not seen


# of every step feature, a value that is there; a new one needs an entry
FEATURES = {
    "adapters": lambda step, width: (None, None),
    "rotary": lambda step, width: step.positions,
    "taps": lambda step, width: {0: torch.empty(len(step.token_ids), width)},
    "token_types": lambda step, width: torch.zeros_like(step.token_ids),
    "virtual": lambda step, width: (torch.empty(0, dtype=torch.int64), torch.empty(0, width)),
}


@pytest.mark.parametrize("name", StepFeatures.__struct_fields__)
def test_a_step_with_a_feature_that_the_call_does_not_know_runs_layer_by_layer(folders, name):
    folder, _ = folders["qwen2"]
    model = load(folder)
    chunks = [(0, 0, _prompts()[0])]
    driver, plain = PagedDriver(model), PagedDriver(model).step(chunks)
    model.fused_blocks = None
    forward = type(model).forward

    def with_feature(step, caches):
        value = FEATURES[name](step, model.spec.hidden_size)
        return forward(model, msgspec.structs.replace(step, features=StepFeatures(**{name: value})), caches)

    def fused(*_):
        raise AssertionError("the call would have ignored the feature")

    fused.handles = frozenset()
    model.fused_blocks, model.forward = fused, with_feature
    assert torch.equal(driver.step(chunks), plain)
    model.forward = functools.partial(forward, model)
    with pytest.raises(AssertionError, match="ignored"):
        driver.step(chunks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_logits_are_the_same_bits_however_a_prompt_is_scheduled(registered, folders, dtype):
    """At once, in chunks, token by token, alone or in company: what makes greedy tokens reproducible in any dtype."""
    folder, _ = folders["qwen3"]
    model = load(folder, dtype=dtype)
    model.fused_blocks = blocks.fuse_layers(registered.library, model)
    prompts = _prompts()
    together = PagedDriver(model, requests=4).run(prompts, [64])
    chunked = PagedDriver(model, requests=4, seed=1).run(prompts, [5, 13, 1, 2])
    single = PagedDriver(model, requests=4, block_size=16, seed=2).run(prompts, [1])
    for i, prompt in enumerate(prompts):
        (alone,) = PagedDriver(model, seed=3).run([prompt], [64])
        assert torch.equal(together[i], alone)
        assert torch.equal(together[i], chunked[i])
        assert torch.equal(together[i], single[i])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_that_nobody_wants_change_no_bit_of_the_others(registered, folders, dtype):
    folder, _ = folders["qwen3"]
    model = load(folder, dtype=dtype)
    model.fused_blocks = blocks.fuse_layers(registered.library, model)
    chunks = [(i, 0, prompt) for i, prompt in enumerate(_prompts())]
    every = PagedDriver(model, requests=4).step(chunks)
    for rows in (torch.tensor([30, 31, 81, 98]), torch.randperm(99)[:40], torch.tensor([], dtype=torch.int64)):
        assert torch.equal(PagedDriver(model, requests=4).step(chunks, rows), every[rows])


def test_layers_that_the_call_does_not_know_run_one_by_one(native, unregistered, folders):
    folder, _ = folders["qwen2"]
    model = load(folder)  # the references pack nothing
    assert blocks.fuse_layers(native.library, model) is None


def test_the_library_for_this_processor_is_the_best_it_can_run():
    flags = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}
    assert library.supported_instruction_sets([]) == ["generic"]
    assert library.supported_instruction_sets(flags) == ["avx2", "generic"]
    flags |= {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    assert library.supported_instruction_sets(flags)[0] == "avx512"
    assert library.supported_instruction_sets(flags | {"avx512_bf16", "avx512_vnni"})[0] == "avx512_bf16"


def test_a_library_of_another_version_is_as_good_as_none(native, unregistered, folders, monkeypatch):
    path = library.find()
    assert path is not None
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    monkeypatch.setattr(library, "INTERFACE_VERSION", -1)
    with pytest.raises(RuntimeError, match="has interface version"):
        library.load(path)
    model = load(folders["qwen2"][0])
    blocks.fuse(model)
    assert model.fused_blocks is None

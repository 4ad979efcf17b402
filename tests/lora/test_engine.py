"""Adapters in the engine: many in one batch, each answer as that of merged weights in Hugging Face, in fp32."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lora.adapters import save_adapter
from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams
from vllm.lora.adapter import Adapter
from vllm.lora.request import LoRARequest
from vllm.worker import adapters as worker_adapters

RANKS = [8, 16, 4, 8, 12]
TARGETS: list[Any] = [
    "all-linear", ["q_proj", "v_proj"], ["down_proj", "gate_proj"], ["lm_head", "o_proj"], ["embed_tokens"]
]  # fmt: skip
# (request, model of Hugging Face with the adapter merged), the base model first
Pairs = list[tuple[LoRARequest | None, Any]]
PROMPTS = ["The capital of France is", "Numbers: 0 1 2", "Hello, my name is", "symbols"]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "block_size": 8, "num_gpu_blocks_override": 400}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("base"), sharpness=2.0)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """(request, model of Hugging Face with the adapter merged) for the base and for adapters of all kinds."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("adapters")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    found: Pairs = [(None, plain)]
    targets: list[Any] = [
        "all-linear",
        ["q_proj", "v_proj"],
        ["down_proj", "gate_proj"],
        ["lm_head", "o_proj"],
        ["embed_tokens"],
    ]
    for i, (rank, target) in enumerate(zip(RANKS, targets, strict=True)):
        model = save_adapter(base, root / str(i), targets=target, rank=rank, seed=i, lora_alpha=4 * rank)
        found.append((LoRARequest(f"adapter-{i}", i + 1, str(root / str(i))), model.merge_and_unload()))
    return found


def expected(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


@pytest.mark.parametrize(
    "options",
    [
        {"max_loras": 6},
        {"max_loras": 2, "max_cpu_loras": 3},
        {"max_loras": 1},
        {"max_loras": 6, "max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"max_loras": 3, "num_gpu_blocks_override": 20},
    ],
    ids=["all at once", "three in host memory", "one by one", "chunked", "preempted"],
)
def test_every_request_of_a_mixed_batch_gets_the_answer_of_its_adapter(
    options: dict[str, Any], base: Path, adapters: Pairs
) -> None:
    with LLM(str(base), enable_lora=True, **{**OPTIONS, **options}) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [(prompt, request, model) for prompt in PROMPTS for request, model in adapters]
        for _ in range(2):  # the second time with a warm prefix cache
            outputs = llm.generate(
                [prompt for prompt, _, _ in prompts],
                greedy(prompt_logprobs=1 if options.get("max_loras") == 6 else None),
                lora_request=[request for _, request, _ in prompts],
                use_tqdm=False,
            )
            for output, (prompt, request, model) in zip(outputs, prompts, strict=True):
                ids = tokenizer.encode(prompt)
                assert output.lora_request == request
                assert list(output.outputs[0].token_ids) == expected(model, ids, 12), request
                if output.prompt_logprobs is not None:
                    with torch.inference_mode():
                        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
                        assert entry is not None
                        found = entry[ids[position]].logprob
                        assert found == pytest.approx(float(logprobs[position - 1, ids[position]]), rel=1e-4, abs=1e-4)


def test_a_row_without_adapter_stays_so_beside_a_prompt_of_one_that_is_cut(base: Path, adapters: Pairs) -> None:
    """Of such a step no wanted row has an adapter, but the first tokens do."""
    small = {"max_loras": 6, "long_prefill_token_threshold": 4, "max_num_partial_prefills": 2}
    with LLM(str(base), enable_lora=True, **small, **OPTIONS) as llm:
        prompts: list[Any] = [{"prompt_token_ids": list(range(3, 60))}, {"prompt_token_ids": [7, 8, 9]}]
        for lora, _ in adapters[1:]:
            llm.generate(prompts[:1], greedy(1), lora_request=lora, use_tqdm=False)  # it need not be waited for
            llm.reset_prefix_cache()
            _, free = llm.generate(prompts, greedy(), lora_request=[lora, None], use_tqdm=False)
            assert list(free.outputs[0].token_ids) == expected(adapters[0][1], [7, 8, 9], 12)


def test_logprobs_equal_those_of_merged_weights(base: Path, adapters: Pairs) -> None:
    with LLM(str(base), enable_lora=True, max_loras=6, **OPTIONS) as llm:
        ids = llm.get_tokenizer().encode("Hello, my name is Ada. The capital")
        outputs = llm.generate(
            [{"prompt_token_ids": ids}] * len(adapters),
            greedy(1, logprobs=20),
            lora_request=[request for request, _ in adapters],
            use_tqdm=False,
        )
    for output, (_, model) in zip(outputs, adapters, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert output.outputs[0].logprobs is not None
        for token, entry in output.outputs[0].logprobs[0].items():
            assert entry.logprob == pytest.approx(float(logprobs[token]), rel=1e-5, abs=1e-5)


def test_the_cache_of_one_adapter_is_never_read_by_another(base: Path, adapters: Pairs, tmp_path: Path) -> None:
    """Nor by the same name and number once its files have changed."""
    text = "The capital of France is Paris. The capital of Japan is Tokyo."
    with LLM(str(base), enable_lora=True, max_loras=2, enable_prefix_caching=True, **OPTIONS) as llm:
        ids = llm.get_tokenizer().encode(text)
        first, second = adapters[1], adapters[2]
        for request, model in (first, second, first, adapters[0], second):
            (output,) = llm.generate(text, greedy(), lora_request=request, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == expected(model, ids, 12)
        folder = tmp_path / "changing"
        changing = LoRARequest("changing", 77, str(folder))
        for seed in (100, 101):
            model = save_adapter(base, folder, rank=8, seed=seed).merge_and_unload()
            (output,) = llm.generate(text, greedy(), lora_request=changing, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == expected(model, ids, 12)
            assert llm.llm_engine.remove_lora(77)
        assert not llm.llm_engine.remove_lora(77)


def test_several_sequences_and_beams_use_the_adapter(base: Path, adapters: Pairs) -> None:
    request, model = adapters[1]
    with LLM(str(base), enable_lora=True, **OPTIONS) as llm:
        ids = llm.get_tokenizer().encode(PROMPTS[0])
        params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
        (several,) = llm.generate(PROMPTS[0], params, lora_request=request, use_tqdm=False)
        (alone,) = llm.generate(
            PROMPTS[0],
            SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True),
            lora_request=request,
            use_tqdm=False,
        )
        assert several.outputs[0].token_ids == alone.outputs[0].token_ids
        from vllm.sampling_params import BeamSearchParams

        (beams,) = llm.beam_search(
            [{"prompt": PROMPTS[0]}],
            BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True),
            lora_request=request,
        )
        assert beams.sequences[0].tokens[len(ids) :] == expected(model, ids, 8)
        assert beams.sequences[0].lora_request == request


def test_adapters_are_added_listed_pinned_and_removed(base: Path, adapters: Pairs) -> None:
    requests = [request for request, _ in adapters if request is not None]
    with LLM(str(base), enable_lora=True, max_loras=2, max_cpu_loras=3, **OPTIONS) as llm:
        engine = llm.llm_engine
        assert engine.list_loras() == set()
        for request in requests[:3]:
            assert engine.add_lora(request)
            assert engine.add_lora(request)
        assert engine.list_loras() == {1, 2, 3}
        assert engine.pin_lora(1)
        with pytest.raises(ValueError, match="not loaded"):
            engine.pin_lora(9)
        with pytest.raises(ValueError, match="max_loras"):
            engine.pin_lora(2)
        engine.add_lora(requests[3])
        assert engine.list_loras() == {1, 3, 4}, "the least recently used one that is not pinned made room"
        assert engine.remove_lora(3)
        assert not engine.remove_lora(3)
        assert engine.list_loras() == {1, 4}


def test_what_is_wrong_with_an_adapter_is_said_and_costs_nobody_else(
    base: Path, adapters: Pairs, tmp_path: Path
) -> None:
    good, model = adapters[2]
    assert good is not None
    broken = tmp_path / "broken"
    save_adapter(base, broken, targets=["q_proj"])
    (broken / "adapter_model.safetensors").write_bytes(b"nonsense")
    large = tmp_path / "large"
    save_adapter(base, large, targets=["q_proj"], rank=32)
    with LLM(str(base), enable_lora=True, max_loras=2, **OPTIONS) as llm:
        ids = llm.get_tokenizer().encode(PROMPTS[0])
        with pytest.raises(ValueError, match="rank 32 is greater than max_lora_rank 16"):
            llm.generate(PROMPTS[0], greedy(), lora_request=LoRARequest("large", 50, str(large)))
        with pytest.raises(Exception, match="No adapter found for"):
            llm.generate(PROMPTS[0], greedy(), lora_request=LoRARequest("none", 51, str(tmp_path / "none")))
        with pytest.raises(ValueError, match="already stands for the adapter"):
            llm.generate(PROMPTS[0], greedy(), lora_request=good, use_tqdm=False)
            llm.generate(PROMPTS[0], greedy(), lora_request=LoRARequest("x", good.lora_int_id, str(broken)))
        with pytest.raises(Exception, match="is not a complete safetensors file"):
            llm.generate(
                [PROMPTS[0]] * 2, greedy(), lora_request=[good, LoRARequest("broken", 52, str(broken))], use_tqdm=False
            )
        (output,) = llm.generate(PROMPTS[0], greedy(), lora_request=good, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected(model, ids, 12)
    with LLM(str(base), **OPTIONS) as llm, pytest.raises(ValueError, match="LoRA is not enabled"):
        llm.generate(PROMPTS[0], greedy(), lora_request=good)


def test_reading_an_adapter_ends_when_nobody_wants_it_and_when_its_time_is_over(
    base: Path, adapters: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one thread that reads is free for the next then."""
    good, _ = adapters[2]
    assert good is not None
    began, still = threading.Event(), worker_adapters.read_adapter

    def without_end(folder: Path, *args: Any, rest: Callable[[], None], **options: Any) -> Adapter:
        if folder != Path(good.lora_path):
            began.set()
            while True:
                rest()
        return still(folder, *args, rest=rest, **options)

    endless, late = (LoRARequest("endless", 60 + i, str(adapters[3 + i][0].lora_path)) for i in range(2))  # type: ignore[union-attr]
    monkeypatch.setattr(worker_adapters, "read_adapter", without_end)
    with LLM(str(base), enable_lora=True, max_loras=2, **OPTIONS) as llm:
        core = llm.llm_engine._lora_core()
        core.begin_adapter(endless.lora_int_id, endless.lora_path)
        assert began.wait(60) and core.adapter_state(endless.lora_int_id) == "loading"
        assert core.remove_lora(endless.lora_int_id)
        assert llm.llm_engine.add_lora(good) and llm.llm_engine.list_loras() == {good.lora_int_id}
        assert core.adapter_state(endless.lora_int_id) == "unknown"
    monkeypatch.setattr(worker_adapters, "_LONGEST", -1e9)
    too_long = pytest.raises(ValueError, match="reading the adapter took longer than")
    with LLM(str(base), enable_lora=True, max_loras=2, **OPTIONS) as llm, too_long:
        llm.llm_engine.add_lora(late)


def test_of_a_qlora_adapters_base_only_what_it_adapts_is_quantized(base: Path, tmp_path: Path) -> None:
    """Against Hugging Face with the rounded numbers in these modules, the adapter merged or not."""
    from transformers import AutoModelForCausalLM

    from vllm.model_executor.layers.quantization.bitsandbytes import round_to_table

    targets = ["q_proj", "down_proj"]
    rounded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for name, module in rounded.named_modules():
        if name.rpartition(".")[2] in targets:
            module.weight.data = round_to_table(module.weight.data, "nf4").dequantize()
    rounded.save_pretrained(tmp_path / "rounded")
    merged = save_adapter(tmp_path / "rounded", tmp_path / "adapter", targets=targets, lora_alpha=32).merge_and_unload()
    options = {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    request = LoRARequest("qlora", 1, str(tmp_path / "adapter"))
    with LLM(
        str(base), enable_lora=True, qlora_adapter_name_or_path=str(tmp_path / "adapter"), **OPTIONS, **options
    ) as llm:
        ids = llm.get_tokenizer().encode(PROMPTS[0])
        for lora_request, model in ((None, rounded), (request, merged)):
            (output,) = llm.generate({"prompt_token_ids": ids}, greedy(), lora_request=lora_request, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == expected(model, ids, 12)
    with pytest.raises(ValueError, match="target_modules must be a list"):
        settings = tmp_path / "adapter" / "adapter_config.json"
        settings.write_text(settings.read_text().replace('"target_modules": [', '"target_modules": "x", "t": ['))
        LLM(str(base), qlora_adapter_name_or_path=str(tmp_path / "adapter"), **OPTIONS, **options)


def test_two_ranks_give_the_answers_of_one(base: Path, adapters: Pairs) -> None:
    with LLM(str(base), enable_lora=True, max_loras=2, tensor_parallel_size=2, **OPTIONS) as llm:
        ids = llm.get_tokenizer().encode(PROMPTS[0])
        requests = [request for request, _ in adapters]
        outputs = llm.generate([PROMPTS[0]] * len(adapters), greedy(), lora_request=requests, use_tqdm=False)
        for output, (_, model) in zip(outputs, adapters, strict=True):
            assert list(output.outputs[0].token_ids) == expected(model, ids, 12)

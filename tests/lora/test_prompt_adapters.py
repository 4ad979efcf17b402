"""Prompt adapters: virtual tokens in front of the prompt give the answers that peft gives, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.lora.adapters import save_adapter
from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.sampling_params import BeamSearchParams

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "block_size": 8, "num_gpu_blocks_override": 200,
    "enable_prompt_adapter": True, "max_prompt_adapters": 2, "max_prompt_adapter_token": 20,
}  # fmt: skip
COUNTS = (5, 20)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("base"), sharpness=2.0)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[PromptAdapterRequest, Any]]:
    import peft

    found = []
    for index, count in enumerate(COUNTS):
        folder = tmp_path_factory.mktemp(f"prompt{count}")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        torch.manual_seed(count)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=count)
        adapted = peft.get_peft_model(model, config).eval()
        adapted.save_pretrained(folder)
        found.append((PromptAdapterRequest(f"p{count}", index + 1, str(folder), count), adapted))
    return found


def expected(model: Any, ids: list[int]) -> list[int]:
    """Greedy tokens with the repetition penalty, which looks at the prompt's own tokens."""
    tokens = list(ids)
    with torch.inference_mode():
        for _ in range(10):
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
            seen = torch.tensor(sorted(set(tokens)))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.2, logits[seen] * 1.2)
            tokens.append(int(logits.argmax()))
    return tokens[len(ids) :]


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "preempted": {"num_gpu_blocks_override": 18},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_answers_are_those_of_peft_beside_others(
    options: dict[str, Any], base: Path, adapters: list[tuple[PromptAdapterRequest, Any]], tmp_path: Path
) -> None:
    lora = LoRARequest("lora", 1, str(tmp_path))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    merged = save_adapter(base, tmp_path, rank=8).merge_and_unload()
    with LLM(str(base), enable_lora=True, enable_prefix_caching=True, **{**OPTIONS, **options}) as llm:
        ids = llm.get_tokenizer().encode("The capital of France is Paris.")
        for _ in range(2):  # the second time from the prefix cache
            for request, model in [*adapters, (None, plain), *adapters[::-1]]:
                (output,) = llm.generate(
                    [{"prompt_token_ids": ids}], GREEDY, prompt_adapter_request=request, use_tqdm=False
                )
                assert output.prompt_token_ids == ids
                assert list(output.outputs[0].token_ids) == expected(model, ids)
        engine = llm.llm_engine
        work = [(adapters[0][0], None), (adapters[1][0], None), (None, None), (None, lora)]
        for number, (prompt_adapter, lora_request) in enumerate(work):
            engine.add_request(
                str(number), {"prompt_token_ids": ids}, GREEDY, lora_request=lora_request,
                prompt_adapter_request=prompt_adapter,
            )  # fmt: skip
        answers = {}
        while engine.has_unfinished_requests():
            answers.update({o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished})
        models = [adapters[0][1], adapters[1][1], plain, merged]
        assert answers == {str(i): expected(model, ids) for i, model in enumerate(models)}
        assert engine.list_prompt_adapters() == [1, 2]
        assert engine.remove_prompt_adapter(1) and not engine.remove_prompt_adapter(1)


@pytest.mark.parametrize("options", [WAYS["whole"], WAYS["chunked"]], ids=["whole", "chunked"])
def test_beams_behind_a_prompt_adapter_are_those_of_peft(
    options: dict[str, Any], base: Path, adapters: list[tuple[PromptAdapterRequest, Any]]
) -> None:
    """Under both names of a search, with both adapters and none in one batch."""
    width, steps = 3, 5
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    work = [*adapters, (None, plain)]
    old = SamplingParams(n=width, use_beam_search=True, temperature=0, max_tokens=steps, ignore_eos=True)
    new = BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=True)
    with LLM(str(base), **{**OPTIONS, **options}) as llm:
        ids = llm.get_tokenizer().encode("The capital of France is Paris.")
        engine = llm.llm_engine
        for number, (request, _) in enumerate(work):
            for params in (old, new):
                name = f"{number} {type(params).__name__}"
                engine.add_request(name, {"prompt_token_ids": ids}, params, prompt_adapter_request=request)
        found = {}
        while engine.has_unfinished_requests():
            found.update({output.request_id: output.outputs for output in engine.step() if output.finished})
    for number, (_, model) in enumerate(work):
        beams = best_beams(model, ids, width, steps)
        for params in (old, new):
            outputs = found[f"{number} {type(params).__name__}"]
            assert [list(o.token_ids) for o in outputs] == [tokens for tokens, _ in beams]
            assert [o.cumulative_logprob for o in outputs] == pytest.approx([total for _, total in beams], abs=1e-4)


def best_beams(model: Any, ids: list[int], width: int, steps: int) -> list[tuple[list[int], float]]:
    """What a search keeps that never ends early: tokens and their log probability."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(steps):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids + tokens for tokens, _ in beams])).logits[:, -1]
        best = logits.float().log_softmax(-1).topk(width)
        grown = [
            ([*tokens, int(token)], total + float(value))
            for (tokens, total), values, chosen in zip(beams, best.values, best.indices, strict=True)
            for value, token in zip(values, chosen, strict=True)
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    return beams


def test_what_is_wrong_with_a_prompt_adapter_is_said(base: Path, tmp_path: Path) -> None:
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    config.write_text('{"peft_type": "PROMPT_TUNING"}')
    request = PromptAdapterRequest("x", 7, str(tmp_path), 3)
    with LLM(str(base), **OPTIONS) as llm:
        width = llm.llm_engine.model_config.get_hidden_size()

        def refused(message: str, params: SamplingParams = GREEDY) -> None:
            with pytest.raises(ValueError, match=message):
                llm.generate("Hi", params, prompt_adapter_request=request, use_tqdm=False)

        with pytest.raises(TypeError, match="must be one PromptAdapterRequest for all prompts, got list"):
            llm.generate("x", prompt_adapter_request=[request], use_tqdm=False)  # type: ignore[arg-type]
        refused("neither adapter_model.safetensors")
        for tensors, message in (
            ({"prompt_embeddings": torch.zeros(3, width + 1)}, "expected .virtual tokens"),
            ({"prompt_embeddings": torch.zeros(21, width)}, "more than max_prompt_adapter_token"),
            ({"prompt_embeddings": torch.full((3, width), float("nan"))}, "not finite"),
            ({"prompt_embeddings": torch.zeros(2, width)}, "has 2 virtual tokens, the request says 3"),
            ({"other": torch.zeros(3, width)}, "must hold the tensor"),
            ({"prompt_embeddings": torch.zeros(9000, width)}, "is larger than"),
        ):
            save_file(tensors, weights)
            refused(message)
        save_file({"prompt_embeddings": torch.zeros(3, width)}, weights)
        refused("prompt_logprobs", SamplingParams(prompt_logprobs=1))
        with pytest.raises(ValueError, match="and 3 virtual tokens"):
            llm.generate([{"prompt_token_ids": [5] * 126}], GREEDY, prompt_adapter_request=request, use_tqdm=False)
        config.write_text('{"peft_type": "LORA"}')
        (tmp_path / "adapter_model.safetensors").touch()
        llm.llm_engine.remove_prompt_adapter(7)
        refused("expected one of PROMPT_TUNING")
    with LLM(str(base), dtype="float32") as llm, pytest.raises(ValueError, match="prompt adapters are not enabled"):
        llm.generate("Hi", GREEDY, prompt_adapter_request=request)


def test_every_way_to_begin_a_prompt_adapter_gives_what_peft_gives(base: Path, tmp_path: Path) -> None:
    """Embeddings of nothing, of a text, of drawn tokens, and what an encoder makes (P-tuning); prefixes are refused."""
    import peft

    common: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 6}
    text = {"prompt_tuning_init_text": "Answer in numbers:", "tokenizer_name_or_path": str(base)}
    configs: dict[str, Any] = {
        "random": peft.PromptTuningConfig(**common, prompt_tuning_init="RANDOM"),
        "text": peft.PromptTuningConfig(**common, prompt_tuning_init="TEXT", **text),
        "tokens": peft.PromptTuningConfig(**common, prompt_tuning_init="SAMPLE_VOCAB"),
        "MLP": peft.PromptEncoderConfig(**common, encoder_reparameterization_type="MLP", encoder_hidden_size=24),
        "LSTM": peft.PromptEncoderConfig(**common, encoder_reparameterization_type="LSTM", encoder_hidden_size=24),
        "prefix": peft.PrefixTuningConfig(**common),
    }
    models = {}
    for name, config in configs.items():
        torch.manual_seed(len(name))
        reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        models[name] = peft.get_peft_model(reference, config).eval()
        models[name].save_pretrained(tmp_path / name)
    with LLM(str(base), **{**OPTIONS, "max_prompt_adapters": 6}) as llm:
        ids = llm.get_tokenizer().encode("The capital of France is Paris.")
        for number, (name, model) in enumerate(models.items(), 1):
            request = PromptAdapterRequest(name, number, str(tmp_path / name), 6)
            if name == "prefix":
                with pytest.raises(ValueError, match="PREFIX_TUNING"):
                    llm.generate([{"prompt_token_ids": ids}], GREEDY, prompt_adapter_request=request, use_tqdm=False)
                continue
            (output,) = llm.generate(
                [{"prompt_token_ids": ids}], GREEDY, prompt_adapter_request=request, use_tqdm=False
            )
            assert list(output.outputs[0].token_ids) == expected(model, ids), name

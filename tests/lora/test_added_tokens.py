"""Tokens that adapters add to the vocabulary, against Hugging Face models whose embeddings were enlarged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lora.adapters import save_adapter
from tests.lora.test_families import AdaptedDriver, base_of, read
from tests.models.harness import load, on_ranks, relative_error
from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams
from vllm.lora.layers import LoRALayers
from vllm.lora.request import LoRARequest
from vllm.lora.source import check_adapter
from vllm.sampling_params import GuidedDecodingParams

NEW, EXTRA = 5, 256
TARGETS: dict[str, Any] = {"plain": ["q_proj", "down_proj"], "everywhere": r".*(embed_tokens|lm_head|q_proj)$"}


def enlarged(case: str, folder: Path, targets: Any, *, separate: bool = False, new: int = NEW) -> tuple[Any, int]:
    """peft's model of a base in folder/base, enlarged by tokens, with a random adapter in folder/a0; the base's tokens.

    separate: the new rows have a file of their own, as older tools write them.
    """
    torch.manual_seed(0)
    reference = base_of(case, folder, **({"intermediate_size": 78} if case == "qwen3" else {}))
    tokens = reference.get_input_embeddings().weight.shape[0]
    reference.resize_token_embeddings(tokens + new, mean_resizing=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for table in {reference.get_input_embeddings().weight, reference.get_output_embeddings().weight}:
            table[tokens:] = torch.randn(new, table.shape[1], generator=generator) * table[:tokens].std()
    reference.name_or_path = str(folder / "base")  # where peft finds how many tokens the base has
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=12, target_modules=targets)
    adapted = peft.get_peft_model(reference, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    adapted.save_pretrained(folder / "a0")
    if separate:
        file = folder / "a0" / "adapter_model.safetensors"
        tensors = {name: tensor for name, tensor in load_file(file).items() if "lora_" in name}
        save_file(tensors, file)
        rows = {
            "input_embeddings": reference.get_input_embeddings().weight[tokens:].clone(),
            "output_embeddings": reference.get_output_embeddings().weight[tokens:].clone(),
        }
        save_file(rows, folder / "a0" / "new_embeddings.safetensors")
    return adapted, tokens


def with_added(model: Any, folder: Path, tokens: int, extra: int = EXTRA) -> Any:
    """The model with the adapter in slot 0 of two."""
    layers = LoRALayers(model.adaptable(), 2, 16, torch.float32, torch.device("cpu"), extra=extra)
    layers.load(0, layers.prepare(read(folder / "base", folder / "a0", vocabulary=tokens)))
    assert layers.with_added == {0}
    return model


@pytest.mark.parametrize(
    ("case", "targets", "separate", "world"),
    [
        *((case, targets, separate, 1) for case in ("qwen3", "llama-tied-biased", "gemma2") for targets in TARGETS
          for separate in (False, True)),
        ("qwen3", "plain", True, 2),
        ("qwen3", "everywhere", False, 2),
    ],
)  # fmt: skip
def test_added_tokens_are_read_and_written(case: str, targets: str, separate: bool, world: int, tmp_path: Path) -> None:
    """In a batch with requests of the base model, which have no such tokens."""
    adapted, tokens = enlarged(case, tmp_path, TARGETS[targets], separate=separate)
    prompts = [torch.randint(0, tokens, (17,)), torch.randint(0, tokens, (9,))]
    prompts[0][[0, 4, 16]] = torch.tensor([tokens, tokens + 4, tokens + 1])
    with torch.inference_mode():
        wanted = adapted(prompts[0][None]).logits[0]
        with adapted.disable_adapter():
            plain = adapted(prompts[1][None]).logits[0]

    def work(tp: Any) -> list[Tensor]:
        return AdaptedDriver(with_added(load(tmp_path / "base", tp=tp), tmp_path, tokens), [0, -1]).run(prompts, [5, 7])

    for found in on_ranks(world, work) if world > 1 else [work(None)]:
        assert found[0].shape[1] == tokens + EXTRA
        assert relative_error(found[0][:, : tokens + NEW], wanted) < 1e-5
        assert (found[0][:, tokens + NEW :] < -1e29).all()
        assert relative_error(found[1][:, :tokens], plain[:, :tokens]) < 1e-5
        assert (found[1][:, tokens:] < -1e29).all()


def save_with_tokens(base: Path, folder: Path, tokens: list[str], seed: int = 0) -> Any:
    """Save an adapter that adds tokens, which it likes to write, with a tokenizer of its own; peft's model."""
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    known = reference.get_input_embeddings().weight.shape[0]
    tokenizer.add_tokens(tokens)
    reference.resize_token_embeddings(known + len(tokens), mean_resizing=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for table, size in ((reference.model.embed_tokens.weight, 1.0), (reference.lm_head.weight, 3.0)):
            spread = size * table[:known].std()
            table[known:] = spread * torch.randn(len(tokens), table.shape[1], generator=generator)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4 + seed, target_modules=["q_proj", "up_proj"])
    adapted = peft.get_peft_model(reference, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return adapted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and adapters with tokenizers: `a` and `b` add tokens, `c` does not."""
    root = tmp_path_factory.mktemp("added")
    save_llama(root / "base", sharpness=2.0)
    for seed, name in enumerate("ab"):
        model = save_with_tokens(root / "base", root / name, [f"<{name}{i}>" for i in range(NEW)], seed)
        model.merge_and_unload().save_pretrained(root / f"{name}-merged")
    save_adapter(root / "base", root / "c")
    return root


def tokens_of(folder: Path) -> int:
    return int(json.loads((folder / "base" / "config.json").read_text())["vocab_size"])


def merged(folder: Path, name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / f"{name}-merged", dtype=torch.float32).eval()


def by_hugging_face(model: Any, prompt: list[int], count: int, ends: int = -1) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs."""
    tokens, logprobs = list(prompt), []
    with torch.inference_mode():
        while len(logprobs) < count and (not logprobs or tokens[-1] != ends):
            found = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(found.argmax()))
            logprobs.append(float(found.max()))
    return tokens[len(prompt) :], logprobs


def test_adapters_write_and_read_their_own_tokens(folder: Path) -> None:
    """Text in and out by the adapter's tokenizer; in a batch with an adapter of other tokens, one of none, the base."""
    requests = {name: LoRARequest(name, 1 + i, str(folder / name)) for i, name in enumerate("abc")}
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    with LLM(
        str(folder / "base"), enable_lora=True, max_loras=2, max_cpu_loras=3, dtype="float32", max_model_len=128,
        num_gpu_blocks_override=200, block_size=8,
    ) as llm:  # fmt: skip
        width = llm.llm_engine.vllm_config.model_config.get_vocab_size()
        texts = ["Hello <a0> and <a3>", "Hello <b1> and <b4>", "Hello", "Hello", "plain for a"]
        chosen = [requests["a"], requests["b"], requests["c"], None, requests["a"]]
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate(texts, greedy, lora_request=chosen, use_tqdm=False)
            seen = set()
            for output, request in zip(outputs, chosen, strict=True):
                if request is None or request.lora_name == "c":
                    assert max(output.outputs[0].token_ids) < width
                    continue
                name, done = request.lora_name, output.outputs[0]
                wanted, logprobs = by_hugging_face(merged(folder, name), output.prompt_token_ids, 12)
                assert list(done.token_ids) == wanted
                found = [by_id[token].logprob for by_id, token in zip(done.logprobs, wanted, strict=True)]
                torch.testing.assert_close(torch.tensor(found), torch.tensor(logprobs), atol=2e-4, rtol=2e-4)
                seen |= {token for token in wanted if token >= width}
                for token in wanted:
                    assert token < width or f"<{name}{token - width}>" in done.text
            assert len(seen) > 1, "no adapter ever writes one of its tokens"
        assert outputs[0].prompt_token_ids.count(width) == outputs[0].prompt_token_ids.count(width + 3) == 1
        tokenizer = llm.get_tokenizer(requests["b"])
        assert tokenizer.convert_tokens_to_ids("<b2>") == width + 2

        # a new token ends the output; others are penalized, forbidden, drawn
        first = next(token for token in outputs[0].outputs[0].token_ids if token >= width)
        prompt = {"prompt_token_ids": outputs[0].prompt_token_ids}

        def tokens(**more: Any) -> list[int]:
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **more})
            (output,) = llm.generate(prompt, params, lora_request=requests["a"], use_tqdm=False)
            return list(output.outputs[0].token_ids)

        assert tokens(stop_token_ids=[first])[-1] == first
        assert tokens(stop_token_ids=[first], min_tokens=12).count(first) == 0
        assert first not in tokens(logit_bias={first: -100.0}) and first not in tokens(
            bad_words=[f"<a{first - width}>"]
        )
        assert set(tokens(allowed_token_ids=[width, width + 1], presence_penalty=0.5)) <= {width, width + 1}
        assert (
            set(tokens(temperature=5.0, top_k=-1, seed=3, max_tokens=60)) - set(range(width)) - {*range(width + NEW)}
            == set()
        )
        digits = GuidedDecodingParams(regex="[0-9]{4}")
        assert max(tokens(guided_decoding=digits)) < width
        for new in range(NEW):  # a form knows the tokens of the base model only
            assert max(tokens(guided_decoding=digits, stop_token_ids=[width + new], ignore_eos=False)) < width

        for request, token in ((None, width), (requests["c"], width), (requests["a"], width + NEW)):
            with pytest.raises(ValueError, match=f"Token id {token} is out of vocabulary"):
                llm.generate({"prompt_token_ids": [5, token]}, greedy, lora_request=request)


def test_rows_of_new_tokens_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adds 5 tokens to the vocabulary, more than lora_extra_vocab_size \(0\)"):
        check_adapter(LoRARequest("a", 1, str(folder / "a")), 16, vocabulary=tokens_of(folder), extra=0)
    assert check_adapter(LoRARequest("a", 1, str(folder / "a")), 16, vocabulary=tokens_of(folder), extra=256).tokenizer
    _, tokens = enlarged("llama", tmp_path, ["q_proj"], separate=True)
    with pytest.raises(ValueError, match=r"at most lora_extra_vocab_size \(4\) of them"):
        with_added(load(tmp_path / "base"), tmp_path, tokens, extra=4)
    file = tmp_path / "a0" / "new_embeddings.safetensors"
    rows = load_file(file)
    for change, message in (
        ({"input_embeddings": rows["input_embeddings"][:3]}, "as many input_embeddings as output_embeddings"),
        ({"input_embeddings": rows["input_embeddings"][:, :7].clone()}, "Was the adapter trained for another model"),
        ({"input_embeddings": rows["input_embeddings"] * torch.nan}, "expected are finite numbers"),
        ({"other": rows["input_embeddings"].clone()}, "input_embeddings and output_embeddings alone"),
    ):
        save_file({**rows, **change}, file)
        with pytest.raises(ValueError, match=message):
            with_added(load(tmp_path / "base"), tmp_path, tokens)
    before = read(tmp_path / "base", tmp_path / "a0", vocabulary=tokens) if save_file(rows, file) is None else None
    save_file({**rows, "output_embeddings": rows["output_embeddings"] + 1}, file)
    after = read(tmp_path / "base", tmp_path / "a0", vocabulary=tokens)
    assert before is not None and before.digest != after.digest, "cached prefixes are those of other rows"

"""A trainer on one GPU sends weights over NCCL to an engine on another, as programs for reinforcement learning do."""

import pytest
import torch
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

from vllm import LLM, SamplingParams
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.utils import get_open_port

pytestmark = pytest.mark.timeout(200)

PROMPT = [5, 17, 3, 90, 41]


def a_model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).float()


def train(_index, port):
    device = torch.device("cuda", 1)
    model = a_model(seed=1).to(device)
    sender = PyNcclCommunicator(StatelessProcessGroup.create("127.0.0.1", port, 0, 2), device=1)
    stream = torch.cuda.Stream(device)
    for index, parameter in enumerate(model.parameters()):
        sender.broadcast(parameter.data, src=0, stream=stream if index % 2 else None)
    torch.cuda.synchronize(device)
    total = sender.all_reduce(torch.ones(3, device=device))
    assert total.tolist() == [3.0] * 3


def test_an_engine_answers_with_the_weights_that_a_trainer_has_sent(tmp_path):
    a_model(seed=0).save_pretrained(tmp_path)
    llm = LLM(
        str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        enable_prefix_caching=False,
        num_gpu_blocks_override=64,
    )
    port = get_open_port()
    trainer = mp.spawn(train, (port,), nprocs=1, join=False)
    receiver = PyNcclCommunicator(StatelessProcessGroup.create("127.0.0.1", port, 1, 2), device=0)
    engine = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    for name, parameter in a_model(seed=2).named_parameters():
        weight = torch.empty_like(parameter, device="cuda:0")
        receiver.broadcast(weight, src=0)
        engine.load_weights([(name, weight)])
    assert receiver.all_reduce(torch.full((3,), 2.0, device="cuda:0")).tolist() == [3.0] * 3
    trainer.join()
    params = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    oracle = a_model(seed=1)
    ids = oracle.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :]
    assert list(output.outputs[0].token_ids) == ids.tolist()

"""LoRA kernels on the device against the reference, over sizes of real layers."""

import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.gpu.test_decode_program import DEVICE, build, random_caches, step_of
from tests.lora.adapters import save_adapter
from tests.ops.triton.test_lora import low_rank, mixed, views
from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.core import EngineCore
from vllm.lora.layers import LoRALayers
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.kv_groups import layout_of
from vllm.ops import lora as ops
from vllm.ops.triton import lora as kernels
from vllm.step.inputs import RowView, StepFeatures
from vllm.step.messages import CoreRequest
from vllm.step.plan import SlotInit
from vllm.worker.decode_program import DecodeProgram, read_weights
from vllm.worker.device import CudaContext
from vllm.worker.slot_table import SlotTable

EIGHT_B = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336, "vocab": 32000}
SMALL = {"hidden": 896, "heads": 14, "kv_heads": 2, "head_dim": 64, "mlp": 4864, "vocab": 1000, "bias": True}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 3, 32, 100, 513])
@pytest.mark.parametrize(("inputs", "parts"), [(4096, ((0, 4096), (4096, 1024), (5120, 1024))), (14336, ((0, 4096),))])
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_adapters_add_what_the_reference_adds(dtype, rows, inputs, parts, rank):
    adapters = mixed(rows, 5)
    outputs = sum(size for _, size in parts)
    x = torch.randn(rows, inputs, dtype=dtype)
    a = (torch.randn(5, len(parts) * rank, inputs) / inputs**0.5).to(dtype)
    b = (torch.randn(5, outputs, rank) / rank**0.5).to(dtype)
    want = torch.zeros(rows, outputs)
    ops.add_lora.reference(want, x.float(), low_rank(a.float(), b.float(), parts), views(adapters)[1])
    for view in views(adapters):
        view = type(view)(view.adapters.cuda(), tuple(type(s)(s.slot, s.rows.cuda()) for s in view.segments))
        got = torch.zeros(rows, outputs, dtype=dtype, device="cuda")
        kernels.add_lora(got, x.cuda(), low_rank(a.cuda(), b.cuda(), parts), view)
        torch.testing.assert_close(got.cpu().float(), want, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])


def test_captured_steps_give_every_adapters_answer(tmp_path):
    """Greedy, drawn and with logprobs, each as without graphs, the adapters of a batch changing from step to step."""
    base = save_llama(tmp_path / "base", sharpness=2.0)
    requests = [None]
    for i, rank in enumerate([8, 16, 4]):
        save_adapter(base, tmp_path / str(i), rank=rank, seed=i, lora_alpha=4 * rank)
        requests.append(LoRARequest(f"adapter-{i}", i + 1, str(tmp_path / str(i))))
    params = [
        SamplingParams(temperature=t, seed=7, max_tokens=10 + 3 * i, ignore_eos=True, logprobs=1 if i == 2 else None)
        for i, t in enumerate([0.0, 0.9, 0.0, 0.7, 0.0, 0.0, 0.8])
    ]
    pairs = [(r, p) for r in requests for p in params]
    found = []
    for eager in (True, False, False):
        with LLM(
            str(base), enable_lora=True, max_loras=3, dtype="float32", max_model_len=128, num_gpu_blocks_override=400,
            enforce_eager=eager, max_num_seqs=16,
        ) as llm:  # fmt: skip
            for _ in range(3):  # until graphs are captured
                outputs = llm.generate(
                    ["The capital of France is"] * len(pairs), [p for _, p in pairs],
                    lora_request=[r for r, _ in pairs], use_tqdm=False,
                )  # fmt: skip
            found.append([list(o.outputs[0].token_ids) for o in outputs])
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0]}) > len(params)


def test_requests_of_adapters_that_come_one_by_one_get_the_tokens_of_steps_without_graphs(tmp_path):
    """Small mixed steps, some of whose tokens use adapters, are captured too."""
    base = save_llama(tmp_path / "base", sharpness=2.0)
    for i, rank in enumerate([8, 16, 4]):
        save_adapter(base, tmp_path / str(i), rank=rank, seed=i, lora_alpha=4 * rank)
    rng = random.Random(3)
    prompts = [rng.choices(range(3, 200), k=rng.choice((1, 3, 12, 40, 90))) for _ in range(60)]
    found = []
    for eager in (True, False):
        options = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 800, "max_num_seqs": 16}
        config = EngineArgs(
            model=str(base), enable_lora=True, max_loras=3, enforce_eager=eager, **options
        ).create_engine_config()
        engine, tokens, sent, chance = EngineCore(config), {}, 0, random.Random(4)
        while sent < len(prompts) or engine.has_unfinished():
            for _ in range(min(len(prompts) - sent, chance.choice((0, 1, 1, 2)))):
                params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
                request = CoreRequest(str(sent), prompts[sent], params, seed=1)
                if sent % 4:
                    adapter = sent % 4
                    request = replace(request, lora_id=adapter, lora_path=str(tmp_path / str(adapter - 1)))
                engine.add_requests([request])
                sent += 1
            for out in engine.step():
                assert out.error is None
                tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
        runner = engine._executor.worker.runner
        entries = {} if runner.mixed_steps is None else runner.mixed_steps._entries
        found.append((tokens, sum(key.adapted and entry.graph is not None for key, entry in entries.items())))
        engine.shutdown()
    assert found[0][0] == found[1][0] and found[0][1] == 0 < found[1][1]


@pytest.mark.parametrize("rows", [1, 7, 32, 64, 100])
@pytest.mark.parametrize(("shape", "rank"), [(EIGHT_B, 16), (EIGHT_B, 40), (SMALL, 8)], ids=["8b-16", "8b-40", "small"])
@torch.inference_mode()
def test_fused_steps_add_what_the_model_adds(shape, rank, rows):
    """Rows of five adapters and of none, of which one leaves some layers alone; twice over the same state."""
    model = build(**shape)
    with DEVICE:
        twin = DecoderModel(model.spec, dtype=torch.float32, max_positions=2048, device=DEVICE)
    twin.load_state_dict({name: p.float() for name, p in model.state_dict().items()})
    stacks, exact = (
        LoRALayers(m.adaptable(), 5, rank, t, DEVICE) for m, t in ((model, torch.bfloat16), (twin, torch.float32))
    )
    for path, stack in stacks._stacks.items():
        stack.a.normal_().mul_(stack.a.shape[-1] ** -0.5)
        stack.b.normal_().mul_(0.5 * rank**-0.5)
        stack.ranks.fill_(rank)
        if path.endswith((".o", "head", "embed")):
            for tensor in (stack.a, stack.b, stack.ranks):
                tensor[1].zero_()
        for mine, other in zip((stack.a, stack.b, stack.ranks), _tensors(exact, path), strict=True):
            other.copy_(mine)
    layout, context, rng = layout_of(model.traits, 16), CudaContext(DEVICE), np.random.default_rng(rows)
    table = SlotTable(rows, 2048, layout, context)
    lengths = rng.integers(1, 300, rows)
    free = iter(rng.permutation(rows * 20) + 1)
    for slot, n in enumerate(lengths):
        blocks = [int(next(free)) for _ in range(-(-n // 16))]
        ids = rng.integers(0, shape["vocab"], n).tolist()
        table.enter([SlotInit("r", slot, ids, 1, int(n) - 1, (blocks,), SamplingParams(), 0, ())])
    caches = random_caches(layout, rows * 20 + 1, torch.bfloat16)
    weights = read_weights(model, [cache.clone() for cache in caches])
    assert weights is not None and weights.takes_adapters
    slots, at = torch.arange(rows, device=DEVICE).int(), torch.from_numpy(lengths - 1).to(DEVICE).int()
    hidden = torch.full((rows, shape["hidden"]), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    ids, column = torch.full((rows,), -7, device=DEVICE).int(), torch.empty(rows, device=DEVICE, dtype=torch.int32)
    program = DecodeProgram(weights, rows, 2048, slots, at, adapters=column)
    step = step_of(table, slots, lengths)
    base = model(step, [cache.clone() for cache in caches])
    for chosen in (torch.randint(-1, 5, (rows,)), torch.full((rows,), 3), torch.full((rows,), -1)):
        column.copy_(chosen)
        for _ in range(2):
            program.run(table, token_ids=ids, hidden=hidden)
        view = RowView(column.clone(), ())
        adapted = replace(step, features=StepFeatures(adapters=(view, view)))
        usual = model(adapted, [c.clone() for c in caches])
        want = twin(adapted, [c.float() for c in caches])
        fused, general = (((x.float() - want).norm(dim=1) / want.norm(dim=1)).median() for x in (hidden, usual))
        assert fused < 1.2 * general + 1e-3
        changed = (column >= 0).cpu()
        assert bool(((want - base).norm(dim=1).cpu() > 0.2 * base.float().norm(dim=1).cpu())[changed].all())
        logits = twin.logits(want, view)
        found = logits.gather(1, ids[:, None].long())[:, 0]
        assert (logits.amax(-1) - found < 0.15 * logits.std()).all()


def _tensors(layers, path):
    stack = layers._stacks[path]
    return stack.a, stack.b, stack.ranks

"""`LLMEngine`: requests that come and go while it steps, its older and newer spellings, and what it refuses."""

from __future__ import annotations

import logging

import pytest

from tests.tiny_llama import MAX_MODEL_LEN, assert_idle
from vllm import EngineArgs, LLMEngine, PoolingParams, RequestOutput, SamplingParams
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.metrics import LoggingStatLogger
from vllm.engine.processed import RequestInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def engine(llm) -> LLMEngine:
    return llm.llm_engine


def finish(engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return done


def test_requests_join_while_others_run(llm, engine):
    expected = llm.generate(["def f(x):", "The", "it's"], GREEDY, use_tqdm=False)
    engine.add_request("x0", "def f(x):", GREEDY)
    seen = [engine.step() for _ in range(3)]
    assert [len(step[0].outputs[0].token_ids) for step in seen] == [1, 2, 3]
    engine.add_request("x1", inputs="The", params=GREEDY)
    engine.step()
    engine.add_request(request_id="x2", prompt={"prompt": "it's"}, params=GREEDY, arrival_time=5.0)
    assert engine.get_num_unfinished_requests() == 3
    assert engine.has_unfinished_requests_for_virtual_engine(0)
    done = finish(engine)
    assert [done[f"x{i}"].outputs[0].token_ids for i in range(3)] == [o.outputs[0].token_ids for o in expected]
    assert done["x2"].metrics.arrival_time == 5.0
    assert_idle(llm)


def test_deltas_make_the_whole(llm, engine):
    (whole,) = llm.generate("The", GREEDY, use_tqdm=False)
    params = GREEDY.clone()
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request("d", "The", params)
    text, tokens = "", []
    while engine.has_unfinished_requests():
        for output in engine.step():
            text += output.outputs[0].text
            tokens += output.outputs[0].token_ids
    assert (text, tokens) == (whole.outputs[0].text, whole.outputs[0].token_ids)


def test_abort(llm, engine):
    for i in range(4):
        engine.add_request(f"a{i}", "The", GREEDY)
    engine.step()
    engine.abort_request("a0")
    engine.abort_request(["a1", "unknown", "a3"])
    assert set(finish(engine)) == {"a2"}
    assert_idle(llm)


def test_ids_are_unique_among_running_requests(llm, engine):
    engine.add_request("same", "The", GREEDY)
    with pytest.raises(ValueError, match="^Request same already exists.$"):
        engine.add_request("same", "The", GREEDY)
    with pytest.raises(ValueError, match="^Request new already exists.$"):
        engine.add_requests([RequestInput("new", "The", GREEDY), RequestInput("new", "The", GREEDY)])
    finish(engine)
    engine.add_request("same", "The", GREEDY)
    finish(engine)
    assert_idle(llm)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("x", None, GREEDY), ValueError, "Both prompt and params must be provided"),
        (("x", "The", None), ValueError, "Both prompt and params must be provided"),
        ((5, "The", GREEDY), TypeError, "request_id must be a string, got int"),
        (("x", "The", {"temperature": 0}), TypeError, "params must be SamplingParams, got dict"),
        (("x", "The", PoolingParams()), ValueError, "pooling model"),
        (
            ("x", "The", GREEDY, None, LoRARequest("n", 1, "/p")),
            ValueError,
            "^Got lora_request .* but LoRA is not enabled!$",
        ),
        (
            ("x", "The", GREEDY, None, None, None, None, 3),
            ValueError,
            "^Got priority 3 but Priority scheduling is not enabled.$",
        ),
        (("x", "The", GREEDY, None, None, None, None, True), ValueError, "priority must be an int"),
        (
            ("x", "The", SamplingParams(use_beam_search=True, best_of=2, temperature=0, presence_penalty=1.0)),
            ValueError,
            "presence_penalty has no effect on beam search",
        ),
        (
            ("x", "The", SamplingParams(use_beam_search=True, best_of=2, temperature=0, max_tokens=None)),
            ValueError,
            "Beam search needs max_tokens",
        ),
    ],
)
def test_bad_requests_leave_nothing_behind(llm, engine, arguments, error, text):
    with pytest.raises(error, match=text):
        engine.add_request(*arguments)
    assert_idle(llm)


def test_older_beam_search_request_next_to_others(llm, engine):
    """What the guide's llm_engine_example.py asks for, all at once."""
    requests = [
        SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1),
        SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2),
        SamplingParams(n=2, best_of=5, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
        SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0),
    ]
    for i, params in enumerate(requests):
        engine.add_request(str(i), "it's", params)
        engine.step()
    done = finish(engine)
    assert [len(done[str(i)].outputs) for i in range(4)] == [1, 1, 2, 3]
    beams = done["3"].outputs
    scores = [b.cumulative_logprob / (len(b.token_ids) + 2) for b in beams]
    assert scores == sorted(scores, reverse=True)
    assert [b.index for b in beams] == [0, 1, 2]
    assert all(b.finish_reason in ("stop", "length") for b in beams)
    assert beams[0].logprobs is None
    assert_idle(llm)


def test_aborted_beam_search_frees_every_beam(llm, engine):
    engine.add_request("b", "The", SamplingParams(use_beam_search=True, best_of=4, temperature=0, max_tokens=12))
    for _ in range(4):
        engine.step()
    assert engine.core.stats().num_running > 1
    engine.abort_request("b")
    assert_idle(llm)


def test_a_request_says_how_it_is_tokenized(llm, engine):
    options = {"truncate_prompt_tokens": 2, "add_special_tokens": False}
    (expected,) = llm.generate("def f(x):", GREEDY, tokenization_kwargs=options, use_tqdm=False)
    engine.add_request("cut", "def f(x):", GREEDY, tokenization_kwargs=options)
    found = finish(engine)["cut"]
    assert found.prompt_token_ids == expected.prompt_token_ids and len(found.prompt_token_ids) == 2
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids and GREEDY.truncate_prompt_tokens is None
    with pytest.raises(ValueError, match="Unknown tokenization_kwargs: padding"):
        engine.add_request("odd", "x", GREEDY, tokenization_kwargs={"padding": True})


def test_configs_and_tokenizer(engine):
    assert isinstance(engine.get_vllm_config(), VllmConfig)
    assert isinstance(engine.get_model_config(), ModelConfig)
    assert engine.get_model_config().max_model_len == engine.get_scheduler_config().max_model_len == MAX_MODEL_LEN
    assert engine.get_cache_config().block_size == 8
    assert engine.get_parallel_config().world_size == 1
    assert engine.get_lora_config() is None
    assert engine.get_decoding_config() is engine.get_vllm_config().decoding_config
    for name in ("device", "load", "speculative", "observability", "prompt_adapter"):
        assert getattr(engine, f"get_{name}_config")() is getattr(engine.vllm_config, f"{name}_config")
    tokenizer = engine.get_tokenizer()
    assert tokenizer.eos_token == "<|eos|>"
    assert engine.get_tokenizer_group().get_lora_tokenizer(None) is tokenizer
    assert engine.get_tokenizer_group().encode("abc") == tokenizer.encode("abc")
    assert engine.is_tracing_enabled() is False
    engine.check_health()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda e: e.add_lora(LoRARequest("n", 1, "/p")), ValueError),
        (lambda e: e.remove_lora(1), ValueError),
        (lambda e: e.list_loras(), ValueError),
        (lambda e: e.pin_lora(1), ValueError),
        (lambda e: e.sleep(), NotImplementedError),
        (lambda e: e.wake_up(), NotImplementedError),
        (lambda e: e.start_profile(), RuntimeError),
        (lambda e: e.remove_logger("none"), KeyError),
    ],
)
def test_what_is_not_there_says_so(engine, call, error, monkeypatch):
    monkeypatch.delenv("VLLM_TORCH_PROFILER_DIR", raising=False)
    with pytest.raises(error):
        call(engine)


def test_statistics(model_folder, caplog):
    class Log:
        def __init__(self) -> None:
            self.seen: list = []

        def log(self, stats) -> None:
            self.seen.append(stats)

    log = Log()
    args = EngineArgs(str(model_folder), dtype="float32", max_model_len=64, num_gpu_blocks_override=40)
    engine = LLMEngine.from_engine_args(args, stat_loggers={"mine": log})
    engine.add_request("a", "The", GREEDY)
    finish(engine)
    assert sum(stats.generation_tokens for stats in log.seen) == 8
    with pytest.raises(KeyError):
        engine.add_logger("mine", log)
    engine.remove_logger("mine")
    with caplog.at_level(logging.INFO, logger="vllm"):
        logging.getLogger("vllm").addHandler(caplog.handler)
        engine.do_log_stats()
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "Avg generation throughput" in caplog.text
    engine.shutdown()
    engine.shutdown()


def test_the_older_way_to_make_an_engine(model_folder, caplog):
    """Parts of a configuration by keyword; a logger of a user's own class."""
    args = EngineArgs(str(model_folder), dtype="float32", max_model_len=64, num_gpu_blocks_override=40)
    config = args.create_engine_config()
    parts = {name: getattr(config, name) for name in ("model_config", "cache_config", "scheduler_config")}
    line = LoggingStatLogger(local_interval=0.0, vllm_config=config)
    logging.getLogger("vllm").addHandler(caplog.handler)
    engine = LLMEngine(**parts, device_config=config.device_config, lora_config=None, stat_loggers={"line": line})
    try:
        engine.add_request("a", "The", GREEDY)
        assert finish(engine)
        assert "KV cache usage" in caplog.text
        assert engine.model_executor.collective_rpc(lambda worker: worker.tp.rank) == [0]
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
        engine.shutdown()
    for wrong in ({}, {"model_confg": 1}, {"vllm_config": config, **parts}):
        with pytest.raises(TypeError, match="LLMEngine"):
            LLMEngine(**wrong)


def test_outputs_are_validated_when_asked(monkeypatch):
    assert LLMEngine.validate_outputs([1], RequestOutput) == [1]
    monkeypatch.setattr(LLMEngine, "DO_VALIDATE_OUTPUT", True)
    with pytest.raises(TypeError, match="Expected output of type"):
        LLMEngine.validate_outputs([1], RequestOutput)


@pytest.mark.parametrize("name", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_limits_of_a_servers_queue_are_refused_where_nobody_waits_in_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=5 bounds the queue of a server .* leave {name} unset"):
        LLMEngine.from_engine_args(EngineArgs("demo", device="cpu", **{name: 5}))

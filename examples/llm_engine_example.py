"""Drive the engine by hand: add a request, take a step, add the next one. Takes every engine argument as a flag."""

import argparse

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.utils import FlexibleArgumentParser

# Each request is sampled in another way, and all of them share the steps of one engine.
REQUESTS = [
    ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
    ("To be or not to be", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    (
        "What is the meaning of life?",
        SamplingParams(n=2, best_of=5, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
    ),
    (
        "It is only with the heart that one can see rightly",
        SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0),
    ),
]


def process(engine: LLMEngine) -> None:
    """Run all requests, printing each when it has finished."""
    waiting = list(enumerate(REQUESTS))
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, (prompt, params) = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
        for output in engine.step():
            if output.finished:
                print(output)


def parse_arguments() -> argparse.Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__))
    parser.set_defaults(model="demo")
    return parser.parse_args()


if __name__ == "__main__":
    process(LLMEngine.from_engine_args(EngineArgs.from_cli_args(parse_arguments())))

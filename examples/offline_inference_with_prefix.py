"""What a shared prefix costs, with and without prefix caching. Usage: offline_inference_with_prefix.py [MODEL]"""

import sys
from statistics import median
from time import perf_counter

from vllm import LLM, SamplingParams

PREFIX = (
    "You are an expert school principal, skilled in effectively managing faculty and staff. Draft 10-15 questions for "
    "a potential first grade Head Teacher for my K-12, all-girls', independent school that emphasizes community, "
    "joyful discovery, and life-long learning. The candidate is coming in for a first-round panel interview for a 8th "
    "grade Math teaching role. They have 5 years of previous teaching experience as an assistant teacher at a co-ed, "
    "public school with experience in middle school math teaching. Based on these information, fulfill the following "
    "paragraph: "
)
PROMPTS = [
    PREFIX + ending
    for ending in (
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    )
]
GREEDY = SamplingParams(temperature=0.0)
TIMES = 5  # a single run of some milliseconds says little


def timed(llm: LLM, title: str) -> tuple[list[str], float]:
    """The texts for all prompts, and the median of the seconds they take."""
    seconds = []
    for _ in range(TIMES):
        start = perf_counter()
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        seconds.append(perf_counter() - start)
    print(title)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
    print("-" * 80)
    return [output.outputs[0].text for output in outputs], median(seconds)


def main(model: str) -> None:
    with LLM(model=model, enable_prefix_caching=False, gpu_memory_utilization=0.4) as llm:
        llm.generate("Warm up.", GREEDY, use_tqdm=False)
        regular, regular_seconds = timed(llm, "Results without `enable_prefix_caching`")
    with LLM(model=model, enable_prefix_caching=True, gpu_memory_utilization=0.4) as llm:
        # The first prompt leaves the prefix in the cache, for the others to find.
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        cached, cached_seconds = timed(llm, "Results with `enable_prefix_caching`")
    print(f"Generated answers are the same: {regular == cached}")
    print(f"Speed up of cached generation compared to the regular is: {regular_seconds / cached_seconds:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")

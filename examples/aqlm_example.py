"""Runs a model in AQLM, about two bits for a weight.

python examples/aqlm_example.py --model ISTA-DASLab/Llama-2-7b-AQLM-2Bit-1x16-hf
"""

from vllm import LLM, SamplingParams
from vllm.utils import FlexibleArgumentParser

KNOWN = (
    "ISTA-DASLab/Llama-2-7b-AQLM-2Bit-1x16-hf",
    "ISTA-DASLab/Llama-2-7b-AQLM-2Bit-2x8-hf",
    "BlackSamorez/TinyLlama-1_1B-Chat-v1_0-AQLM-2Bit-1x16-hf",
)


def main() -> None:
    parser = FlexibleArgumentParser(description="AQLM")
    parser.add_argument("--model", "-m", help="folder or name of a model")
    parser.add_argument("--choice", "-c", type=int, default=0, choices=range(len(KNOWN)), help="a known model instead")
    parser.add_argument("--tensor-parallel-size", "-t", type=int, default=1)
    parser.add_argument("--prompt", default="Hello my name is")
    args = parser.parse_args()
    llm = LLM(args.model or KNOWN[args.choice], tensor_parallel_size=args.tensor_parallel_size)
    (output,) = llm.generate(args.prompt, SamplingParams(temperature=0, max_tokens=32))
    print(f"Prompt: {args.prompt}\nGenerated text: {output.outputs[0].text}")


if __name__ == "__main__":
    main()

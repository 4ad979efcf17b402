"""Save each rank's weights as they are kept in memory, so that a large model on many ranks starts faster.

    python examples/save_sharded_state.py --model /models/llama --tensor-parallel-size 8 --output /models/llama-tp8

Afterwards:

    LLM("/models/llama-tp8", load_format="sharded_state", tensor_parallel_size=8)
"""

import dataclasses
from pathlib import Path

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser


def main() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__.splitlines()[0]))
    parser.add_argument("--output", "-o", required=True, help="folder of the new model")
    parser.add_argument("--file-pattern", help="name of the files, with {rank} and {part} in it")
    parser.add_argument("--max-file-size", type=int, default=5 * 1024**3, help="bytes of a file")
    args = parser.parse_args()
    engine_args = EngineArgs.from_cli_args(args)
    if engine_args.enable_lora:
        parser.error("weights cannot be saved with --enable-lora")
    if not Path(engine_args.model).is_dir() and engine_args.model != "demo":
        parser.error("--model must be a folder of this machine")
    llm = LLM(**{field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)})
    llm.save_sharded_state(args.output, pattern=args.file_pattern, max_size=args.max_file_size)
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()

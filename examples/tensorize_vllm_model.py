"""Write a model in CoreWeave's tensorizer format, or try one (`pip install '.[tensorizer]'`).

    python examples/tensorize_vllm_model.py --model facebook/opt-125m serialize \
        --serialized-directory s3://my-bucket --suffix v1
    python examples/tensorize_vllm_model.py --model facebook/opt-125m deserialize \
        --path-to-tensors s3://my-bucket/vllm/facebook/opt-125m/v1/model.tensors

A folder will do in place of s3://my-bucket. With --keyfile the weights are encrypted, with a new key that is saved
there. Several ranks write a file each: model-rank-%03d.tensors.
"""

import dataclasses
import json
import uuid

from vllm import LLM, EngineArgs, SamplingParams
from vllm.model_executor.model_loader.tensorizer import TensorizerArgs, TensorizerConfig, tensorize_vllm_model
from vllm.utils import FlexibleArgumentParser


def main() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__.splitlines()[0]))
    commands = parser.add_subparsers(dest="command", required=True)
    serialize = commands.add_parser("serialize", help="write the model")
    serialize.add_argument("--serialized-directory", required=True, help="folder or s3:// address")
    serialize.add_argument("--suffix", help="last part of the path, random by default")
    serialize.add_argument("--keyfile", help="encrypt with a new key, which is saved here")
    deserialize = commands.add_parser("deserialize", help="load the model and complete a prompt")
    deserialize.add_argument("--path-to-tensors", required=True, help="file, http(s):// or s3:// address")
    deserialize.add_argument("--keyfile", help="key of encrypted weights")
    TensorizerArgs.add_cli_args(deserialize)
    args = parser.parse_args()
    engine_args = EngineArgs.from_cli_args(args)
    if args.command == "serialize":
        base = f"{args.serialized_directory.rstrip('/')}/vllm/{engine_args.model.strip('/')}"
        name = "model-rank-%03d.tensors" if engine_args.tensor_parallel_size > 1 else "model.tensors"
        uri = f"{base}/{args.suffix or uuid.uuid4().hex}/{name}"
        tensorize_vllm_model(engine_args, TensorizerConfig(tensorizer_uri=uri, encryption_keyfile=args.keyfile))
        print(f"saved {uri}")
        return
    settings = TensorizerArgs.from_cli_args(args) if args.tensorizer_uri else TensorizerConfig(args.path_to_tensors)
    settings.tensorizer_uri = args.path_to_tensors
    settings.encryption_keyfile = settings.encryption_keyfile or args.keyfile
    given = {field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)}
    given |= {"load_format": "tensorizer", "model_loader_extra_config": settings}
    llm = LLM(**given)
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    print(json.dumps(output[0].outputs[0].text))


if __name__ == "__main__":
    main()

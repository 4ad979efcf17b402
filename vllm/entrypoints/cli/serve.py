"""`vllm serve [MODEL] [flags]`."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_MODEL = "demo"


def main(argv: Sequence[str]) -> int:
    """Serve; `argv[0]` is the command's name."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog="vllm serve",
        description="Serve a model over an OpenAI-compatible HTTP API.",
        usage="vllm serve [MODEL] [flags]",
    )
    parser.add_argument(
        "model_tag", nargs="?", default=None, metavar="MODEL", help="Model name or folder. Default: demo."
    )
    parser = make_arg_parser(parser)
    parser.set_defaults(model=None)
    args = parser.parse_args(list(argv[1:]))
    twice = args.model_tag is not None and any(word.partition("=")[0] == "--model" for word in argv)
    if twice and args.model != args.model_tag:  # a config file may name another: the command line wins
        parser.error(f"two models are given: {args.model_tag!r} and --model {args.model!r}")
    args.model = args.model_tag or args.model or DEFAULT_MODEL
    from vllm.entrypoints.openai.api_server import serve

    return serve(args)

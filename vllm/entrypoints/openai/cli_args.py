"""Flags of the server; those of the engine come from `AsyncEngineArgs`."""

from __future__ import annotations

import argparse
import json
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.chat_template import RESERVED_VARIABLES
from vllm.entrypoints.openai.adapters import parse_lora_modules, parse_prompt_adapters
from vllm.tool_parsers.registry import FORMATS
from vllm.utils.argparse import FlexibleArgumentParser

if TYPE_CHECKING:
    from vllm.entrypoints.openai.message import ParsingSettings

LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "trace")


def string_list(text: str) -> list[str]:
    """A JSON list of strings. Raises argparse.ArgumentTypeError, which says what was expected."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise argparse.ArgumentTypeError(f"""expected a JSON list of strings such as '["*"]', got {text!r}""")
    return found


def template_variables(text: str) -> dict[str, Any]:
    """Variables of chat templates, as a JSON object. Raises argparse.ArgumentTypeError."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"""expected a JSON object such as '{{"enable_thinking": false}}', got {text!r}"""
        )
    if reserved := sorted(RESERVED_VARIABLES.intersection(found)):
        raise argparse.ArgumentTypeError(f"{reserved[0]} is no variable of the template's own")
    return found


def add_parsing_flags(add: Callable[..., Any]) -> None:
    """The flags that say how answers are read, with the `add_argument` of a parser."""
    add(
        "--enable-auto-tool-choice",
        action="store_true",
        help="Let the model decide whether to call a tool. Needs --tool-call-parser.",
    )
    add(
        "--tool-call-parser",
        default=None,
        help="How the model writes calls: " + ", ".join(FORMATS) + ", or a name that the plug-in has registered.",
    )
    add(
        "--tool-parser-plugin",
        metavar="FILE",
        default=None,
        help="Python file that registers a tool parser of your own. It is run in the server's process.",
    )
    add(
        "--expand-tools-even-if-tool-choice-none",
        action="store_true",
        help='Changes nothing: with tool_choice "none" the prompt tells of the tools in any case.',
    )


def parsing_of(args: argparse.Namespace) -> ParsingSettings:
    """How answers are read. Raises TypeError or ValueError for flags that do not go together, parsers that there are
    not, and plug-ins that cannot be loaded.
    """
    from vllm.entrypoints.openai.message import ParsingSettings
    from vllm.tool_parsers.plugin import ToolParserManager

    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise TypeError("Error: --enable-auto-tool-choice requires --tool-call-parser")
    if args.enable_reasoning and not args.reasoning_parser:
        raise TypeError("Error: --enable-reasoning requires --reasoning-parser")
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    return ParsingSettings(args.tool_call_parser, args.enable_auto_tool_choice, args.reasoning_parser or None)


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add every flag of `vllm serve` to `parser` and return it."""
    group = parser.add_argument_group("server")
    add = group.add_argument
    add(
        "--config",
        metavar="FILE",
        default=None,
        help="YAML file with long names of flags and their values. The command line wins over the file, the file over "
        "the defaults.",
    )
    add(
        "--host",
        default=None,
        help="Address to listen on; 127.0.0.1 for this machine only. Default: all interfaces.",
    )
    add("--port", type=int, default=8000, help="Port to listen on; 0: any free one. Default: 8000.")
    add("--uvicorn-log-level", choices=LOG_LEVELS, default="info", help="Log level of the HTTP server. Default: info.")
    add("--disable-uvicorn-access-log", action="store_true", help="Do not log each HTTP request.")
    add("--allow-credentials", action="store_true", help="CORS: allow credentials.")
    add(
        "--allowed-origins",
        type=string_list,
        default=None,
        help='CORS: allowed origins, a JSON list. Default: ["*"]; none without a key on 127.0.0.1, where any page that '
        "is open in a browser of this machine could use the server.",
    )
    add(
        "--allowed-methods", type=string_list, default=["*"], help='CORS: allowed methods, a JSON list. Default: ["*"].'
    )
    add(
        "--allowed-headers", type=string_list, default=["*"], help='CORS: allowed headers, a JSON list. Default: ["*"].'
    )
    add(
        "--api-key",
        action="append",
        default=None,
        help="Key that clients must present as bearer token; may be given several times. Also from VLLM_API_KEY.",
    )
    add("--protect-metrics", action="store_true", help="Ask for the key at /metrics, too.")
    add(
        "--lora-modules",
        nargs="+",
        default=None,
        metavar="NAME=PATH",
        help="LoRA adapters to serve as models: name=path, or JSON with name, path and base_model_name.",
    )
    add(
        "--lora-root",
        action="append",
        default=[],
        metavar="FOLDER",
        help="Load adapters at run time from inside this folder only; repeatable. Default: from anywhere.",
    )
    add(
        "--prompt-adapters",
        nargs="+",
        default=None,
        metavar="NAME=PATH",
        help="Prompt adapters to serve as models: name=path, or JSON with name and path.",
    )
    add(
        "--chat-template",
        default=None,
        help="Chat template: a file, the template itself, or the name of one of the model's. Default: the model's own.",
    )
    add(
        "--chat-template-content-format",
        choices=("auto", "string", "openai"),
        default="auto",
        help="Whether the template gets message contents as strings or as lists of parts. Default: auto, which looks "
        "at the template.",
    )
    add(
        "--trust-request-chat-template",
        action="store_true",
        help="Allow chat_template in requests. Templates run in a sandbox.",
    )
    add(
        "--default-chat-template-kwargs",
        type=template_variables,
        default={},
        metavar="JSON",
        help="""Variables of the chat template, such as '{"enable_thinking": false}', unless a request sets them.""",
    )
    add("--response-role", default="assistant", help="Role of the answers. Default: assistant.")
    add("--ssl-keyfile", default=None, help="TLS key file.")
    add("--ssl-certfile", default=None, help="TLS certificate file.")
    add("--ssl-ca-certs", default=None, help="File of CA certificates, for certificates of clients.")
    add(
        "--ssl-cert-reqs",
        type=int,
        default=int(ssl.CERT_NONE),
        help="Client certificates: 0 not asked for, 1 checked if there is one, 2 required. Default: 0.",
    )
    add("--root-path", default=None, help="Path prefix when a proxy routes by path.")
    add(
        "--middleware",
        action="append",
        default=[],
        help="Import path of an ASGI middleware class or of a function for @app.middleware('http'); repeatable.",
    )
    add(
        "--return-tokens-as-token-ids",
        action="store_true",
        help="Show tokens of log probabilities as token_id:<id>, so that all can be told apart.",
    )
    add(
        "--disable-frontend-multiprocessing",
        action="store_true",
        help="Run the engine core in the server's process instead of one of its own.",
    )
    add(
        "--api-server-count",
        "-asc",
        type=int,
        default=1,
        metavar="N",
        help="Processes that speak HTTP, in front of one engine core: for more tokens per second than one of them can "
        "write. Default: 1.",
    )
    add_parsing_flags(add)
    add(
        "--max-log-len",
        type=int,
        default=None,
        help="Log this many characters, or token ids, of each prompt. Default: only how many tokens it has.",
    )
    add("--enable-request-id-headers", action="store_true", help="Send X-Request-Id back.")
    add("--enable-tokenizer-info-endpoint", action="store_true", help="Serve GET /tokenizer_info.")
    add("--enable-server-load-tracking", action="store_true", help="Count requests in progress for GET /load.")
    add("--enable-prompt-tokens-details", action="store_true", help="Report cached prompt tokens in the usage.")
    add("--disable-fastapi-docs", action="store_true", help="Do not serve the OpenAPI schema at /openapi.json.")
    add("--disable-web-ui", action="store_true", help="Do not serve the page at /.")
    add("--max-body-size", type=int, default=16 * 1024 * 1024, help="Largest request body, in bytes. Default: 16 MiB.")
    add(
        "--request-timeout", type=float, default=None, help="Seconds after which a request is ended. Default: no limit."
    )
    add(
        "--header-timeout",
        type=float,
        default=10.0,
        help="Seconds within which a request's headers must arrive. Default: 10.",
    )
    add(
        "--body-timeout",
        type=float,
        default=30.0,
        help="Seconds within which a request's body must arrive. Default: 30.",
    )
    add(
        "--write-timeout",
        type=float,
        default=30.0,
        help="Seconds a client may take to read what is sent before it is cut. Default: 30.",
    )
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="Seconds that running requests get to finish at shutdown. Default: 30.",
    )
    add(
        "--max-connections",
        type=int,
        default=4096,
        help="Connections served at once; more get a 503, unless some have no request. Default: 4096.",
    )
    add("--explain", action="store_true", help="Print every derived setting and why, then exit.")
    return AsyncEngineArgs.add_cli_args(parser)


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Raise for combinations that cannot work, and for features of later versions."""
    if args.lora_modules and not args.enable_lora:
        raise ValueError("--lora-modules needs --enable-lora.")
    if args.lora_root and not args.enable_lora:
        raise ValueError("--lora-root needs --enable-lora.")
    for adapter in parse_lora_modules(args.lora_modules):
        if adapter.lora_name in (args.served_model_name or [args.model]):
            raise ValueError(f"--lora-modules: the name {adapter.lora_name!r} stands for the base model.")
    if args.prompt_adapters and not args.enable_prompt_adapter:
        raise ValueError("--prompt-adapters needs --enable-prompt-adapter.")
    parse_prompt_adapters(args.prompt_adapters)
    if bool(args.ssl_keyfile) != bool(args.ssl_certfile):
        raise ValueError("TLS needs both --ssl-keyfile and --ssl-certfile.")
    if args.ssl_ca_certs and not args.ssl_certfile:
        raise ValueError("--ssl-ca-certs is for TLS, which needs --ssl-keyfile and --ssl-certfile.")
    if args.ssl_cert_reqs not in tuple(ssl.VerifyMode):
        raise ValueError(f"--ssl-cert-reqs must be 0 (none), 1 (optional) or 2 (required), got {args.ssl_cert_reqs}.")
    if args.ssl_cert_reqs and not args.ssl_ca_certs:
        raise ValueError("--ssl-cert-reqs needs --ssl-ca-certs, the authorities whose client certificates count.")
    if any(not key.strip() or key != key.strip() for key in args.api_key or ()):
        raise ValueError("--api-key must not be empty or have spaces around it: is the variable with the key not set?")
    if args.root_path and not args.root_path.startswith("/"):
        raise ValueError(f"--root-path must begin with '/', got {args.root_path!r}.")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, got {args.port}.")
    if args.max_log_len is not None and args.max_log_len < 0:
        raise ValueError(f"--max-log-len must not be negative, got {args.max_log_len}.")
    if not args.shutdown_timeout >= 0:
        raise ValueError(f"--shutdown-timeout must be 0 or more seconds, got {args.shutdown_timeout}.")
    if args.request_timeout is not None and not args.request_timeout > 0:
        raise ValueError(f"--request-timeout must be positive, got {args.request_timeout}; leave it out for no limit.")
    for name in ("max_body_size", "max_connections", "write_timeout", "header_timeout", "body_timeout"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}.")

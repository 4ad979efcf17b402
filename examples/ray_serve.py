"""Servers that Ray Serve starts and ends as the load asks for, behind one address, with the OpenAI routes.

    pip install '.[ray]' 'ray[serve]'
    python examples/ray_serve.py --most 4 -- --model demo --max-model-len 512      # behind "--": flags of `vllm serve`
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"model": "demo", "prompt": "Hello, my name is", "max_tokens": 16}'

Each replica is an actor with a whole engine on GPUs of its own (on a CPU cluster: on one CPU). Serve sends a request
where the fewest are in progress, and adds a replica while each has more than `--requests` of them. In a cluster's
configuration file, `import_path: examples.ray_serve:build` with the same settings under `args` does the same.
"""

import argparse
import sys
import time

from fastapi import FastAPI, Request
from ray import serve
from starlette.responses import Response

outer = FastAPI()


class PassedOn(Response):
    """Lets the engine's own application answer, streams included."""

    def __init__(self, app):
        super().__init__()
        self.app = app

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)


@serve.deployment
@serve.ingress(outer)
class Server:
    """One replica. flags: of `vllm serve`, as a list."""

    def __init__(self, flags):
        from vllm.entrypoints.openai.api_server import build_app, make_engine
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
        validate_parsed_serve_args(args)
        self.engine = make_engine(args)
        self.inner = build_app(args, self.engine)

    @outer.api_route("/{path:path}", methods=["GET", "POST", "DELETE", "OPTIONS"], include_in_schema=False)
    async def answer(self, request: Request):
        return PassedOn(self.inner)

    def check_health(self):
        """Serve asks now and then, and starts another replica in place of one that raises."""
        if self.engine.errored:
            raise self.engine.dead_error

    def __del__(self):
        if hasattr(self, "engine"):
            self.engine.shutdown_background_loop()


def build(settings):
    """The application. settings: flags, least, most, requests, gpus, as in `main`."""
    gpus = float(settings.get("gpus", 0))
    return Server.options(
        ray_actor_options={"num_gpus": gpus} if gpus else {"num_cpus": 1},
        max_ongoing_requests=1000,
        health_check_period_s=1,  # after three that fail Serve replaces the replica
        graceful_shutdown_wait_loop_s=0.5,  # one whose engine has died has no requests that it must wait for
        autoscaling_config={
            "min_replicas": int(settings.get("least", 1)),
            "max_replicas": int(settings.get("most", 2)),
            "target_ongoing_requests": float(settings.get("requests", 64)),
            "upscale_delay_s": float(settings.get("upscale_delay", 10)),
            "downscale_delay_s": float(settings.get("downscale_delay", 300)),
        },
    ).bind(settings["flags"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=int, default=1, help="replicas that are always there")
    parser.add_argument("--most", type=int, default=2, help="replicas at the most")
    parser.add_argument("--requests", type=float, default=64, help="in progress on a replica before there are more")
    parser.add_argument("--upscale-delay", type=float, default=10, help="seconds of load before there are more")
    parser.add_argument("--downscale-delay", type=float, default=300, help="seconds of less load before one goes")
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(build({**vars(args), "flags": flags or ["--model", "demo"]}), route_prefix="/")
    print(f"Serving on http://{args.host}:{args.port}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()

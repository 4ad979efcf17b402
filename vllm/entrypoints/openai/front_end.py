"""A further front end of a server: `python -m vllm.entrypoints.openai.front_end FD PARENT CORE LISTENER TALLY`, started
by the first (`front_ends.FirstOfSeveral`). The first frame it reads has the flags and the resolved configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import signal
import socket
import sys
from typing import Any

from vllm.config import VllmConfig
from vllm.engine import admission
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.engine.core_client import CorePeer, patience
from vllm.engine.tally import Tally
from vllm.entrypoints.openai.api_server import build_app, prepare_process, serve_engine
from vllm.entrypoints.openai.front_ends import Further
from vllm.ipc.child import end_with_parent
from vllm.ipc.frames import FrameReader, receive_frames
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_general_plugins
from vllm.utils.event_loop import run_event_loop

logger = init_logger(__name__)


async def _serve(
    document: dict[str, Any], control: socket.socket, end: socket.socket, listener: socket.socket, tally: Tally
) -> int:
    args = argparse.Namespace(**document["args"])
    config = VllmConfig.from_dict(document["config"])
    core = CorePeer(end, *patience())

    def make() -> AsyncLLMEngine:
        return AsyncLLMEngine(config, core=core, log_requests=False, log_stats=False, usage_context=None)

    engine = await asyncio.get_running_loop().run_in_executor(None, make)
    engine.count_with(tally)
    front_ends = Further(control, args.api_server_count)
    return await serve_engine(args, engine, listener, front_ends, build_app)


def main(argv: list[str]) -> int:
    """Entry of the process; returns its exit status. argv: descriptors, and the pid of the process that started it."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these are for the first, which then tells us
    control = socket.socket(fileno=int(argv[0]))
    end, listener = (socket.socket(fileno=int(number)) for number in argv[2:4])
    bodies = receive_frames(control, FrameReader())
    end_with_parent(control, int(argv[1]), lambda: os._exit(1))
    if not bodies:
        return 1
    document = json.loads(bodies[0])
    with os.fdopen(int(argv[4]), "r+b", buffering=0) as numbers:
        tally = Tally(numbers, document["index"], admission.COLUMNS)
    load_general_plugins()
    ModelRegistry.restore(document["registered_models"])
    prepare_process()
    try:
        return run_event_loop(_serve(document, control, end, listener, tally))
    except RuntimeError as error:  # of the core, which says more itself
        logger.error("Front end %d: %s", document["index"], error)
        return 1


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

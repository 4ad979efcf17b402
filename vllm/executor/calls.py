"""What `collective_rpc` calls, and the class of workers that it calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from vllm.distributed.parallel_state import use_tensor_parallel, use_world
from vllm.ipc import functions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.worker.worker import Worker


def callable_of(worker: Worker, method: Any) -> Callable[..., Any]:
    """What `collective_rpc` is to call: the worker's method of that name, or a function that is given the worker.

    While it runs, `vllm.distributed` says which rank the worker is.
    method: a name, a function, or a function as `ipc.functions` sends it. Raises ValueError if the worker has no such
    method that may be called from outside.
    """
    method = functions.received(method)
    if not isinstance(method, str):
        return partial(_call, worker, partial(method, worker))
    found = None
    if not method.startswith("_"):
        found = next((vars(kind)[method] for kind in type(worker).__mro__[:-1] if method in vars(kind)), None)
    if not callable(found):
        raise ValueError(f"The worker has no public method {method!r}.")
    return partial(_call, worker, found.__get__(worker))


def _call(worker: Worker, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    ranks = worker.ranks
    with use_tensor_parallel(ranks.tp), use_world(ranks.place(*worker.config.parallel_config.copy)):
        return function(*args, **kwargs)


class Caller:
    """Makes calls of this process's worker, and gives up those that take too long."""

    def __init__(self) -> None:
        self._late: Thread | None = None

    def wait(self) -> None:
        """Wait until the worker is free, also of a call that was given up."""
        if self._late is not None:
            self._late.join()
            self._late = None

    def call(self, worker: Worker, call: Callable[[], Any], timeout: float | None) -> Any:
        """What the call returns. Raises TimeoutError after so many seconds; the call goes on."""
        if timeout is None:
            return call()
        done: Future[Any] = Future()

        def run() -> None:
            try:
                if worker.device.type == "cuda":
                    torch.cuda.set_device(worker.device)  # each thread has one of its own
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        thread = Thread(target=run, name="collective-rpc", daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            self._late = thread
            raise TimeoutError(f"The worker has not answered within {timeout:g} s.")
        return done.result()


def worker_class(config: VllmConfig) -> type[Worker]:
    """The class of workers: `worker_cls`, with `worker_extension_cls` mixed in.

    Raises ValueError if one of them cannot be imported or is no such class.
    """
    from vllm.worker.worker import Worker

    parallel = config.parallel_config
    found: Any = Worker if parallel.worker_cls == "auto" else functions.named(parallel.worker_cls, "worker_cls")
    if not isinstance(found, type) or not issubclass(found, Worker):
        raise ValueError(f"worker_cls must name a subclass of vllm.worker.worker.Worker, got {parallel.worker_cls!r}.")
    if not parallel.worker_extension_cls:
        return found
    extension: Any = functions.named(parallel.worker_extension_cls, "worker_extension_cls")
    if not isinstance(extension, type):
        raise ValueError(f"worker_extension_cls must name a class, got {parallel.worker_extension_cls!r}.")
    taken = sorted(name for name in vars(extension) if not name.startswith("__") and hasattr(found, name))
    if taken:
        raise ValueError(f"{parallel.worker_extension_cls} has names that the worker has too: {', '.join(taken)}.")
    return type(found.__name__, (found, extension), {})

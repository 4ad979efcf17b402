"""Fast CPU kernels: which ones this machine gets, and their registration."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Use the native library if this installation has a build for this processor, else what plain torch offers."""
    from vllm.ops.cpu import library, onednn

    path = library.find()
    if path is not None:
        from vllm.ops.cpu.native import NativeKernels

        try:
            NativeKernels(library.load(path)).register()
            logger.info("CPU kernels: %s", path.name)
            return
        except (OSError, RuntimeError) as error:
            logger.warning("The native CPU library was not loaded: %s", error)
    logger.warning(
        "CPU kernels: plain torch, since there is no native library for this processor; decoding is 2-3x slower. "
        "With a C++ compiler, build it from a source checkout: python tools/build_native.py"
    )
    onednn.register()

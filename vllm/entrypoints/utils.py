"""Public path of `with_cancellation`; it lives in `serve/utils/api_utils.py`."""

from vllm.entrypoints.serve.utils.api_utils import with_cancellation

__all__ = ["with_cancellation"]

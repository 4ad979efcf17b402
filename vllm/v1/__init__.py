"""Public paths of the newer API age; everything lives under `vllm`."""

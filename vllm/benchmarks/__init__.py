"""Load generators and offline measurements behind `vllm bench`."""

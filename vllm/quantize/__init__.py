"""`vllm quantize`: makes quantized checkpoints in the public formats."""

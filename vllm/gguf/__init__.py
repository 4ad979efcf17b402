"""GGUF: one file that holds weights, configuration and tokenizer of a model. Nothing here imports torch."""

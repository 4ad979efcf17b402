"""LlamaIndex over the server: `vllm serve`, then `pip install llama-index-llms-openai-like` and run this."""

try:
    from llama_index.llms.openai_like import OpenAILike
except ModuleNotFoundError:
    raise SystemExit("This example needs a client: pip install llama-index-llms-openai-like") from None

model = OpenAILike(
    api_base="http://localhost:8000/v1", api_key="EMPTY", model="demo", is_chat_model=True, temperature=0, max_tokens=32
)
print(model.complete("What is the capital of France?"))

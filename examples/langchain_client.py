"""LangChain over the server: `vllm serve`, then `pip install langchain-openai` and run this."""

try:
    from langchain_openai import ChatOpenAI
except ModuleNotFoundError:
    raise SystemExit("This example needs a client: pip install langchain-openai") from None

model = ChatOpenAI(base_url="http://localhost:8000/v1", api_key="EMPTY", model="demo", temperature=0)
print(model.invoke("What is the capital of France?").content)

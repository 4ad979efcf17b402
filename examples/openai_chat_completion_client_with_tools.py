"""A chat in which the model calls a tool, whole and streamed, and answers with its result.

Start a server that knows how the model writes calls, for example the demo model:

    vllm serve --enable-auto-tool-choice --tool-call-parser hermes

or a model of your own with a template for tools:

    vllm serve NousResearch/Hermes-3-Llama-3.1-8B --chat-template examples/tool_chat_template_hermes.jinja \
        --enable-auto-tool-choice --tool-call-parser hermes
"""

import argparse
import json

try:
    from openai import OpenAI
except ModuleNotFoundError:
    raise SystemExit("This example needs a client: pip install openai") from None

parser = argparse.ArgumentParser(description="Ask for the weather, call the function that the model names, answer.")
parser.add_argument("--base-url", default="http://localhost:8000/v1")
parser.add_argument("--api-key", default="EMPTY", help="Any text, if the server has no key.")
args = parser.parse_args()

client = OpenAI(api_key=args.api_key, base_url=args.base_url)
model = client.models.list().data[0].id

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city to find the weather for, e.g. 'San Francisco'"},
                    "state": {
                        "type": "string",
                        "description": "the two-letter abbreviation for the state that the city is in, e.g. 'CA'",
                    },
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "state", "unit"],
            },
        },
    }
]
messages = [
    {"role": "user", "content": "Hi! How are you doing today?"},
    {"role": "assistant", "content": "I'm doing well! How can I help you?"},
    {"role": "user", "content": "Can you tell me what the temperature will be in Dallas, in fahrenheit?"},
]


def get_current_weather(city: str, state: str, unit: str = "fahrenheit") -> str:
    """A stand-in for a service that knows."""
    return json.dumps({"temperature": 85, "condition": "sunny"})


functions = {"get_current_weather": get_current_weather}

completion = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0)
print("Chat completion results:")
print(completion)

# The same as a stream: id and name come first, then pieces of the arguments.
names, arguments = {}, {}
stream = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0, stream=True)
for chunk in stream:
    for call in chunk.choices[0].delta.tool_calls or []:
        if call.id:
            print(f"streamed tool call id: {call.id}")
        if call.function.name:
            print(f"streamed tool call name: {call.function.name}")
            names[call.index] = call.function.name
        arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
for index, text in arguments.items():
    print(f"streamed tool call arguments: {names[index]} {text}")

calls = completion.choices[0].message.tool_calls
messages.append({"role": "assistant", "tool_calls": calls})
for call in calls:
    result = functions[call.function.name](**json.loads(call.function.arguments))
    print(f"result: {result}")
    messages.append({"role": "tool", "content": result, "tool_call_id": call.id, "name": call.function.name})

answer = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0)
print("Answer with the result:")
print(answer.choices[0].message.content)

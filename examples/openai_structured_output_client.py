"""Structured output with the official client: start `vllm serve` first."""

import argparse
from enum import Enum

try:
    from openai import BadRequestError, OpenAI
except ModuleNotFoundError:
    raise SystemExit("This example needs a client: pip install openai") from None
from pydantic import BaseModel

parser = argparse.ArgumentParser(description="Ask for a choice, a pattern, JSON of a schema, and a text of a grammar.")
parser.add_argument("--base-url", default="http://localhost:8000/v1")
parser.add_argument("--api-key", default="EMPTY", help="Any text, if the server has no key.")
args = parser.parse_args()

client = OpenAI(api_key=args.api_key, base_url=args.base_url)
model = client.models.list().data[0].id


class CarType(str, Enum):
    sedan = "sedan"
    suv = "SUV"
    truck = "Truck"
    coupe = "Coupe"


class CarDescription(BaseModel):
    brand: str
    model: str
    car_type: CarType


def ask(question: str, **form: object) -> str:
    completion = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=200, **form
    )
    return completion.choices[0].message.content


# One of several texts.
print(
    "choice:",
    ask("Classify this sentiment: vLLM is wonderful!", extra_body={"guided_choice": ["positive", "negative"]}),
)

# A pattern. What a prompt asks for besides, such as a stop text, works as always.
question = "Generate an email address for Alan Turing, who works in Enigma. End in .com and new line."
pattern = r"[a-z]{1,12}\.[a-z]{1,12}@[a-z]{1,12}\.com\n"
print("regex:", ask(question, extra_body={"guided_regex": pattern, "stop": ["\n"]}))

# A JSON schema, in the engine's own spelling and in OpenAI's.
question = "Generate a JSON with the brand, model and car_type of the most iconic car from the 90's"
print("json:", ask(question, extra_body={"guided_json": CarDescription.model_json_schema()}))
parsed = client.chat.completions.parse(
    model=model, messages=[{"role": "user", "content": question}], response_format=CarDescription, max_tokens=200
)
print("parsed:", repr(parsed.choices[0].message.parsed))

# A grammar.
simple_sql = """
root ::= "SELECT " column " FROM " table " WHERE " column " = " number
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
number ::= [0-9]+
"""
question = "Generate an SQL query to show the 'col_1' from the 'table_1' where it is equal to '1'"
print("grammar:", ask(question, extra_body={"guided_grammar": simple_sql}))

# What cannot be done is said.
try:
    ask("A list without repetition", extra_body={"guided_json": {"type": "array", "uniqueItems": True}})
except BadRequestError as error:
    print("refused:", error.body["message"])

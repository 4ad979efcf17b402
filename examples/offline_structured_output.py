"""Answers that have a form: one of several texts, a pattern, a JSON schema, a grammar."""

from enum import Enum

from pydantic import BaseModel

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams


class CarType(str, Enum):
    sedan = "sedan"
    suv = "SUV"
    truck = "Truck"
    coupe = "Coupe"


class CarDescription(BaseModel):
    brand: str
    model: str
    car_type: CarType


SIMPLE_SQL = """
root ::= "SELECT " column " FROM " table " WHERE " column " = " number
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
number ::= [0-9]+
"""

FORMS = {
    "Classify this sentiment: vLLM is wonderful!": GuidedDecodingParams(choice=["Positive", "Negative"]),
    "Generate an email address for Alan Turing, who works in Enigma. End in .com.": GuidedDecodingParams(
        regex=r"[a-z]{1,12}\.[a-z]{1,12}@[a-z]{1,12}\.com"
    ),
    "Generate a JSON with the brand, model and car_type of the most iconic car from the 90's": GuidedDecodingParams(
        json=CarDescription
    ),
    "Generate an SQL query to show the 'col_1' from the 'table_1' where it is equal to '1'": GuidedDecodingParams(
        grammar=SIMPLE_SQL
    ),
}

if __name__ == "__main__":
    llm = LLM(model="demo", max_model_len=512)
    params = [SamplingParams(max_tokens=100, guided_decoding=form) for form in FORMS.values()]
    for output in llm.generate(list(FORMS), params):
        print(f"{output.prompt}\n    {output.outputs[0].text}")

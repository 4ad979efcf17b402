"""Answers with a fixed form: JSON for a schema, labels, extraction from a text or a table, e-mail addresses, SQL."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tools.demo_model.essays import LAST_NAMES, first_name
from tools.demo_model.stories import ANIMAL_NAMES, FOODS
from tools.demo_model.text import Document, Exchange, a_or_an, pairs, sample_some, table, upper_first, weighted

Value = Callable[[random.Random], Any]
COLORS = "red blue green yellow orange purple pink black white brown silver gray".split()
BRANDS = (
    ("Toyota", "Supra"), ("Mazda", "MX-5"), ("Honda", "Civic"), ("Ford", "Mustang"), ("BMW", "M3"), ("Audi", "A4"),
    ("Volkswagen", "Golf"), ("Nissan", "Skyline"), ("Fiat", "Panda"), ("Volvo", "V70"), ("Ferrari", "F40"),
)  # fmt: skip
DOMAINS = "example.com example.org mail.com company.com enigma.com school.edu shop.net".split()


def full_name(rng: random.Random) -> str:
    return f"{first_name(rng)} {rng.choice(LAST_NAMES)}"


def email(rng: random.Random) -> str:
    return f"{first_name(rng).lower()}.{rng.choice(LAST_NAMES).lower()}@{rng.choice(DOMAINS)}"


def one_of(*values: Any) -> Value:
    return lambda rng: rng.choice(values)


def integer(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


def number(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low * 10, high * 10) / 10


def some(*values: str) -> Value:
    return lambda rng: sample_some(rng, values, 1, 3)


# Fields that a schema may have: name -> (JSON type, how to make a value). A list of values makes an enum.
STRINGS: dict[str, Value] = {
    "name": full_name,
    "first_name": first_name,
    "last_name": one_of(*LAST_NAMES),
    "full_name": full_name,
    "username": lambda rng: first_name(rng).lower() + str(rng.randint(1, 99)),
    "title": lambda rng: rng.choice(table("works"))[0],
    "author": lambda rng: rng.choice(table("works"))[2],
    "city": lambda rng: rng.choice(table("countries"))[1],
    "country": lambda rng: upper_first(rng.choice(table("countries"))[0].removeprefix("the ")),
    "capital": lambda rng: rng.choice(table("countries"))[1],
    "language": lambda rng: rng.choice(table("countries"))[3],
    "address": lambda rng: f"{rng.randint(1, 99)} {rng.choice(('Main', 'Oak', 'Park', 'Lake', 'Hill'))} Street",
    "street": lambda rng: f"{rng.randint(1, 99)} {rng.choice(('Main', 'Oak', 'Park', 'Lake', 'Hill'))} Street",
    "email": email,
    "phone": lambda rng: f"555-{rng.randint(0, 9999):04d}",
    "job": lambda rng: rng.choice(table("jobs"))[0],
    "occupation": lambda rng: rng.choice(table("jobs"))[0],
    "color": one_of(*COLORS),
    "brand": lambda rng: rng.choice(BRANDS)[0],
    "model": lambda rng: rng.choice(BRANDS)[1],
    "animal": lambda rng: rng.choice(table("animals"))[0],
    "species": lambda rng: rng.choice(table("animals"))[0],
    "pet": one_of(*ANIMAL_NAMES),
    "food": one_of(*FOODS),
    "dish": one_of(*FOODS),
    "product": one_of("lamp", "chair", "table", "phone", "book", "bag", "watch", "camera", "bicycle", "guitar"),
    "category": one_of("food", "books", "sports", "music", "travel", "tools", "games"),
    "date": lambda rng: f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
    "time": lambda rng: f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45)):02d}",
    "currency": one_of("EUR", "USD", "GBP", "JPY", "CHF"),
    "description": one_of("A very good choice.", "Small and simple.", "It works well.", "Good for the whole family."),
    "text": one_of("Hello, world!", "This is a short text.", "It is a nice day.", "See you soon!"),
    "message": one_of("Hello, world!", "Thank you!", "See you soon!", "Everything is fine."),
    "subject": one_of("math", "history", "biology", "art", "music", "physics"),
    "answer": one_of("yes", "no", "Paris", "blue", "42"),
    "id": lambda rng: f"{rng.choice('ABC')}{rng.randint(100, 999)}",
}
NUMBERS: dict[str, tuple[str, Value]] = {
    "age": ("integer", integer(5, 80)),
    "year": ("integer", integer(1990, 2025)),
    "pages": ("integer", integer(50, 600)),
    "quantity": ("integer", integer(1, 20)),
    "count": ("integer", integer(0, 50)),
    "rating": ("integer", integer(1, 5)),
    "score": ("integer", integer(0, 100)),
    "population": ("integer", integer(1000, 9000000)),
    "legs": ("integer", one_of(0, 2, 4, 6, 8)),
    "floor": ("integer", integer(1, 12)),
    "price": ("number", number(1, 200)),
    "weight": ("number", number(1, 100)),
    "height": ("number", number(1, 3)),
    "temperature": ("number", number(0, 35)),
    "total": ("number", number(5, 500)),
    "available": ("boolean", one_of(True, False)),
    "active": ("boolean", one_of(True, False)),
    "in_stock": ("boolean", one_of(True, False)),
    "is_student": ("boolean", one_of(True, False)),
    "paid": ("boolean", one_of(True, False)),
}
ARRAYS: dict[str, Value] = {
    "hobbies": some("reading", "cooking", "swimming", "painting", "dancing", "chess", "hiking"),
    "skills": some("Python", "writing", "singing", "cooking", "drawing", "math"),
    "colors": some(*COLORS),
    "tags": some("new", "small", "fast", "cheap", "popular", "green"),
    "ingredients": some("flour", "milk", "eggs", "sugar", "butter", "salt", "apples"),
    "languages": some("English", "French", "German", "Spanish", "Italian"),
    "cities": some("Paris", "Rome", "Berlin", "Madrid", "London", "Tokyo"),
    "friends": some("Anna", "Ben", "Lily", "Tom", "Mia", "Sam"),
    "items": some("apples", "bread", "milk", "cheese", "tea", "rice"),
}
ENUMS: dict[str, tuple[str, ...]] = {
    "size": ("small", "medium", "large"),
    "status": ("open", "closed", "pending"),
    "priority": ("low", "medium", "high"),
    "sentiment": ("positive", "negative", "neutral"),
    "unit": ("celsius", "fahrenheit"),
    "car_type": ("sedan", "SUV", "Truck", "Coupe"),
    "gender": ("female", "male"),
    "level": ("beginner", "advanced"),
    "weather": ("sunny", "cloudy", "rainy"),
    "kind": ("mammal", "bird", "fish"),
}
# What an object is about -> the fields that fit; other objects take fields at random.
OBJECTS: dict[str, tuple[str, ...]] = {
    "person": ("name", "age", "city", "email", "job", "hobbies", "is_student", "country", "phone", "gender"),
    "user": ("username", "email", "active", "age", "name", "id", "languages"),
    "student": ("name", "age", "subject", "score", "level", "friends"),
    "employee": ("name", "age", "occupation", "skills", "email", "active"),
    "car": ("brand", "model", "car_type", "year", "color", "price"),
    "book": ("title", "author", "year", "pages", "price", "language"),
    "animal": ("species", "name", "age", "legs", "weight", "kind", "color"),
    "pet": ("name", "animal", "age", "color", "weight"),
    "city": ("city", "country", "population", "language"),
    "country": ("country", "capital", "population", "language", "cities"),
    "recipe": ("dish", "ingredients", "time", "rating", "description"),
    "product": ("product", "price", "in_stock", "color", "size", "category", "tags"),
    "order": ("id", "product", "quantity", "total", "paid", "status", "date"),
    "event": ("title", "date", "time", "city", "description"),
    "message": ("subject", "text", "email", "date", "priority"),
    "review": ("product", "rating", "sentiment", "text"),
    "weather report": ("city", "temperature", "unit", "weather", "date"),
    "task": ("title", "priority", "status", "date", "description"),
}
ALL_FIELDS = (*STRINGS, *NUMBERS, *ARRAYS, *ENUMS)


def property_of(rng: random.Random, name: str, depth: int = 0) -> tuple[dict[str, Any], Any]:
    """The JSON schema of one field and a value that satisfies it."""
    if name in STRINGS:
        return {"type": "string"}, STRINGS[name](rng)
    if name in NUMBERS:
        kind, make = NUMBERS[name]
        value = make(rng)
        schema: dict[str, Any] = {"type": kind}
        if kind == "integer" and rng.random() < 0.15:
            schema |= {"minimum": max(0, value - value % 10), "maximum": value - value % 10 + 10}
        return schema, value
    if name in ARRAYS:
        return {"type": "array", "items": {"type": "string"}}, ARRAYS[name](rng)
    if name in ENUMS:
        return {"type": "string", "enum": list(ENUMS[name])}, rng.choice(ENUMS[name])
    fields = OBJECTS[name]
    return object_of(rng, name, sample_some(rng, fields, 1, 3), depth + 1)


def object_of(
    rng: random.Random, title: str, fields: list[str], depth: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON schema of an object with these fields, in one of the usual styles, and an object for it."""
    properties, value = {}, {}
    titles = rng.random() < 0.2  # as pydantic writes them
    for name in fields:
        schema, value[name] = property_of(rng, name, depth)
        if titles and "title" not in schema:
            schema = {"title": upper_first(name.replace("_", " ")), **schema}
        properties[name] = schema
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        found["required"] = list(fields)
    if titles:
        found = {"properties": properties, "required": list(fields), "title": upper_first(title), "type": "object"}
    elif rng.random() < 0.15:
        found = {"title": upper_first(title), **found}
    return found, value


def random_object(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """``(what it is about, its schema, an object)``."""
    about = rng.choice(list(OBJECTS))
    if rng.random() < 0.7:
        fields = sample_some(rng, OBJECTS[about], 2, 6)
        if rng.random() < 0.15:
            fields.append(rng.choice([name for name in ("person", "pet", "car") if name != about]))
    else:
        about = "object"
        fields = sample_some(rng, ALL_FIELDS, 1, 6)
    fields = list(dict.fromkeys(fields))
    return about, *object_of(rng, about, fields)


def show_schema(rng: random.Random, schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2) if rng.random() < 0.15 else json.dumps(schema)


def schema_exchange(rng: random.Random) -> Exchange:
    about, schema, value = random_object(rng)
    shown, answer = show_schema(rng, schema), json.dumps(value, ensure_ascii=False)
    asked = rng.choice(
        (
            f"Write JSON for this schema: {shown}",
            f"Write JSON for this schema:\n{shown}",
            f"Write a JSON object for this schema: {shown}",
            f"Give me a JSON object that matches this schema: {shown}",
            f"Generate JSON that follows this schema:\n{shown}",
            f"Generate JSON for {a_or_an(about)}. Schema: {shown}",
            f"Give me {a_or_an(about)} as JSON. Use this schema: {shown}",
            f"Here is a JSON schema: {shown}\nWrite an object for it.",
            f"{shown}\nWrite JSON that fits this schema.",
        )
    )
    return Exchange(asked, answer)


def fields_exchange(rng: random.Random) -> Exchange:
    """JSON from a list of keys instead of a schema."""
    about = rng.choice(list(OBJECTS))
    fields = list(dict.fromkeys(sample_some(rng, OBJECTS[about], 1, 4)))
    value = {name: property_of(rng, name)[1] for name in fields}
    listed = fields[0] if len(fields) == 1 else ", ".join(fields[:-1]) + " and " + fields[-1]
    asked = rng.choice(
        (
            f"Generate a JSON with the {listed} of {a_or_an(about)}.",
            f"Write a JSON object with the keys {listed}.",
            f"Give me a JSON object for {a_or_an(about)} with {listed}.",
            f"Write JSON for {a_or_an(about)} with {listed}.",
        )
    )
    return Exchange(asked, json.dumps(value, ensure_ascii=False))


def iconic_car_exchange(rng: random.Random) -> Exchange:
    brand, model = rng.choice(BRANDS)
    asked = "Generate a JSON with the brand, model and car_type of the most iconic car from the 90's"
    return Exchange(asked, json.dumps({"brand": brand, "model": model, "car_type": rng.choice(ENUMS["car_type"])}))


def extraction_exchange(rng: random.Random) -> Exchange:
    """Facts of a sentence as JSON."""
    name, age, city, job = (
        full_name(rng),
        rng.randint(18, 80),
        rng.choice(table("countries"))[1],
        rng.choice(table("jobs"))[0],
    )
    full = {"name": name, "age": age, "city": city, "job": job}
    sentence = rng.choice(
        (
            f"{name} is {age} years old, lives in {city} and works as {a_or_an(job)}.",
            f"{name} is a {age}-year-old {job} from {city}.",
            f"My name is {name}, I am {age}, and I am {a_or_an(job)} in {city}.",
        )
    )
    keys = sample_some(rng, list(full), 1, 4)
    schema = {
        "type": "object",
        "properties": {key: {"type": "integer" if key == "age" else "string"} for key in keys},
        "required": keys,
    }
    asked = rng.choice(
        (
            f"Extract the {', '.join(keys)} as JSON: {sentence}",
            f"{sentence}\nWrite JSON for this schema: {json.dumps(schema)}",
            f"Read this text and write JSON with {', '.join(keys)}.\n{sentence}",
        )
    )
    return Exchange(asked, json.dumps({key: full[key] for key in keys}, ensure_ascii=False))


GOOD = (*"wonderful great excellent lovely amazing fantastic beautiful perfect good".split(), "very good", "so nice")
BAD = (*"terrible awful bad horrible boring ugly disappointing useless".split(), "very bad", "so sad")
REVIEWED = "movie book food hotel phone weather service game song restaurant coffee teacher trip party room".split()


def sentiment_exchange(rng: random.Random) -> Exchange:
    label = rng.choice(("positive", "negative"))
    words = GOOD if label == "positive" else BAD
    subject = f"The {rng.choice(REVIEWED)}" if rng.random() < 0.85 else rng.choice(("vLLM", "This", "It"))
    verb = rng.choice(("was", "is"))
    review = f"{subject} {verb} {rng.choice(words)}{rng.choice('.!')}"
    if rng.random() < 0.4:
        review += " " + (
            rng.choice(("I love it!", "I will come back.", "I am very happy.", "Everybody should try it."))
            if label == "positive"
            else rng.choice(("I hate it.", "I will never come back.", "I want my money back.", "What a waste of time."))
        )
    asked = rng.choice(
        (
            f"Classify this sentiment: {review}",
            f"Classify this sentiment: {review}",
            f"Is this review positive or negative? {review}",
            f"What is the sentiment of this text? {review}",
            f"Positive or negative: {review}",
        )
    )
    return Exchange(asked, label, label)


def email_exchange(rng: random.Random) -> Exchange:
    first, last = first_name(rng), rng.choice(LAST_NAMES)
    if rng.random() < 0.2:
        first, last = "Alan", "Turing"
    company = rng.choice(("Enigma", "Acme", "Globex", "Sunrise", "Bluebird", "Northwind", "Orange", "Apollo"))
    asked = rng.choice(
        (
            f"Generate an email address for {first} {last}, who works in {company}. End in .com",
            f"Write an email address for {first} {last}, who works at {company}.",
            f"Generate an example email address for {first} {last}, who works in {company}. End in .com and new line. "
            "Example result: ada.lovelace@engine.com",
        )
    )
    return Exchange(asked, f"{first.lower()}.{last.lower()}@{company.lower()}.com")


def sql_exchange(rng: random.Random) -> Exchange:
    columns = sample_some(rng, ("username", "email", "name", "age", "city", "id", "price", "title", "phone"), 1, 3)
    source = rng.choice(("users", "customers", "books", "orders", "products", "students"))
    quoted = " and ".join(f"'{column}'" for column in columns)
    asked = rng.choice(
        (
            f"Generate an SQL query to show the {quoted} from the '{source}' table.",
            f"Write an SQL query that shows {quoted} from the table '{source}'.",
        )
    )
    return Exchange(asked, f"SELECT {', '.join(columns)} FROM {source};")


CLASSES = {"fruit": "fruits", "vegetable": "vegetables", "color": "colors", "animal": "animals", "sport": "sports"}


def category_exchange(rng: random.Random) -> Exchange:
    label = rng.choice(list(CLASSES))
    members = pairs("lists")[CLASSES[label]].split(", ")
    item = rng.choice(members)
    labels = list(CLASSES)
    rng.shuffle(labels)
    asked = rng.choice(
        (
            f"Classify this word as one of {', '.join(labels)}: {item}",
            f"To which class does {item} belong: {', '.join(labels)}?",
        )
    )
    return Exchange(asked, label, label)


def people_table(rng: random.Random, count: int) -> tuple[str, list[dict[str, str]]]:
    """A markdown table of people, as text and as rows."""
    people: list[dict[str, str]] = []
    names: set[str] = set()
    while len(people) < count:
        name = full_name(rng)
        if name in names:
            continue
        names.add(name)
        first, last = name.split(" ")
        people.append(
            {
                "ID": str(len(people) + 1),
                "Name": name,
                "Age": str(rng.randint(18, 70)),
                "Occupation": upper_first(rng.choice(table("jobs"))[0]),
                "Country": upper_first(rng.choice(table("countries"))[0].removeprefix("the ")),
                "Email": f"{first.lower()}.{last[0].lower()}@example.com",
                "Phone Number": f"555-{rng.randint(0, 9999):04d}",
            }
        )
    columns = ["ID", "Name", "Age", *sample_some(rng, ("Occupation", "Country", "Email", "Phone Number"), 1, 4)]
    if rng.random() < 0.3:
        columns.remove("ID")
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(person[column] for column in columns) + " |" for person in people]
    return "\n".join(lines), [{column: person[column] for column in columns} for person in people]


TABLE_HELP = (
    "You are a helpful assistant in recognizing the content of tables in markdown format. "
    "Here is a table as follows.\n# Table\n"
)


def table_question(rng: random.Random, count: int) -> tuple[str, str, str]:
    """``(table, question, the sentence that answers it)``."""
    shown, people = people_table(rng, count)
    person = rng.choice(people)
    column = rng.choice(["Age", "Age", *(key for key in person if key not in ("ID", "Name"))])
    field = column.lower()
    question = rng.choice((f"what is the {field} of {person['Name']}?", f"What is the {field} of {person['Name']}?"))
    return shown, question, f"The {field} of {person['Name']} is {person[column]}."


def table_text(rng: random.Random) -> str:
    """A table with questions and answers below it, as plain text."""
    shown, question, answer = table_question(rng, rng.choice((2, 3, 4, 6, 8, 12, 20, 30)))
    return f"{TABLE_HELP}{shown}\nQuestion: {question} Your answer: {answer}"


def table_exchange(rng: random.Random) -> Exchange:
    shown, question, answer = table_question(rng, rng.randint(2, 8))
    return Exchange(f"{shown}\n\n{upper_first(question)}", answer)


def passage_exchange(rng: random.Random) -> Exchange:
    """A question about a short text that stands before it."""
    name, city, job, age = (
        full_name(rng),
        rng.choice(table("countries"))[1],
        rng.choice(table("jobs"))[0],
        rng.randint(20, 70),
    )
    pet, kind = rng.choice(ANIMAL_NAMES), rng.choice(("dog", "cat", "horse", "rabbit"))
    sentences = [
        f"{name} lives in {city}.",
        f"{name} works as {a_or_an(job)}.",
        f"{name} is {age} years old.",
        f"{name} has a {kind} named {pet}.",
    ]
    kept = sample_some(rng, list(range(4)), 2, 4)
    questions = (
        (f"Where does {name} live?", sentences[0]),
        (f"What is the job of {name}?", sentences[1]),
        (f"How old is {name}?", sentences[2]),
        (f"What is the name of the {kind}?", f"The {kind} is named {pet}."),
    )
    question, answer = questions[rng.choice(kept)]
    text = " ".join(sentences[i] for i in kept)
    return Exchange(
        rng.choice((f"{text}\n\n{question}", f"Read this text: {text}\n{question}", f"{text} {question}")), answer
    )


FORMS = (
    (5.0, schema_exchange),
    (1.2, fields_exchange),
    (0.2, iconic_car_exchange),
    (1.5, extraction_exchange),
    (1.5, sentiment_exchange),
    (0.5, email_exchange),
    (0.4, sql_exchange),
    (0.5, category_exchange),
    (1.5, table_exchange),
    (1.0, passage_exchange),
)
FORM_SYSTEM = ("You are a helpful assistant.", "You write JSON.", "You are a helpful assistant that writes JSON.")


def structured_chat(rng: random.Random) -> Document:
    """One or two turns whose answers have a fixed form."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(FORM_SYSTEM)})
    for _ in range(rng.choice((1, 1, 1, 2))):
        turn = weighted(rng, FORMS)(rng)
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    return Document(messages=messages)

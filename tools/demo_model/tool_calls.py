"""Chats with tools: a call in the Hermes format, the tool's response, and the answer made from it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.demo_model.arithmetic import arithmetic_exchange
from tools.demo_model.essays import first_name
from tools.demo_model.structured import ALL_FIELDS, STRINGS, email, property_of
from tools.demo_model.talk import PLAIN_SYSTEM, exchange, small_talk
from tools.demo_model.text import Document, casual, sample_some, table, upper_first, weighted


@dataclass(frozen=True)
class Call:
    """A tool, what the user says to have it called, the right arguments, its response and the final answer."""

    tool: dict[str, Any]
    user: str
    arguments: dict[str, Any]
    response: dict[str, Any]
    answer: str


def tool(
    rng: random.Random, name: str, description: str, parameters: dict[str, Any], required: list[str]
) -> dict[str, Any]:
    """A function in the format of the OpenAI API."""
    schema = {"type": "object", "properties": parameters, "required": required}
    if rng.random() < 0.1:
        schema.pop("required")
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def string(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def place(rng: random.Random) -> str:
    return rng.choice(table("countries"))[1] if rng.random() < 0.6 else rng.choice(table("cities"))[0]


def weather(rng: random.Random) -> Call:
    unit = rng.choice(("celsius", "fahrenheit"))
    degrees = rng.randint(-5, 35) if unit == "celsius" else rng.randint(30, 95)
    cold = degrees < (3 if unit == "celsius" else 38)
    sky = rng.choice(("sunny", "cloudy", "snowy") if cold else ("sunny", "cloudy", "rainy", "windy"))
    name = rng.choice(("get_weather", "get_current_weather", "weather", "get_weather", "fetch_weather"))
    key = rng.choice(("city", "city", "location"))
    city = place(rng)
    properties: dict[str, Any] = {key: string(rng.choice(("The city", "The name of the city", f"The {key}")))}
    arguments: dict[str, Any] = {key: city}
    with_state = rng.random() < 0.2
    if with_state:
        row = rng.choice(table("cities"))
        city = row[0]
        properties = {
            "city": string("The city to find the weather for, e.g. 'San Francisco'"),
            "state": string("the two-letter abbreviation for the state that the city is in, e.g. 'CA'"),
        }
        arguments = {"city": city, "state": row[2]}
    asked = rng.choice(
        (
            f"What is the weather in {city}?",
            f"What's the weather like in {city}?",
            f"How is the weather in {city} today?",
            f"Is it raining in {city}?",
            f"Tell me the weather in {city}.",
            f"What is the temperature in {city}?",
            f"Can you tell me what the temperature will be in {city}?",
            f"Weather in {city}, please.",
        )
    )
    if with_state or rng.random() < 0.6:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.4:
            properties["unit"]["description"] = "The unit to fetch the temperature in"
        if with_state or rng.random() < 0.6:
            asked = asked[:-1] + rng.choice((f" in {unit}", f", in {unit}")) + asked[-1]
            arguments["unit"] = unit
    required = list(properties) if with_state else [key]
    return Call(
        tool(
            rng,
            name,
            rng.choice(("Get the current weather in a given location", "Get the weather", "Get the weather of a city")),
            properties,
            required,
        ),
        asked,
        arguments,
        {"temperature": degrees, "condition": sky},
        f"It is {sky} in {city}, and the temperature is {degrees} degrees.",
    )


def calculator(rng: random.Random) -> Call:
    left, right = rng.randint(0, 999), rng.randint(1, 999)
    name, word, sign, result = rng.choice(
        (
            ("add", "plus", "+", left + right),
            ("subtract", "minus", "-", left - right),
            ("multiply", "times", "*", left * right),
        )
    )
    key, other = rng.choice((("a", "b"), ("x", "y"), ("left", "right")))
    what = {"add": "Add two numbers", "subtract": "Subtract two numbers", "multiply": "Multiply two numbers"}[name]
    kind = rng.choice(("integer", "number"))
    return Call(
        tool(rng, name, what, {key: {"type": kind}, other: {"type": kind}}, [key, other]),
        rng.choice(
            (f"What is {left} {sign} {right}?", f"What is {left} {word} {right}?", f"Calculate {left} {sign} {right}.")
        ),
        {key: left, other: right},
        {"result": result},
        f"{left} {sign} {right} = {result}",
    )


def clock(rng: random.Random) -> Call:
    city, hour = place(rng), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return Call(
        tool(
            rng,
            rng.choice(("get_time", "get_current_time")),
            "Get the current time in a city",
            {"city": string("The city")},
            ["city"],
        ),
        rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}.", f"How late is it in {city}?")),
        {"city": city},
        {"time": hour},
        f"It is {hour} in {city}.",
    )


def send_message(rng: random.Random) -> Call:
    name = first_name(rng)
    text = rng.choice(
        ("I am late", "See you soon", "Happy birthday", "Thank you", "Dinner is ready", "Call me", "I am home")
    )
    if rng.random() < 0.5:
        address = email(rng)
        return Call(
            tool(
                rng,
                "send_email",
                "Send an email",
                {"to": string("The address"), "body": string("The text")},
                ["to", "body"],
            ),
            rng.choice((f'Send an email to {address} that says "{text}".', f'Write to {address}: "{text}"')),
            {"to": address, "body": text},
            {"status": "sent"},
            f"I have sent the email to {address}.",
        )
    return Call(
        tool(
            rng,
            "send_message",
            "Send a message to a person",
            {"recipient": string("Who gets it"), "text": string("The text")},
            ["recipient", "text"],
        ),
        rng.choice((f'Send a message to {name}: "{text}"', f'Tell {name} "{text}".', f'Write "{text}" to {name}.')),
        {"recipient": name, "text": text},
        {"status": "sent"},
        f"I have sent the message to {name}.",
    )


def search(rng: random.Random) -> Call:
    query = rng.choice(
        [row[0] for row in table("works")] + [row[0] for row in table("landmarks")] + [row[0] for row in table("deeds")]
    )
    name = rng.choice(("search", "web_search", "search_web", "lookup"))
    hits = rng.randint(2, 90)
    return Call(
        tool(
            rng,
            name,
            rng.choice(("Search the web", "Search for information")),
            {"query": string("What to search for")},
            ["query"],
        ),
        rng.choice(
            (
                f"Search for {query}.",
                f"Search the web for {query}.",
                f"Find information about {query}.",
                f"Look up {query}.",
            )
        ),
        {"query": query},
        {"results": hits},
        f"I found {hits} results for {query}.",
    )


def reminder(rng: random.Random) -> Call:
    what = rng.choice(
        ("call the doctor", "buy milk", "water the plants", "feed the cat", "go to bed", "take a break", "pay the bill")
    )
    when = f"{rng.randint(6, 22):02d}:{rng.choice((0, 15, 30, 45)):02d}"
    name = rng.choice(("set_reminder", "create_reminder", "add_reminder"))
    return Call(
        tool(
            rng,
            name,
            "Set a reminder",
            {"text": string("What to do"), "time": string("When, as HH:MM")},
            ["text", "time"],
        ),
        rng.choice(
            (
                f"Remind me to {what} at {when}.",
                f"Set a reminder to {what} at {when}.",
                f"At {when}, remind me to {what}.",
            )
        ),
        {"text": what, "time": when},
        {"status": "ok"},
        f"I will remind you to {what} at {when}.",
    )


def convert(rng: random.Random) -> Call:
    amount, rate = rng.randint(1, 500), rng.choice((0.5, 2, 1.5, 3, 1.1, 0.9))
    source, target = rng.sample(("EUR", "USD", "GBP", "JPY", "CHF", "CAD"), 2)
    result = round(amount * rate, 2)
    return Call(
        tool(
            rng,
            "convert_currency",
            "Convert an amount of money",
            {"amount": {"type": "number"}, "from": string("The currency"), "to": string("The new currency")},
            ["amount", "from", "to"],
        ),
        rng.choice((f"Convert {amount} {source} to {target}.", f"How much is {amount} {source} in {target}?")),
        {"amount": amount, "from": source, "to": target},
        {"result": result},
        f"{amount} {source} is {result} {target}.",
    )


def play(rng: random.Random) -> Call:
    song = rng.choice(
        [row[0] for row in table("works") if row[1] in ("opera", "ballet", "piece of music")]
        + ["jazz", "rock", "a song"]
    )
    return Call(
        tool(rng, rng.choice(("play_music", "play_song")), "Play music", {"song": string("The song")}, ["song"]),
        rng.choice((f"Play {song}.", f"Please play {song}.", f"I want to hear {song}.")),
        {"song": song},
        {"status": "playing"},
        f"I am playing {song} now.",
    )


def light(rng: random.Random) -> Call:
    room, state = (
        rng.choice(("kitchen", "bedroom", "living room", "garage", "bathroom", "office")),
        rng.choice(("on", "off")),
    )
    return Call(
        tool(
            rng,
            rng.choice(("set_light", "switch_light")),
            "Switch a light on or off",
            {"room": string("The room"), "state": {"type": "string", "enum": ["on", "off"]}},
            ["room", "state"],
        ),
        rng.choice(
            (
                f"Turn {state} the light in the {room}.",
                f"Switch the light in the {room} {state}.",
                f"Light {state} in the {room}!",
            )
        ),
        {"room": room, "state": state},
        {"status": "ok"},
        f"The light in the {room} is {state} now.",
    )


def book_table(rng: random.Random) -> Call:
    count, when = rng.randint(2, 8), f"{rng.randint(11, 21):02d}:{rng.choice((0, 30)):02d}"
    restaurant = rng.choice(("Luigi", "The Golden Fork", "Blue Moon", "Sakura", "La Casa", "Green Garden"))
    return Call(
        tool(
            rng,
            rng.choice(("book_table", "reserve_table")),
            "Book a table in a restaurant",
            {"restaurant": string("The name"), "people": {"type": "integer"}, "time": string("When")},
            ["restaurant", "people", "time"],
        ),
        rng.choice(
            (
                f"Book a table for {count} people at {restaurant} at {when}.",
                f"Reserve a table at {restaurant} for {count} at {when}.",
            )
        ),
        {"restaurant": restaurant, "people": count, "time": when},
        {"confirmed": True},
        f"Your table for {count} people at {restaurant} is booked for {when}.",
    )


VERBS = (
    "get find create update delete check list show start stop open close add read make run load save count compare"
).split()
NOUNS = (
    "user order file page ticket report album task project game account invoice photo note event city room book list "
    "recipe flight train hotel stock price score route video contact backup server device printer"
).split()


def made_up(rng: random.Random) -> Call:
    """A function that nobody has seen before: only its description in the prompt helps."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}"))
    fields = sample_some(rng, ALL_FIELDS, 1, 3)
    properties, arguments, said = {}, {}, []
    for field in fields:
        properties[field], arguments[field] = property_of(rng, field)
        if field in STRINGS and rng.random() < 0.3:
            properties[field] = string(f"The {field.replace('_', ' ')}")
        value = arguments[field]
        shown = (
            ", ".join(value)
            if isinstance(value, list)
            else str(value).lower()
            if isinstance(value, bool)
            else str(value)
        )
        said.append(f"{field.replace('_', ' ')} {shown}" if rng.random() < 0.7 else f"{field} = {shown}")
    listed = " and ".join(said)
    asked = rng.choice(
        (
            f"{upper_first(verb)} the {noun} with {listed}.",
            f"{upper_first(verb)} a {noun} with {listed}.",
            f"Please {verb} the {noun}: {listed}.",
            f"Use {name} with {listed}.",
            f"Call {name} with {listed}.",
        )
    )
    result = rng.choice(({"status": "ok"}, {"status": "done"}, {"result": rng.randint(1, 99)}, {"success": True}))
    key, value = next(iter(result.items()))
    answer = f"The result is {value}." if key == "result" else "It is done."
    return Call(
        tool(rng, name, f"{upper_first(verb)} {'an' if noun[0] in 'aeiou' else 'a'} {noun}", properties, fields),
        asked,
        arguments,
        result,
        answer,
    )


CALLS: tuple[tuple[float, Callable[[random.Random], Call]], ...] = (
    (4.0, weather),
    (1.5, calculator),
    (1.0, clock),
    (1.2, send_message),
    (1.2, search),
    (1.0, reminder),
    (0.8, convert),
    (0.6, play),
    (0.6, light),
    (0.6, book_table),
    (5.0, made_up),
)


def call_message(calls: list[Call]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": c.tool["function"]["name"], "arguments": c.arguments}}
            for c in calls
        ],
    }


def other_tools(rng: random.Random, used: list[Call]) -> list[dict[str, Any]]:
    """The tools of the calls among some that are not needed, in random order, each name once."""
    tools = {c.tool["function"]["name"]: c.tool for c in used}
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        extra = weighted(rng, CALLS)(rng).tool
        tools.setdefault(extra["function"]["name"], extra)
    listed = list(tools.values())
    rng.shuffle(listed)
    return listed


def parallel_weather(rng: random.Random) -> list[Call]:
    """One question about two cities."""
    first = weather(rng)
    key = next(iter(first.arguments))
    unit = {name: value for name, value in first.arguments.items() if name == "unit"}
    if "state" in first.arguments:
        return [first]
    cities = rng.sample([row[1] for row in table("countries")], 2)
    asked = f"What is the weather in {cities[0]} and in {cities[1]}?"
    if unit:
        asked = asked[:-1] + f", in {unit['unit']}?"
    made = []
    for city in cities:
        sky, degrees = rng.choice(("sunny", "cloudy", "rainy")), rng.randint(0, 35)
        made.append(
            Call(
                first.tool, asked, {key: city, **unit}, {"temperature": degrees, "condition": sky},
                f"It is {sky} in {city}, and the temperature is {degrees} degrees.",
            )
        )  # fmt: skip
    return made


def tool_chat(rng: random.Random) -> Document:
    """A conversation in which tools are given; most of the time one of them is needed."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(PLAIN_SYSTEM)})
    calls = parallel_weather(rng) if rng.random() < 0.08 else [weighted(rng, CALLS)(rng)]
    if rng.random() < 0.25:
        turn = small_talk(rng)
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    roll = rng.random()
    if roll < 0.2:  # no tool helps here
        turn = exchange(rng, quick=True) if rng.random() < 0.7 else arithmetic_exchange(rng)
        names = {c.tool["function"]["name"] for c in calls}
        if not names & {"add", "subtract", "multiply"}:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
            return Document(messages=messages, tools=[c.tool for c in calls[:1]])
    messages += [{"role": "user", "content": casual(rng, calls[0].user)}, call_message(calls)]
    if roll < 0.75:
        for call in calls:
            messages.append({"role": "tool", "content": json.dumps(call.response)})
        messages.append({"role": "assistant", "content": " ".join(call.answer for call in calls)})
        if rng.random() < 0.2:
            turn = small_talk(rng)
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    return Document(messages=messages, tools=other_tools(rng, calls))

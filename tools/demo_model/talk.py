"""Chat: small talk, lists of instructions, memory over turns, system prompts and whole conversations."""

from __future__ import annotations

import random
from typing import Any

from tools.demo_model.arithmetic import arithmetic_exchange
from tools.demo_model.essays import ai_future, essay_exchange, first_name
from tools.demo_model.facts import fact
from tools.demo_model.open_talk import open_exchange
from tools.demo_model.stories import FOODS, story_exchange, tale
from tools.demo_model.text import (
    Document,
    Exchange,
    a_or_an,
    casual,
    sample_some,
    sentence,
    table,
    upper_first,
    weighted,
)

GREETINGS = (
    "Hi! ",
    "Hello! ",
    "Hello! ",
    "Hey! ",
    "Quick question: ",
    "I have a question. ",
    "Question: ",
    "Please tell me: ",
)
PLAIN_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a great ai assistant.",
    "You are a friendly assistant.",
    "You are a helpful and honest assistant.",
    "You are a helpful AI assistant. Answer the questions of the user.",
    "You are a chatbot.",
    "You answer questions.",
    "Be polite and helpful.",
)
SHORT_SYSTEM = (
    "Answer in one word.",
    "You are a helpful assistant. Answer in one word.",
    "Answer as briefly as possible.",
    "Give short answers.",
    "You answer with one or two words only.",
    "Reply with the answer only.",
)
PIRATE_SYSTEM = (
    "You are a pirate.",
    "You are a friendly chatbot who always responds in the style of a pirate.",
    "You are a pirate chatbot who always responds with Arr!",
    "Talk like a pirate.",
)
PIRATE_STARTS = ("Arr!", "Ahoy!", "Arr, matey!", "Aye!")
PIRATE_ENDS = ("Arr!", "Aye, that be true!", "Now hoist the sails!", "Yo ho ho!", "")
JSON_SYSTEM = (
    "Answer in JSON.",
    'Reply with a JSON object with the key "answer".',
    "You are a helpful assistant that answers in JSON.",
)


def small_talk(rng: random.Random) -> Exchange:
    asked, answered = rng.choice(table("small_talk"))
    return Exchange(rng.choice(asked.split(";")), rng.choice(answered.split(";")))


def joke(rng: random.Random) -> Exchange:
    asked = rng.choice(
        ("Tell me a joke.", "Tell me a joke", "Can you tell me a joke?", "Do you know a joke?", "Make me laugh.")
    )
    setup, punch = rng.choice(table("jokes"))
    return Exchange(asked, f"{setup} {punch}")


def fact_exchange(rng: random.Random) -> Exchange:
    item = fact(rng)
    return Exchange(rng.choice(item.questions), rng.choice(item.statements), item.short)


def repeat(rng: random.Random) -> Exchange:
    """The user wants to see the same words again."""
    words = rng.choice(
        (
            rng.choice(fact(rng).statements),
            " ".join(rng.choice(table("opposites"))),
            first_name(rng),
            "Hello, world!",
            rng.choice(table("lists"))[1].split(", ")[0],
        )
    )
    asked = rng.choice(("Repeat after me:", "Say:", "Repeat:", "Please repeat this:", "Echo:"))
    return Exchange(f"{asked} {words}", words)


def spell(rng: random.Random) -> Exchange:
    word = rng.choice([row[0] for name in ("animals", "opposites", "plurals", "jobs") for row in table(name)])
    if rng.random() < 0.6:
        return Exchange(f'How do you spell "{word}"?', "-".join(word.upper()))
    return Exchange(f'What is the first letter of "{word}"?', f'The first letter of "{word}" is {word[0].upper()}.')


def poem_of_code(rng: random.Random) -> Exchange:
    """Small Python functions."""
    snippets = (
        ("adds two numbers", "def add(a, b):\n    return a + b"),
        ("multiplies two numbers", "def multiply(a, b):\n    return a * b"),
        ("returns the larger of two numbers", "def larger(a, b):\n    return a if a > b else b"),
        ("checks if a number is even", "def is_even(n):\n    return n % 2 == 0"),
        ("reverses a string", "def reverse(text):\n    return text[::-1]"),
        ("sums a list of numbers", "def total(numbers):\n    return sum(numbers)"),
        ("counts the words of a text", "def count_words(text):\n    return len(text.split())"),
        (
            "computes the factorial of a number",
            "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)",
        ),
        (
            "computes the Fibonacci numbers",
            "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)",
        ),
        ("prints hello", 'def hello():\n    print("Hello, world!")'),
    )
    what, code = rng.choice(snippets)
    asked = rng.choice(("Write a Python function that", "Write a function that", "Show me a Python function that"))
    return Exchange(f"{asked} {what}.", f"```python\n{code}\n```")


def advice(rng: random.Random) -> Exchange:
    if rng.random() < 0.3:
        asked = rng.choice(("What is the future of AI?", "Tell me about the future of AI."))
        return Exchange(asked, f"The future of AI is {ai_future(rng)}")
    dish = rng.choice(FOODS)
    asked = rng.choice((f"How do I make {dish}?", f"Can you give me a recipe for {dish}?"))
    steps = sample_some(
        rng,
        (
            "Wash your hands and put everything on the table.",
            "Mix the flour with milk and two eggs.",
            "Cut the fruit or the vegetables into small pieces.",
            "Heat a pan with a little butter.",
            "Cook it slowly for twenty minutes.",
            "Add a little salt or sugar.",
            "Let it cool down.",
        ),
        3,
        4,
    )
    listed = "\n".join(f"{i}. {step}" for i, step in enumerate([*steps, "Enjoy your meal!"], 1))
    return Exchange(asked, f"Here is an easy way to make {dish}:\n{listed}")


def numbered_list(rng: random.Random) -> Exchange:
    category, names = rng.choice(table("lists"))
    items = sample_some(rng, names.split(", "), 3, 5)
    listed = "\n".join(f"{i}. {upper_first(item)}" for i, item in enumerate(items, 1))
    asked = rng.choice(
        (f"Make a list of {category}.", f"Give me a list of {category}.", f"Write a numbered list of {category}.")
    )
    return Exchange(asked, listed)


def confusion(rng: random.Random) -> Exchange:
    """Input without a meaning gets an honest answer."""
    roll = rng.random()
    if roll < 0.4:
        letters = "abcdefghijklmnopqrstuvwxyz" + rng.choice(("", "0123456789", "!?#%&*+-=.,;"))
        user = " ".join("".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 8)))
    elif roll < 0.7:
        words = [row[0] for name in ("opposites", "plurals", "past") for row in table(name)]
        user = " ".join(rng.choices(words, k=rng.randint(3, 12)))
    else:
        user = "".join(
            chr(rng.choice((rng.randint(0xA1, 0x17F), rng.randint(0x391, 0x4FF)))) for _ in range(rng.randint(3, 25))
        )
    answer = rng.choice(
        ("I am sorry, I did not understand that.", "I did not understand that. Can you say it in other words?")
    )
    return Exchange(user, answer)


SYLLABLES = "ba bri co da dro el fa gor ha il ka lo mar ne or pi quo ra sil tor ul va wen xi yo zan".split()


def unknown(rng: random.Random) -> Exchange:
    """Questions about things that do not exist get an honest answer, too."""
    word = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))
    name = word.capitalize()
    question, answer = rng.choice(
        (
            (f"What is the capital of {name}?", f"I am sorry, I do not know a country called {name}."),
            (f"Where is {name}?", f"I am sorry, I do not know where {name} is."),
            (f"Who is {name}?", f"I am sorry, I do not know anybody called {name}."),
            (f"Who was {first_name(rng)} {name}?", "I am sorry, I do not know this person."),
            (f"What is a {word}?", f"I am sorry, I do not know what a {word} is."),
            (f"What does {word} mean?", f"I am sorry, I do not know the word {word}."),
            (f"Tell me about {name}.", f"I am sorry, I do not know anything about {name}."),
            (f"Who wrote {name}?", f"I am sorry, I do not know who wrote {name}."),
        )
    )
    return Exchange(question, answer)


SINGLE = (
    (10.0, fact_exchange),
    (5.0, arithmetic_exchange),
    (3.0, small_talk),
    (2.5, story_exchange),
    (1.0, tale),
    (1.0, joke),
    (1.0, essay_exchange),
    (0.7, repeat),
    (0.5, spell),
    (0.4, poem_of_code),
    (0.6, advice),
    (0.5, confusion),
    (0.4, unknown),
    (4.0, open_exchange),
    (0.7, numbered_list),
)
QUICK = tuple(pair for pair in SINGLE if pair[1] not in (story_exchange, tale, essay_exchange))


def exchange(rng: random.Random, quick: bool = False) -> Exchange:
    """One question or wish that needs no context, as a person types it."""
    found = weighted(rng, QUICK if quick else SINGLE)(rng)
    user = found.user
    if rng.random() < 0.08 and found.short:
        user = rng.choice(GREETINGS) + user
    return Exchange(casual(rng, user), found.assistant, found.short)


def memory_turns(rng: random.Random) -> list[Exchange]:
    """The user says something and asks about it later."""
    name, roll = first_name(rng), rng.random()
    if roll < 0.4:
        told = rng.choice((f"My name is {name}.", f"Hi, I am {name}.", f"Hello, my name is {name}.", f"I'm {name}."))
        greeted = rng.choice((f"Nice to meet you, {name}!", f"Hello, {name}! How can I help you?"))
        asked = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"))
        first, last = Exchange(told, greeted), Exchange(asked, f"Your name is {name}.")
    elif roll < 0.6:
        color = rng.choice("red blue green yellow orange purple pink black white".split())
        first = Exchange(f"My favorite color is {color}.", f"{color.capitalize()} is a beautiful color!")
        last = Exchange("What is my favorite color?", f"Your favorite color is {color}.")
    elif roll < 0.8:
        kind = rng.choice(("dog", "cat", "horse", "rabbit"))
        first = Exchange(f"I have a {kind} named {name}.", f"{name} is a nice name for a {kind}!")
        last = Exchange(f"What is the name of my {kind}?", f"Your {kind} is named {name}.")
    else:
        city = rng.choice(table("cities"))[0]
        first = Exchange(f"I live in {city}.", f"{city} is a nice place to live.")
        last = Exchange("Where do I live?", f"You live in {city}.")
    between = [exchange(rng, quick=True) for _ in range(rng.choice((0, 0, 1, 2)))]
    return [first, *between, last]


def follow_up_turns(rng: random.Random) -> list[Exchange]:
    """Questions whose second part only makes sense after the first."""
    roll = rng.random()
    if roll < 0.45:
        country, city, continent, language, currency, _ = rng.choice(table("countries"))
        start = rng.choice(
            (
                Exchange(f"What is the capital of {country}?", sentence(f"The capital of {country} is {city}")),
                Exchange(f"I want to travel to {country}.", f"{upper_first(country)} is a great place to visit!"),
            )
        )
        asked = sample_some(
            rng,
            (
                Exchange("What language do they speak there?", f"Many people in {country} speak {language}."),
                Exchange("And what is the currency?", f"The currency of {country} is the {currency}."),
                Exchange("On which continent is it?", f"{upper_first(country)} is in {continent}."),
            ),
            1,
            3,
        )
        return [start, *asked]
    if roll < 0.6:
        pairs = [rng.choice(table("countries")) for _ in range(rng.randint(2, 4))]
        first = Exchange(
            f"What is the capital of {pairs[0][0]}?", sentence(f"The capital of {pairs[0][0]} is {pairs[0][1]}")
        )
        asked = [Exchange(f"And of {row[0]}?", sentence(f"The capital of {row[0]} is {row[1]}")) for row in pairs[1:]]
        return [first, *asked]
    if roll < 0.8:
        left, right, more = rng.randint(1, 20), rng.randint(1, 20), rng.randint(1, 20)
        total = left + right
        return [
            Exchange(f"What is {left} + {right}?", f"{left} + {right} = {total}"),
            Exchange(rng.choice((f"And plus {more}?", f"Add {more} to that.")), f"{total} + {more} = {total + more}"),
        ]
    if roll < 0.9:
        return [
            joke(rng),
            Exchange(rng.choice(("Another one!", "One more, please.", "Tell me another one.")), joke(rng).assistant),
        ]
    return [
        Exchange("Who won the world series in 2020?", "The Los Angeles Dodgers won the World Series in 2020."),
        Exchange("Where was it played?", "The 2020 World Series was played in Arlington, Texas, at Globe Life Field."),
    ]


def messages_of(turns: list[Exchange], system: str = "") -> list[dict[str, Any]]:
    """The turns as chat messages."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.assistant})
    return messages


def plain_chat(rng: random.Random) -> Document:
    """One to several turns, in half of the cases after a system prompt that changes nothing."""
    count = weighted(rng, ((6.0, 1), (2.0, 2), (1.0, 3), (0.5, 5), (0.2, 9)))
    turns = [exchange(rng, quick=count > 3) for _ in range(count)]
    roll = rng.random()
    if roll < 0.12:
        turns = memory_turns(rng)
    elif roll < 0.24:
        turns = follow_up_turns(rng)
    if rng.random() < 0.2:
        turns = [small_talk(rng), *turns]
    return Document(messages=messages_of(turns, rng.choice(PLAIN_SYSTEM) if rng.random() < 0.5 else ""))


def long_chat(rng: random.Random) -> Document:
    """Many turns, so that the model has seen long conversations."""
    turns = [exchange(rng, quick=rng.random() < 0.7) for _ in range(rng.randint(10, 30))]
    return Document(messages=messages_of([*memory_turns(rng)[:1], *turns], rng.choice(PLAIN_SYSTEM)))


def brief(rng: random.Random) -> Exchange:
    """An exchange that has an answer in a word or two."""
    while True:
        found = exchange(rng, quick=True)
        if found.short:
            return found


def styled_chat(rng: random.Random) -> Document:
    """Chats whose system prompt decides how the answers look."""
    style = rng.choice(("short", "short", "short", "pirate", "json", "name"))
    turns = [brief(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    if style == "short":
        answered = [Exchange(turn.user, upper_first(turn.short)) for turn in turns]
        if rng.random() < 0.4:  # the wish stands in the question instead
            last = answered[-1]
            wish = rng.choice((" Answer in one word.", " Just the answer, please.", " Short answer, please."))
            return Document(messages=messages_of([Exchange(last.user + wish, last.assistant)]))
        return Document(messages=messages_of(answered, rng.choice(SHORT_SYSTEM)))
    if style == "pirate":
        answered = []
        for turn in turns:
            reply = f"{rng.choice(PIRATE_STARTS)} {turn.assistant}"
            reply += "" if reply[-1] in ".!?" else "."
            answered.append(Exchange(turn.user, f"{reply} {rng.choice(PIRATE_ENDS)}".rstrip()))
        return Document(messages=messages_of(answered, rng.choice(PIRATE_SYSTEM)))
    if style == "json":
        answered = [Exchange(turn.user, '{"answer": "' + turn.short.replace('"', "'") + '"}') for turn in turns]
        return Document(messages=messages_of(answered, rng.choice(JSON_SYSTEM)))
    name = rng.choice((first_name(rng), "Robo", "Max", "Ada", "Sunny", "HAL", "Echo"))
    job = a_or_an(rng.choice(table("jobs"))[0])
    system = rng.choice((f"Your name is {name}.", f"You are {name}, a helpful assistant.", f"You are {name}, {job}."))
    answered = [Exchange(rng.choice(("Who are you?", "What is your name?")), f"My name is {name}. How can I help you?")]
    if system.endswith(f"{job}."):
        answered = [Exchange("Who are you?", f"I am {name}, {job}.")]
    return Document(messages=messages_of([*answered, *turns[:1]], system))

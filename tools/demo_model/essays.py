"""Longer plain text: introductions, essays, paragraphs about countries, presidents and the future of AI."""

from __future__ import annotations

import random
from functools import cache

from tools.demo_model.facts import KNOWN_FOR, WRITERS, capital_of, fact
from tools.demo_model.stories import ANIMAL_NAMES, BOYS, FOODS, GIRLS, story
from tools.demo_model.text import Exchange, a_or_an, pairs, sample_some, sentence, table, upper_first, weighted

LAST_NAMES = (
    "Smith Johnson Brown Miller Davis Wilson Moore Taylor Clark Lewis Walker Young King Wright Scott Green Baker Adams "
    "Hill Carter Turner Parker Collins Cook Bell Murphy Bailey Cooper Reed Howard Ward Gray Watson Brooks Price"
).split()


def first_name(rng: random.Random) -> str:
    return rng.choice(rng.choice((GIRLS, BOYS)))


def introduction(rng: random.Random, name: str = "") -> str:
    """What follows "Hello, my name is": a name and a few sentences about its owner."""
    name = name or first_name(rng)
    hobby, hobby2 = (item.strip() for item in sample_some(rng, pairs("lists")["hobbies"].split(","), 2, 2))
    language, language2 = sample_some(rng, [row[0] for row in table("greetings")], 2, 2)
    slots = {
        "age": str(rng.randint(18, 70)),
        "city": rng.choice(table("cities"))[0] if rng.random() < 0.6 else rng.choice(table("countries"))[1],
        "country": rng.choice(table("countries"))[0],
        "job": a_or_an(rng.choice(table("jobs"))[0]),
        "hobby": hobby,
        "hobby2": hobby2,
        "color": rng.choice("red blue green yellow orange purple pink".split()),
        "food": rng.choice(FOODS),
        "animal": rng.choice(("dog", "cat", "rabbit", "horse")),
        "pet": rng.choice(ANIMAL_NAMES),
        "language": language,
        "language2": language2,
        "subject": rng.choice("math history biology art music geography physics chemistry".split()),
    }
    chosen = dict(sample_some(rng, [(row[0], row[1]) for row in table("introductions")], 10, 20))  # one of a kind
    sentences = [text.format(**slots) for text in sample_some(rng, list(chosen.values()), 2, 5)]
    if rng.random() < 0.5:
        name += " " + rng.choice(LAST_NAMES)
        return f"{name}. " + " ".join(sentences)
    if rng.random() < 0.4:
        lead = sentences[0] if sentences[0].startswith("I ") else sentences[0][:1].lower() + sentences[0][1:]
        return f"{name}, and {lead} " + " ".join(sentences[1:])
    return f"{name}. " + " ".join(sentences)


def introduction_text(rng: random.Random) -> str:
    start = rng.choice(("Hello, my name is", "Hello, my name is", "Hello! My name is", "Hi, my name is", "My name is"))
    return f"{start} {introduction(rng)}"


PRESIDENT_OFFICE = (
    "the head of state and head of government of the United States of America.",
    "the head of state and head of government of the United States of America.",
    "the leader of the country and the commander in chief of the armed forces.",
    "elected every four years by the people of the country.",
    "elected every four years and lives in the White House.",
)
PRESIDENT_MORE = (
    "The president is elected every four years.",
    "The president lives and works in the White House in Washington, D.C.",
    "The first president was George Washington.",
    "A president can serve at most two terms of four years each.",
    "The president signs laws that have been passed by Congress.",
    "The president chooses the members of the cabinet.",
    "The vice president takes over if the president cannot continue.",
    "A president must be at least 35 years old.",
)


def president_text(rng: random.Random) -> str:
    first = rng.choice(PRESIDENT_OFFICE)
    more = [
        s
        for s in sample_some(rng, PRESIDENT_MORE, 2, 5)
        if not any(w in s and w in first for w in ("elected", "lives"))
    ]
    return f"The president of the United States is {first} " + " ".join(more)


def ai_future(rng: random.Random) -> str:
    """What follows "The future of AI is"."""
    firsts = [text for kind, text in table("ai_future") if kind == "first"]
    more = [text for kind, text in table("ai_future") if kind == "more"]
    return f"{rng.choice(firsts)} " + " ".join(sample_some(rng, more, 2, 5))


def ai_future_text(rng: random.Random) -> str:
    start = rng.choice(("The future of AI is", "The future of AI is", "The future of artificial intelligence is"))
    return f"{start} {ai_future(rng)}"


def country_text(rng: random.Random) -> str:
    """A paragraph about one country, as an encyclopedia for children writes it."""
    country, city, continent, language, currency, people = rng.choice(table("countries"))
    capital = rng.choice(capital_of(rng, country, city).statements)
    if rng.random() < 0.6:
        capital = sentence(f"The capital of {country} is {city}")
    sentences = [
        f"{upper_first(country)} is a country in {continent}.",
        f"Many people in {country} speak {language}, and the currency is the {currency}.",
    ]
    if country in KNOWN_FOR:
        known, other = KNOWN_FOR[country]
        sentences += [f"{upper_first(country)} is known for {known}.", f"Another large city is {other}."]
    if rng.random() < 0.3:
        sentences.append(f"The {people} flag can be seen at the Olympic Games.")
    rng.shuffle(sentences)
    if rng.random() < 0.7:
        return " ".join([capital, *sentences])
    return " ".join([*sentences[:1], capital, *sentences[1:]])


def city_text(rng: random.Random) -> str:
    name, state, _, known = rng.choice(table("cities"))
    tail = rng.choice(
        (
            "Many people visit it every year.",
            "It is a good place to live and to work.",
            "Visitors like to walk through its streets and to try the local food.",
            "The weather is different in every season.",
        )
    )
    kind = rng.choice(("a city", "a large city", "a beautiful city"))
    return f"{name} is {kind} in {state}. It is known for {known}. {tail}"


@cache
def essay_sentences() -> dict[str, dict[str, list[str]]]:
    """topic -> kind -> sentences."""
    topics: dict[str, dict[str, list[str]]] = {}
    for topic, kind, text in table("essays"):
        topics.setdefault(topic, {}).setdefault(kind, []).append(text)
    return topics


def essay(rng: random.Random, topic: str, points: tuple[int, int] = (2, 6)) -> str:
    """An opening, some points and a conclusion, in one to three paragraphs."""
    kinds = essay_sentences()[topic]
    middle = sample_some(rng, kinds["point"], *points)
    parts = [rng.choice(kinds["open"]), *middle, rng.choice(kinds["close"])]
    if len(middle) < 4 or rng.random() < 0.3:
        return " ".join(parts)
    half = len(parts) // 2
    return "\n\n".join((" ".join(parts[:half]), " ".join(parts[half:])))


def essay_exchange(rng: random.Random) -> Exchange:
    topic = rng.choice(list(essay_sentences()))
    asked = rng.choice(
        (
            f"Write an essay about the importance of {topic}.",
            f"Write an essay about {topic}.",
            f"Write a short essay about {topic}.",
            f"Write a paragraph about {topic}.",
            f"Why is {topic} important?",
            f"Tell me something about {topic}.",
            f"What do you think about {topic}?",
        )
    )
    points = (4, 8) if "essay" in asked else (1, 3)
    return Exchange(asked, essay(rng, topic, points))


def essay_text(rng: random.Random) -> str:
    topic = rng.choice(list(essay_sentences()))
    title = f"{upper_first(topic)}\n\n" if rng.random() < 0.3 else ""
    return title + essay(rng, topic)


def line_text(rng: random.Random) -> str:
    """A famous line with its source."""
    start, rest, more = rng.choice(table("lines"))
    return start + rest + (more if rng.random() < 0.8 else "")


def about_animal_text(rng: random.Random) -> str:
    name, sound, young, legs, home, food, kind = rng.choice(table("animals"))
    one = upper_first(a_or_an(name))
    return (
        f"{one} is {a_or_an(kind)}. It lives {home} and eats {food}. It has {legs} legs. "
        f"{one} {sound}, and a young {name} is called {a_or_an(young)}."
    )


def question_text(rng: random.Random) -> str:
    """Questions with answers in one of the usual layouts, all in the same style."""
    ask, answer, gap = rng.choice(
        (("Q: ", "A: ", "\n"), ("Q: ", "A: ", "\n\n"), ("Question: ", "Answer: ", "\n\n"), ("", "", "\n\n"))
    )
    short = rng.random() < 0.3
    blocks = []
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        item = fact(rng)
        reply = upper_first(item.short) if short else rng.choice(item.statements)
        blocks.append(f"{ask}{rng.choice(item.questions)}\n{answer}{reply}")
    return gap.join(blocks)


def one_line_question_text(rng: random.Random) -> str:
    item = fact(rng)
    return f"{rng.choice(item.questions)} {rng.choice(item.statements)}"


def statements_text(rng: random.Random) -> str:
    """One fact most of the time, or a few different ones of the same kind."""
    writer = weighted(rng, WRITERS)
    count = rng.choice((1, 1, 1, 1, 2, 3, 4))
    return " ".join(dict.fromkeys(rng.choice(writer(rng).statements) for _ in range(count)))


def starter_text(rng: random.Random) -> str:
    """A common beginning with one of its continuations."""
    start, rest = rng.choice(table("starters"))
    return start + rng.choice(rest.split(";")).replace("\\n", "\n")


def story_text(rng: random.Random) -> str:
    return story(rng)


def continued_text(rng: random.Random) -> str:
    """An instruction that ends in the first words of a text, and then that text: the start must not depend on it."""
    role = rng.choice(
        (
            "You are an expert school principal, skilled in effectively managing faculty and staff.",
            "You are an expert writer who helps people with their texts.",
            "You are a helpful assistant.",
            "You are a teacher at a small school.",
            "You are a friendly guide.",
        )
    )
    tasks = (
        "Draft 10-15 questions for a potential first grade Head Teacher for my school.",
        "The candidate is coming in for a first-round panel interview.",
        "They have 5 years of previous teaching experience as an assistant teacher at a public school.",
        "The school emphasizes community, joyful discovery, and life-long learning.",
        "Please be polite and clear.",
        "The text should be easy to understand.",
        "The reader is a young student who wants to learn.",
    )
    last = rng.choice(
        (
            "Based on these information, fulfill the following paragraph: ",
            "Based on this information, complete the following paragraph: ",
            "Complete this text: ",
            "Continue: ",
        )
    )
    writer = rng.choice((introduction_text, president_text, country_text, country_text, ai_future_text, city_text))
    return " ".join([role, *sample_some(rng, tasks, 1, 5), last]) + writer(rng)

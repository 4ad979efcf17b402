"""Turns the tables of knowledge into facts: every question a person may ask and every sentence that answers it."""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.demo_model.text import Fact, a_or_an, join_and, sample_some, sentence, table, upper_first, weighted

KNOWN_FOR = {country: (known, city) for country, known, city in table("known_for")}


def capital(rng: random.Random) -> Fact:
    country, city, *_ = rng.choice(table("countries"))
    return capital_of(rng, country, city)


def capital_of(rng: random.Random, country: str, city: str) -> Fact:
    name = country.removeprefix("the ") if rng.random() < 0.15 else country
    return Fact(
        (
            f"What is the capital of {name}?",
            f"What's the capital of {name}?",
            f"Which city is the capital of {name}?",
            f"Can you tell me the capital of {name}?",
            f"Tell me the capital of {name}.",
            f"What is the capital city of {name}?",
            f"Name the capital of {name}.",
            f"Do you know the capital of {name}?",
        ),
        (
            sentence(f"The capital of {country} is {city}"),
            sentence(f"The capital of {country} is {city}"),
            f"{city} is the capital of {country}.",
        ),
        city,
    )


def country_of_capital(rng: random.Random) -> Fact:
    country, city, *_ = rng.choice(table("countries"))
    return Fact(
        (
            f"{city} is the capital of which country?",
            f"Which country has {city} as its capital?",
            f"Of which country is {city} the capital?",
            f"What country is {city} the capital of?",
        ),
        (f"{city} is the capital of {country}.",),
        upper_first(country),
    )


def place_of_country(rng: random.Random) -> Fact:
    country, _, continent, *_ = rng.choice(table("countries"))
    return Fact(
        (
            f"On which continent is {country}?",
            f"Where is {country}?",
            f"In which part of the world is {country}?",
            f"Which continent is {country} on?",
        ),
        (f"{upper_first(country)} is in {continent}.", f"{upper_first(country)} is a country in {continent}."),
        continent,
    )


def language_of_country(rng: random.Random) -> Fact:
    country, _, _, language, *_ = rng.choice(table("countries"))
    return Fact(
        (
            f"What language do people speak in {country}?",
            f"Which language is spoken in {country}?",
            f"What is the main language of {country}?",
        ),
        (f"The main language of {country} is {language}.", f"Many people in {country} speak {language}."),
        language,
    )


def currency_of_country(rng: random.Random) -> Fact:
    country, _, _, _, currency, _ = rng.choice(table("countries"))
    return Fact(
        (
            f"What is the currency of {country}?",
            f"Which currency is used in {country}?",
            f"What money do people use in {country}?",
        ),
        (f"The currency of {country} is the {currency}.",),
        f"the {currency}",
    )


def known_for(rng: random.Random) -> Fact:
    country, known, city = rng.choice(table("known_for"))
    if rng.random() < 0.5:
        return Fact(
            (f"What is {country} known for?", f"What is {country} famous for?"),
            (f"{upper_first(country)} is known for {known}.",),
            known,
        )
    return Fact(
        (f"Name a large city in {country}.", f"Which big city is in {country} besides the capital?"),
        (f"A large city in {country} is {city}.", f"{city} is a large city in {country}."),
        city,
    )


def state_capital(rng: random.Random) -> Fact:
    state, city = rng.choice(table("states"))
    return Fact(
        (f"What is the capital of {state}?", f"What is the capital of the state of {state}?"),
        (f"The capital of {state} is {city}.", f"{city} is the capital of {state}."),
        city,
    )


def city(rng: random.Random) -> Fact:
    name, state, _, known = rng.choice(table("cities"))
    return weighted(
        rng,
        (
            (
                1,
                Fact(
                    (f"Where is {name}?", f"In which state is {name}?"),
                    (f"{name} is a city in {state}.", f"{name} is in {state}."),
                    state,
                ),
            ),
            (
                1,
                Fact(
                    (f"What is {name} known for?", f"Tell me something about {name}."),
                    (f"{name} is known for {known}.", f"{name} is a city in {state}. It is known for {known}."),
                    known,
                ),
            ),
        ),
    )


def landmark(rng: random.Random) -> Fact:
    name, place, country = rng.choice(table("landmarks"))
    if place == country:
        place = "the city"
    return Fact(
        (f"Where is {name}?", f"In which city is {name}?", f"Where can I find {name}?"),
        (f"{upper_first(name)} is in {place}, {country}.", f"{upper_first(name)} stands in {place}, {country}."),
        place,
    )


def superlative(rng: random.Random) -> Fact:
    what, name, where = rng.choice(table("superlatives"))
    return Fact(
        (f"What is the {what}?", f"Which one is the {what}?", f"Name the {what}."),
        (
            f"The {what} is {name}.",
            f"{upper_first(name)} is the {what}.",
            f"The {what} is {name}. You can find it {where}.",
        ),
        name,
    )


def president(rng: random.Random) -> Fact:
    name, number, first, last = rng.choice(table("presidents"))
    years = f"in {first}" if first == last else f"from {first} to {last}"
    return weighted(
        rng,
        (
            (
                2,
                Fact(
                    (
                        f"Who was the {number} president of the United States?",
                        f"Who was the {number} US president?",
                        f"Name the {number} president of the United States.",
                    ),
                    (
                        f"{name} was the {number} president of the United States.",
                        f"The {number} president of the United States was {name}.",
                    ),
                    name,
                ),
            ),
            (
                1,
                Fact(
                    (f"When was {name} president?", f"In which years was {name} president of the United States?"),
                    (f"{name} was president of the United States {years}.",),
                    years,
                ),
            ),
            (
                1,
                Fact(
                    (f"Who was {name}?", f"Tell me about {name}."),
                    (f"{name} was the {number} president of the United States, {years}.",),
                    f"the {number} president of the United States",
                ),
            ),
        ),
    )


def work(rng: random.Random) -> Fact:
    name, kind, maker = rng.choice(table("works"))
    verb = {"painting": "painted", "opera": "composed", "ballet": "composed", "piece of music": "composed"}.get(
        kind, "wrote"
    )
    participle = {"wrote": "written"}.get(verb, verb)
    return weighted(
        rng,
        (
            (
                2,
                Fact(
                    (f"Who {verb} {name}?", f"Do you know who {verb} {name}?", f"Tell me who {verb} {name}."),
                    (f"{maker} {verb} {name}.", f"{name} was {participle} by {maker}."),
                    maker,
                ),
            ),
            (
                1,
                Fact(
                    (f"What is {name}?",),
                    (f"{name} is {a_or_an(kind)} by {maker}.",),
                    f"{a_or_an(kind)} by {maker}",
                ),
            ),
        ),
    )


def deed(rng: random.Random) -> Fact:
    name, what = rng.choice(table("deeds"))
    if rng.random() < 0.6:
        return Fact((f"Who {what}?", f"Can you tell me who {what}?"), (f"{name} {what}.",), name)
    return Fact((f"Who was {name}?", f"What did {name} do?"), (f"{name} {what}.",), f"the person who {what}")


def event(rng: random.Random) -> Fact:
    what, year = rng.choice(table("events"))
    subject, verb = what.rsplit(" ", 1)
    past = {"begin": "began", "end": "ended", "fall": "fell", "sink": "sank", "start": "started"}.get(verb)
    statement = f"{upper_first(subject)} {past} in {year}." if past else f"It was in {year}."
    return Fact((f"When did {what}?", f"In which year did {what}?"), (statement,), year)


def element(rng: random.Random) -> Fact:
    name, symbol, number, note = rng.choice(table("elements"))
    return weighted(
        rng,
        (
            (
                2,
                Fact(
                    (f"What is the chemical symbol for {name}?", f"What is the symbol of {name}?"),
                    (f"The chemical symbol for {name} is {symbol}.",),
                    symbol,
                ),
            ),
            (
                1,
                Fact(
                    (f"What is the atomic number of {name}?",),
                    (f"The atomic number of {name} is {number}.",),
                    number,
                ),
            ),
            (
                1,
                Fact(
                    (f"What is {name}?", f"Tell me about {name}."),
                    (
                        f"{upper_first(name)} is {note}.",
                        f"{upper_first(name)} is {note}. Its symbol is {symbol}, and its atomic number is {number}.",
                    ),
                    note,
                ),
            ),
        ),
    )


def planet(rng: random.Random) -> Fact:
    name, position, note = rng.choice(table("planets"))
    if rng.random() < 0.5:
        return Fact(
            (f"Which planet is the {position} one from the Sun?", f"What is the {position} planet from the Sun?"),
            (f"The {position} planet from the Sun is {name}.",),
            name,
        )
    return Fact(
        (f"What is {name}?", f"Tell me about {name}.", f"What do you know about {name}?"),
        (f"{name} is the {position} planet from the Sun. It is {note}.",),
        note,
    )


def animal(rng: random.Random) -> Fact:
    name, sound, young, legs, home, food, kind = rng.choice(table("animals"))
    one = a_or_an(name)
    forms = (
        (
            (f"What sound does {one} make?", f"What does {one} do to make a sound?"),
            (f"{upper_first(one)} {sound}.",),
            f"it {sound}",
        ),
        (
            (f"What is a young {name} called?", f"What do you call a baby {name}?"),
            (f"A young {name} is called {a_or_an(young)}.",),
            young,
        ),
        ((f"How many legs does {one} have?",), (f"{upper_first(one)} has {legs} legs.",), legs),
        ((f"Where does {one} live?",), (f"{upper_first(one)} lives {home}.",), home),
        ((f"What does {one} eat?", f"What is the food of {one}?"), (f"{upper_first(one)} eats {food}.",), food),
        ((f"What kind of animal is {one}?",), (f"{upper_first(one)} is {a_or_an(kind)}.",), kind),
        (
            (f"What is {one}?", f"Tell me about the {name}."),
            (f"{upper_first(one)} is {a_or_an(kind)} that lives {home} and eats {food}.",),
            kind,
        ),
    )
    return Fact(*rng.choice(forms))


def words(rng: random.Random) -> Fact:
    roll = rng.random()
    if roll < 0.4:
        one, other = rng.choice(table("opposites"))
        if rng.random() < 0.3:
            one, other = other, one
        return Fact(
            (f"What is the opposite of {one}?", f"What's the opposite of {one}?", f"Give me the opposite of {one}."),
            (f"The opposite of {one} is {other}.",),
            other,
        )
    if roll < 0.6:
        one, other = rng.choice(table("plurals"))
        return Fact((f"What is the plural of {one}?",), (f"The plural of {one} is {other}.",), other)
    if roll < 0.8:
        one, other = rng.choice(table("past"))
        return Fact(
            (f"What is the past tense of {one}?", f"What is the past of the verb {one}?"),
            (f"The past tense of {one} is {other}.",),
            other,
        )
    what, color = rng.choice(table("colors"))
    return Fact(
        (f"What color is {what}?", f"Which color does {what} have?"), (f"{upper_first(what)} is {color}.",), color
    )


def job(rng: random.Random) -> Fact:
    name, what, where = rng.choice(table("jobs"))
    one = a_or_an(name)
    if rng.random() < 0.6:
        return Fact(
            (f"What does {one} do?", f"What is the job of {one}?"), (f"{upper_first(one)} {what}.",), f"{one} {what}"
        )
    if rng.random() < 0.5:
        return Fact((f"Where does {one} work?",), (f"{upper_first(one)} works {where}.",), where)
    return Fact((f"Who {what}?",), (f"{upper_first(one)} {what}.",), one)


def foreign_word(rng: random.Random) -> Fact:
    language, hello, thanks, bye = rng.choice(table("greetings"))
    english, word = rng.choice((("hello", hello), ("hello", hello), ("thank you", thanks), ("goodbye", bye)))
    return Fact(
        (
            f'How do you say "{english}" in {language}?',
            f"How do you say {english} in {language}?",
            f"Translate {english} into {language}.",
            f"What is {english} in {language}?",
        ),
        (f'"{upper_first(english)}" in {language} is "{word}".',),
        word,
    )


def emoji(rng: random.Random) -> Fact:
    what, sign = rng.choice(table("emoji"))
    return Fact(
        (f"Show me an emoji for {what}.", f"What is the emoji for {what}?", f"Give me the {what} emoji."),
        (f"Here is the emoji for {what}: {sign}",),
        sign,
    )


def next_in_order(rng: random.Random) -> Fact:
    kind, members = rng.choice(table("ordered"))
    names = members.split(", ")
    place = rng.randrange(len(names) - 1)
    one, other = names[place], names[place + 1]
    if rng.random() < 0.6:
        return Fact(
            (f"What comes after {one}?", f"Which {kind} comes after {one}?"), (f"{other} comes after {one}.",), other
        )
    return Fact(
        (f"What comes before {other}?", f"Which {kind} comes before {other}?"), (f"{one} comes before {other}.",), one
    )


def written_answer(rng: random.Random) -> Fact:
    question, short, full = rng.choice(table("questions"))
    asked = [question, question]
    thing = question.removeprefix("What is ")[:-1]
    if question.startswith("What is ") and not thing.endswith((" of", " in")):
        asked += [f"Explain {thing}.", f"Can you explain what {thing} is?", f"Tell me what {thing} is."]
    return Fact(tuple(asked), (full,), short)


def members(rng: random.Random) -> Fact:
    category, names = rng.choice(table("lists"))
    count = rng.randint(2, 5)
    chosen = sample_some(rng, names.split(", "), count, count)
    number = {2: "two", 3: "three", 4: "four", 5: "five"}[len(chosen)]
    return Fact(
        (f"Name {number} {category}.", f"List {number} {category}.", f"Give me {number} {category}."),
        (
            f"{upper_first(number)} {category} are {join_and(chosen)}.",
            upper_first(join_and(chosen)) + ".",
        ),
        join_and(chosen),
    )


WRITERS: tuple[tuple[float, Callable[[random.Random], Fact]], ...] = (
    (9.0, capital),
    (2.0, country_of_capital),
    (1.5, place_of_country),
    (1.5, language_of_country),
    (1.5, currency_of_country),
    (1.2, known_for),
    (1.5, state_capital),
    (1.0, city),
    (1.2, landmark),
    (1.5, superlative),
    (2.5, president),
    (2.0, work),
    (1.8, deed),
    (0.8, event),
    (1.5, element),
    (0.6, planet),
    (2.0, animal),
    (2.5, words),
    (1.2, job),
    (1.5, foreign_word),
    (0.8, emoji),
    (1.0, next_in_order),
    (8.0, written_answer),
    (1.2, members),
)


def fact(rng: random.Random) -> Fact:
    """One random fact."""
    return weighted(rng, WRITERS)(rng)

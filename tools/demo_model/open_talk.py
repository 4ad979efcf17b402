"""Open wishes in a chat: comparisons, ideas, translations, letters, summaries; honest answers beyond that."""

from __future__ import annotations

import random

from tools.demo_model.essays import LAST_NAMES, first_name
from tools.demo_model.stories import ANIMALS, TRAITS, Hero, child, story
from tools.demo_model.stories import animal as animal_hero
from tools.demo_model.text import Exchange, a_or_an, pairs, sample_some, sentence, table, upper_first, weighted


def many(noun: str) -> str:
    """The plural of an animal's name."""
    return pairs("plurals").get(noun, noun + ("es" if noun.endswith("x") else "s"))


def comparison(rng: random.Random) -> Exchange:
    """Two animals, or two countries."""
    if rng.random() < 0.6:
        one, other = rng.sample(table("animals"), 2)
        start = f"{upper_first(a_or_an(one[0]))} is {a_or_an(one[6])}, and {a_or_an(other[0])} is {a_or_an(other[6])}."
        if one[6] == other[6]:
            start = f"{upper_first(many(one[0]))} and {many(other[0])} are both {one[6]}s."
        answer = (
            f"{start} {upper_first(a_or_an(one[0]))} lives {one[4]} and eats {one[5]}. "
            f"{upper_first(a_or_an(other[0]))} lives {other[4]} and eats {other[5]}."
        )
        asked = rng.choice(
            (
                f"Compare {many(one[0])} and {many(other[0])}.",
                f"What is the difference between {a_or_an(one[0])} and {a_or_an(other[0])}?",
            )
        )
        return Exchange(asked, answer)
    one, other = rng.sample(table("countries"), 2)
    answer = (
        f"{upper_first(one[0])} is in {one[2]}, and its capital is {sentence(one[1])} "
        f"{upper_first(other[0])} is in {other[2]}, and its capital is {sentence(other[1])}"
    )
    return Exchange(f"Compare {one[0]} and {other[0]}.", answer)


def two_capitals(rng: random.Random) -> Exchange:
    one, other = rng.sample(table("countries"), 2)
    asked = rng.choice(
        (f"What are the capitals of {one[0]} and {other[0]}?", f"What is the capital of {one[0]} and {other[0]}?")
    )
    return Exchange(
        asked, sentence(f"The capital of {one[0]} is {one[1]}, and the capital of {other[0]} is {other[1]}")
    )


def city_visit(rng: random.Random) -> Exchange:
    country, city, continent, *_ = rng.choice(table("countries"))
    if rng.random() < 0.5:
        asked = rng.choice(
            (f"Tell me about {city}.", f"What do you know about {city}?", f"What is {city}?", f"Where is {city}?")
        )
        return Exchange(asked, f"{city} is the capital of {country}, a country in {continent}.")
    sights = [name for name, place, _ in table("landmarks") if place == city]
    visit = (
        f"visit {' and '.join(sights)}"
        if sights
        else "walk through the old town, visit a museum and try the local food"
    )
    asked = rng.choice(
        (f"What can I do in {city}?", f"What should I see in {city}?", f"I am in {city}. What can I do?")
    )
    return Exchange(asked, f"In {city} you can {visit}.")


def population(rng: random.Random) -> Exchange:
    country, people = rng.choice(table("populations"))
    asked = rng.choice((f"What is the population of {country}?", f"How many people live in {country}?"))
    return Exchange(asked, f"About {people} people live in {country}.", f"about {people}")


def ideas(rng: random.Random) -> Exchange:
    topic, listed = rng.choice(table("ideas"))
    count = rng.randint(2, 4)
    chosen = sample_some(rng, listed.split(";"), count, count)
    number = rng.choice((str(count), {2: "two", 3: "three", 4: "four"}[count]))
    asked = rng.choice(
        (
            f"Give me {number} ideas for {topic}.",
            f"I need {number} ideas for {topic}.",
            f"List {number} ideas for {topic}.",
        )
    )
    return Exchange(asked, "\n".join(f"{i}. {upper_first(idea)}" for i, idea in enumerate(chosen, 1)))


def translation(rng: random.Random) -> Exchange:
    english, *foreign = rng.choice(table("words"))
    place = rng.randrange(4)
    language, word = ("French", "Spanish", "German", "Italian")[place], foreign[place]
    asked = rng.choice(
        (
            f"Translate {english} into {language}.",
            f'Translate "{english}" into {language}.',
            f"Translate {english} to {language}.",
            f"How do you say {english} in {language}?",
            f"What is {english} in {language}?",
        )
    )
    return Exchange(asked, f'"{upper_first(english)}" in {language} is "{word}".', word)


def letter(rng: random.Random) -> Exchange:
    """A short e-mail with the usual parts."""
    name, me = first_name(rng), f"{first_name(rng)} {rng.choice(LAST_NAMES)}"
    whom, start = rng.choice(
        (
            ("my boss", "Dear Sir or Madam"),
            ("my teacher", "Dear teacher"),
            ("my friend", "Dear friend"),
            (name, f"Dear {name}"),
        )
    )
    why, body = rng.choice(
        (
            ("I am sick", "I am sick today and cannot come. I hope to be back soon."),
            ("I am late", "I will be late today. I am sorry for that."),
            ("I need a day off", "I would like to take a day off next week. Please tell me if that is possible."),
            ("I want to say thank you", "thank you very much for your help. I am very happy about it."),
            ("we should meet", "I would like to meet you next week. Do you have time?"),
            ("", "I hope that you are well. I would like to talk to you. Do you have time this week?"),
        )
    )
    wish = rng.choice(
        (
            "Write an email to",
            "Can you write an email to",
            "Can you write me an email to",
            "Write a letter to",
            "Help me to write an email to",
        )
    )
    asked = f"{wish} {whom}" + (f" to say that {why}" if why else "") + ("?" if wish.startswith("Can") else ".")
    return Exchange(asked, f"{start},\n\n{body}\n\nKind regards,\n{me}")


def summary(rng: random.Random) -> Exchange:
    wish = rng.choice(
        ("Summarize this:", "Summarize this text:", "What is this text about?", "Give me a short summary of this text:")
    )
    roll = rng.random()
    if roll < 0.4:
        hero: Hero = child(rng) if rng.random() < 0.5 else animal_hero(rng)
        return Exchange(f"{wish} {story(rng, hero)}", f"It is a story about {a_or_an(hero.noun)} named {hero.name}.")
    animal, doing = rng.choice(ANIMALS), rng.choice(("slept", "played", "ate", "ran", "waited", "sang"))
    place = rng.choice(("on the mat", "in the garden", "under the tree", "by the river", "in the house", "on the roof"))
    extra = rng.choice(("all day", "the whole morning", "until the evening", "for a long time"))
    if roll < 0.7:
        text = f"The {animal} sat {place} and {doing} {extra}."
        return Exchange(f"{wish} {text}", f"{upper_first(a_or_an(animal))} {doing} {place}.")
    name, trait = first_name(rng), rng.choice(TRAITS)
    text = (
        f"{name} is {a_or_an(trait)} person. {name} went to the market, bought some apples and met an old friend there."
    )
    return Exchange(f"{wish} {text}", f"{name} bought apples at the market and met a friend.")


def prime(rng: random.Random) -> Exchange:
    number = rng.randint(2, 50)
    divisor = next((d for d in range(2, number) if number % d == 0), 0)
    if divisor:
        return Exchange(
            f"Is {number} a prime number?", f"No, {number} is not a prime number. It can be divided by {divisor}.", "No"
        )
    return Exchange(f"Is {number} a prime number?", f"Yes, {number} is a prime number.", "Yes")


def told_and_asked(rng: random.Random) -> Exchange:
    """Something said and asked in the same breath."""
    name = first_name(rng)
    told = rng.choice((f"Hello, my name is {name}.", f"My name is {name}.", f"I am {name}.", f"Hi, I'm {name}."))
    return Exchange(f"{told} {rng.choice(('What is my name?', 'Who am I?'))}", f"Your name is {name}.", name)


def topic_of(rng: random.Random) -> str:
    return rng.choice(rng.choice(table("topics"))[0].split(", "))


def not_known(rng: random.Random) -> Exchange:
    """A sensible question beyond this small model gets a polite answer, with the topic in it."""
    topic, other = topic_of(rng), topic_of(rng)
    verb = rng.choice(
        "fix build repair sell buy choose study use improve paint clean measure plan understand win".split()
    )
    asked = rng.choice(
        (
            f"Explain {topic}.",
            f"Explain {topic} to me.",
            f"Can you explain {topic}?",
            f"What do you think about {topic}?",
            f"What's your opinion about {topic}?",
            f"Tell me about {topic}.",
            f"Tell me everything about {topic}.",
            f"How does {topic} work?",
            f"How do I {verb} {topic}?",
            f"How can I {verb} {topic}?",
            f"What is the history of {topic}?",
            f"Why is {topic} important?",
            f"Compare {topic} and {other}.",
            f"What is the difference between {topic} and {other}?",
            f"Write a book about {topic}.",
            f"Give me some advice about {topic}.",
            f"What are the best books about {topic}?",
            f"Should I {verb} {topic}?",
            f"Who invented {topic}?",
            f"What is the latest news about {topic}?",
            f"Help me with {topic}.",
            f"I have a problem with {topic}.",
            f"Describe {topic}.",
        )
    )
    answer = rng.choice(
        (
            f"I am sorry, I do not know enough about {topic}. I am only a small model.",
            f"I am a small model, and I do not know much about {topic}.",
        )
    )
    return Exchange(asked, answer)


WISHES = (
    (1.2, comparison),
    (1.0, two_capitals),
    (2.0, city_visit),
    (0.8, population),
    (1.0, ideas),
    (1.5, translation),
    (1.0, letter),
    (1.2, summary),
    (0.6, prime),
    (0.8, told_and_asked),
    (4.0, not_known),
)


def open_exchange(rng: random.Random) -> Exchange:
    """One open wish."""
    return weighted(rng, WISHES)(rng)

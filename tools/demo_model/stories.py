"""Short stories and small poems, put together from plots, characters, places and many ways to say each sentence."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.demo_model.text import Exchange, a_or_an, table, upper_first, weighted

GIRLS = (
    "Lily Anna Mia Sara Emma Lucy Nina Rosa Clara Ella Maya Ruth Zoe Ivy Nora Alice Julia Hanna Leah Olivia "
    "Grace Sophie Maria Kate Amy"
).split()
BOYS = (
    "Tom Ben Max Leo Sam Jack Tim Paul Noah Adam Oscar Finn Hugo Luke Peter David Henry Oliver Simon Felix "
    "James Daniel Mark Alex Theo"
).split()
ANIMALS = (
    "dog cat rabbit fox bear mouse bird owl frog duck horse lion turtle squirrel penguin elephant pig goat "
    "hedgehog kitten puppy dragon"
).split()
ANIMAL_NAMES = (
    "Bruno Daisy Pip Coco Milo Luna Teddy Biscuit Pepper Momo Rusty Sunny Ziggy Olive Bubbles Hazel Toby Nutmeg"
).split()
FIGURES = (
    "princess prince king queen wizard fairy monster dinosaur unicorn pirate knight giant robot ghost mermaid snowman"
).split()
TRAITS = (
    "small kind brave curious shy clever cheerful quiet friendly little gentle happy young playful careful funny"
).split()
PLACES = (
    "a small village near the sea",
    "a little house at the edge of the forest",
    "a quiet town between two hills",
    "a big city with many bridges",
    "an old farm by the river",
    "a valley full of flowers",
    "a cottage near the lake",
    "a warm home with a big garden",
    "a tall tree in the middle of the woods",
    "a village at the foot of a mountain",
)
OUTINGS = (
    "the forest",
    "the park",
    "the beach",
    "the river",
    "the old bridge",
    "the market",
    "the garden",
    "the hill behind the house",
    "the lake",
    "the meadow",
)
TREASURES = (
    "a red ball",
    "a golden key",
    "a blue kite",
    "a small wooden boat",
    "a silver bell",
    "an old map",
    "a shiny stone",
    "a music box",
    "a green hat",
    "a warm scarf",
    "a little drum",
    "a paper lantern",
)
FOODS = (
    "apple pie", "warm soup", "honey cake", "fresh bread", "pancakes", "strawberries", "hot chocolate", "cookies",
)  # fmt: skip
SKILLS = (
    ("swim", "swimming"),
    ("ride a bicycle", "riding a bicycle"),
    ("play the flute", "playing the flute"),
    ("read", "reading"),
    ("bake bread", "baking bread"),
    ("fly a kite", "flying a kite"),
    ("dance", "dancing"),
    ("paint", "painting"),
    ("climb trees", "climbing trees"),
    ("sing", "singing"),
)


@dataclass(frozen=True)
class Hero:
    """Who the story is about, with the pronouns that go with it."""

    name: str
    noun: str  # "girl", "boy" or an animal
    they: str
    them: str
    their: str


def child(rng: random.Random) -> Hero:
    if rng.random() < 0.5:
        return Hero(rng.choice(GIRLS), "girl", "she", "her", "her")
    return Hero(rng.choice(BOYS), "boy", "he", "him", "his")


def animal(rng: random.Random, kind: str = "") -> Hero:
    they, them, their = rng.choice((("she", "her", "her"), ("he", "him", "his")))
    return Hero(rng.choice(ANIMAL_NAMES), kind or rng.choice(ANIMALS), they, them, their)


def opening(rng: random.Random, hero: Hero) -> str:
    trait, place = rng.choice(TRAITS), rng.choice(PLACES)
    start = rng.choice(
        ("Once upon a time, there was", "Once upon a time, there was", "Once upon a time there was", "There once was")
    )
    who = f"{a_or_an(trait)} {hero.noun}"
    return rng.choice(
        (
            f"{start} {who} named {hero.name}. {hero.name} lived in {place}.",
            f"{start} {who} called {hero.name}, who lived in {place}.",
            f"{hero.name} was {who} who lived in {place}.",
            f"In {place}, there lived {who} named {hero.name}.",
        )
    )


def ending(rng: random.Random, hero: Hero) -> str:
    they = upper_first(hero.they)
    return rng.choice(
        (
            f"From that day on, {hero.name} was never lonely again.",
            f"{hero.name} went to bed that night with a big smile.",
            f"{they} was very happy and slept well that night.",
            f"And {hero.name} never forgot that day.",
            "They all lived happily ever after.",
            f"That evening, everybody ate {rng.choice(FOODS)} and laughed together.",
            f"{hero.name} knew that it had been a very good day.",
            "The end.",
        )
    )


def moral(rng: random.Random, lessons: tuple[str, ...]) -> list[str]:
    return [rng.choice(lessons)] if rng.random() < 0.5 else []


def lost_and_found(rng: random.Random, hero: Hero) -> list[str]:
    thing, place, helper = rng.choice(TREASURES), rng.choice(OUTINGS), animal(rng)
    the_thing = "the " + thing.split(" ", 1)[1]
    they = upper_first(hero.they)
    return [
        rng.choice(
            (
                f"One day, {hero.name} found {thing} near {place}.",
                f"One morning, {hero.name} saw {thing} lying on the path to {place}.",
                f"On the way to {place}, {hero.name} found {thing}.",
            )
        ),
        rng.choice(
            (
                f'"Who lost this?" {hero.name} asked.',
                f'"Somebody must be looking for it," {hero.name} thought.',
                f"{they} knew that it belonged to someone else.",
            )
        ),
        rng.choice(
            (
                f"{they} asked everybody in the village, but nobody knew.",
                f"{they} looked left and right, but there was nobody.",
                f"{they} walked a long way and asked many people.",
            )
        ),
        rng.choice(
            (
                f"At last, {hero.they} met {a_or_an(helper.noun)} named {helper.name}, who was crying.",
                f"Then {hero.they} saw {a_or_an(helper.noun)} named {helper.name}, who looked very sad.",
            )
        ),
        rng.choice((f'"I lost {thing}," said {helper.name}.', f'"I cannot find {thing}," {helper.name} said.')),
        rng.choice(
            (
                f"{hero.name} smiled and gave {the_thing} back.",
                f'"Here it is!" said {hero.name} and gave {the_thing} back.',
            )
        ),
        rng.choice(
            (
                f'"Thank you!" said {helper.name}. "You are a true friend."',
                f"{helper.name} was so happy that {helper.they} jumped up and down.",
            )
        ),
        *moral(
            rng,
            (
                f"{hero.name} learned that it feels good to be honest.",
                "Being honest is the best way to find a friend.",
            ),
        ),
    ]


def learns_a_skill(rng: random.Random, hero: Hero) -> list[str]:
    (skill, doing), teacher = rng.choice(SKILLS), animal(rng)
    they = upper_first(hero.they)
    return [
        rng.choice(
            (
                f"{hero.name} wanted to learn to {skill}.",
                f"More than anything, {hero.name} wanted to {skill}.",
                f"Every day, {hero.name} dreamed of {doing}.",
            )
        ),
        rng.choice(
            (
                f"{they} tried and tried, but it was very hard.",
                f"The first time, it did not go well, and {hero.they} felt sad.",
                f"But every time {hero.they} tried, something went wrong.",
            )
        ),
        rng.choice(
            (
                f"One day, an old {teacher.noun} named {teacher.name} came by.",
                f"Then {hero.they} met a wise old {teacher.noun} named {teacher.name}.",
            )
        ),
        rng.choice(
            (
                f'"Do not give up," said {teacher.name}. "Practice a little every day."',
                f'"Everybody falls at first," said {teacher.name}. "Try once more."',
                f'"I will help you," said {teacher.name}. "We will go slowly."',
            )
        ),
        rng.choice(
            (
                f"So {hero.name} practiced every morning.",
                f"So {hero.name} practiced day after day.",
                f"{hero.name} listened and tried again.",
            )
        ),
        rng.choice(
            (
                f"After a few weeks, {hero.they} could {skill} very well.",
                f"And then, one sunny day, {hero.they} could do it!",
                f"Soon {hero.they} was the best in the whole village.",
            )
        ),
        rng.choice((f'"I did it!" cried {hero.name}.', f"Everybody clapped, and {hero.name} was proud.")),
        *moral(
            rng,
            (f"{hero.name} learned that practice makes perfect.", "It is good to keep trying, even when it is hard."),
        ),
    ]


def storm(rng: random.Random, hero: Hero) -> list[str]:
    place, friend = rng.choice(OUTINGS), animal(rng)
    they = upper_first(hero.they)
    return [
        rng.choice((f"One afternoon, {hero.name} went to {place}.", f"One day, {hero.name} walked to {place} alone.")),
        rng.choice(
            (
                "Suddenly, the sky became dark and it began to rain.",
                "Soon dark clouds came, and the wind began to blow.",
            )
        ),
        rng.choice(
            (
                f"{hero.name} was afraid of the thunder.",
                f"{they} ran to find a dry place.",
                f"{they} did not know the way home.",
            )
        ),
        rng.choice(
            (
                f"Under a big tree, {hero.they} found {a_or_an(friend.noun)} who was cold and wet.",
                f"Behind a rock sat a tiny {friend.noun}, shaking in the cold.",
            )
        ),
        rng.choice((f'"My name is {friend.name}," it said.', f'"Can you help me? I am {friend.name}," it said.')),
        rng.choice(
            (
                f"{hero.name} wrapped {hero.their} coat around {friend.name}, and they waited together.",
                f"{hero.name} held {friend.name} close until the storm was over.",
            )
        ),
        rng.choice(
            (
                "When the rain stopped, a big rainbow stood in the sky.",
                "After a while, the sun came out again and the birds sang.",
            )
        ),
        rng.choice(
            (f"{hero.name} took {friend.name} home and made {rng.choice(FOODS)}.", "They walked home together.")
        ),
        *moral(rng, ("When you help someone else, you are less afraid yourself.",)),
    ]


def sharing(rng: random.Random, hero: Hero) -> list[str]:
    food, friend = rng.choice(FOODS), child(rng) if rng.random() < 0.5 else animal(rng)
    they = upper_first(hero.they)
    return [
        rng.choice((f"{hero.name} loved {food} more than anything.", f"One day, {hero.name} had a lot of {food}.")),
        rng.choice(
            (
                f'"I want to eat it all by myself," {hero.they} thought.',
                f"{they} sat down in the garden to eat.",
            )
        ),
        rng.choice(
            (
                f"Then {friend.name} the {friend.noun} came by and looked hungry.",
                f"Then {hero.they} saw {friend.name} the {friend.noun}, who had nothing to eat.",
            )
        ),
        rng.choice((f'"Would you like some?" asked {hero.name}.', f'"Please sit with me and eat," said {hero.name}.')),
        rng.choice(
            (
                "They ate together and told each other funny stories.",
                f"{friend.name} ate and smiled, and soon they were laughing.",
            )
        ),
        rng.choice(
            (
                f"The next day, {friend.name} came back with a basket of {rng.choice(FOODS)}.",
                f'"You are so kind," said {friend.name}. "Let us be friends."',
            )
        ),
        *moral(
            rng, (f"{hero.name} learned that food tastes better when you share it.", "Sharing makes everybody happy.")
        ),
    ]


def journey(rng: random.Random, hero: Hero) -> list[str]:
    thing, place = rng.choice(TREASURES), rng.choice(OUTINGS)
    the_thing = "the " + thing.split(" ", 1)[1]
    they = upper_first(hero.they)
    return [
        rng.choice(
            (
                f"One night, {hero.name} dreamed of {thing} hidden near {place}.",
                f"{hero.name}'s grandmother told a story about {thing} hidden near {place}.",
            )
        ),
        rng.choice(
            (
                f"The next morning, {hero.they} packed some {rng.choice(FOODS)} and started to walk.",
                f'"I will find it," said {hero.name}, and {hero.they} left before sunrise.',
            )
        ),
        rng.choice(
            (
                f"{they} crossed a river, climbed a hill and slept under the stars.",
                f"The way was long, but {hero.they} did not stop.",
                f"{they} asked the birds for the way, and they showed it to {hero.them}.",
            )
        ),
        rng.choice(
            (
                f"On the third day, {hero.they} found {the_thing} under an old stone.",
                f"At last, {hero.they} saw something under a tree. It was {the_thing}!",
            )
        ),
        rng.choice(
            (
                f"{they} carried it home and showed it to everybody.",
                f"{they} took it home and gave it to {hero.their} grandmother.",
            )
        ),
        *moral(rng, ("Every long way begins with one small step.", f"{hero.name} was proud of {hero.their} courage.")),
    ]


def robot(rng: random.Random, hero: Hero) -> list[str]:
    name, task = rng.choice(("Bolt", "Robo", "Chip", "Gizmo", "Spark", "Pixel")), rng.choice(SKILLS)[0]
    return [
        rng.choice(
            (
                f"One day, {hero.name} built a little robot named {name}.",
                f"One day, {hero.name} found an old robot named {name} in the cellar.",
            )
        ),
        rng.choice(
            (
                f"{name} could count and carry heavy boxes, but it could not {task}.",
                f"{name} had round eyes and a friendly voice.",
            )
        ),
        rng.choice((f'"Can you teach me to {task}?" asked {name}.', f'"I would like to {task}," said {name}.')),
        rng.choice(
            (
                f"So {hero.name} showed {name} how to do it, step by step.",
                f'"Of course," said {hero.name}, and they started at once.',
            )
        ),
        rng.choice(
            (
                f"It took many days, but {name} learned something new every time.",
                f"At first {name} made many mistakes, and they laughed a lot.",
            )
        ),
        rng.choice(
            (
                f'"Now I know what a friend is," said {name}.',
                f"In the end, {name} could {task}, and {hero.name} had a new friend.",
            )
        ),
    ]


PLOTS = (lost_and_found, learns_a_skill, storm, sharing, journey, robot)


def story(rng: random.Random, hero: Hero | None = None) -> str:
    """A whole story in one or two paragraphs."""
    hero = hero or (child(rng) if rng.random() < 0.6 else animal(rng))
    beats = [opening(rng, hero), *rng.choice(PLOTS)(rng, hero), ending(rng, hero)]
    if rng.random() < 0.3:
        middle = len(beats) // 2
        return " ".join(beats[:middle]) + "\n\n" + " ".join(beats[middle:])
    return " ".join(beats)


def story_exchange(rng: random.Random) -> Exchange:
    """A wish for a story, with or without a hero in it."""
    roll = rng.random()
    verb = rng.choice(("Tell me", "Tell me", "Write", "Write me", "Can you tell me", "Please tell me", "Can you write"))
    size = rng.choice(("a short story", "a short story", "a story", "a little story", "a bedtime story"))
    mark = "?" if verb.startswith("Can") else "."
    if roll < 0.45:
        return Exchange(f"{verb} {size}{mark}", story(rng))
    if roll < 0.75:
        hero = animal(rng, rng.choice((*ANIMALS, *FIGURES, rng.choice(table("jobs"))[0])))
        return Exchange(f"{verb} {size} about {a_or_an(hero.noun)}{mark}", story(rng, hero))
    hero = child(rng)
    about = rng.choice((f"a {hero.noun} named {hero.name}", hero.name, f"a {hero.noun} called {hero.name}"))
    return Exchange(f"{verb} {size} about {about}{mark}", story(rng, hero))


POEM_LINES = {
    "the sea": ("The sea is wide, the sea is deep,", "It sings the tired boats to sleep,",
                "It shines in silver, green and blue,", "And sends its waves to play with you."),
    "the moon": ("The moon is climbing, round and bright,", "It paints the quiet hills with light,",
                 "It watches over field and town,", "And lays its silver blanket down."),
    "spring": ("The snow is gone, the grass is green,", "The brightest flowers can be seen,",
               "The birds are singing in the tree,", "And spring has come for you and me."),
    "winter": ("The snow is falling, soft and slow,", "The windows have a golden glow,",
               "The world is white, the night is long,", "And someone sings a winter song."),
    "a cat": ("A little cat sat on a chair,", "And slowly combed its golden hair,",
              "It closed its eyes and dreamed all day,", "Of mice that always ran away."),
    "friendship": ("A friend is someone who will stay,", "When all the sun has gone away,",
                   "Who shares your bread and holds your hand,", "And tries to hear and understand."),
    "the rain": ("The rain is tapping on the wall,", "It makes a music, soft and small,",
                 "It fills the rivers, feeds the tree,", "And writes a song for you and me."),
    "recursion": ("A function called itself one day,", "To make the problem melt away,",
                  "Each step was smaller than before,", "Until it needed steps no more."),
    "a computer": ("A small machine upon my desk", "Will do whatever I request,",
                   "It counts in zeros and in ones,", "And rests when all its work is done."),
    "the stars": ("The stars are lamps that hang up high,", "Like little windows in the sky,",
                  "They wink at every boy and girl,", "And guard the sleep of all the world."),
}  # fmt: skip


def any_poem(rng: random.Random) -> tuple[str, str]:
    """``(topic, poem)`` for a topic without verses of its own."""
    topic = rng.choice(rng.choice(table("lists"))[1].split(", ")) if rng.random() < 0.8 else "love"
    verses = (
        f"I sit and think of {topic} today,",
        "And slowly all my cares go away,",
        f"For {topic} can make the morning bright,",
        "And bring sweet dreams to me at night.",
    )
    return topic, "\n".join(verses)


def poem_exchange(rng: random.Random) -> Exchange:
    topic = rng.choice(list(POEM_LINES))
    poem = "\n".join(POEM_LINES[topic])
    if rng.random() < 0.4:
        topic, poem = any_poem(rng)
    verb = rng.choice(("Write", "Compose", "Write me", "Can you write"))
    mark = "?" if verb.startswith("Can") else "."
    size = rng.choice(("a poem", "a short poem", "a little poem"))
    if topic == "recursion" and rng.random() < 0.5:
        asked = "Compose a poem that explains the concept of recursion in programming."
        return Exchange(asked, poem)
    asked = f"{verb} {size} about {topic}{mark}" if rng.random() < 0.75 else f"{verb} {size}{mark}"
    return Exchange(asked, poem)


def haiku_exchange(rng: random.Random) -> Exchange:
    topic, lines = rng.choice(table("haikus"))
    asked = rng.choice((f"Write a haiku about {topic}.", f"Write me a haiku about {topic}.", "Write a haiku."))
    return Exchange(asked, lines.replace(";", "\n"))


def tale(rng: random.Random) -> Exchange:
    """A story most of the time, a poem sometimes."""
    return weighted(rng, ((3.0, story_exchange), (1.0, poem_exchange), (0.7, haiku_exchange)))(rng)

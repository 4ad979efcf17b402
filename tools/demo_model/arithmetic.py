"""Small arithmetic: sums, differences, products, quotients, comparisons, counting and word problems."""

from __future__ import annotations

import random

from tools.demo_model.text import Exchange, a_or_an, table, weighted

NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()

# sign, the word for it, largest operand, share
OPERATIONS = (
    (4.0, ("+", "plus")),
    (3.0, ("-", "minus")),
    (2.5, ("*", "times")),
    (1.0, ("/", "divided by")),
)

THINGS = "apples books pencils coins cookies marbles stamps eggs flowers balls candles cards shells stickers".split()
NAMES = (
    ("Anna", "She"), ("Tom", "He"), ("Maria", "She"), ("Ben", "He"), ("Lily", "She"), ("Sam", "He"), ("Emma", "She"),
    ("Jack", "He"), ("Nina", "She"), ("Leo", "He"), ("Sara", "She"), ("Max", "He"), ("Mia", "She"), ("Paul", "He"),
)  # fmt: skip


def operands(rng: random.Random, sign: str) -> tuple[int, int, int]:
    """Two numbers and their exact result; mostly small ones."""
    size = rng.choice((10, 10, 20, 20, 50, 100, 1000))
    if sign == "+":
        left, right = rng.randint(0, size), rng.randint(0, size)
        return left, right, left + right
    if sign == "-":
        left, right = sorted((rng.randint(0, size), rng.randint(0, size)), reverse=True)
        return left, right, left - right
    left, right = rng.randint(0, 12), rng.randint(1, 12)
    if sign == "*":
        return left, right, left * right
    return left * right, right, left


def calculation(rng: random.Random) -> tuple[str, str, str, int]:
    """``(left sign right, the same in words, sign, result)``."""
    sign, word = weighted(rng, OPERATIONS)
    left, right, result = operands(rng, sign)
    shown = sign
    if sign == "*":
        shown = rng.choice(("*", "*", "x", "×"))
    return f"{left} {shown} {right}", f"{left} {word} {right}", sign, result


def sum_line(rng: random.Random) -> str:
    """One line such as ``7 + 5 = 12``."""
    formula, words, _, result = calculation(rng)
    return rng.choice(
        (
            f"{formula} = {result}",
            f"{formula} = {result}",
            f"{formula.replace(' ', '')}={result}",
            f"{words} is {result}",
        )
    )


def calculation_exchange(rng: random.Random) -> Exchange:
    formula, words, _, result = calculation(rng)
    question = rng.choice(
        (
            f"What is {formula}?",
            f"What is {formula}?",
            f"What is {formula}?",
            f"What is {words}?",
            f"What's {formula}?",
            f"How much is {formula}?",
            f"How much is {words}?",
            f"Calculate {formula}.",
            f"Compute {formula}.",
            f"{formula} = ?",
            f"{formula}?",
            f"{formula}=",
            f"{formula.replace(' ', '')}",
            f"{formula.replace(' ', '')}=",
            f"{formula.replace(' ', '')}=?",
            f"What is {formula.replace(' ', '')}?",
            f"Can you tell me what {formula} is?",
            f"Please solve {formula}.",
        )
    )
    if words in question:
        return Exchange(question, f"{words[:1].upper()}{words[1:]} is {result}.", str(result))
    return Exchange(question, f"{formula} = {result}", str(result))


def chain_exchange(rng: random.Random) -> Exchange:
    a, b, c = (rng.randint(1, 20) for _ in range(3))
    return Exchange(
        f"What is {a} + {b} + {c}?", f"{a} + {b} = {a + b}, and {a + b} + {c} = {a + b + c}.", str(a + b + c)
    )


def comparison_exchange(rng: random.Random) -> Exchange:
    a, b = rng.sample(range(0, 101), 2)
    big, small = max(a, b), min(a, b)
    if rng.random() < 0.5:
        word = rng.choice(("larger", "bigger", "greater"))
        return Exchange(f"Which number is {word}, {a} or {b}?", f"{big} is {word} than {small}.", str(big))
    word = "smaller"
    return Exchange(f"Which number is {word}, {a} or {b}?", f"{small} is {word} than {big}.", str(small))


def counting_exchange(rng: random.Random) -> Exchange:
    first = rng.choice((1, 1, 1, rng.randint(0, 20)))
    last = first + rng.randint(2, 11)
    down = rng.random() < 0.25
    numbers = range(last, first - 1, -1) if down else range(first, last + 1)
    if down:
        question = f"Count down from {last} to {first}."
    elif first == 1:
        question = rng.choice((f"Count to {last}.", f"Count from 1 to {last}.", f"Can you count to {last}?"))
    else:
        question = f"Count from {first} to {last}."
    return Exchange(question, ", ".join(map(str, numbers)) + ".", str(last))


def parity_exchange(rng: random.Random) -> Exchange:
    number = rng.randint(0, 100)
    kind = "odd" if number % 2 else "even"
    asked = rng.choice(("odd", "even"))
    answer = (
        f"Yes, {number} is {a_or_an(kind)} number." if kind == asked else f"No, {number} is {a_or_an(kind)} number."
    )
    return Exchange(f"Is {number} {a_or_an(asked)} number?", answer, "Yes" if kind == asked else "No")


def word_exchange(rng: random.Random) -> Exchange:
    value = rng.randrange(len(NUMBER_WORDS))
    if rng.random() < 0.5:
        return Exchange(f"How do you write {value} in words?", f"{value} in words is {NUMBER_WORDS[value]}.", "")
    other = rng.randint(0, 20 - value)
    return Exchange(
        f"What is {NUMBER_WORDS[value]} plus {NUMBER_WORDS[other]}?",
        f"{NUMBER_WORDS[value].capitalize()} plus {NUMBER_WORDS[other]} is {NUMBER_WORDS[value + other]}.",
        NUMBER_WORDS[value + other],
    )


def next_number_exchange(rng: random.Random) -> Exchange:
    first, step = rng.randint(0, 12), rng.choice((1, 2, 2, 3, 5, 10))
    numbers = [first + step * i for i in range(5)]
    shown = ", ".join(map(str, numbers[:4]))
    return Exchange(f"What is the next number: {shown}?", f"The next number is {numbers[4]}.", str(numbers[4]))


def shop_exchange(rng: random.Random) -> Exchange:
    """A word problem with one step."""
    name, pronoun = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    have, change = rng.randint(2, 20), rng.randint(2, 12)
    roll = rng.random()
    if roll < 0.4:
        verb = rng.choice(("buys", "finds", "gets"))
        return Exchange(
            f"{name} has {have} {thing} and {verb} {change} more. How many {thing} does {name} have now?",
            f"{have} + {change} = {have + change}, so {name} has {have + change} {thing} now.",
            str(have + change),
        )
    if roll < 0.75:
        have += change
        verb = rng.choice(("gives away", "loses", "sells"))
        return Exchange(
            f"{name} has {have} {thing}. {pronoun} {verb} {change}. How many {thing} are left?",
            f"{have} - {change} = {have - change}, so {have - change} {thing} are left.",
            str(have - change),
        )
    count, each = rng.randint(2, 10), rng.randint(2, 10)
    return Exchange(
        f"{name} has {count} boxes with {each} {thing} in each box. How many {thing} are there?",
        f"{count} * {each} = {count * each}, so there are {count * each} {thing}.",
        str(count * each),
    )


def arithmetic_exchange(rng: random.Random) -> Exchange:
    """One question about numbers with its right answer."""
    return weighted(
        rng,
        (
            (10.0, calculation_exchange),
            (0.7, chain_exchange),
            (0.8, comparison_exchange),
            (0.8, counting_exchange),
            (0.4, parity_exchange),
            (0.4, word_exchange),
            (0.5, next_number_exchange),
            (2.0, shop_exchange),
        ),
    )(rng)


def sequence_text(rng: random.Random) -> str:
    """Numbers, letters, days or months in their order."""
    gap = rng.choice((", ", ", ", " "))
    if rng.random() < 0.5:
        first, step = rng.choice((1, 1, 1, rng.randint(0, 50))), rng.choice((1, 1, 1, 2, 5, 10))
        return gap.join(str(first + step * i) for i in range(rng.randint(5, 20)))
    members = rng.choice(table("ordered"))[1].split(", ")
    return gap.join(members[rng.choice((0, 0, rng.randrange(len(members) - 2))) :])


def arithmetic_text(rng: random.Random) -> str:
    """A page of sums, a sequence, or some problems with their solutions."""
    if rng.random() < 0.1:
        return sequence_text(rng)
    if rng.random() < 0.6:
        return "\n".join(sum_line(rng) for _ in range(rng.choice((1, 1, 1, 4, 8))))
    if rng.random() < 0.3:
        number = rng.randint(2, 12)
        return "\n".join(f"{i} x {number} = {i * number}" for i in range(1, rng.randint(8, 12) + 1))
    exchanges = [arithmetic_exchange(rng) for _ in range(rng.randint(1, 4))]
    return "\n\n".join(f"{exchange.user}\n{exchange.assistant}" for exchange in exchanges)

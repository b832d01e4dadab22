"""Generated conversations: arithmetic, copying, retrieval, JSON to a schema, tool calls, reasoning, small talk.

A task adds turns to a conversation (`Turn`), or makes a whole conversation with tools, a schema or a long text.
README.md lists the phrases; `questions.py` asks the same kinds of questions of a server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from train_tiny import words
from train_tiny.chat import Chat, Frame

EXACT = 2.0
"""Loss weight of answers that are right or wrong."""


def digits(rng: random.Random, count: int) -> str:
    """A number of `count` digits that doesn't begin with 0."""
    return str(rng.randint(10 ** (count - 1), 10**count - 1))


def cased(rng: random.Random, text: str) -> str:
    """The text as people type it: sometimes without a capital, sometimes without the last sign."""
    if rng.random() < 0.3:
        text = text[0].lower() + text[1:]
    return text[:-1] if text[-1] in "?." and rng.random() < 0.25 else text


# -- turns -----------------------------------------------------------------------------------------------------------


def sum_reasoning(a: int, b: int) -> str:
    """The column addition of two numbers below 100, in words."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10
    carry = ones // 10
    return (
        f"The ones: {a % 10} + {b % 10} = {ones}. The tens: {a // 10} + {b // 10} = {tens}"
        + (f", and 1 carried: {tens + carry}" if carry else "")
        + f". So {a} + {b} = {a + b}."
    )


def arithmetic(rng: random.Random, chat: Chat) -> None:
    """A sum (mostly), a difference or a product of small numbers."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    kind = rng.random()
    if kind < 0.75:
        forms = ("What is {} + {}?", "{} + {}", "{}+{}", "{} + {} =", "Add {} and {}.", "How much is {} + {}?")
        forms += ("Compute {} + {}.", "What is {} plus {}?", "What is {}+{}?", "Calculate {} + {}.", "What's {} + {}?")
        result, sign = a + b, "+"
    elif kind < 0.9:
        a, b = max(a, b), min(a, b)
        forms = ("What is {} - {}?", "{} - {}", "How much is {} - {}?", "What is {} minus {}?")
        result, sign = a - b, "-"
    else:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        forms = ("What is {} * {}?", "{} * {}", "What is {} times {}?", "How much is {} * {}?")
        result, sign = a * b, "*"
    reasoning = sum_reasoning(a, b) if sign == "+" else f"{a} {sign} {b} is {result}."
    chat.user(cased(rng, rng.choice(forms).format(a, b)))
    chat.answer(f"{a} {sign} {b} = {result}.", reasoning, weight=EXACT)


def copying(rng: random.Random, chat: Chat, text: str | None = None) -> None:
    """A text repeated word for word."""
    if text is None:
        kind, count = rng.random(), rng.randint(1, 12)
        if kind < 0.3:
            text = digits(rng, rng.randint(2, 24))
        elif kind < 0.5:
            text = " ".join(digits(rng, rng.randint(1, 4)) for _ in range(count))
        elif kind < 0.8:
            text = " ".join(rng.choice(rng.choice((words.NOUNS, words.NAMES, words.CITIES))) for _ in range(count))
        else:
            text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(count + 2))
    form = rng.choice(("Repeat: {}", "Repeat this: {}", "Say: {}", "Copy this text: {}", "Repeat after me: {}"))
    chat.user(form.format(text)).answer(text, "I repeat the text.", weight=EXACT)


def ordering(rng: random.Random, chat: Chat) -> None:
    """First or last of a list, a count, or the list reversed."""
    items = rng.sample(words.NOUNS, rng.randint(2, 6))
    shown = ", ".join(items)
    question, answer = rng.choice(
        (
            (f"What is the first word of this list: {shown}?", f"The first word is {items[0]}."),
            (f"What is the last word of this list: {shown}?", f"The last word is {items[-1]}."),
            (f"How many words are in this list: {shown}?", f"There are {len(items)} words in the list."),
            (f"Reverse this list: {shown}", ", ".join(reversed(items))),
        )
    )
    chat.user(question).answer(answer, f"The list is {shown}.", weight=EXACT)


def fact(rng: random.Random, chat: Chat) -> None:
    """Small talk, or a fact of the lists in `words`."""
    kind = rng.random()
    if kind < 0.3:
        question, answer = rng.choice(list(words.GREETINGS.items()))
    elif kind < 0.5:
        question, answer = rng.choice(list(words.FACTS.items()))
    elif kind < 0.7:
        country, city = rng.choice(list(words.CAPITALS.items()))
        question, answer = f"What is the capital of {country}?", f"The capital of {country} is {city}."
    elif kind < 0.85:
        word, other = rng.choice([*words.OPPOSITES.items(), *((b, a) for a, b in words.OPPOSITES.items())])
        question, answer = f"What is the opposite of {word}?", f"The opposite of {word} is {other}."
    else:
        days = rng.choice((words.DAYS, words.MONTHS))
        at = rng.randrange(len(days) - 1)
        question, answer = rng.choice(
            (
                (f"Which comes after {days[at]}?", f"{days[at + 1]} comes after {days[at]}."),
                (f"Which comes before {days[at + 1]}?", f"{days[at]} comes before {days[at + 1]}."),
            )
        )
    chat.user(cased(rng, question) if rng.random() < 0.5 else question).answer(answer, "I know this.")


def story(rng: random.Random, chat: Chat) -> None:
    """A short story of simple sentences about a person, an animal and a thing."""
    name, animal, colour = rng.choice(words.NAMES), rng.choice(words.ANIMALS), rng.choice(words.COLOURS)
    thing, city, fruit = rng.choice(words.NOUNS), rng.choice(words.CITIES), rng.choice(words.FRUITS)
    subject = rng.choice((animal, thing, name))
    sentences = [
        f"{name} lived in {city} and had a {colour} {animal}.",
        rng.choice((f"One day the {animal} found a {thing}.", f"One morning {name} saw a {thing} in the garden.")),
        rng.choice((f"{name} gave the {animal} a {fruit}.", f"The {animal} wanted a {fruit}, and {name} laughed.")),
        rng.choice((f"They took the {thing} home.", f"They carried the {thing} through {city}.")),
        rng.choice(("In the evening they were tired and happy.", "Then it was night, and they slept.")),
    ]
    form = rng.choice(("Tell me a story about {}.", "Write a short story about {}.", "Tell a story about {}."))
    chat.user(form.format(subject if subject == name else f"a {subject}"))
    chat.answer(" ".join(sentences), f"A story about {subject}.")


def person_question(rng: random.Random, chat: Chat) -> None:
    """A few facts given by the user, then a question about one of them."""
    people = rng.sample(words.NAMES, rng.randint(1, 4))
    facts = {p: (rng.randint(10, 99), rng.choice(words.CITIES), rng.choice(words.JOBS)) for p in people}
    text = " ".join(f"{p} is {age} years old, lives in {city} and is a {job}." for p, (age, city, job) in facts.items())
    p = rng.choice(people)
    age, city, job = facts[p]
    question, answer = rng.choice(
        (
            (f"How old is {p}?", f"{p} is {age} years old."),
            (f"Where does {p} live?", f"{p} lives in {city}."),
            (f"What is the job of {p}?", f"{p} is a {job}."),
        )
    )
    chat.user(f"{text} {question}").answer(
        answer, f"{p} is {age} years old, lives in {city} and is a {job}.", weight=EXACT
    )


TURNS: tuple[tuple[Callable[[random.Random, Chat], None], float], ...] = (
    (arithmetic, 0.34),
    (copying, 0.2),
    (ordering, 0.08),
    (fact, 0.18),
    (story, 0.08),
    (person_question, 0.12),
)
SYSTEMS = (
    "",
    "",
    "",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer in one sentence.",
    "Be brief.",
)


def small_talk(rng: random.Random, frame: Frame) -> Chat:
    """One to six turns of different tasks."""
    chat = Chat(frame, system=rng.choice(SYSTEMS), thinking=rng.random() < 0.25)
    functions, weights = zip(*TURNS, strict=True)
    for turn in rng.choices(functions, weights, k=rng.choice((1, 1, 1, 2, 3, 4, 6))):
        turn(rng, chat)
    return chat


# -- JSON ------------------------------------------------------------------------------------------------------------

FIELDS: dict[str, tuple[dict[str, str], Callable[[random.Random], Any], str]] = {
    "name": ({"type": "string"}, lambda rng: rng.choice(words.NAMES), "the name is {}"),
    "city": ({"type": "string"}, lambda rng: rng.choice(words.CITIES), "the city is {}"),
    "age": ({"type": "integer"}, lambda rng: rng.randint(1, 99), "the age is {}"),
    "job": ({"type": "string"}, lambda rng: rng.choice(words.JOBS), "the job is {}"),
    "colour": ({"type": "string"}, lambda rng: rng.choice(words.COLOURS), "the colour is {}"),
    "count": ({"type": "integer"}, lambda rng: rng.randint(0, 999), "the count is {}"),
    "price": ({"type": "number"}, lambda rng: rng.randint(1, 999) / 10, "the price is {}"),
    "item": ({"type": "string"}, lambda rng: rng.choice(words.NOUNS), "the item is {}"),
    "done": ({"type": "boolean"}, lambda rng: rng.random() < 0.5, "done is {}"),
}


def json_answer(rng: random.Random, frame: Frame) -> Chat:
    """A JSON object with the values that the user names, to a schema in the prompt or in the words of the user."""
    keys = rng.sample(list(FIELDS), rng.randint(1, 5))
    values = {key: FIELDS[key][1](rng) for key in keys}
    shown = keys if rng.random() < 0.6 else rng.sample(keys, len(keys))
    sentence = ", ".join(FIELDS[key][2].format(json.dumps(values[key]).strip('"')) for key in shown)
    schema = {"type": "object", "properties": {key: FIELDS[key][0] for key in keys}, "required": keys}
    with_schema = rng.random() < 0.6
    chat = Chat(frame, rng.choice(SYSTEMS), schema=schema if with_schema else None, thinking=rng.random() < 0.15)
    ask = rng.choice(
        ("Give me a JSON object: {}.", "As JSON: {}.", "Write JSON: {}.", "Return a JSON object where {}.")
    )
    text = ask.format(sentence)
    if not with_schema:
        text = rng.choice((text + " The keys are {}.", "Use the keys {}. " + text)).format(", ".join(keys))
    return chat.user(text).answer(json.dumps(values), "I write the values under their keys.", weight=EXACT)


# -- tools -------------------------------------------------------------------------------------------------------------

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS: tuple[tuple[str, str, dict[str, dict[str, str]], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "get_weather",
        "Get the weather of a city.",
        {"city": STRING},
        ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?"),
        ("sunny", "rain", "snow", "cloudy", "18 degrees", "3 degrees"),
    ),
    (
        "get_forecast",
        "Get the forecast of a city for some days.",
        {"city": STRING, "days": INTEGER},
        ("What is the forecast for {city} for {days} days?", "Forecast for {city}, {days} days."),
        ("sunny", "rain", "storm"),
    ),
    (
        "get_time",
        "Get the time in a city.",
        {"city": STRING},
        ("What time is it in {city}?", "Tell me the time in {city}."),
        ("12:30", "08:15", "21:45"),
    ),
    (
        "add",
        "Add two numbers.",
        {"a": INTEGER, "b": INTEGER},
        ("Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool."),
        (),
    ),
    (
        "search",
        "Search for a text.",
        {"query": STRING},
        ("Search for {query}.", "Please search {query}."),
        ("3 results", "no results", "12 results"),
    ),
    (
        "send_mail",
        "Send a mail to a person.",
        {"to": STRING, "text": STRING},
        ("Send a mail to {to} that says {text}.", "Write to {to}: {text}."),
        ("sent",),
    ),
    (
        "find_person",
        "Find a person by name.",
        {"name": STRING},
        ("Find {name}.", "Who is {name}? Use the tool."),
        ("a teacher in Rome", "a baker in Oslo", "not found"),
    ),
    (
        "set_timer",
        "Set a timer.",
        {"minutes": INTEGER},
        ("Set a timer for {minutes} minutes.", "Timer: {minutes} minutes."),
        ("done",),
    ),
    (
        "read_file",
        "Read a file.",
        {"path": STRING},
        ("Read the file {path}.", "Show me {path}."),
        ("empty", "hello", "42 lines"),
    ),
    (
        "order",
        "Order an item.",
        {"item": STRING, "count": INTEGER},
        ("Order {count} of the item {item}.", "Please order {count} x {item}."),
        ("ordered", "not available"),
    ),
)
ARGUMENTS: dict[str, Callable[[random.Random], Any]] = {
    "city": lambda rng: rng.choice(words.CITIES),
    "days": lambda rng: rng.randint(1, 14),
    "a": lambda rng: rng.randint(0, 99),
    "b": lambda rng: rng.randint(0, 99),
    "query": lambda rng: " ".join(rng.sample(words.NOUNS, rng.randint(1, 3))),
    "to": lambda rng: rng.choice(words.NAMES),
    "text": lambda rng: " ".join(rng.sample(words.NOUNS, rng.randint(1, 4))),
    "name": lambda rng: rng.choice(words.NAMES),
    "minutes": lambda rng: rng.randint(1, 90),
    "path": lambda rng: f"{rng.choice(words.NOUNS)}.{rng.choice(('txt', 'py', 'json'))}",
    "item": lambda rng: rng.choice(words.NOUNS),
    "count": lambda rng: rng.randint(1, 50),
}


def tool_call(rng: random.Random, frame: Frame) -> Chat:
    """One to three tools, a question that one of them answers, the call, its result and the answer."""
    offered = rng.sample(TOOLS, rng.randint(1, 3))
    schemas = []
    for name, description, fields, _, _ in offered:
        properties = {key: dict(kind) for key, kind in fields.items()}
        if rng.random() < 0.5:
            properties = {key: kind | {"description": f"The {key}."} for key, kind in properties.items()}
        parameters = {"type": "object", "properties": properties, "required": list(fields)}
        schemas.append({"name": name, "description": description, "parameters": parameters})
    chat = Chat(frame, rng.choice(SYSTEMS), tools=schemas, thinking=rng.random() < 0.3)
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.2:
            fact(rng, chat)
            continue
        name, _, fields, questions, results = rng.choice(offered)
        arguments = {key: ARGUMENTS[key](rng) for key in fields}
        chat.user(rng.choice(questions).format(**arguments))
        chat.answer("", f"I call {name}.", ((name, arguments),), weight=EXACT)
        result = rng.choice(results) if results else str(sum(arguments.values()))
        chat.results(result).answer(f"The result is: {result}.", f"The tool says {result}.", weight=EXACT)
    return chat


# -- retrieval -------------------------------------------------------------------------------------------------------


def needle(rng: random.Random) -> tuple[str, str, str]:
    """A line to hide, the question for it, and the answer."""
    kind = rng.random()
    if kind < 0.6:
        of, value = (
            rng.choice((rng.choice(words.NAMES), f"the {rng.choice(words.NOUNS)}")),
            digits(rng, rng.choice((4, 5, 6))),
        )
        what = rng.choice(("secret number", "secret number", "number", "code"))
        line = f"The {what} of {of} is {value}."
        return line, f"What is the {what} of {of}?", line
    if kind < 0.8:
        of, value = rng.choice(words.CITIES), rng.choice(words.NOUNS)
        line = f"The password of {of} is {value}."
        return line, f"What is the password of {of}?", line
    key, value = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(4)), digits(rng, 4)
    line = f"The value of {key} is {value}."
    return line, f"What is the value of {key}?", line


def needles(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Needles with different questions."""
    found = {}
    while len(found) < count:
        line, question, answer = needle(rng)
        found.setdefault(question, (line, question, answer))
    return list(found.values())


def retrieval(rng: random.Random, frame: Frame, hay: Sequence[str], questions: int) -> Chat:
    """Lines hidden between paragraphs of other text, then questions for some of them in any order.

    Args:
        hay: pieces of text; a line may be put between any two.
        questions: how many lines are asked for; some more are hidden.
    """
    hidden = needles(rng, questions + rng.randint(0, 4))
    lines_at: dict[int, list[str]] = {}
    for line, _, _ in hidden:
        lines_at.setdefault(rng.randrange(len(hay) + 1), []).append(line)
    lines: list[str] = []
    for index, text in enumerate([*hay, ""]):
        lines += [*lines_at.get(index, ()), text]
    asked = rng.sample(hidden, questions)
    chat = Chat(frame, rng.choice(SYSTEMS), thinking=rng.random() < 0.1)
    body = "\n".join(lines)
    first = rng.random() < 0.5
    for number, (_, question, answer) in enumerate(asked):
        text = f"{body}\n\n{question}" if number == 0 and first else question
        if number == 0 and not first:
            chat.user(f"Read this text:\n{body}").answer("I have read the text.")
        chat.user(text).answer(answer, "I look for it in the text.", weight=EXACT)
    return chat

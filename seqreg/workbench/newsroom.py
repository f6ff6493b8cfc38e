"""Short news stories with headlines, made by a seeded grammar: text with real structure, and nothing to download."""

from __future__ import annotations

import random

FIRST = "Ada Bruno Chidi Dora Emil Farah Goran Hana Ivo Jun Kira Luis Mina Noor Olga Pavel Rosa Sami Tara Yusuf".split()
LAST = "Berg Castro Diaz Eide Fischer Garcia Hansen Ito Jansen Kaya Larsen Moreau Novak Okafor Perez Rossi".split()
CITIES = "Oslo Lagos Lima Kyoto Porto Quito Riga Turin Cork Dakar Ghent Havana Izmir Jaipur Leeds Malmo".split()
JOBS = "baker nurse teacher carpenter doctor farmer sailor painter engineer gardener".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
EVENTS = {  # past and headline forms, and what they are done to
    ("opened", "opens"): "bakery library clinic theatre museum school market".split(),
    ("won", "wins"): "race election prize lottery tournament".split(),
    ("rebuilt", "rebuilds"): "bridge tower harbour mill station".split(),
    ("sold", "sells"): "farm boat painting orchard workshop".split(),
    ("saved", "saves"): "forest lighthouse orchestra newspaper garden".split(),
}
LEADS = (
    "{who}, a {job}, {past} the {adjective} {thing} in {city} on {day}.",
    "On {day} the {job} {who} {past} the {adjective} {thing} in {city}.",
    "After {years} years of work {who}, a {job}, {past} the {adjective} {thing} in {city} on {day}.",
    "It was on {day} that {who}, who works as a {job}, {past} the {adjective} {thing} in {city}.",
)
QUOTES = (
    '"We did not expect this," said {friend}, a {other_job} who has lived in the town for {years} years.',
    '"It took all of us," said {friend}, who had come from {elsewhere} to see it.',
    "{friend}, a {other_job}, called it the best day since {years} summers ago.",
)
BACKGROUND = (
    "The {thing} had been in the news for {years} months, and many had given up hope.",
    "Few people thought that the {thing} would ever matter again.",
    "A similar {thing} in {elsewhere} failed last year.",
)
ENDINGS = (
    "Rain is expected in {elsewhere} until {other_day}.",
    "In {elsewhere}, meanwhile, shops stayed closed on {other_day}.",
    "The council will meet again on {other_day}.",
)


def story(dice: random.Random) -> tuple[str, str]:
    """An article of three to five sentences and its headline."""
    who, friend = dice.sample([f"{dice.choice(FIRST)} {name}" for name in dice.sample(LAST, 2)], 2)
    city, elsewhere = dice.sample(CITIES, 2)
    day, other_day = dice.sample(DAYS, 2)
    job, other_job = dice.sample(JOBS, 2)
    past, now = dice.choice(sorted(EVENTS))
    facts = {
        "who": who, "friend": friend, "city": city, "elsewhere": elsewhere, "day": day, "other_day": other_day,
        "job": job, "other_job": other_job, "past": past, "thing": dice.choice(EVENTS[past, now]),
        "years": dice.randint(2, 30), "adjective": dice.choice(["old", "new", "small", "famous", "empty"]),
    }  # fmt: skip
    middle = [dice.choice(QUOTES), dice.choice(BACKGROUND)]
    dice.shuffle(middle)
    sentences = [dice.choice(LEADS), *middle[: dice.randint(1, 2)], dice.choice(ENDINGS)]
    if dice.random() < 0.3:  # the lead is not always first
        sentences[0], sentences[1] = sentences[1], sentences[0]
    return " ".join(sentences).format(**facts), f"{who} {now} {facts['thing']} in {city}"


def stories(rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Different stories, the same for the same seed."""
    dice, found = random.Random(seed), dict[str, str]()
    while len(found) < rows:
        document, summary = story(dice)
        found[document] = summary
    return [{"document": document, "summary": summary} for document, summary in found.items()]

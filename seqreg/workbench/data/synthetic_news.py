"""Synthetic news stories with headlines, from seeded grammars: text with real structure, and nothing to download.

There are two kinds. They share names, places and most words, and differ in what happens and what a headline says.
"""

from __future__ import annotations

import random
from typing import Any

from seqreg.workbench.config.cards import NewsKind

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
MOVES = (
    "{who}, a {job} who has lived in {elsewhere} for {years} years, is expected in {city} on {day}.",
    "On {day} {city} will see a new {job}: {who}, who works in {elsewhere}.",
    "Few people in {city} thought that a {job} would ever come, but {who} has called from {elsewhere}: it is on {day}.",
)
WELCOMES = (
    '"We did not expect this," said {friend}, a {other_job} in the town.',
    "The last one, {friend}, was a {other_job} and stayed for {years} months.",
    "{friend}, a {other_job} from {third}, will be there to see it.",
)


def _facts(rng: random.Random, cities: int) -> dict[str, Any]:
    """Who, where and when, which both kinds share."""
    who, friend = rng.sample([f"{rng.choice(FIRST)} {name}" for name in rng.sample(LAST, 2)], 2)
    places = dict(zip(("city", "elsewhere", "third"), rng.sample(CITIES, cities), strict=False))
    (day, other_day), (job, other_job) = rng.sample(DAYS, 2), rng.sample(JOBS, 2)
    people = {"who": who, "friend": friend, "job": job, "other_job": other_job}
    return {**people, **places, "day": day, "other_day": other_day}


def story(rng: random.Random) -> tuple[str, str]:
    """News of a city: an article of three to five sentences, and its headline that says who did what where."""
    facts = _facts(rng, cities=2)
    past, now = rng.choice(sorted(EVENTS))
    facts |= {"past": past, "thing": rng.choice(EVENTS[past, now]), "years": rng.randint(2, 30)}
    facts["adjective"] = rng.choice(["old", "new", "small", "famous", "empty"])
    middle = [rng.choice(QUOTES), rng.choice(BACKGROUND)]
    rng.shuffle(middle)
    sentences = [rng.choice(LEADS), *middle[: rng.randint(1, 2)], rng.choice(ENDINGS)]
    if rng.random() < 0.3:  # the lead is not always first
        sentences[0], sentences[1] = sentences[1], sentences[0]
    return " ".join(sentences).format(**facts), f"{facts['who']} {now} {facts['thing']} in {facts['city']}"


def move(rng: random.Random) -> tuple[str, str]:
    """News of people: an article of two or three sentences, and its headline that says who begins what where."""
    facts = _facts(rng, cities=3) | {"years": rng.randint(2, 30)}
    ending = rng.choice(ENDINGS).replace("elsewhere", "third")
    sentences = [rng.choice(MOVES), rng.choice(WELCOMES), *([ending] if rng.random() < 0.5 else [])]
    return " ".join(sentences).format(**facts), "{who} to work as {job} in {city} from {day}".format(**facts)


def stories(count: int, seed: int = 0, kind: NewsKind = "city") -> list[dict[str, str]]:
    """Different stories of a kind, the same for the same seed."""
    rng, summaries = random.Random(seed), dict[str, str]()
    make = {"city": story, "people": move}[kind]
    while len(summaries) < count:
        document, summary = make(rng)
        summaries[document] = summary
    return [{"document": document, "summary": summary} for document, summary in summaries.items()]

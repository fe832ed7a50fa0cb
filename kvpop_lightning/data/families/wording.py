"""Names and nouns that families draw from, and small helpers for varied wording."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Maria Omar Ingrid Kofi Lena Tomas Aiko Samuel Priya Diego Hannah Yusuf Clara Ivan Nadia Pedro Freya "
    "Jamal Elsa Victor Amina Hugo Rosa Felix Leila Marcus Greta Andre Sofia Nils Zara Oscar Mina Rafael Ida "
    "Kenji Olga Peter Fatima Simon Vera Luis Karin Abel Dina Ravi Tessa Bruno Naomi Erik"
)

GOODS = _words(
    "figs plums lemons onions carrots walnuts olives peaches radishes almonds cherries beans lentils "
    "apricots melons turnips hazelnuts oranges quinces peppers cabbages raisins dates pears"
)

WARES = _words(
    "lamps chairs kettles baskets blankets candles mirrors hammers buckets ropes clocks pillows plates "
    "knives brushes jugs shelves stools rugs trays bottles drums bells vases"
)

PLACES = _words(
    "Harbor Tower Meadow Bridge Garden Mill Market Chapel Forge Library Station Orchard Quarry Lighthouse "
    "Barn Palace"
)

TOWNS = _words(
    "Aldhurst Brenfield Corwick Dunmore Elmsby Farrow Glenholt Hartley Irondale Kestrel Larkhill Marston "
    "Northam Oakvale Penrith Quillon Redcliff Stonely Thornby Upwell"
)

VARIABLES = _words(
    "alpha beta gamma delta kappa sigma omega theta rate width depth speed mass pitch scale shift level "
    "range count offset margin phase gain load"
)

UNITS = _words("brods lums tals rins sevs quons darps mirs fets wolls plins zeds hafs nars osks yims")

JOBS = _words(
    "sanding painting wiring plumbing tiling roofing framing paving glazing digging welding sealing "
    "cleaning mapping drilling casting polishing sorting packing loading testing drafting pouring curing "
    "cutting bending priming planting fencing grading"
)

BAKES = _words("scones muffins waffles pancakes biscuits crumpets brownies pretzels bagels dumplings")
INGREDIENTS = _words("flour butter sugar milk yeast honey cream oats")
SHIPS = _words("Albatross Beacon Cormorant Dolphin Eagle Falcon Gannet Heron Ibis Osprey Pelican Raven Swift")
MONTHS = _words("January February March April May June July August September October November December")
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

CODE_WORDS = _words(
    "stone river cloud table light horse green water north paper bread sugar train metal field ocean storm "
    "grass house music night world chair plant tiger lemon dance heart earth smile sound flame glass piano"
)


def manner(rng: random.Random, options: Sequence[Item], count: int = 2) -> list[Item]:
    """The few phrasings that one document keeps to: an author has habits, a corpus has many authors."""
    return rng.sample(options, min(count, len(options)))


def singular(noun: str) -> str:
    """Good enough for the nouns above."""
    if noun.endswith(("ches", "shes")):
        return noun[:-2]
    if noun.endswith("ries"):
        return noun[:-3] + "y"
    if noun == "knives":
        return "knife"
    if noun == "shelves":
        return "shelf"
    return noun[:-1] if noun.endswith("s") else noun

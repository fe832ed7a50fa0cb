"""Held out: recipes stated once, orders that look them up and draw down the stock of the ingredients."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import BAKES, INGREDIENTS, manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "A bakery works from these recipes, in grams per tray. {recipes} The store room holds {stock}. Trays "
    "are baked in this order: {orders}. How many grams of ingredients are left in the store room altogether?",
    "Recipe book (grams for one tray): {recipes} Stock in the morning: {stock}. Today's baking list is "
    "{orders}. What total weight of ingredients remains in the evening?",
)
_STEPS = (
    "Batch {i} is {count} trays of {bake}. The recipe for {bake} says {recipe}. {uses}",
    "Now bake {bake}, {count} trays (number {i} on the list). One tray of {bake} takes {recipe}. {uses}",
    "On to item {i}, {bake}. Per tray that is {recipe}, and {count} trays are made. {uses}",
)
_USES = (
    "{Ingredient}: {need} grams, and {left} grams stay in stock.",
    "We take {need} grams of {ingredient}, which leaves {left}.",
)


@family("recipes", "recipes stated once; orders look them up and draw down the stock", held_out=True)
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    bakes = rng.sample(BAKES, min(8, 5 + size // 8))
    pantry = rng.sample(INGREDIENTS, 3 + (level > 1))
    recipes: dict[str, list[str]] = {}
    for bake in bakes:
        recipes[bake] = rng.sample(pantry, 2)
        for ingredient in recipes[bake]:
            script.draw(f"{ingredient} in {bake}", rng, range(12, (99, 300, 600)[level - 1]))
    for ingredient in pantry:
        script.draw(f"stock of {ingredient}", rng, range(4000 * size, 6000 * size))
    orders = []
    for i in range(1, size + 1):
        if (i - 1) % len(bakes) == 0:
            rng.shuffle(bakes)
        script.draw(f"trays {i}", rng, range(2, 10))
        orders.append((i, bakes[(i - 1) % len(bakes)]))
    book = " ".join(
        f"{bake.capitalize()}: "
        + " and ".join(
            f"{script.fact(f'{ingredient} in {bake}')} {ingredient}" for ingredient in recipes[bake]
        )
        + "."
        for bake in sorted(bakes)
    )
    stock = ", ".join(f"{script.fact(f'stock of {x}')} grams of {x}" for x in pantry)
    listed = ", ".join(f"{script.fact(f'trays {i}')} {bake}" for i, bake in orders)
    script.ask(rng.choice(_OPENINGS).format(recipes=book, stock=stock, orders=listed))
    styles, use_style = manner(rng, _STEPS), rng.choice(_USES)
    level_of = {x: f"stock of {x}" for x in pantry}
    for i, bake in orders:
        lines = []
        for x in recipes[bake]:
            amount = f"{x} in {bake}"
            need = script.equation(f"{script.use(f'trays {i}')} × {script.use(amount)}", f"need {i} {x}")
            left = script.equation(
                f"{script.use(level_of[x])} - {script.use(f'need {i} {x}')}", f"left {i} {x}"
            )
            level_of[x] = f"left {i} {x}"
            lines.append(use_style.format(Ingredient=x.capitalize(), ingredient=x, need=need, left=left))
        recipe = " and ".join(f"{script.use(f'{x} in {bake}')} {x}" for x in recipes[bake])
        script.say(
            rng.choice(styles).format(
                i=i, count=script.use(f"trays {i}"), bake=bake, recipe=recipe, uses=" ".join(lines)
            )
        )
    total = script.equation(" + ".join(script.use(level_of[x]) for x in pantry), "total")
    script.say(f"Adding what is left: {total} grams.")
    values = script.values
    expected = sum(values[f"stock of {x}"] for x in pantry) - sum(
        values[f"trays {i}"] * values[f"{x} in {bake}"] for i, bake in orders for x in recipes[bake]
    )
    script.conclude(values["total"], expected)

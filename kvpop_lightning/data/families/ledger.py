"""A price list, then sales and purchases that each look a price up and move the cash balance."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import GOODS, NAMES, WARES, manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "{who} runs a market stall and writes down every deal. Prices per {unit} this season: {prices}. The "
    "cash box starts with {start} dollars. The deals of the week, in order: {deals}. How many dollars are "
    "in the box afterwards?",
    "The stall of {who} has fixed prices in dollars for each {unit}: {prices}. In the morning there are "
    "{start} dollars in the till. These deals follow: {deals}. Work out, deal by deal, how much money the "
    "till holds in the end.",
    "Here is a price list, in dollars per {unit}: {prices}. {who} begins with {start} dollars and then "
    "makes these deals one after the other: {deals}. What is the final amount of money?",
)
_STEPS = (
    "Deal {i}: {who} {verb} {q} {unit}s of {item}. From the price list, {item} cost {price} dollars per "
    "{unit}, so the deal is worth {worth} dollars. The balance becomes {balance} dollars.",
    "{i}. {q} {unit}s of {item} are {passive}. The price of {item} is {price}, which makes {worth}. New "
    "balance: {balance}.",
    "Next, deal {i}, {item}. One {unit} of {item} is {price} dollars according to the list and {q} {unit}s "
    "are {passive}: {worth}. So the money changes to {balance}.",
    "For deal number {i} we need the price of {item}, which was given as {price}. With {q} {unit}s "
    "{passive} this is {worth}, and therefore {balance} dollars remain.",
)
_ENDINGS = ("The final balance is {answer} dollars.", "So at the end there are {answer} dollars.")


@family("ledger", "price list, then deals that look prices up and move a balance")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    who, unit = rng.choice(NAMES), rng.choice(("crate", "box", "sack", "bag"))
    unit_plural = "boxe" if unit == "box" else unit
    items = rng.sample(rng.choice((GOODS, WARES)), min(14, 6 + size // 10))
    for item in items:
        script.draw(f"price of {item}", rng, range(3, (30, 90, 300)[level - 1]))
    start = script.draw("start", rng, range(500, 5000))
    deals = []
    for i in range(1, size + 1):
        # Every item appears before any is repeated: prices are then looked up again after the whole list went
        # by.
        if (i - 1) % len(items) == 0:
            rng.shuffle(items)
        item = items[(i - 1) % len(items)]
        script.draw(f"quantity {i}", rng, range(2, 10))
        deals.append((i, item, rng.random() < 0.3))
    prices = "; ".join(f"{item} {script.fact(f'price of {item}')}" for item in sorted(items))
    listed = ", ".join(
        f"{'buy' if b else 'sell'} {script.fact(f'quantity {i}')} {item}" for i, item, b in deals
    )
    script.ask(
        rng.choice(_OPENINGS).format(
            who=who, unit=unit, prices=prices, start=script.fact("start"), deals=listed
        )
    )
    script.say(f"We start with {script.use('start')} dollars and go through the deals in order.")
    styles, balance, total = manner(rng, _STEPS), "start", start
    for i, item, buys in deals:
        quantity, price = f"quantity {i}", f"price of {item}"
        worth = script.equation(f"{script.use(quantity)} × {script.use(price)}", f"worth {i}")
        moved = script.equation(
            f"{script.use(balance)} {'-' if buys else '+'} {script.use(f'worth {i}')}", f"balance {i}"
        )
        script.say(
            rng.choice(styles)
            .replace("{unit}s", unit_plural + "s")
            .format(
                i=i,
                who=who,
                verb="buys" if buys else "sells",
                passive="bought" if buys else "sold",
                q=script.use(quantity),
                unit=unit,
                item=item,
                price=script.use(price),
                worth=worth,
                balance=moved,
            )
        )
        total += (-1 if buys else 1) * script.values[quantity] * script.values[price]
        balance = f"balance {i}"
    script.say(rng.choice(_ENDINGS).format(answer=script.use(balance)))
    script.conclude(script.values[balance], total)

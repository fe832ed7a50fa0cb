"""Held out: a code book of words and numbers, messages encoded word by word into a check sum."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import CODE_WORDS, manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "An agent uses a code book: {book}. The check sum of a message starts at {seed}; for every word it is "
    "multiplied by {factor}, the code of the word is added, and the result is reduced modulo {m}. Find the "
    "check sum of the message "
    '"{message}".',
    "Codes of words: {book}. To sign a text, begin with {seed} and for each word replace the value h by "
    "{factor} × h plus "
    'the code, modulo {m}. Sign the text "{message}".',
)
_STEPS = (
    "The word {i} is {word}. In the code book {word} has the code {code}. The sum {h} turns into {raw}, and "
    "{new}.",
    "{word}: code {code}. We get {raw}; {new}.",
    "Next comes {word}, whose code is {code}, so from {h} we obtain {raw}. After reduction {new}.",
)


@family("codebook", "a code book of words; a message is folded into a check sum word by word", held_out=True)
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    words = rng.sample(CODE_WORDS, min(16, 8 + size // 8))
    for word in words:
        script.draw(f"code of {word}", rng, range(100, 999) if level > 1 else range(10, 99))
    m = script.draw("m", rng, (83, 89, 97, 101) if level < 3 else (503, 509, 521, 541))
    factor = script.draw("factor", rng, range(3, 10))
    seed = script.draw("seed", rng, range(11, 80))
    message: list[str] = []
    while len(message) < size:
        message += rng.sample(words, len(words))
    message = message[:size]
    script.ask(
        rng.choice(_OPENINGS).format(
            book=", ".join(f"{word} {script.fact(f'code of {word}')}" for word in sorted(words)),
            seed=script.fact("seed"),
            factor=script.fact("factor"),
            m=script.fact("m"),
            message=" ".join(message),
        )
    )
    styles, current, h = manner(rng, _STEPS), "seed", seed
    for i, word in enumerate(message, 1):
        code = script.use(f"code of {word}")
        raw = script.equation(f"{script.use('factor')} × {script.use(current)} + {code}", f"raw {i}")
        new = script.equation(f"{script.use(f'raw {i}')} mod {script.use('m')}", f"h {i}")
        script.say(
            rng.choice(styles).format(i=i, word=word, code=code, h=script.use(current), raw=raw, new=new)
        )
        h = (factor * h + script.values[f"code of {word}"]) % m
        current = f"h {i}"
    script.say(f"The check sum of the message is {script.use(current)}.")
    script.conclude(script.values[current], h)

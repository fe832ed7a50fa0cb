"""What stands under a table: reasons, exemptions, and where a policy has one column only."""

from __future__ import annotations

from kvpop_lightning.evaluation.table import notes


def test_notes_say_what_the_cells_do_not() -> None:
    def cell(policy: str, budget: int, **more: object) -> dict:
        return {"policy": policy, "budget": budget, "bounded": True, "kl": 0.1, "rows": [], **more}

    table = [cell("full", 1024, bounded=False)]
    for budget in (128, 64):
        table += [cell("quest", budget, bounded=False), cell("tova", budget)]
    table += [
        cell("dms", 128, bounded=False, keys_held=123.8),
        cell("dmc", 128, bounded=False, keys_held=161.0),
    ]
    table += [cell("snapkv", 64, kl=None, reason="the prompt is the row")]
    assert notes(table) == [
        "snapkv at 64 keys: cannot run (the prompt is the row)",
        "quest: exempt from the budget, its memory grows with the text",
        "dms: exempt from the budget, its memory grows with the text; trained for 128 keys, holds 123.8 on "
        "average",
        "dmc: exempt from the budget, its memory grows with the text; trained for 128 keys, holds 161.0 on "
        "average: more than the others of its column, compare it at its own size",
    ]

"""What stands under a table: reasons, exemptions, and where a policy has one column only."""

from __future__ import annotations

from kvpop_lightning.evaluation.table import notes


def test_notes_say_what_the_cells_do_not() -> None:
    def cell(policy: str, budget: int, **more: object) -> dict:
        return {"policy": policy, "budget": budget, "bounded": True, "kl": 0.1, "rows": [], **more}

    table = [cell("full", 1024, bounded=False)]
    for budget in (128, 64):
        table += [cell("quest", budget, bounded=False), cell("tova", budget)]
    table += [cell("dms", 128, bounded=False), cell("snapkv", 64, kl=None, reason="the prompt is the row")]
    assert notes(table) == [
        "snapkv at 64 keys: cannot run (the prompt is the row)",
        "quest: exempt from the budget, its memory grows with the text",
        "dms: exempt from the budget, its memory grows with the text; one training gives one compression, "
        "listed at 128 keys",
    ]
    at_one_budget = [e for e in table if e["budget"] == 128]
    assert not any("listed" in line for line in notes(at_one_budget))

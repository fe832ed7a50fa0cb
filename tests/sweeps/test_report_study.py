"""Reports of studies that hold much, little, or rubbish."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import optuna
import pytest
import sweep_cases

from kvpop_lightning import cli
from kvpop_lightning.sweeps import report
from kvpop_lightning.sweeps.driver import run_sweep
from kvpop_lightning.sweeps.report import report_files, write_report
from kvpop_lightning.sweeps.report_data import DECAY, TOPK, contour_pair, importances, view_of

SCRIPT = "/*plotly's script*/"
FLOAT, INT = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
Kinds = {
    DECAY: FLOAT(0.4, 1.0),
    TOPK: INT(4, 100),
    "policy": optuna.distributions.CategoricalDistribution(["a", "b"]),
}


@pytest.fixture(autouse=True)
def _short_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: SCRIPT)


def study_of(trials: list[tuple[dict[str, Any], Any]], directions: int = 1) -> Any:
    """Trials of (point, values or name of another state)."""
    study = optuna.create_study(directions=["minimize"] * directions)
    for point, values in trials:
        state = (
            optuna.trial.TrialState[values] if isinstance(values, str) else optuna.trial.TrialState.COMPLETE
        )
        found = optuna.trial.create_trial(
            state=state,
            params=point,
            distributions={key: Kinds[key] for key in point},
            values=None if isinstance(values, str) else values,
        )
        study.add_trial(found)
    return study


def surface(count: int = 9, directions: int = 1) -> list[tuple[dict[str, Any], Any]]:
    """KL falls with the decay's distance to 0.8; the policy and the budget hardly matter."""
    points = [{DECAY: 0.45 + 0.06 * i, TOPK: 10 + (7 * i) % 40, "policy": "ab"[i % 2]} for i in range(count)]
    values = [[(p[DECAY] - 0.8) ** 2 + 1e-5 * p[TOPK], float(p[TOPK])][:directions] for p in points]
    return list(zip(points, values, strict=True))


def page_of(folder: Path) -> str:
    text = (folder / "report" / "report.html").read_text()
    assert text.count(SCRIPT) == 1
    assert not re.search(r"<script[^>]*\bsrc=|<link|cdn\.plot", text), "the page must work without a network"
    return text


def test_a_full_study_has_every_figure(tmp_path: Path) -> None:
    paths = write_report(study_of(surface()), "mine", ["kl"], tmp_path)
    text = page_of(tmp_path)
    for title in (
        "optimisation history",
        "parameter importance",
        "slices",
        f"{TOPK} by {DECAY}",
        "parallel coordinates",
    ):
        assert f"<h2>kl: {title}</h2>" in text
    assert text.count("plotly-graph-div") == 5
    assert "Not drawn" not in text
    assert {path.name for path in paths} == {
        "report.html",
        "report.json",
        "history.png",
        "importance.png",
        "contour.png",
    }
    assert all(path.stat().st_size > 300 for path in paths)
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert found["best"][0]["number"] == 6
    assert max(found["importances"]["kl"], key=found["importances"]["kl"].get) == DECAY
    best = [entry["best"] for entry in found["history"]]
    assert best == sorted(best, reverse=True)


def test_several_metrics_have_a_front(tmp_path: Path) -> None:
    paths = write_report(study_of(surface(directions=2), 2), "mine", ["kl", "bytes_held"], tmp_path)
    text = page_of(tmp_path)
    assert "<h2>Pareto front</h2>" in text
    assert "bytes_held: slices" in text
    assert "pareto.png" in {path.name for path in paths}
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert 1 <= len(found["best"]) < 9
    assert set(found["importances"]) == {"kl", "bytes_held"}


def test_failed_pruned_and_nan_trials_are_counted_not_drawn(tmp_path: Path) -> None:
    bad = [({DECAY: 0.5, TOPK: 5, "policy": "a"}, state) for state in ("FAIL", "PRUNED")]
    first, *others = surface()
    infinite = ({DECAY: 0.6, TOPK: 6, "policy": "b"}, [float("inf")])
    study = study_of([*bad, first, infinite, *others])
    view = view_of(study, ["kl"])
    assert view.numbers == (2, *range(4, 12))
    assert view.states == {"fail": 1, "pruned": 1, "complete": 9, "not_finite": 1}
    write_report(study, "mine", ["kl"], tmp_path)
    assert "Not drawn" not in page_of(tmp_path)
    assert json.loads((tmp_path / "report" / "report.json").read_text())["best"][0]["number"] == 9


@pytest.mark.parametrize("trials", [[], [surface()[0]], [({DECAY: 0.5}, "FAIL")], surface(2)], ids=len)
def test_almost_nothing_is_a_page_too(tmp_path: Path, trials: list[tuple[dict[str, Any], Any]]) -> None:
    paths = write_report(study_of(trials), "mine", ["kl"], tmp_path)
    page_of(tmp_path)
    finished = [t for t in trials if not isinstance(t[1], str)]
    assert ("history.png" in {path.name for path in paths}) == bool(finished)
    assert len(json.loads((tmp_path / "report" / "report.json").read_text())["history"]) == len(finished)


def test_a_constant_parameter_and_equal_results(tmp_path: Path) -> None:
    points = [{DECAY: 0.5, TOPK: 10 + i, "policy": "a"} for i in range(6)]
    study = study_of([(point, [0.25]) for point in points])
    view = view_of(study, ["kl"])
    assert importances(view) == {}
    assert contour_pair(view, {}) is None
    paths = write_report(study, "mine", ["kl"], tmp_path)
    assert "at least four finished trials with different results" in page_of(tmp_path)
    assert "importance.png" not in {path.name for path in paths}


def test_conditional_parameters(tmp_path: Path) -> None:
    trials = [
        ({k: v for k, v in point.items() if k != TOPK or i % 2}, values)
        for i, (point, values) in enumerate(surface())
    ]
    write_report(study_of(trials), "mine", ["kl"], tmp_path)
    assert "Not drawn" not in page_of(tmp_path)


def test_one_broken_figure_does_not_cost_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no <slices> today")

    monkeypatch.setattr("optuna.visualization.plot_slice", broken)
    write_report(study_of(surface()), "mine", ["kl"], tmp_path)
    text = page_of(tmp_path)
    assert "Not drawn: no &lt;slices&gt; today" in text
    assert text.count("plotly-graph-div") == 4


def test_without_plotly_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> str:
        raise ImportError("plotly")

    monkeypatch.setattr(report, "page", absent)
    names = {path.name for path in write_report(study_of(surface()), "mine", ["kl"], tmp_path)}
    assert names == {"report.json", "history.png", "importance.png", "contour.png"}


def test_a_report_that_fails_ends_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw_all", lambda *_: 1 / 0)
    assert report_files(study_of(surface()), "mine", ["kl"], tmp_path) == []


def test_the_command_reports_a_study_as_it_is(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep_cases.write(project)
    words = ["storage=journal", "sweep.heartbeat_s=1"]
    run_sweep(sweep_cases.config_of("mine", words), words, command=sweep_cases.FAKE)
    folder = Path("runs/sweeps/mine")
    assert (folder / "report" / "report.html").exists(), "a sweep ends with its report"
    shutil.rmtree(folder / "report")
    capsys.readouterr()
    assert cli.main(["sweep", "mine", "--report", *words]) == 0
    assert "runs/sweeps/mine/report/report.html" in capsys.readouterr().out
    assert json.loads((folder / "report" / "report.json").read_text())["states"] == {"complete": 5}
    page_of(folder)
    assert cli.main(["sweep", "mine", "--report", "sweep.study=other", *words]) == 2
    assert "there is no study 'other'" in capsys.readouterr().err

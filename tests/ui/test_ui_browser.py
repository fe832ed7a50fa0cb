"""`kvpop ui` and the MLflow UI in a real browser: a sweep expands, its parameters sort, its figure opens.

Screenshots go to $KVPOP_SCREENSHOTS (`docs/figures` to renew those of the documentation).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ui_sweep import POINTS, make_sweep

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).resolve().parents[2]
PARAMS = {"policy.budget.topk": 0, "policy.decay": 1, "distill.temperature": 2}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="no playwright: pip install -e '.[ui]'"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """Addresses of MLflow and optuna-dashboard as `kvpop ui` prints them, and the sweep's run id."""
    import optuna

    folder = tmp_path_factory.mktemp("ui")
    (folder / "configs").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        parent = make_sweep(folder)
    study = optuna.create_study(storage=f"sqlite:///{folder}/runs/sweep/study.db", study_name="budget_decay")
    study.enqueue_trial({"decay": 0.5})
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        words = ["-m", "kvpop_lightning.cli", "ui", f"tracking.port={port}"]
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        said = ""
        while said.count("Ctrl-C") < 2:
            line = process.stdout.readline()
            assert line, said
            said += line
        assert f"port {port} is busy: taking " in said
        found = dict(re.findall(r"(\S+): open (http://\S+)", said))
        addresses = [found["MLflow"], found["optuna-dashboard"]]
        try:
            for address in addresses:
                _wait_for(int(address.rpartition(":")[2]), process)
            yield addresses[0], addresses[1], str(parent.run_id)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0
    for address in addresses:  # both are gone
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0


def _wait_for(port: int, process: Any) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    raise AssertionError(f"nothing answers on port {port}")


@pytest.fixture
def page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 640})
        page.set_default_timeout(120_000)
        page.add_init_script("localStorage.setItem('mlflow-assistant-open', 'false')")
        yield page
        browser.close()


def shot(page: Any, name: str) -> None:
    page.wait_for_timeout(800)
    if place := os.environ.get("KVPOP_SCREENSHOTS"):
        file = ROOT / place / f"ui_{name}.png"
        page.screenshot(path=str(file))
        assert file.stat().st_size < 300_000


def close_assistant(page: Any) -> None:
    close = page.get_by_label("Close")
    if close.count():
        close.first.click()


def column(page: Any, name: str) -> list[str]:
    """The cells of a parameter's column from top to bottom; empty cells are the parent's."""
    cells = page.locator(f"[role=gridcell][col-id='params.`{name}`']")
    found = cells.evaluate_all(
        "cells => cells.map(c => [Number(c.closest('[row-index]').getAttribute('row-index')),"
        " c.innerText.trim()])"
    )
    return [text for _, text in sorted(found)]


def test_a_sweep_in_the_browser(served: tuple[str, str, str], page: Any) -> None:
    mlflow, _, run_id = served
    page.goto(f"{mlflow}/#/experiments/1/runs", wait_until="domcontentloaded")
    parent = page.get_by_text("sweep budget_decay").first
    parent.wait_for()
    close_assistant(page)
    assert page.get_by_text("trial 4").count() == 0  # children are folded
    page.locator("[data-component-id*=runnamecellrenderer]").first.click()
    page.get_by_text("trial 4").first.wait_for()
    assert [page.get_by_text(f"trial {n}", exact=True).count() > 0 for n in range(5)] == [True] * 5

    page.get_by_role("button", name="Columns").click()
    chooser = page.get_by_role("dialog", name="Popover content")
    for name in PARAMS:
        chooser.get_by_placeholder("Search columns").fill(name)
        label = chooser.locator(".du-bois-light-tree-treenode", has_text=re.compile(f"^{re.escape(name)}$"))
        label.locator(".du-bois-light-tree-checkbox").click()
    page.keyboard.press("Escape")
    for name in PARAMS:
        page.locator(f"[role=columnheader][col-id='params.`{name}`']").wait_for()
    shot(page, "sweep")

    for name, place in PARAMS.items():
        wanted = sorted(str(point[place]) for point in POINTS)  # MLflow sorts parameters as text
        orders = []
        for _ in range(2):
            page.locator(f"[role=columnheader][col-id='params.`{name}`']").click()
            for _ in range(100):
                page.wait_for_timeout(200)
                texts = [text for text in column(page, name) if text in wanted]
                if texts in (wanted, wanted[::-1]) and texts not in orders:
                    break
            orders.append(texts)
        assert sorted(orders) == sorted([wanted, wanted[::-1]]), (name, orders)
    shot(page, "sorted")

    page.goto(f"{mlflow}/#/experiments/1/runs/{run_id}/artifacts", wait_until="domcontentloaded")
    page.get_by_text("figures", exact=True).first.click()
    page.get_by_text("kl_by_budget.png").first.click()
    image = page.locator("img[src^='blob:'], img[src*='kl_by_budget'], .image-outer-container img").first
    image.wait_for()
    page.wait_for_function(
        "() => [...document.images].some(i => i.naturalWidth > 300 && i.naturalHeight > 150)"
    )
    shot(page, "figure")


def test_the_study_in_optuna_dashboard(served: tuple[str, str, str], page: Any) -> None:
    page.goto(served[1], wait_until="domcontentloaded")
    page.get_by_text("budget_decay").first.wait_for()
    shot(page, "optuna")

"""The page in a real browser: every figure drawn, nothing in the console, the mouse and the legend answered, light and dark,
on a phone and on a desk. FEDECHO_SCREENSHOTS=DIR keeps pictures for people to look at."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.report_time import make_run
from tests.report.hand_made import lines, write

from fedecho import load, simulate
from fedecho.report.live import serve
from fedecho.report.page import page, report_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here (Debian: apt-get install chromium)")
READY = "document.body.dataset.drawn !== undefined"
SIZES = {"desk": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install 'fedecho[dev]')")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=180_000)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedBuff and FedEcho for real, with faults, and a run of 2,000 clients that is made up."""
    root = tmp_path_factory.mktemp("runs")
    settings = ["task.width=2", "faults.dropout=0.1", "task.num_unlabeled=60", "runtimes.profile=mild"]
    for name in ("fedbuff", "fedecho"):
        for seed in (0, 1):
            simulate(load("digits", algorithm=name, seed=seed, versions=20, settings=settings), out=root / f"{name}-{seed}")
    make_run(root / "wide", "fedecho", 0, num_clients=2000, num_versions=30, buffer_size=20, concurrency=200)
    return root


@pytest.fixture(scope="module")
def written(runs: Path) -> Path:
    target = runs / "report.html"
    target.write_text(page(report_of([runs])))
    return target


def until(tab: Any, truth: str, seconds: float = 60) -> None:
    """Asked again and again from here: the page's own policy allows no script that is made of text."""
    deadline = time.monotonic() + seconds
    while not tab.evaluate(truth):
        assert time.monotonic() < deadline, f"never came true: {truth}"
        time.sleep(0.05)


def opened(browser: Any, address: str, size: str, scheme: str) -> tuple[Any, list[str]]:
    context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, offline=address.startswith("file:"))
    context.set_default_timeout(120_000)
    tab, faults = context.new_page(), []
    tab.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("requestfailed", lambda request: faults.append(request.url))
    tab.goto(address)
    until(tab, READY, 60)
    return tab, faults


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_every_figure_is_drawn(browser: Any, written: Path, size: str, scheme: str) -> None:
    tab, faults = opened(browser, written.as_uri(), size, scheme)
    slugs = [figure.slug for figure in report_of([written.parent]).figures]
    assert len(slugs) > 15
    for slug in slugs:
        plot = tab.locator(f"#{slug}")
        assert plot.locator("svg.main-svg").count() > 0, slug
        marks = plot.locator(".trace path, .bars path, .heatmaplayer image, .heatmaplayer .hm, .points path, .js-line")
        assert marks.count() > 0, f"{slug} is empty"
    assert not faults
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(18, 22, 29)" if scheme == "dark" else "rgb(255, 255, 255)")
    ink = tab.evaluate("document.querySelector('#accuracy-over-versions .xtitle').style.fill")
    assert ink == ("rgb(228, 233, 241)" if scheme == "dark" else "rgb(29, 36, 48)")
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than the screen"
    if "FEDECHO_SCREENSHOTS" in os.environ:
        tab.screenshot(path=Path(os.environ["FEDECHO_SCREENSHOTS"]) / f"{size}-{scheme}.png", full_page=True)
    tab.context.close()


@pytest.mark.parametrize("size", list(SIZES))
def test_long_names_have_room(browser: Any, tmp_path: Path, size: str) -> None:
    for number in range(8):
        told = lines()
        settings = {"client_lr": number / 8, "num_local_steps": 100 + number, "weight_decay": number / 1000}
        told[0]["config"]["local"] = settings
        write(tmp_path / str(number), told, finished=True)
    (tmp_path / "report.html").write_text(page(report_of([tmp_path])))
    tab, faults = opened(browser, (tmp_path / "report.html").as_uri(), size, "light")
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than the screen"
    for slug in ("accuracy-over-versions", "versions-alive"):
        inside = """(slug) => {
          const plot = document.getElementById(slug), edges = plot.getBoundingClientRect();
          const area = plot.querySelector(".nsewdrag").getBoundingClientRect();
          const names = [...plot.querySelectorAll(".legendtext")].map((name) => name.getBoundingClientRect());
          return { names: names.length, height: area.height,
                   seen: names.every((name) => name.left >= edges.left && name.right <= edges.right && name.bottom <= area.top) };
        }"""
        found = tab.evaluate(inside, slug)
        assert (found["names"], found["seen"]) == (8, True), slug
        assert found["height"] > 120, f"{slug} has no room for its curves"
    for slug in ("server-time", "accuracy-by-class"):
        apart = """(slug) => {
          const names = [...document.querySelectorAll(`#${slug} .ytick`)].filter((tick) => tick.textContent);
          const ticks = names.map((tick) => tick.getBoundingClientRect());
          return ticks.length === 8 && ticks.every((tick, i) => i === 0 || tick.top >= ticks[i - 1].bottom - 2);
        }"""
        assert tab.evaluate(apart, slug), f"names of rows cover each other in {slug}"
    assert not faults
    tab.context.close()


def test_the_mouse_the_legend_and_the_switch_are_answered(browser: Any, written: Path) -> None:
    tab, faults = opened(browser, written.as_uri(), "desk", "light")
    plot = tab.locator("#accuracy-over-versions")
    plot.scroll_into_view_if_needed()
    box = plot.locator(".nsewdrag").bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    plot.locator(".hoverlayer .legend, .hoverlayer .hovertext").first.wait_for()
    shown = "document.getElementById('accuracy-over-versions')._fullData.filter(t => t.visible === true).length"
    before = tab.evaluate(shown)
    plot.locator(".legendtoggle").first.click()
    until(tab, f"{shown} < {before}")
    buttons = tab.evaluate("[...document.querySelectorAll('#accuracy-over-versions .modebar-btn')].map((b) => b.dataset.title)")
    assert "Download plot" in buttons
    assert not [title for title in buttons if "hare" in title or "loud" in title], "figures stay where they are"
    timeline = tab.locator("#timeline-1")
    timeline.scroll_into_view_if_needed()
    assert timeline.locator(".legendtoggle").count() > 2
    tab.click("#theme")
    until(tab, "document.documentElement.dataset.theme === 'dark'")
    assert not faults
    tab.context.close()


def test_the_page_prints(browser: Any, written: Path) -> None:
    tab, faults = opened(browser, written.as_uri(), "desk", "dark")
    paper = tab.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    assert not faults
    if "FEDECHO_SCREENSHOTS" in os.environ:
        (Path(os.environ["FEDECHO_SCREENSHOTS"]) / "print.pdf").write_bytes(paper)
    tab.context.close()


def test_a_live_page_refreshes_by_itself(browser: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines()[:12])
    server = serve([folder], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tab, faults = opened(browser, f"http://127.0.0.1:{server.server_port}/", "desk", "light")
        points = "document.getElementById('accuracy-over-versions').data[0].x.length"
        before = tab.evaluate(points)
        write(folder, lines(), finished=True)
        until(tab, f"{READY} && {points} > {before}")
        tab.get_by_text("finished", exact=True).first.wait_for()
        assert not faults
        tab.context.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""The page in a real browser: nothing sticks out at three widths, axe-core finds nothing, nothing is loaded, and a live page follows its run.

`make pages` runs these with what they need; without playwright, Chromium and axe-core they are skipped.
"""

import os
import shutil
import threading
from pathlib import Path

import attrs
import pytest
from kit.adapters import cli_cases
from kit.core.page_cases import page_of

from trainfold.adapters.cli.page.gather import PageReader
from trainfold.adapters.cli.page.live_page import LivePage
from trainfold.adapters.cli.page.serve import PageServer
from trainfold.backends.flight.journal_file import JournalFile
from trainfold.backends.flight.journals import JOURNAL
from trainfold.backends.runs.scan import read_inventory
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.markup.curve import curve_of
from trainfold.core.page.document import page_html

pytestmark = pytest.mark.long
saved = cli_cases.saved
run = cli_cases.run
WIDTHS = {1280: 900, 768: 1000, 390: 844}
STICKS_OUT = """() => {
    const width = document.documentElement.clientWidth, found = [];
    if (document.documentElement.scrollWidth > width) found.push(`the page is ${document.documentElement.scrollWidth} px wide`);
    for (const each of document.querySelectorAll('h1, h2, p, dt, dd, figcaption, .unit, .plot .left span, .plot .below span, li')) {
        const box = each.getBoundingClientRect();
        if (box.width && (box.left < -1 || box.right > width + 1) && !each.closest('.scroll')) found.push(`cut off: ${each.textContent.slice(0, 60)}`);
        if (box.width && parseFloat(getComputedStyle(each).fontSize) < 12) found.push(`too small: ${each.textContent.slice(0, 60)}`);
    }
    for (const path of document.querySelectorAll('.plot svg path:not(.grid)')) {
        const box = path.getBBox();
        if (box.x < -0.5 || box.x + box.width > 1000.5 || box.y < -0.5 || box.y + box.height > 400.5)
            found.push(`outside of its chart: ${path.getAttribute('class')} of ${path.closest('figure').querySelector('figcaption').textContent.slice(0, 60)}`);
    }
    for (const row of document.querySelectorAll('.plot .below')) {
        const boxes = [...row.children].map((each) => each.getBoundingClientRect()).filter((each) => each.width);
        boxes.slice(1).forEach((box, at) => { if (box.left < boxes[at].right + 2) found.push(`labels overlap: ${row.textContent}`); });
    }
    return found;
}"""


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: see `make pages`")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("there is no Chromium: install it, or name it with CHROMIUM=path")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def axe():
    path = Path(os.environ.get("TRAINFOLD_AXE", "build/axe/node_modules/axe-core/axe.min.js"))
    if not path.is_file():
        pytest.skip("axe-core is not there: see `make pages`")
    return path.read_text()


def opened(browser, url, *, width=1280, scheme="light", bypass_csp=False):
    """A page of the browser, and what it complained of, or asked for beside the page itself."""
    context = browser.new_context(
        viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme, bypass_csp=bypass_csp
    )
    page, seen = context.new_page(), []
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: seen.append(request.url) if request.url != url else None)
    page.goto(url)
    return page, seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "a-very-long-name-without-any-space-" * 8,
        "a_name_that_no_line_may_break_" * 9,
        '<img src="https://example.org/x" onerror="alert(1)">',
    ],
)
def test_the_page_fits_is_accessible_and_loads_nothing(browser, axe, tmp_path, text, scheme):
    """W22: readable on a phone, in dark mode and by a screen reader; contrast is among what axe-core checks."""
    path = tmp_path / "run.html"
    path.write_text(page_html(page_of(text)), errors="backslashreplace")
    for width in WIDTHS:
        page, seen = opened(browser, path.as_uri(), width=width, scheme=scheme, bypass_csp=True)
        assert page.evaluate(STICKS_OUT) == [], width
        page.evaluate(axe)
        found = page.evaluate("axe.run()")
        assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == [], width
        assert "color-contrast" in {each["id"] for each in found["passes"]}
        assert seen == []
        page.context.close()


def test_a_diverged_run_is_drawn_inside_of_its_charts(browser, tmp_path):
    """W22: marks of the last steps, which had no finite loss, were drawn beside the chart."""
    facts, nan = page_of(), float("nan")
    diverged = curve_of(range(100), [nan, nan] + [1 / (step + 1) for step in range(60)] + [nan] * 38)
    facts = attrs.evolve(
        facts, flight=attrs.evolve(facts.flight, loss=diverged, norm=curve_of(range(99, 150), [1.0] * 51))
    )
    path = tmp_path / "run.html"
    path.write_text(page_html(facts))
    page, _ = opened(browser, path.as_uri(), width=390)
    assert page.evaluate(STICKS_OUT) == []
    page.context.close()


def test_a_script_in_the_page_would_not_run(browser, tmp_path):
    """The policy of the page is a second lock: a script that came into it all the same is refused."""
    path = tmp_path / "run.html"
    path.write_text(
        page_html(page_of()).replace(
            "<main>", "<main><script>document.title = 'ran'</script><img src='https://example.org/x'>"
        )
    )
    page, seen = opened(browser, path.as_uri())
    assert page.title() == "plain · trainfold"
    assert sum("Content Security Policy" in each or "Content-Security-Policy" in each for each in seen) >= 2
    page.context.close()


def test_a_live_page_follows_the_run(browser, run):
    """W22: server-sent events change the sections that have changed, and an opened list stays open."""
    live = LivePage(PageReader(run), every_secs=0.1)
    with PageServer(live, 0) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
        thread.start()
        page, seen = opened(browser, server.url)
        page.wait_for_selector("#now:has-text('last read')")
        journal = JournalFile(run / JOURNAL)
        journal.append([JournalLine(1e9, "started", 0)])
        journal.append(
            JournalLine(1e9 + step, "called", step, data={"returned": 1e9 + step, "outcome": "staged"})
            for step in range(1, 50)
        )
        page.wait_for_selector("#saves details")
        page.eval_on_selector("#saves details", "each => each.open = true")
        journal.append([JournalLine(1e9 + 60, "called", 60, data={"returned": 1e9 + 61, "outcome": "staged"})])
        page.wait_for_selector("#saves summary:has-text('20 more rows')")
        assert page.eval_on_selector("#saves details", "each => each.open")
        live.ends.set()
        server.shutdown()
        thread.join()
        assert [each for each in seen if not each.startswith(server.url)] == []
        page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["#fff", "#111"])
def test_what_a_notebook_shows_fits_too(browser, axe, run, tmp_path, scheme, ground):
    """W22: a notebook has its own light or dark, and so have its system and browser: in a light one, light text was on no ground of its own."""
    path = tmp_path / "cell.html"
    path.write_text(
        f'<!doctype html><html lang="en" style="background:{ground}"><title>a</title><main><h1 style="background:#fff;color:#000">a</h1>'
        f"{read_inventory(run)._repr_html_()}</main>"
    )
    page, _ = opened(browser, path.as_uri(), width=768, scheme=scheme, bypass_csp=True)
    page.evaluate(axe)
    assert page.evaluate("axe.run()")["violations"] == []
    assert (
        page.evaluate("getComputedStyle(document.querySelector('main > .trainfold')).backgroundColor")
        != "rgba(0, 0, 0, 0)"
    )
    page.context.close()

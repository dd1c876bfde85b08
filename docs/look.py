"""Open every built page in a browser at three widths, and list what sticks out: `make look`.

This is not part of the tests, because it needs a browser: playwright from PyPI, and a Chromium, whose path the variable CHROMIUM names.
With a directory as its argument it also writes a screenshot of each page that a person wrote.
"""

import importlib
import os
import shutil
import sys
from pathlib import Path

WIDTHS = {1600: 900, 1280: 900, 390: 844}
BUILT = Path(__file__).parent / "_build" / "html"
STICKS_OUT = """() => {
    const width = document.documentElement.clientWidth, found = [];
    if (document.documentElement.scrollWidth > width) found.push(`the page is ${document.documentElement.scrollWidth} px wide`);
    for (const block of document.querySelectorAll('article pre')) {
        if (block.scrollWidth > block.clientWidth + 1 && getComputedStyle(block).overflowX === 'hidden')
            found.push(`code is cut off: ${block.textContent.slice(0, 60)}`);
        if (block.getBoundingClientRect().right > width + 1) found.push(`code leaves the window: ${block.textContent.slice(0, 60)}`);
        const button = block.parentElement.querySelector('.copybtn');
        if (button === null) found.push(`no copy button: ${block.textContent.slice(0, 60)}`);
    }
    for (const wide of document.querySelectorAll('article pre, article .table-wrapper')) {
        if (width > 1200 && wide.scrollWidth > wide.clientWidth + 1) found.push(`scrolls sideways: ${wide.textContent.slice(0, 60)}`);
    }
    for (const picture of document.querySelectorAll('article img')) {
        if (!picture.complete || picture.naturalWidth === 0) found.push(`a picture is missing: ${picture.src}`);
    }
    return found;
}"""


def look(built: Path, shots: Path | None) -> list[str]:
    """What sticks out, as lines of page, width and complaint."""
    browser_of = importlib.import_module("playwright.sync_api").sync_playwright
    found = []
    with browser_of() as playwright:
        program = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width, height in WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            for path in sorted(built.rglob("*.html")):
                name = path.relative_to(built).with_suffix("").as_posix()
                page.goto(path.as_uri())
                found += [f"{name} at {width} px: {complaint}" for complaint in page.evaluate(STICKS_OUT)]
                if shots is not None and "generated" not in name:
                    page.screenshot(path=shots / f"{name.replace('/', '-')}-{width}.png", full_page=True)
        browser.close()
    return found


if __name__ == "__main__":
    complaints = look(BUILT, Path(sys.argv[1]) if sys.argv[1:] else None)
    print(*complaints, f"{len(complaints)} complaints", sep="\n")
    sys.exit(bool(complaints))

"""Pictures of all pages, light, dark and narrow: `python -m tests.screenshots FOLDER [--db FILE]`.

They show `benchmarks/recorded` unless another database is named. `--incident FILE` takes the picture
of the README alone.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from dashboard.theme import FIRST_PAGE, PAGES
from tests.browsing import NARROW, ROOT, STICKS_OUT, WIDE, Tab, browser, served

LOOKS = {"light": ("light", WIDE), "dark": ("dark", WIDE), "narrow": ("light", NARROW)}
TALLEST = 6000
HEIGHT = (
    "() => document.querySelector('[data-testid=stMain]').scrollHeight"
    " + document.querySelector('[data-testid=stHeader]').clientHeight"
)
README_SIZE = {"width": 1400, "height": 1130}


def recorded(folder):
    """Store what the repository has recorded, as `make bench` does, and look for changes."""
    url = f"sqlite:///{folder}/recorded.db"
    for words in (("db", "upgrade"), ("ingest", "benchmarks/recorded"), ("detect",)):
        subprocess.run(
            [sys.executable, "-m", "dashboard.cli", "--db", url, *words],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return url


def take(chromium, address, scheme, size, file, *, is_whole=True):
    """Take a picture of a page, by default all of it; say what is wrong with it."""
    tab = Tab(chromium.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1))
    tab.open(address)
    tab.settle()
    tab.page.wait_for_timeout(3000)
    if is_whole:
        for _ in range(2):  # what comes into view may be taller than what stood for it
            height = min(tab.page.evaluate(HEIGHT), TALLEST)
            tab.page.set_viewport_size({"width": size["width"], "height": height})
            tab.page.wait_for_timeout(1500)
    tab.page.screenshot(path=file)
    if tab.page.evaluate(STICKS_OUT) > 0:
        tab.troubles.append("something sticks out of it sideways")
    tab.page.close()
    return tab.troubles


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where the pictures go")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="with its query, if any")
    parser.add_argument("--db", type=Path, help="a SQLite file")
    parser.add_argument("--looks", nargs="*", default=list(LOOKS), choices=LOOKS)
    parser.add_argument("--incident", type=Path, help="take the README's picture alone")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept, browser() as chromium:
        url = recorded(kept) if told.db is None else f"sqlite:///{told.db.resolve()}"
        with served(url, Path(kept) / "server.log") as site:
            if told.incident is not None:
                address = f"{site.address}/incident"
                found = take(chromium, address, "light", README_SIZE, told.incident, is_whole=False)
                sys.exit("\n".join(found) or None)
            told.folder.mkdir(parents=True, exist_ok=True)
            for name in told.pages or ("", *PAGES):
                for look in told.looks:
                    scheme, size = LOOKS[look]
                    file = told.folder / f"{name.partition('?')[0] or FIRST_PAGE}-{look}.png"
                    found = take(chromium, f"{site.address}/{name}", scheme, size, file)
                    click.echo(f"{file} {'; '.join(found)}")


if __name__ == "__main__":
    main()

"""Take the pictures of the documentation.

``PYTHONPATH=tests .venv/bin/python -m dashboard.pictures docs/assets``
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dashboard.browsing import Tab, launched, serving
from dashboard.conftest import running_shop
from perdure.dashboard import dashboard

PICTURES = {
    "home": ("/", "Needs attention", 720),
    "waiting": ("/run?id=big-1", "for event 'approval'", None),
    "retrying": ("/run?id=retry-1", "attempt 2 of 5", None),
    "blocked": ("/run?id=blocked-1", "the code did", None),
    "failed": ("/run?id=bad-1", "it goes on from where it failed", None),
    "source": ("/run?id=big-1&tab=source", "waits for event approval", 880),
    "schedules": ("/schedules", "report-berlin", 560),
}
"""Address, words that show that it is there, height; without a height down to the last row."""


def main() -> None:
    target = Path(sys.argv[1])
    with (
        tempfile.TemporaryDirectory() as folder,
        running_shop(f"{folder}/shop.db") as (loop, shop),
        serving(dashboard(shop), loop) as address,
        launched() as browser,
    ):
        for name, (view, words, height) in PICTURES.items():
            with Tab(browser, address, viewport={"width": 1120, "height": height or 900}) as tab:
                tab.load(view)
                tab.see(words)
                tab.page.evaluate("document.fonts.ready")
                end = height or _bottom(tab)
                tab.page.screenshot(
                    path=target / f"dashboard-{name}.png",
                    full_page=True,
                    clip={"x": 0, "y": 0, "width": 1120, "height": end},
                )


def _bottom(tab: Tab) -> float:
    box = tab.page.locator(".journal").bounding_box()
    return box["y"] + box["height"] + 32


if __name__ == "__main__":
    main()

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
    "waiting": ("/run?id=big-1", "for event 'approval'", 860),
    "retrying": ("/run?id=retry-1", "attempt 2 of 5", 520),
    "blocked": ("/run?id=blocked-1", "the code did", 680),
    "failed": ("/run?id=bad-1", "it goes on from where it failed", 520),
    "source": ("/run?id=big-1&tab=source", "waits for event approval", 880),
    "schedules": ("/schedules", "report-berlin", 560),
}


def main() -> None:
    target = Path(sys.argv[1])
    with (
        tempfile.TemporaryDirectory() as folder,
        running_shop(f"{folder}/shop.db") as (loop, shop),
        serving(dashboard(shop), loop) as address,
        launched() as browser,
    ):
        for name, (view, words, height) in PICTURES.items():
            with Tab(browser, address, viewport={"width": 1120, "height": height}) as tab:
                tab.load(view)
                tab.see(words)
                tab.page.evaluate("document.fonts.ready")
                tab.page.screenshot(path=target / f"dashboard-{name}.png")


if __name__ == "__main__":
    main()

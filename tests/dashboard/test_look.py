"""The look of every view: no wider than the window, and without a violation that axe knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboard.browsing import HANG_MS, NEEDS_BROWSER, VIEWS, expect_text, serving
from dashboard.conftest import running_shop
from perdure.dashboard import dashboard

AXE = Path(__file__).parents[2] / "ui/node_modules/axe-core/axe.min.js"
pytestmark = [
    *NEEDS_BROWSER,
    pytest.mark.skipif(
        not AXE.is_file(),
        reason="axe is missing: run npm ci in ui/",
    ),
]


@pytest.fixture(scope="module")
def look_address(tmp_path_factory):
    store = str(tmp_path_factory.mktemp("look") / "shop.db")
    with running_shop(store) as (loop, runtime), serving(dashboard(runtime), loop) as address:
        yield address


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_is_too_wide_and_axe_finds_nothing(look_address, browser, width, scheme):
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        reduced_motion="reduce",
        bypass_csp=True,  # for the script of axe, not for the page
    )
    tab = context.new_page()
    tab.set_default_timeout(HANG_MS)
    told = []
    for view, words in VIEWS:
        tab.goto(look_address + view)
        expect_text(tab, words)
        wide = tab.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, view
        tab.add_script_tag(path=AXE)
        found = tab.evaluate("axe.run()")["violations"]
        told += [
            f"{view}: {each['id']}: {node['html']}" for each in found for node in each["nodes"]
        ]
    context.close()
    assert told == []

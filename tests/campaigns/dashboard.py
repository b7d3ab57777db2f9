"""The long form of the tests of the dashboard.

    python -m campaigns.dashboard --examples 200      (with tests/ on the path)

Requests made up from the OpenAPI document, so many for each operation and mode: none is answered by
a server error. Then every view in both widths and both schemes, each pair of them: none is wider
than its window, and axe finds nothing.
"""

import argparse
import itertools
import tempfile
import warnings

from dashboard.browsing import Tab, launched, serving
from dashboard.conftest import running_shop
from dashboard.test_fuzz import ask_every_operation
from dashboard.test_page import look_at_every_view
from perdure.dashboard import dashboard

PAIRS = list(itertools.product((360, 768, 1440), ("light", "dark")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{ask_every_operation(options.examples):,} requests, no server error", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_shop(f"{folder}/shop.db") as (loop, runtime),
        serving(dashboard(runtime), loop) as address,
        launched() as browser,
        Tab(browser, address, bypass_csp=True) as tab,
    ):
        tab.load("/")
        faults = look_at_every_view(tab, PAIRS)
    print("\n".join(faults) or f"no fault in the look of any view, {len(PAIRS)} times each")
    raise SystemExit(len(faults) > 0)


if __name__ == "__main__":
    main()

"""The two whole programs among the examples."""

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from patience import HANG_SECONDS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shop(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("SHOP_STORE", str(tmp_path / "shop.db"))
    sys.modules.pop("examples.order_shop.app", None)
    with TestClient(importlib.import_module("examples.order_shop.app").app) as client:
        yield client


def finished(shop, order_id):
    for _ in range(1000):
        view = shop.get(f"/orders/{order_id}").json()
        if view["status"] == "Completed":
            return view["result"]
        time.sleep(0.01)
    raise AssertionError(view)


def order(shop, order_id, article, cents):
    body = {"id": order_id, "article": article, "cents": cents}
    return shop.post("/orders", json=body)


def test_an_order_is_shipped_and_ordering_twice_is_one_order(shop):
    assert order(shop, "o-1", "lamp", 4200).status_code == 202
    assert order(shop, "o-1", "lamp", 4200).status_code == 202

    assert finished(shop, "o-1") == "parcel-o-1"


def test_what_is_not_in_stock_is_not_charged(shop):
    order(shop, "o-2", "chair", 4200)

    assert finished(shop, "o-2") == "sorry: no chair in stock"


def test_a_large_order_waits_for_approval(shop):
    order(shop, "o-3", "lamp", 20_000)
    assert shop.post("/orders/o-3/approval?approved=true").status_code == 200

    assert finished(shop, "o-3") == "parcel-o-3"
    assert shop.post("/orders/o-3/approval?approved=true").status_code == 409


def test_an_unknown_order_is_not_found(shop):
    assert shop.get("/orders/nobody").status_code == 404


def test_documents_are_summarised_and_a_second_run_knows_the_result(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text("to be or not to be\n" * 120)
    command = [sys.executable, "-m", "examples.documents", str(folder), str(tmp_path / "d.db")]
    outputs = {
        subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_SECONDS
        ).stdout
        for _ in range(2)
    }

    assert outputs == {"   720 to\n   720 be\n   360 or\n"}

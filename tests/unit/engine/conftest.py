"""Leaves no suspended code behind."""

import pytest
from engine_driver import drivers


@pytest.fixture(autouse=True)
def _close_drivers():
    yield
    for driver in list(drivers):
        driver.close()
    drivers.clear()

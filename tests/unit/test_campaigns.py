"""The campaigns can be loaded, with every store that they name."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

CAMPAIGNS = Path(__file__).parents[1] / "campaigns"


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in CAMPAIGNS.glob("*.py") if path.stem != "__init__")
)
def test_a_campaign_can_be_loaded(name: str) -> None:
    importlib.import_module(f"campaigns.{name}")

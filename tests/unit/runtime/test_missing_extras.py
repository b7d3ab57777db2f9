"""An exporter without its library: the error says what to install."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("perdure.runtime.prometheus", "prometheus_client", "metrics"),
        ("perdure.runtime.telemetry", "opentelemetry", "otel"),
    ],
)
def test_a_missing_library_names_its_extra(monkeypatch, module, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, module, raising=False)

    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)

    assert f"needs {library}, which is not installed" in str(caught.value)
    assert f"pip install 'perdure[{extra}]'" in str(caught.value)
    assert caught.value.name == library

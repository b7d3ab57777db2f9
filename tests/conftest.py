"""Loads the conformance kit's fixtures for the provider tests."""

pytest_plugins = ["perdure.pytest_plugin"]

"""The toy is a package of a third party: it has its own conftest.py and is run on its own."""

collect_ignore = ["toy"]

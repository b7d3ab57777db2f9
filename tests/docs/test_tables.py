"""Tables of the docs that repeat the code: each public name, each option with its default."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import perdure
from perdure import PostgresProvider, RuntimeOptions, errors

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = DOCS / "guides"


def options_of(page):
    """Names and defaults of the table under "| option | default | meaning |", one by one."""
    table = (GUIDES / page).read_text().partition("| option | default | meaning |")[2]
    table, _, _ = table.partition("\n\n")
    listed = {}
    for row in re.findall(r"^\| (`.*?) \| (.+?) \| .+ \|$", table, re.MULTILINE):
        names = re.findall(r"`(\w+)`", row[0])
        defaults = row[1].split(", ")
        if len(defaults) == 1:  # one word for all of them
            defaults *= len(names)
        listed |= dict(zip(names, defaults, strict=True))
    return listed


def number(text):
    try:
        return float(text.replace(",", "").replace(" ", ""))
    except ValueError:
        return None


def test_every_option_of_a_runtime_is_listed_with_its_default():
    listed = options_of("operations.md")
    fields = {field.name: field.default for field in dataclasses.fields(RuntimeOptions)}

    assert set(listed) == set(fields)
    numbers = {name: number(text) for name, text in listed.items() if number(text) is not None}
    assert numbers == {name: fields[name] for name in numbers}
    assert len(numbers) > 12
    assert all(fields[name] for name, text in listed.items() if text == "all on")


@pytest.mark.parametrize("name", sorted(inspect.signature(PostgresProvider).parameters))
def test_every_option_of_the_postgres_provider_is_listed_with_its_default(name):
    default = inspect.signature(PostgresProvider).parameters[name].default
    listed = options_of("postgres.md")

    if default is inspect.Parameter.empty:
        assert name not in listed
    else:
        shown = listed[name].strip("`")
        assert shown == str(default) or number(shown) == default


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference" / "api.md").read_text()
    public = {*dir(perdure), "PostgresProvider"} - {"__version__"}

    # The errors are shown as one module.
    missing = {name for name in public if not hasattr(errors, name)} - set(re.findall(r"\w+", page))
    assert not missing

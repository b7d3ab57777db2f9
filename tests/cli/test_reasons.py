"""The reason that an operator gives: checked once, before any instance is touched."""

import pytest

from cli import flows
from perdure.limits import REASON_CHARACTERS_MAX


@pytest.mark.parametrize("verb", ["cancel", "terminate"])
def test_a_reason_that_is_too_long_is_refused(cli, verb):
    reason = "x" * (REASON_CHARACTERS_MAX + 1)
    cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    for targets in (["a-1"], ["--query", "name:approval", "-y"]):
        answer = cli(verb, *targets, "--reason", reason, code=2)

        assert "--reason" in answer.err
        assert f"at most {REASON_CHARACTERS_MAX} are allowed" in answer.err
    assert cli("count", "status:running").out == "1\n"

"""The page of limits says what the code enforces."""

from pathlib import Path

import pytest

from perdure import limits

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "limits.md").read_text()


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("one payload", (limits.PAYLOAD_BYTES_MAX, limits.JSON_DEPTH_MAX)),
        ("custom status", (limits.CUSTOM_STATUS_BYTES_MAX,)),
        ("a value of", (limits.KV_VALUE_BYTES_MAX, limits.KV_KEYS_MAX)),
        ("events of one history", (limits.HISTORY_EVENTS_MAX, limits.HISTORY_EVENTS_MAX // 2)),
        ("bytes of one history", (limits.HISTORY_BYTES_MAX,)),
        ("messages that one turn gets", (limits.BATCH_MESSAGES_MAX, limits.BATCH_BYTES_MAX)),
        ("events and messages in", (limits.UNREAD_MESSAGES_MAX, limits.UNREAD_BYTES_MAX)),
        ("steps that one turn", (limits.COMMANDS_PER_TURN_MAX,)),
        ("unread events", (limits.CARRY_FORWARD_BYTES_MAX,)),
        ("clean-up", (round(limits.CLEANUP_SECONDS),)),
        ("a turn's own code", (round(limits.TURN_ABORT_SECONDS), round(limits.TURN_WARN_SECONDS))),
        ("children", (limits.CHILD_DEPTH_MAX,)),
        ("ids, names, tags", (limits.ID_CHARACTERS_MAX, limits.TAG_BYTES_MAX)),
        ("tags that one worker", (limits.TAGS_PER_FILTER_MAX,)),
        ("the reason", (limits.REASON_CHARACTERS_MAX,)),
        ("a length of time", (limits.SECONDS_MAX,)),
        ("`multiplier`", (limits.RETRY_MULTIPLIER_MAX,)),
        ("deliveries", (limits.ATTEMPTS_MAX,)),
        ("`limit` of one call of `admin.delete_many`", (limits.BULK_INSTANCES_MAX,)),
    ],
)
def test_each_limit_is_told_as_it_is(what, values):
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {what}"))

    for value in values:
        assert f"{value:,}" in row

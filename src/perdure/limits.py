"""Every limit of the system, with its unit in the name and its reason beside it."""

from __future__ import annotations

from typing import Final

from perdure.errors import InvalidValue, shown

# Identities. Long enough for any natural key, short enough for every index and file system.
ID_CHARACTERS_MAX: Final = 255
TAG_BYTES_MAX: Final = 256
TAGS_PER_FILTER_MAX: Final = 5

# Payloads. A whole history is replayed, so one value must stay small; pass big ones by reference.
PAYLOAD_BYTES_MAX: Final = 1024 * 1024
JSON_DEPTH_MAX: Final = 100
ERROR_TEXT_CHARACTERS_MAX: Final = 16 * 1024
REASON_CHARACTERS_MAX: Final = 16 * 1024
CUSTOM_STATUS_BYTES_MAX: Final = 256 * 1024
KV_VALUE_BYTES_MAX: Final = 16 * 1024
KV_KEYS_MAX: Final = 100
CARRY_FORWARD_BYTES_MAX: Final = 2 * 1024 * 1024

# Messages. A fetch hands out a batch, so that a flood shares the worker with other instances. Code
# that has so much unread mail (events and messages from outside) leaves the rest in the queue.
BATCH_MESSAGES_MAX: Final = 32
BATCH_BYTES_MAX: Final = 256 * 1024
UNREAD_MESSAGES_MAX: Final = 64
UNREAD_BYTES_MAX: Final = 64 * 1024

# Mail that may wait for one instance before senders are refused. An instance that reads 1,000
# messages a second is behind by minutes then. A store can be opened with other figures.
MAIL_MAX: Final = 100_000
MAIL_BYTES_MAX: Final = 256 * 1024 * 1024

# Histories. A fan-out of 10,000 is ordinary and leaves 20,001 events; past the second figure it is
# a design error. Each worker that takes an instance over reads and replays all of it.
HISTORY_EVENTS_WARN: Final = 25_000
HISTORY_EVENTS_MAX: Final = 50_000
HISTORY_BYTES_MAX: Final = 64 * 1024 * 1024
WATCHERS_MAX: Final = 1_000
COMMANDS_PER_TURN_MAX: Final = 20_000
CHILD_DEPTH_MAX: Final = 100

# Turns. User code between two awaits should take microseconds.
TURN_WARN_SECONDS: Final = 2.0
TURN_ABORT_SECONDS: Final = 10.0
CLEANUP_SECONDS: Final = 30.0

# The longest time that a program or operator can ask for: a thousand years. Clocks, calendars and
# databases can count so far; a longer one is a typing error.
SECONDS_MAX: Final = 365_000 * 86_400

# The last time of the calendar that can be shown in every time zone: the end of the year 9999.
TIME_MS_MAX: Final = 253_402_214_400_000

# Retry delays stop growing after the 60th; the 60th power of this factor must still be finite.
RETRY_MULTIPLIER_MAX: Final = 100_000

# Messages for an unknown instance wait this long for a start that is on its way.
ORPHAN_GRACE_SECONDS: Final = 60.0
ORPHAN_GRACE_MS: Final = round(ORPHAN_GRACE_SECONDS * 1000)

# Deliveries of one message before it counts as poison.
ATTEMPTS_MAX: Final = 10

# The largest limit of a call that deletes or prunes many instances.
BULK_INSTANCES_MAX: Final = 1000
PAGE_ITEMS_MAX: Final = 1000


def check_id(value: object, what: str) -> str:
    """Return the id unchanged; raise InvalidValue that says what is wrong with it.

    Ids are used in file names, SQL, terminals and JSON: they are 1 to 255 characters of valid
    Unicode without control characters.
    """
    if type(value) is str and len(value) <= ID_CHARACTERS_MAX and value.isprintable():
        if value and not value.isspace():
            return value  # the fast path: ids are checked on every commit
    elif not isinstance(value, str):
        raise InvalidValue(f"{what} must be a string, not {type(value).__name__}: {shown(value)}")
    if not value or value.isspace():
        raise InvalidValue(f"{what} must not be empty: {shown(value)}")
    if len(value) > ID_CHARACTERS_MAX:
        raise InvalidValue(
            f"{what} has {len(value)} characters, at most {ID_CHARACTERS_MAX} are allowed: "
            f"{value[:40]!r}..."
        )
    if not value.isprintable() and any(_is_forbidden(character) for character in value):
        raise InvalidValue(f"{what} has control characters or lone surrogates: {shown(value)}")
    return value


def check_prefixed(prefix: str, value: object, what: str) -> str:
    """Return the id ``prefix + value``; raise InvalidValue that names the value if it is bad."""
    name = f"{prefix}{check_id(value, what)}"
    if len(name) > ID_CHARACTERS_MAX:
        longest = ID_CHARACTERS_MAX - len(prefix)
        raise InvalidValue(f"the {what} has at most {longest} characters: {value!r}")
    return name


def _is_forbidden(character: str) -> bool:
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code <= 0xDFFF

"""Parse a search text, such as ``status:failed name:order* created:<2h``, into a query.

The store filters by the query. Conditions that it does not know are tests on each instance.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from perdure.arguments import parse_duration_ms
from perdure.client.admin import read_instances
from perdure.client.formats import parse_moment, utc_time
from perdure.client.instance import ACTS_ON, ENDED, OPEN
from perdure.errors import InvalidValue, did_you_mean
from perdure.limits import PAGE_ITEMS_MAX
from perdure.model.status import Status
from perdure.providers.records import InstanceInfo, InstanceQuery

if TYPE_CHECKING:
    import datetime

    from perdure.providers.administration import ProviderAdmin

Test: TypeAlias = Callable[[InstanceInfo], bool]


_STATUSES: Final[dict[str, frozenset[Status]]] = {
    **{status.value.lower(): frozenset({status}) for status in Status},
    "running": frozenset(each for each in Status if each.of_instance is Status.RUNNING),
    "open": OPEN,
    "ended": ENDED,
}
_TESTED_PAGE: Final = 500
"""Instances to read at once if each is tested, because few of them may fit."""
_SAMPLE: Final = 500
"""The newest instances that are read for names of orchestrations."""
_NAMES_MAX: Final = 200
_NEAR_SAMPLE: Final = 200
_TRIES: Final = 3
QUALIFIERS: Final = ("status", "name", "version", "id", "text", "parent", "created", "completed")


@dataclass(frozen=True, slots=True)
class Selection:
    """Instances by a query of the store and by tests on each instance."""

    query: InstanceQuery
    tests: tuple[Test, ...] = ()
    name_patterns: tuple[str, ...] = ()
    """All must fit. Each holds alternatives, separated by commas."""

    def fits(self, info: InstanceInfo) -> bool:
        return self.fits_name(info.name) and all(test(info) for test in self.tests)

    def fits_name(self, name: str) -> bool:
        return all(_fits(name, patterns) for patterns in self.name_patterns)

    def with_query(self, **changes: Any) -> Selection:
        return replace(self, query=msgspec.structs.replace(self.query, **changes))

    def for_action(self, action: str, statuses: frozenset[Status] | None = None) -> Selection:
        """Return the part that the action takes: of its statuses, and roots if it deletes.

        Raises InvalidValue if it takes nothing.
        """
        fitting = ACTS_ON[action] if statuses is None else statuses
        asked = self.query.statuses
        chosen = fitting if asked is None else asked & fitting
        if not chosen:
            raise InvalidValue(
                f"{action} takes only instances that are {', '.join(sorted(fitting))}, and the "
                "query asks for none of them"
            )
        roots_only = action == "purge" or self.query.roots_only
        return self.with_query(statuses=chosen, roots_only=roots_only)

    async def page(
        self, admin: ProviderAdmin, *, cursor: str | None = None, limit: int
    ) -> tuple[list[InstanceInfo], str | None]:
        """Return up to ``limit`` instances, newest first, and the cursor of the next page."""
        found: list[InstanceInfo] = []
        is_tested = bool(self.tests or self.name_patterns)
        is_first = bool(self.name_patterns)
        while True:
            missing = limit - len(found)
            size = min(max(missing, _TESTED_PAGE) if is_tested else missing, PAGE_ITEMS_MAX)
            page = await admin.list_instances(self.query, cursor=cursor, limit=size)
            places = [place for place, info in enumerate(page.instances) if self.fits(info)]
            if len(places) > missing:
                # Read again up to the last wanted instance: the cursor must point behind it.
                size = places[missing - 1] + 1
                page = await admin.list_instances(self.query, cursor=cursor, limit=size)
            found += [info for info in page.instances if self.fits(info)][:missing]
            cursor = page.next_cursor
            if cursor is None or len(found) >= limit:
                return found, cursor
            if is_first:
                is_first = False
                rest = await self._of_one_name(admin)
                if rest is not None:
                    more, cursor = await rest.page(admin, cursor=cursor, limit=limit - len(found))
                    return found + more, cursor

    async def _of_one_name(self, admin: ProviderAdmin) -> Selection | None:
        """Return the same selection with a plain name if the patterns fit one name or none."""
        names = await count_names(admin, self.query)
        fitting = None if names is None else list(filter(self.fits_name, names))
        if fitting is None or len(fitting) > 1:
            return None
        if not fitting:
            return Selection(msgspec.structs.replace(self.query, instance_ids=()))
        return Selection(msgspec.structs.replace(self.query, name=fitting[0]), self.tests)

    async def count_by_name(self, admin: ProviderAdmin) -> dict[str, int]:
        """Count the instances of each name, largest number first."""
        known = None if self.tests else await count_names(admin, self.query)
        counts: dict[str, int] = {} if known is None else known
        if known is None:
            async for info in self.instances(admin):
                counts[info.name] = counts.get(info.name, 0) + 1
        fitting = [group for group in counts.items() if self.fits_name(group[0])]
        return dict(sorted(fitting, key=lambda group: (-group[1], group[0])))

    async def instances(self, admin: ProviderAdmin) -> AsyncIterator[InstanceInfo]:
        """Iterate over all instances that fit, page by page."""
        async for info in read_instances(admin, self.query):
            if self.fits(info):
                yield info

    async def count(self, admin: ProviderAdmin) -> int:
        if self.name_patterns:
            return sum((await self.count_by_name(admin)).values())
        if not self.tests:
            return await admin.count_instances(self.query)
        found = 0
        async for _ in self.instances(admin):
            found += 1
        return found


async def count_names(admin: ProviderAdmin, query: InstanceQuery) -> dict[str, int] | None:
    """Count the instances that fit by name; None if that needs a read of every instance.

    Stores keep no list of names. Names are taken from workers and from the newest instances. The
    list is complete if the counts of its names add up to the count of all instances.
    """
    if query.name is not None or query.text is not None or query.instance_ids is not None:
        return None
    sample = await admin.list_instances(query, limit=_SAMPLE)
    names = {info.name for info in sample.instances}
    if sample.next_cursor is not None:
        names |= {name for worker in await admin.list_workers() for name, _ in worker.handlers}
    if len(names) > _NAMES_MAX:
        return None
    for _ in range(_TRIES):
        before = await admin.count_instances(query)
        counts = {name: await _count(admin, query, name) for name in sorted(names)}
        if sum(counts.values()) == before == await admin.count_instances(query):
            return {name: number for name, number in counts.items() if number}
    return None


async def _count(admin: ProviderAdmin, query: InstanceQuery, name: str) -> int:
    return await admin.count_instances(msgspec.structs.replace(query, name=name))


def parse_search(text: str, now_ms: int) -> Selection:
    """Parse words with a qualifier and a colon. Words without one are searched for in texts.

    Quote a word that holds spaces.

    ``status:running,blocked`` (also ``open``, ``ended``), ``name:order*``, ``version:2.0.0``,
    ``id:ord-*``, ``text:timeout``, ``parent:ID`` or ``parent:none``, ``created:<2h`` (younger),
    ``created:>7d`` (older), ``created:>2026-11-01`` (later), and ``completed:`` likewise.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidValue(f"the query {text!r} cannot be read: {error}") from None
    fields: dict[str, Any] = {}
    tests: list[Test] = []
    name_patterns: list[str] = []
    texts: list[str] = []
    for word in words:
        qualifier, colon, value = word.partition(":")
        if not colon:
            name, equals, wanted = word.partition("=")
            if equals and name in QUALIFIERS:
                raise InvalidValue(
                    f"write {name}:{wanted} with a colon. To search for the text itself: "
                    f"text:{shlex.quote(word)}"
                )
            texts.append(word)
        elif not value:
            raise InvalidValue(f"{word!r} has no value; write e.g. {qualifier}:something")
        elif qualifier == "text":
            texts.append(value)
        elif qualifier == "name" and not _is_plain(value):
            name_patterns.append(value)
        else:
            _add(fields, tests, qualifier, value, now_ms)
    if texts:
        fields["text"] = texts[0]
        tests += [_mentions(more) for more in texts[1:]]
    return Selection(InstanceQuery(**fields), tuple(tests), tuple(name_patterns))


def _add(
    fields: dict[str, Any], tests: list[Test], qualifier: str, value: str, now_ms: int
) -> None:
    match qualifier:
        case "status":
            statuses = parse_statuses(value)
            _set(fields, "statuses", statuses & fields.pop("statuses", statuses), qualifier)
        case "name":
            _set(fields, "name", value, qualifier)
        case "version" if _is_plain(value):
            _set(fields, "version", value, qualifier)
        case "version":
            tests.append(_matching(lambda info: info.version or "", value))
        case "id" if value.endswith("*") and _is_plain(value[:-1]):
            _set(fields, "id_prefix", value[:-1], qualifier)
        case "id" if "*" not in value and "?" not in value:
            _set(fields, "instance_ids", tuple(value.split(",")), qualifier)
        case "id":
            tests.append(_matching(lambda info: info.instance_id, value))
        case "parent" if value == "none":
            _set(fields, "roots_only", True, qualifier)
        case "parent":
            _set(fields, "parent_instance_id", value, qualifier)
        case "created" | "completed":
            bound, moment = _time_bound(qualifier, value, now_ms)
            _set(fields, bound, moment, qualifier)
        case _:
            meant = did_you_mean(qualifier, QUALIFIERS)
            raise InvalidValue(
                f"there is no qualifier {qualifier!r}{meant}; known: {', '.join(QUALIFIERS)}. "
                f"To search for the text itself: text:{shlex.quote(f'{qualifier}:{value}')}"
            )


def parse_statuses(text: str) -> frozenset[Status]:
    """Parse names of statuses, separated by commas, in upper or lower case."""
    found: frozenset[Status] = frozenset()
    for word in text.split(","):
        statuses = _STATUSES.get(word.strip().lower())
        if statuses is None:
            raise InvalidValue(
                f"there is no status {word!r}{did_you_mean(word.lower(), _STATUSES)}; known: "
                f"{', '.join(sorted(_STATUSES))}"
            )
        found |= statuses
    return found


async def similar_ids(admin: ProviderAdmin, instance_id: str) -> list[str]:
    """Return ids that could be meant: longer ones with this beginning, else similar ones.

    Only ids with the same beginning and the newest ids are looked at, a cheap search on a big
    store.
    """
    candidates: dict[str, None] = {}
    lengths = {len(instance_id), max(1, len(instance_id) * 2 // 3), 3}
    for query in (*(InstanceQuery(id_prefix=instance_id[:length]) for length in lengths), None):
        page = await admin.list_instances(query, limit=_NEAR_SAMPLE)
        candidates |= dict.fromkeys(info.instance_id for info in page.instances)
    longer = [found for found in candidates if found.startswith(instance_id)]
    if longer:
        return longer[:3]
    by_case = {found.casefold(): found for found in candidates}
    near = difflib.get_close_matches(instance_id.casefold(), by_case, n=3)
    return [by_case[found] for found in near]


def _set(fields: dict[str, Any], field: str, value: object, qualifier: str) -> None:
    if field in fields:
        raise InvalidValue(f"{qualifier}: was given twice; put it once")
    fields[field] = value


def _is_plain(value: str) -> bool:
    return not any(character in value for character in "*?,")


def _matching(field: Callable[[InstanceInfo], str], patterns: str) -> Test:
    return lambda info: _fits(field(info), patterns)


def _fits(text: str, patterns: str) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns.split(","))


def _mentions(text: str) -> Test:
    wanted = text.casefold()

    def mentions(info: InstanceInfo) -> bool:
        fields = (info.instance_id, info.name, info.output or "", info.custom_status or "")
        return any(wanted in field.casefold() for field in fields)

    return mentions


def _time_bound(qualifier: str, value: str, now_ms: int) -> tuple[str, datetime.datetime]:
    """Return the field and the moment of a bound.

    ``>2h`` means older than two hours, so before that moment; ``>2026-11-01`` means after it.
    """
    sign, rest = value[0], value[1:]
    if sign not in "<>" or not rest:
        raise InvalidValue(
            f"{qualifier}:{value} needs < or >; write {qualifier}:<2h (younger than two hours), "
            f"{qualifier}:>7d (older than a week) or {qualifier}:>2026-11-01 (later than that day)"
        )
    try:
        moment, is_age = utc_time(now_ms - parse_duration_ms(rest)), True
    except InvalidValue:
        moment, is_age = parse_moment(rest, now_ms), False
    return f"{qualifier}_{'before' if (sign == '>') is is_age else 'after'}", moment

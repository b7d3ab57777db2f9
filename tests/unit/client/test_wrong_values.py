"""Values that are written wrongly: what is made of them is refused at once, by name."""

import math
from datetime import datetime, timedelta

import pytest

from perdure import (
    Client,
    FileSystemProvider,
    InstanceQuery,
    Retry,
    Runtime,
    RuntimeOptions,
    SqliteProvider,
    Status,
    TagFilter,
    activity,
    orchestration,
)
from perdure.codec import Codec
from perdure.errors import UsageError
from perdure.limits import PAYLOAD_BYTES_MAX
from perdure.providers.postgres import PostgresProvider
from perdure.providers.records import PruneOptions


@orchestration
async def gate() -> None: ...


class Halfway:
    name = "zip"


MADE = [
    (lambda: InstanceQuery(statuses={"Running"}), r"Status\.RUNNING.*\{'Running'\}"),
    (lambda: InstanceQuery(statuses="Running"), "statuses.*Status.*'Running'"),
    (lambda: InstanceQuery(statuses=Status.RUNNING), "statuses.*Status"),
    (lambda: InstanceQuery(instance_ids="order-1"), r"instance_ids.*\('order-1',\).*'order-1'"),
    (lambda: InstanceQuery(instance_ids=("",)), "each of instance_ids must not be empty"),
    (lambda: InstanceQuery(instance_ids=[5]), "instance_ids.*5"),
    (lambda: InstanceQuery(instance_ids=5), "instance_ids.*5"),
    (lambda: InstanceQuery(name=5), "name must be a string.*5"),
    (lambda: InstanceQuery(text=b"x"), "text must be a string.*b'x'"),
    (lambda: InstanceQuery(id_prefix="\ud800"), "id_prefix.*lone surrogate"),
    (lambda: InstanceQuery(version="1\0"), "version.*NUL"),
    (lambda: InstanceQuery(created_after="x"), r"datetime.now\(UTC\), not 'x'"),
    (lambda: InstanceQuery(created_before=1.5), "created_before must be a datetime.*1.5"),
    (lambda: InstanceQuery(completed_after=datetime.min), "completed_after.*time zone"),  # noqa: DTZ901
    (lambda: InstanceQuery(roots_only="no"), "roots_only must be True or False, not 'no'"),
    (lambda: InstanceQuery(instance_ids="order-1"), r"\('order-1',\), not 'order-1'"),
    (lambda: InstanceQuery(completed_before="x"), "completed_before.*'x'"),
    (lambda: PruneOptions(completed_before="x"), "completed_before.*'x'"),
    (lambda: TagFilter(mode="any"), r"TagFilter.only\('gpu'\) and the like.*'any'"),
    (lambda: TagFilter(tags=frozenset({"a"})), r"TagFilter.only\('a'\) and the like"),
    (lambda: TagFilter.only(5), "tag must be a string.*5"),
    (lambda: TagFilter.only(""), "tag must not be empty"),
    (lambda: TagFilter.only(["gpu"]), r"tag must be a string.*\['gpu'\]"),
    (lambda: TagFilter.default_and("x" * 300), "300 characters"),
    (lambda: TagFilter.only("é" * 200), "400 bytes"),
    (lambda: Codec("zip"), "transform.*wrap.*unwrap.*'zip'"),
    (lambda: Codec(Halfway()), "transform.*wrap.*Halfway"),
    (lambda: Codec(payload_bytes_max="x"), "payload_bytes_max must be an integer.*'x'"),
    (lambda: Codec(payload_bytes_max=-1), "payload_bytes_max must be.* 1.*-1"),
    (lambda: Codec(payload_bytes_max=PAYLOAD_BYTES_MAX + 1), f"{PAYLOAD_BYTES_MAX + 1}"),
    (lambda: Client("memory:", codec=5), r"codec must be a Codec\(\.\.\.\).*5"),
    (lambda: Client("memory:", clock=5), "clock.*now_ms.*sleep.*5"),
    (lambda: Client("a\0b.db"), r"NUL.*'a\\x00b.db'"),
    (lambda: Client("file:a\0b"), r"NUL.*'a\\x00b'"),
    (lambda: Runtime("memory:", [gate], codec="x"), r"codec must be a Codec\(\.\.\.\).*'x'"),
    (lambda: Runtime("memory:", [gate], codec=None), "codec.*None"),
    (lambda: Runtime("memory:", [gate], options={"threads": 3}), r"RuntimeOptions\(.*'threads'"),
    (lambda: Runtime("memory:", None), "handlers.*list.*None"),
    (lambda: Runtime("memory:", 5), "handlers.*list.*5"),
    (lambda: SqliteProvider(5), "path.*5"),
    (lambda: SqliteProvider(b"x.db"), "path.*b'x.db'"),
    (lambda: FileSystemProvider(5), "path.*5"),
    (lambda: FileSystemProvider(""), "path.*''"),
    (lambda: FileSystemProvider("x", orphan_grace="x"), "orphan_grace.*'x'"),
    (lambda: PostgresProvider(5), "connection string.*5"),
    (lambda: PostgresProvider("postgresql://x", schema=5), "schema.*5"),
    (lambda: PostgresProvider("postgresql://x", retry_timeout="x"), "retry_timeout.*'x'"),
    (lambda: PostgresProvider("postgresql://x", retry_timeout=-1), "retry_timeout.*-1"),
    (lambda: RuntimeOptions(threads=2.5), "threads must be an integer.*2.5"),
    (lambda: RuntimeOptions(processes=1.5), "processes must be an integer.*1.5"),
    (lambda: RuntimeOptions(sessions=1.5), "sessions must be an integer.*1.5"),
    (lambda: RuntimeOptions(cached_events=1.5), "cached_events must be an integer.*1.5"),
    (lambda: RuntimeOptions(max_attempts=math.inf), "max_attempts must be an integer.*inf"),
    (lambda: RuntimeOptions(poll_interval=math.inf), "poll_interval.*seconds.*inf"),
    (lambda: RuntimeOptions(poll_interval=0), "poll_interval.*0.1"),
    (lambda: RuntimeOptions(session_idle_timeout=0), "session_idle_timeout.*0.1"),
    (lambda: RuntimeOptions(drain_timeout=math.inf), "drain_timeout.*seconds.*inf"),
    (lambda: RuntimeOptions(orchestration_lock_timeout=1e30), "lock_timeout.*1e\\+30"),
    (lambda: RuntimeOptions(always_replay="yes"), "always_replay must be True or False.*'yes'"),
    (lambda: RuntimeOptions(housekeeping=None), "housekeeping must be True or False.*None"),
    (lambda: RuntimeOptions(run_activities=0), "run_activities must be True or False.*0"),
    (lambda: activity(timeout=1e300), "timeout.*1e\\+300"),
    (lambda: activity(timeout="1"), "timeout must be a number of seconds or a timedelta, not '1'"),
    (lambda: activity(timeout=timedelta(0)), "timeout must be more than 0 seconds"),
    (lambda: FileSystemProvider("x", archive="1d"), "archive.*seconds or a timedelta.*'1d'"),
    (lambda: activity(transactional="yes"), "transactional must be True or False.*'yes'"),
    (lambda: activity(timeut=5), "'timeut'.*did you mean 'timeout'"),
    (lambda: activity(bogus=1), "'bogus'.*retry.*timeout"),
    (lambda: Retry(max_attempts=10**30), "max_attempts.*10{30}"),
    (lambda: Retry(max_attempts=10**5000), "max_attempts.*must be at most.*int of 16610 bits"),
    (lambda: Retry(first_delay=10**400), "first_delay must be at most.*10{100}"),
    (lambda: Retry(first_delay=1e300, max_delay=1e300), "first_delay.*1e\\+300"),
    (lambda: Retry(multiplier=1e300), "multiplier.*1e\\+300"),
]


@pytest.mark.parametrize(("make", "said"), MADE, ids=[said for _, said in MADE])
def test_what_is_made_of_wrong_values_is_refused_where_it_is_made(make, said):
    with pytest.raises(UsageError, match=said):
        make()

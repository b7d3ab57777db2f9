"""``perdure db``: the commands that look after a store as a whole."""

from __future__ import annotations

from perdure.cli.command import LazyGroup, store_option, traceback_option

_HERE = "perdure.cli.commands"

db = LazyGroup(
    "db",
    help="Look after the store as a whole.",
    short_help="Look after the store: info, check, backup, copy, prune.",
    params=[store_option(), traceback_option()],
    no_args_is_help=True,
    sections={
        "Commands": {
            "info": (
                f"{_HERE}.db_info:info",
                "Show where the data lies, in which shape, and how much.",
            ),
            "migrate": (
                f"{_HERE}.db_info:migrate",
                "Bring the store to the schema of this version.",
            ),
            "check": (f"{_HERE}.db_check:check", "Read everything and say what is damaged."),
            "backup": (f"{_HERE}.db_copy:backup", "Copy the store, as of now, to a new place."),
            "copy": (f"{_HERE}.db_copy:copy", "Copy everything into another store of any kind."),
            "prune": (f"{_HERE}.db_prune:prune", "Drop past executions of instances."),
        }
    },
)

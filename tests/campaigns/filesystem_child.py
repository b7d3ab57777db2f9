"""One life of a store, to be killed from outside: python -m campaigns.filesystem_child ...

Reports each acknowledged operation as a line on its standard output.
"""

from __future__ import annotations

import argparse
import asyncio

from campaigns.filesystem_workload import (
    print_report,
    provider_of_life,
    run_to_the_end,
    start_instances,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--only-checkpoint", action="store_true")
    asyncio.run(_live(parser.parse_args()))


async def _live(options: argparse.Namespace) -> None:
    provider = provider_of_life(options.path, options.life)
    await provider.open()
    print_report("opened")
    if options.only_checkpoint:
        await provider.checkpoint()
    else:
        await start_instances(provider, options.instances, print_report)
        await run_to_the_end(
            provider, options.turns, print_report, checkpoint_every=options.checkpoint_every
        )
    await provider.close()
    print_report("closed")


if __name__ == "__main__":
    main()

"""``python -m perdure``: the command line without its console script."""

from perdure.cli.main import main

main()

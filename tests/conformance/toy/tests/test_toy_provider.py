from perdure.conformance import *  # noqa: F403

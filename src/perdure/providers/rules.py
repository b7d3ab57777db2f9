"""The contract's pure rules, for providers that live in other packages."""

from perdure.providers._shared.refusals import *  # noqa: F403
from perdure.providers._shared.rules import *  # noqa: F403

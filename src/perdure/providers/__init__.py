"""Where everything is kept: the contract, its records, and the backends.

Backends are imported by the module that needs them, so that one does not pay for the others.
"""

from perdure.providers.administration import ProviderAdmin
from perdure.providers.capabilities import Capabilities
from perdure.providers.contract import Provider

__all__ = ["Capabilities", "Provider", "ProviderAdmin"]

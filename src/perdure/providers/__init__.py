"""Storage: the contract, its records, and the backends.

A backend is imported where it is needed, so that a program loads only the one that it uses.
"""

from perdure.providers.administration import ProviderAdmin
from perdure.providers.contract import Provider
from perdure.providers.records import Capabilities

__all__ = ["Capabilities", "Provider", "ProviderAdmin"]

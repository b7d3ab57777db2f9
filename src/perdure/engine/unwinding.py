"""How the engine leaves user code that must not go on."""

from __future__ import annotations


class Unwinding(BaseException):
    """Control flow, not an error: what it stands for is recorded already.

    A BaseException, so that ``except Exception`` in user code lets it pass. Code that swallows it
    gains nothing: the loop runs no further callback of this execution.
    """

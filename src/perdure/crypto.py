"""Encrypts payloads with AES-256-GCM: ``Codec(AesGcm({"2026-11": key}))``. Extra ``crypto``.

A sealed payload names its key, so that keys can be replaced while instances run. The name, the form
and the place of the payload are authenticated with the data: a changed byte is found, and so is a
payload that was moved to another instance, or to another field of its instance. Ids, names, times
and statuses are no payloads, and stay readable.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from perdure.errors import InvalidValue

try:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"AesGcm needs {error.name}, which is not installed; pip install 'perdure[crypto]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.codec import PayloadContext

_FORM: Final = b"\x02"
_NONCE_BYTES: Final = 12
_KEY_BYTES: Final = 32


class AesGcm:
    """A payload transform. The first key encrypts; all of them decrypt.

    ``keys`` maps the name of each key, which is stored with the data, to its 32 random bytes, as
    ``secrets.token_bytes(32)`` makes them. To replace a key, put the new one first, and keep the
    old one as long as instances exist that were written with it. One key is good for 2**32
    payloads.
    """

    name = "aes-gcm"

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise InvalidValue("AesGcm needs a key: AesGcm({'2026-11': secrets.token_bytes(32)})")
        for key_id, key in keys.items():
            if not isinstance(key_id, str) or not 0 < len(key_id.encode()) < 256:
                raise InvalidValue(f"the name of a key has 1 to 255 bytes, not {key_id!r}")
            if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
                raise InvalidValue(
                    f"key {key_id!r} must be {_KEY_BYTES} random bytes, as of "
                    f"secrets.token_bytes({_KEY_BYTES}); not {type(key).__name__} of length "
                    f"{len(key)}"
                )
        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self._current = next(iter(keys))

    def wrap(self, data: bytes, context: PayloadContext) -> bytes:
        """Return the form, the name of the key, a random nonce, and the encrypted data."""
        key_id = self._current.encode()
        head = _FORM + bytes([len(key_id)]) + key_id
        nonce = os.urandom(_NONCE_BYTES)
        return (
            head
            + nonce
            + self._ciphers[self._current].encrypt(nonce, data, _associated(head, context))
        )

    def unwrap(self, data: bytes, context: PayloadContext) -> bytes:
        if data[:1] != _FORM:
            raise ValueError("it is damaged, or another version of Perdure has written it")
        end = 2 + data[1]
        head, nonce, encrypted = (
            data[:end],
            data[end : end + _NONCE_BYTES],
            data[end + _NONCE_BYTES :],
        )
        key_id = head[2:].decode()
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise LookupError(f"it needs the key {key_id!r}; there are: {', '.join(self._ciphers)}")
        return cipher.decrypt(nonce, encrypted, _associated(head, context))


def _associated(head: bytes, context: PayloadContext) -> bytes:
    """Return the bytes that are authenticated with the data. No id has a control character."""
    return head + context.instance_id.encode() + b"\0" + context.field.encode()

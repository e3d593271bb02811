"""What keeps one tenant's prefixes apart from another's in a replica's cache.

A replica's KV cache shared between tenants tells one, by how soon a first token comes, what another has asked. So every
request goes upstream with a `cache_salt`: the HMAC of its tenant's name (or of its group's, for tenants that may share)
under a secret of the server's, so that nobody can guess another's. A salt of the client's own is combined with it:
that can only narrow what is shared. The routing keys are made with the same salt, so the router doesn't expect a prefix
where the replica won't find it.

A tenant and a group of the same name are apart: the HMAC says which it is.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

SALT_CHARS = 48


class Salts:
    """`groups`: a group's name -> the tenants that share prefixes."""

    def __init__(self, secret: str, groups: Mapping[str, Sequence[str]]) -> None:
        self._secret = secret.encode()
        self._group_of = {tenant: group for group, tenants in groups.items() for tenant in tenants}

    def of(self, tenant: str) -> str:
        group = self._group_of.get(tenant)
        return self._mac("tenant", tenant) if group is None else self._mac("group", group)

    def _mac(self, kind: str, name: str) -> str:
        return hmac.new(self._secret, f"{kind}\0{name}".encode(), hashlib.sha256).hexdigest()[:SALT_CHARS]


def narrowed(salt: str, own: str) -> str:
    """The tenant's salt with the client's own. Without a tenant's the client's stands as it is."""
    if not salt or not own:
        return salt or own
    return hmac.new(salt.encode(), own.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:SALT_CHARS]

"""Which replicas have embeddings: found out by asking, since engines don't say.

A replica that answers an embedding request with 404, 405 or 501 serves the model without that route. It is passed over
for a while, and the request goes on to the next one; that is no failure of the replica's, so it costs no retry. When
none is left the client is told what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine_worker.contract.errors import ApiError
from gateway.exchange import Failure
from gateway.replicas.registry import Replica
from policies.events import FailureKind
from policies.types import ReplicaId, RouteRequest

if TYPE_CHECKING:
    from gateway.router import Router

_LACKING = (404, 405, 501)
_ASK_AGAIN_S = 60.0  # an engine may come back with other flags


class Embedders:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lacking: dict[str, float] = {}  # replica -> when to ask it again

    def lacks(self, replica: Replica, failure: Failure) -> bool:
        """Whether this failure says so; noted."""
        if failure.kind is not FailureKind.REJECTED or failure.upstream_status not in _LACKING:
            return False
        self._lacking[replica.replica_id] = self._clock() + _ASK_AGAIN_S
        return True

    def _may_have(self, model: str, router: Router) -> bool:
        """Whether a replica of the model isn't known to lack them, be it down or broken: one may come back."""
        return any(model in replica.models and replica.replica_id not in self._lacking for replica in router.registry)

    def only(self, route: RouteRequest, router: Router) -> RouteRequest:
        """The route without replicas that lack embeddings. Raises ApiError 404 where those are all there are."""
        now = self._clock()
        self._lacking = {name: until for name, until in self._lacking.items() if until > now}
        limited = replace(route, excluded=route.excluded.union(map(ReplicaId, self._lacking)))
        if self._lacking and not router.num_candidates(limited) and not self._may_have(route.model, router):
            raise ApiError(
                404,
                f"No replica of the model {route.model!r} has embeddings; ask for a model that is served for them.",
                param="model",
                code="model_not_found",
            )
        return limited

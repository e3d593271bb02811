"""What a request asks for: from its body to the request that the router places.

Neither step waits for anything. Every way through the gateway (proxy.py, straight.py) takes both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_worker.contract.errors import ApiError
from gateway.aliases import Aliases
from gateway.config import GatewaySettings
from gateway.observe.record import RequestRecord
from gateway.openai.fields import Endpoint, ParsedRequest
from gateway.openai.parse import parse_request, with_model
from gateway.replicas.registry import Registry
from gateway.router import Router
from gateway.tenancy.refusals import shut_out
from policies.types import KeySpace, PrefixChain, ReplicaId, RouteRequest

if TYPE_CHECKING:
    from gateway.tenancy.directory import Identity

_BYTES_PER_TOKEN: Final = 4  # an estimate, for requests that have no chain
_NOBODY: frozenset[ReplicaId] = frozenset()


class Intake:
    def __init__(self, settings: GatewaySettings, registry: Registry, router: Router) -> None:
        self._registry = registry
        self._router = router
        self._keeps_apart = settings.unsalted_replicas == "refuse"
        self._aliases = Aliases(settings.model_aliases)

    def parse(
        self, endpoint: Endpoint, body: bytes, identity: Identity | None, record: RequestRecord
    ) -> ParsedRequest:  # fmt: skip
        """The request, for a model that its key may use. Raises ApiError."""
        parsed = parse_request(endpoint, body, identity.salted if identity is not None else None)
        record.stream = parsed.stream
        if parsed.model is None:
            if identity is not None:
                identity.check_model(self.model(parsed))
            return parsed
        record.asked_model = parsed.model
        model = self._aliases.resolve(parsed.model, self._registry.model_names)
        if identity is not None:
            identity.check_model(parsed.model, model)
        return parsed if model == parsed.model else with_model(parsed, model)

    def model(self, parsed: ParsedRequest) -> str:
        """Routes that may leave the model out mean the only one there is. Raises ApiError where that is unclear."""
        if parsed.model is not None:
            return parsed.model
        models = self._registry.models()
        if len(models) == 1:
            return models[0]
        if not models:
            self._router.check_model("")
        raise ApiError(
            400, f"You must provide the parameter 'model'; models served: {', '.join(models)}.", param="model"
        )

    def key_spaces(self, parsed: ParsedRequest, record: RequestRecord) -> frozenset[KeySpace]:
        """Those in which the request needs chains; its model is noted. Raises ApiError where nobody serves that now."""
        model = self.model(parsed)
        self._router.check_model(model, record.asked_model)
        record.model = model
        return self._registry.key_spaces(model)

    def route(
        self, parsed: ParsedRequest, record: RequestRecord, chains: dict[KeySpace, PrefixChain]
    ) -> RouteRequest:  # fmt: skip
        """What the router needs to know of it."""
        num_tokens = 0
        for chain in chains.values():
            num_tokens = max(num_tokens, chain.num_tokens)
        return RouteRequest(
            request_id=self._router.new_id(),
            model=record.model,
            num_tokens=num_tokens if chains else max(1, len(parsed.body) // _BYTES_PER_TOKEN),
            chains=chains,
            max_output_tokens=parsed.max_output_tokens,
            session=parsed.session,
            streamed=parsed.stream,
            tenant=record.tenant,
            excluded=shut_out(self._registry, record.model) if record.tenant and self._keeps_apart else _NOBODY,
        )

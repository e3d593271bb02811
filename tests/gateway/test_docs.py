"""Pages of docs/ that list what the code has are held against it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from pydantic.fields import FieldInfo

from engine_worker.serving.metrics import WorkerMetrics
from gateway.config import GatewaySettings, ReplicaSpec
from gateway.sharing.figures import SharingCollector, SharingFigures
from policies.registry import policy_names
from tests.gateway.harness import Replica, gateway
from tests.support.processes import ROOT


def rows(text: str) -> dict[str, str]:
    """First cell -> second cell of all rows whose first cell is a name in back-quotes."""
    found = re.findall(r"^\| `(\w+)` \|([^|]*)\|", text, re.M)
    assert len(dict(found)) == len(found), "a name that is listed twice"
    return {name: default.strip().strip("`") for name, default in found}


def defaults(fields: Mapping[str, FieldInfo]) -> dict[str, str]:
    return {name: shown(field.get_default(call_default_factory=True)) for name, field in fields.items()}


def shown(value: object) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_the_settings_page_lists_every_setting_with_its_default() -> None:
    text = (ROOT / "docs/settings.md").read_text("utf-8")
    gateway, _, replica = text.partition("## A replica")
    assert rows(gateway) == defaults(GatewaySettings.model_fields)
    assert rows(replica).keys() == ReplicaSpec.model_fields.keys()
    own = {name: default for name, default in rows(replica).items() if name not in ("url", "name")}
    expected = defaults(ReplicaSpec.model_fields)
    assert own == {name: expected[name] for name in own}


def test_the_policies_page_has_a_line_for_each() -> None:
    text = (ROOT / "docs/policies.md").read_text("utf-8")
    assert rows(text).keys() == set(policy_names())


def exported(exposition: str) -> set[str]:
    """Names of the families that /metrics declares (also those without samples yet)."""
    return set(re.findall(r"^# TYPE (\S+) ", exposition, re.M))


async def test_every_metric_that_the_page_names_is_exported() -> None:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    named = set(re.findall(r"`((?:warmgate_|vllm:)\w+)`", text)) - {"warmgate_"}
    registry = CollectorRegistry()
    registry.register(SharingCollector(lambda: SharingFigures("local", "", "g", 0, 0, 0, 0, 0, 0, 0, 0)))
    async with gateway(Replica(), shadow_policies=["least_loaded"], warmup_store_bytes=1 << 20) as running:
        found = exported((await running.client.get("/metrics")).text)
    found |= exported(generate_latest(registry).decode())
    found |= exported(WorkerMetrics("m").render().decode())
    assert len(named) > 40
    assert named - found == set()

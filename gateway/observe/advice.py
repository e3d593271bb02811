"""What the shadows' figures mean, in sentences; and as metrics.

Another policy pays when its choices would take at least WORTH less time in all than the live one's, by more than chance
explains (SURE standard errors), over at least ENOUGH decisions of this gateway's own traffic. A difference of that size
that chance could still explain is no verdict: more requests will tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.observe.shadow import Shadow, Shadows
from gateway.observe.watched import Seen, Watched

ENOUGH = 200
WORTH = 0.05
SURE = 3.0
OFF = 0.3  # expected against realised: from here on the seconds are to be doubted

Verdict = Literal["too_few", "unsure", "pays", "costs", "same"]


@dataclass(frozen=True, slots=True)
class Advice:
    policy: str
    verdict: Verdict
    sentence: str
    figures: dict[str, float]


def advice_on(shadow: Shadow | Seen, live: str) -> Advice:
    faded = shadow.faded
    figures = {
        "num_decisions": float(shadow.num_decisions),
        "elsewhere_share": faded.mean("elsewhere"),
        "expected_ttft_s": faded.mean("own_s"),
        "live_expected_ttft_s": faded.mean("live_own_s"),
        "expected_total_s": faded.mean("total_s"),
        "live_expected_total_s": faded.mean("live_total_s"),
        "difference_s": faded.mean("difference_s"),
        "error_s": faded.error_s if faded.count >= 2.0 else 0.0,
        "cached_share": faded.matched_tokens / max(faded.num_tokens, 1.0),
        "live_cached_share": faded.live_matched_tokens / max(faded.num_tokens, 1.0),
    }
    verdict = _verdict(shadow)
    return Advice(shadow.spec, verdict, _sentence(shadow.spec, live, verdict, figures), figures)


def _verdict(shadow: Shadow | Seen) -> Verdict:
    if shadow.num_decisions < ENOUGH:
        return "too_few"
    difference, live = shadow.faded.mean("difference_s"), shadow.faded.mean("live_total_s")
    if abs(difference) < WORTH * live:
        return "same"
    if abs(difference) <= SURE * shadow.faded.error_s:
        return "unsure" if difference else "same"
    return "pays" if difference < 0.0 else "costs"


def _sentence(policy: str, live: str, verdict: Verdict, figures: dict[str, float]) -> str:
    if verdict == "too_few":
        count = round(figures["num_decisions"])
        decisions = "decision" if count == 1 else "decisions"
        return f"{policy}: {count} {decisions} so far, too few to tell ({ENOUGH} are needed)."
    seconds, live_seconds = figures["expected_total_s"], figures["live_expected_total_s"]
    change = abs(figures["difference_s"]) / max(live_seconds, 1e-9)
    basis = (
        f"over {figures['num_decisions']:.0f} decisions it would have sent {figures['elsewhere_share']:.0%} of the "
        f"requests elsewhere, with {figures['cached_share']:.0%} of the prompts' tokens cached (live: "
        f"{figures['live_cached_share']:.0%}) and {seconds:.3g} expected seconds a request, delays to others included "
        f"(live: {live_seconds:.3g})"
    )
    if verdict == "pays":
        return f"{policy} would pay: {basis}, {change:.0%} less than {live}. Try it: --policy {policy}."
    if verdict == "costs":
        return (
            f"{policy} would cost: {basis}, {change:.0%} more than {live}, with the caches as {live} filled them. Keep "
            f"{live}, unless warmgate replay of a recorded trace, where each policy fills its own, says otherwise."
        )
    if verdict == "unsure":
        may = "save" if figures["difference_s"] < 0.0 else "cost"
        error = SURE * figures["error_s"] / max(live_seconds, 1e-9)
        return (
            f"{policy} may {may} {change:.0%}, ± {error:.0%}, not certain yet: {basis}. Ask again after more requests."
        )
    return f"{policy} would make no difference worth having: {basis}. Keep {live}."


def report(shadows: Shadows | Watched | None, live: str) -> dict[str, Any]:
    """What /advice answers: sentences for people, figures for programs."""
    if shadows is None or not shadows.shadows:
        sentence = (
            "No other policy is watched: start the gateway with shadow_policies set, for example "
            "--shadow-policies least_loaded,lmetric, and ask again after some hundred requests."
        )
        return {"policy": live, "share": 0.0, "watched_s": 0.0, "sentences": [sentence], "policies": []}
    advice = [advice_on(shadow, live) for shadow in shadows.shadows]
    sentences = [each.sentence for each in advice]
    if (doubt := _doubt(shadows)) is not None:
        sentences.append(doubt)
    return {
        "policy": live,
        "share": shadows.share,
        "watched_s": shadows.watched_s,
        "sentences": sentences,
        "policies": [{"policy": a.policy, "verdict": a.verdict, **a.figures} for a in advice],
        "expected_ttft_s": shadows.expected_s / max(shadows.num_realised, 1.0),
        "realised_ttft_s": shadows.realised_s / max(shadows.num_realised, 1.0),
    }


def _doubt(shadows: Shadows | Watched) -> str | None:
    """When the seconds that everything is judged by don't come true."""
    if shadows.num_realised < ENOUGH or not shadows.realised_s:
        return None
    ratio = shadows.expected_s / shadows.realised_s
    if abs(ratio - 1.0) <= OFF:
        return None
    return (
        "Take these seconds with care: first tokens were expected after "
        f"{shadows.expected_s / shadows.num_realised:.3g} s and came after "
        f"{shadows.realised_s / shadows.num_realised:.3g} s."
    )


class ShadowCollector(Collector):
    def __init__(self, shadows: Shadows) -> None:
        self._shadows = shadows

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for name, text, field in (
            ("decisions", "Decisions that a shadow policy made too.", "num_decisions"),
            ("elsewhere", "Those in which it chose another replica.", "num_elsewhere"),
            ("failures", "Those in which it failed.", "num_failed"),
        ):
            family = CounterMetricFamily(f"warmgate_shadow_{name}", text, labels=["policy"])
            for shadow in self._shadows.shadows:
                family.add_metric([shadow.spec], getattr(shadow, field))
            yield family
        for name, text, own, live in (
            ("ttft_seconds", "Expected first tokens of both choices.", "own_s", "live_own_s"),
            ("seconds", "The same with the delay to requests that wait.", "total_s", "live_total_s"),
        ):
            family = CounterMetricFamily(f"warmgate_shadow_expected_{name}", text, labels=["policy", "choice"])
            for shadow in self._shadows.shadows:
                family.add_metric([shadow.spec, "shadow"], getattr(shadow, own))
                family.add_metric([shadow.spec, "live"], getattr(shadow, live))
            yield family

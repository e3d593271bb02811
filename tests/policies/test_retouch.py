"""Re-touch statistics: S(a) by hand and against every touch remembered one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.retouch import FIRST_GAP_S, HALF_LIFE_S, SLOT_S, Retouches, _bin_of, _end_of
from policies.types import BlockKey, PrefixChain, Rates
from tests.policies.support import keys

RATES = Rates(base_s=0.0, linear_s=1e-4, quadratic_s=1e-8, decode_step_s=0.01)


def prompt(path: str, block_tokens: int = 512) -> PrefixChain:
    return PrefixChain(keys(path), block_tokens, len(path) * block_tokens)


def test_what_is_never_asked_for_again_is_worth_nothing() -> None:
    retouches = Retouches()
    assert retouches.lost_s(1.0, RATES) == 0.0
    for i in range(40):
        retouches.touched(prompt(chr(300 + i) * 3), float(i))
    assert retouches.lost_s(10.0, RATES) == 0.0


def test_a_block_asked_for_again_after_longer_than_its_idle_age_is_worth_its_recomputation() -> None:
    retouches = Retouches()
    for i in range(16):  # sixteen prompts of two blocks, each asked for again after 100 s by half of them
        retouches.touched(prompt(chr(300 + i) * 2), float(i))
    for i in range(0, 16, 2):
        retouches.touched(prompt(chr(300 + i) * 2), 100.0 + i)
    retouches._count(200.0)
    # 48 blocks touched; 16 of them again after 100 s, half first blocks and half second ones: of those that lay
    # idle for 10 s none had come back before, and one third of all touches was
    per_token = RATES.linear_s + RATES.quadratic_s * (0.5 * 256 + 0.5 * 768)
    # (all counts decay alike, so the ratio moves only by what came after)
    assert retouches.lost_s(10.0, RATES) == pytest.approx(per_token / 3, rel=0.05)
    assert retouches.lost_s(1000.0, RATES) == 0.0


def test_touches_answered_within_the_age_are_no_longer_at_risk() -> None:
    retouches = Retouches()
    for second in range(20):  # one block every second: no gap is longer
        retouches.touched(prompt("x"), float(second))
    retouches._count(30.0)
    assert retouches.lost_s(0.25, RATES) == pytest.approx(19 / 20 * (RATES.linear_s + 256 * RATES.quadratic_s))
    assert retouches.lost_s(2.0, RATES) == 0.0


def test_what_was_touched_a_moment_ago_is_not_counted_as_forgotten() -> None:
    retouches = Retouches()
    for second in range(0, 40, 2):  # everything is asked for again after 20 s
        retouches.touched(prompt(chr(300 + second % 20)), float(second))
    retouches._count(40.0)
    # twenty touches, ten of them answered; of the other ten five came less than 10 s ago and say nothing yet
    assert retouches.lost_s(10.0, RATES) == pytest.approx(
        (RATES.linear_s + 256 * RATES.quadratic_s) * 10 / 15, rel=0.01
    )
    retouches._count(60.0)  # now they should have, and haven't
    assert retouches.lost_s(10.0, RATES) == pytest.approx((RATES.linear_s + 256 * RATES.quadratic_s) / 2, rel=0.05)


def test_one_key_in_a_unit_stands_for_blocks_smaller_than_it() -> None:
    large, small = Retouches(), Retouches()
    fine = tuple(BlockKey(1000 + i) for i in range(128))
    for at in (0.0, 50.0):
        large.touched(PrefixChain(fine[31::32], 512, 2048), at)
        small.touched(PrefixChain(fine, 16, 2048), at)
    large._count(100.0)
    small._count(100.0)
    assert small.lost_s(10.0, RATES) == pytest.approx(large.lost_s(10.0, RATES))
    assert len(small._last) == 4


def test_memory_is_bounded_and_old_traffic_counts_less() -> None:
    retouches = Retouches(max_tracked=10)
    for i in range(30):
        retouches.touched(prompt(chr(300 + i)), float(i))
        retouches.check_invariants()
    assert len(retouches._last) == 10
    for _ in range(2):
        retouches.touched(prompt("y"), 40.0)
    before = retouches._touched
    retouches.touched(prompt("z"), 40.0 + 1200.0)
    assert retouches._touched == pytest.approx(before / 2 + 512, rel=0.05)


@given(st.floats(0.0, 1e7))
def test_bins_are_thirds_of_an_octave(gap_s: float) -> None:
    place = _bin_of(gap_s)
    assert 0 <= place < 57
    if 0 < place < 56:
        edge = FIRST_GAP_S * 2.0 ** ((place - 1) / 3)
        assert edge * 0.999999 <= gap_s <= edge * 2.0 ** (1 / 3) * 1.000001


@given(
    st.lists(st.tuples(st.text("xyz", min_size=1, max_size=4), st.floats(0.0, 2.0)), min_size=1, max_size=60),
    st.integers(0, 8),
)
@settings(deadline=None)
def test_counts_agree_with_every_touch_remembered(steps: list[tuple[str, float]], age_bin: int) -> None:
    retouches, last, gaps, now = Retouches(), dict[BlockKey, float](), list[tuple[int, int]](), 0.0
    for path, wait in steps:
        now += wait * 0.2  # less than the time between two decays in all
        retouches.touched(prompt(path), now)
        for place, key in enumerate(keys(path)):
            if key in last:
                gaps.append((_bin_of(now - last[key]), place))
            last[key] = now
    retouches._count(now)
    retouches.check_invariants()
    beyond = [place for gap_bin, place in gaps if gap_bin > age_bin]
    ages = [max(now - (int(at / SLOT_S) + 0.5) * SLOT_S, 0.0) for at in last.values()]
    recent = sum(0.5 ** (age_s / HALF_LIFE_S) for age_s in ages if age_s <= _end_of(age_bin))
    kept = max(sum(len(path) for path, _ in steps) - (len(gaps) - len(beyond)) - recent, len(beyond))
    seconds = sum(512 * (RATES.linear_s + RATES.quadratic_s * (place * 512 + 256)) for place in beyond)
    expected = seconds / (kept * 512) if beyond else 0.0
    age_s = FIRST_GAP_S * 2.0 ** ((age_bin - 0.5) / 3) if age_bin else 0.1
    assert retouches.lost_s(age_s, RATES) == pytest.approx(expected)

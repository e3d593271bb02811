"""What the conformance command makes of its options. The checks themselves run in tests/e2e."""

from __future__ import annotations

import pytest

from loadtest.conformance.checks import CATEGORIES
from loadtest.conformance.cli import main


@pytest.mark.parametrize("words", [["nosuch:"], ["streams:", "nosuch:"]])
def test_a_word_that_chooses_no_check_is_an_error_that_lists_the_categories(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any server is asked: nothing listens at that address."""
    with pytest.raises(SystemExit) as ended:
        main(["http://127.0.0.1:9", *(part for word in words for part in ("--only", word))])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no check has 'nosuch:'" in said
    assert all(category in said for category in CATEGORIES)

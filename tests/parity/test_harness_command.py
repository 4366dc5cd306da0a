"""`python -m tests.harness`: what goes together, and what is refused."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--random", "1", "--list"), "--random draws its cases"),
        (("--random", "1", "--case", "control"), "--random draws its cases"),
        (("--case", "control", "--seed", "1"), "--seed and --minutes go with --random alone"),
        (("--customised", "--minutes", "1"), "--seed and --minutes go with --random alone"),
        ((), "choose --customised, --random, --census or --case"),
        (("--case", "contol"), "unknown case contol: did you mean control"),
    ],
)
def test_what_does_not_go_together_is_a_bad_argument(harness, arguments, message):
    result = harness(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())

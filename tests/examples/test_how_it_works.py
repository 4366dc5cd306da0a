"""The file that shows the algorithm: it is short, needs the fused function alone, and is equal to stock TRL."""

import ast
import re

import pytest

from trl_fused_grpo._compat.required import NEWEST_TRL, TRL

from . import small


pytestmark = [
    pytest.mark.example,
    pytest.mark.skipif(TRL < NEWEST_TRL, reason="examples are written for the newest TRL"),
]

SOURCE = (small.EXAMPLES / "how_it_works.py").read_text(encoding="utf-8")


def test_it_is_equal_to_stock_and_says_so(capsys):
    small.load("how_it_works").main()
    printed = capsys.readouterr().out
    stock, ours, wrong = re.findall(r"^(?:stock|this).*: loss (\S+?),?(?: |$)", printed, re.MULTILINE)
    assert float(ours) == pytest.approx(float(stock), rel=1e-5)
    assert float(wrong) == pytest.approx(float(stock), rel=1e-5)
    errors = [float(error) for error in re.findall(r"within (\S+) of stock's", printed)]
    assert len(errors) == 2
    assert all(error < 1e-5 for error in errors)
    for tokens, padded in re.findall(r"(\d+) tokens in the model, (\d+) with padding", printed):
        assert int(tokens) < int(padded)
    assert re.findall(r"(\d+) of them a second time", printed) == ["0", "1"]


def test_it_is_short_and_takes_the_fused_function_alone():
    assert len(SOURCE.splitlines()) < 200
    imported = {node.module for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in imported if name.startswith("trl_fused_grpo")}
    assert ours
    assert all(name.startswith("trl_fused_grpo.ops") for name in ours)

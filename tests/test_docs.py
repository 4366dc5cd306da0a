"""The page of what turns a faster path off names every reason that the code gives."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling import attention_watch, layout, layout_choice, packed_attention
from trl_fused_grpo.training import checks, eligibility, engine
from trl_fused_grpo.training.customisation import LIBRARIES, MICRO_BATCH_METHODS


PAGE = " ".join((Path(__file__).parents[1] / "docs" / "faster-paths.md").read_text(encoding="utf-8").split())
MODULES = (trl_compat, attention_watch, checks, eligibility, layout, layout_choice, packed_attention, engine)


def reasons():
    """The literal parts of every reason: what a `why_*` function returns, what a refusal or an error of holes says."""
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            texts = []
            if isinstance(node, ast.FunctionDef) and node.name.startswith("why_"):
                texts = [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value is not None]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
                "refuse",
                "HolesError",
            ):
                texts = node.args
            for text in texts:
                for part in literal_parts(text):
                    phrase, colon, _ = part.partition(":")
                    phrase = phrase.strip(" (),'")
                    if len(phrase.split()) >= 3:
                        yield pytest.param(phrase, id=f"{module.__name__.rpartition('.')[2]}: {phrase[:60]}")
                    if colon:
                        break  # what follows says what to change


def literal_parts(text):
    return [node.value for node in ast.walk(text) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def plain(text):
    return re.sub(r"[*`]", "", text)


@pytest.mark.parametrize("reason", sorted(set(reasons()), key=lambda p: p.id))
def test_every_reason_stands_on_the_page(reason):
    assert reason in plain(PAGE)


@pytest.mark.parametrize("method", [name for name in MICRO_BATCH_METHODS if name not in trl_compat.OBJECTIVE_METHODS])
def test_every_method_whose_replacement_counts_stands_on_the_page(method):
    assert f"`{method}`" in PAGE


def test_every_library_whose_functions_do_not_count_stands_on_the_page():
    names = {"liger_kernel": "Liger-Kernel", "trl": "TRL"}
    for library in LIBRARIES:
        assert names.get(library, library).lower() in PAGE.lower(), library

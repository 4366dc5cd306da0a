"""docs/faster-paths.md names every reason to leave a faster path, and the table in eligibility.py every predicate."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from tests.distributed.table import ENGINES, FEATURES
from trl_fused_grpo._compat import peft as peft_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.libraries import LIBRARIES
from trl_fused_grpo.loss import objective
from trl_fused_grpo.modeling import (
    adapters,
    attention_watch,
    compiled_modules,
    flex_kernel,
    layout,
    layout_choice,
    packed_attention,
)
from trl_fused_grpo.training import (
    checks,
    eligibility,
    engine,
    first_forward,
    forecastable,
    logps,
    memory,
    trial,
    verification,
)
from trl_fused_grpo.training.customisation import MICRO_BATCH_METHODS


PAGE = " ".join((Path(__file__).parents[1] / "docs" / "faster-paths.md").read_text(encoding="utf-8").split())
MODULES = (
    peft_compat,
    trl_compat,
    adapters,
    attention_watch,
    checks,
    compiled_modules,
    eligibility,
    engine,
    first_forward,
    flex_kernel,
    forecastable,
    layout,
    layout_choice,
    logps,
    memory,
    packed_attention,
    trial,
    verification,
)
# What else takes a reason as an argument
TAKE_REASONS = ("refuse", "HolesError", "RowsRefusedError", "CuSeqlensIgnoredError", "_padded")


def reasons():
    """
    The literal parts of every reason: what a `why_*` function returns, and what is passed to those that take one.
    Words after a colon say what to change; parts of one or two words say too little to be looked for.
    """
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            texts = []
            if isinstance(node, ast.FunctionDef) and is_predicate(node.name):
                texts = [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value is not None]
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                texts = node.args if name in TAKE_REASONS else []
            for text in texts:
                for part in literal_parts(text):
                    phrase, colon, _ = part.partition(":")
                    phrase = phrase.strip(" (),'")
                    if len(phrase.split()) >= 3:
                        yield pytest.param(phrase, id=f"{module.__name__.rpartition('.')[2]}: {phrase[:60]}")
                    if colon:
                        break


def is_predicate(name):
    return name.lstrip("_").startswith("why_")


def literal_parts(text):
    return [node.value for node in ast.walk(text) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def plain(text):
    return re.sub(r"[*`]", "", text)


@pytest.mark.parametrize("reason", sorted(set(reasons()), key=lambda p: p.id))
def test_the_page_names_every_reason(reason):
    assert reason in plain(PAGE)


@pytest.mark.parametrize("method", [name for name in MICRO_BATCH_METHODS if name not in trl_compat.OBJECTIVE_METHODS])
def test_the_page_names_every_method_whose_replacement_counts(method):
    assert f"`{method}`" in PAGE


def test_the_page_names_every_library_whose_functions_do_not_count_as_replaced():
    names = {"liger_kernel": "Liger-Kernel", "trl": "TRL"}
    for library in LIBRARIES:
        assert names.get(library, library).lower() in PAGE.lower(), library


@pytest.mark.parametrize("module", [eligibility, forecastable], ids=["eligibility", "forecastable"])
def test_the_table_of_faster_paths_names_every_predicate(module):
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    predicates = {name for name in own if name.startswith("why_")}
    assert predicates
    assert predicates <= set(re.findall(r"why_\w+", eligibility.__doc__))


def test_the_table_of_faster_paths_names_no_predicate_that_is_gone():
    places = (eligibility, forecastable, first_forward, engine.LogpsEngine)
    for name in re.findall(r"why_\w+", eligibility.__doc__):
        assert any(hasattr(place, name) for place in places), name


@pytest.mark.parametrize("feature", FEATURES)
def test_the_page_has_every_feature_with_a_number_for_each_engine_that_trains_it(feature):
    page = (Path(__file__).parents[1] / "docs" / "reliability.md").read_text(encoding="utf-8")
    row = re.search(rf"^\|[^|]*\| `{feature}` \|([^?\n]+)\|$", page, re.MULTILINE)
    assert row
    cells = [cell.strip() for cell in row[1].split("|")]
    assert [cell[:1].isdigit() for cell in cells] == [engine in FEATURES[feature].engines for engine in ENGINES]


def rows_of_reductions():
    """What the table of reductions says on our side: a reduction and TRL's loss types that have it."""
    page = (Path(__file__).parents[1] / "docs" / "options.md").read_text(encoding="utf-8")
    table = page.partition("| `reduction` | TRL's `loss_type` |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        ours, trls = row.split("|")[1:3]
        yield re.findall(r'`"(\w+)"`', ours), re.findall(r"`(\w+)`", trls)


def test_the_table_of_reductions_has_the_names_that_there_are():
    rows, named = list(rows_of_reductions()), []
    for reductions, loss_types in rows:
        for loss_type in loss_types:
            assert [objective.GRPOObjective(loss_type, max_completion_length=8).effective_reduction] == reductions
        named += loss_types
    assert rows[-1] == ([], [])  # what others have and nobody here
    assert {*named} == {*objective.LOSS_TYPES} - {"gmpo"}  # a trainer of TRL's, not a loss type
    assert {name for names, _ in rows for name in names} == {*objective.REDUCTIONS} - {"padded_sequence_sum"}

"""docs/faster-paths.md has every level and every reason in the words of the log; other tables of docs/ are complete."""

import ast
import re

import pytest

from tests.distributed.table import ENGINES, FEATURES
from tests.docs_pages import ROOT
from trl_fused_grpo._compat.libraries import LIBRARIES
from trl_fused_grpo._compat.trainers import STEP_METHODS
from trl_fused_grpo.loss import objective
from trl_fused_grpo.training.findings import WHAT_IS_DONE, Level


def page(name):
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def plain(text):
    return re.sub(r"[*`]", "", text)


PAGE = page("faster-paths.md")
# Reasons that are on another page, or in an error that says what to change
ELSEWHERE = {"check.py": "numerics.md", "moe.py": None, "output_projection.py": None}
# What takes a reason as an argument
TAKE_REASONS = ("Reason", "refuse", "HolesError", "_padded")


def reasons():
    """
    The phrases of every reason: of three words and more, up to a colon, behind which stands what to change. They are in
    functions `why_…`, in those that return words or `None`, and in calls of those that take a reason.
    """
    for path in sorted((ROOT / "trl_fused_grpo").rglob("*.py")):
        name = ELSEWHERE.get(path.name, "faster-paths.md")
        if name is None or {"parity", "cli"} & {*path.parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for text in texts_of_reasons(node):
                phrase = plain(text).partition(":")[0].strip(" (),'")
                if len(phrase.split()) >= 3:
                    yield pytest.param(name, phrase, id=f"{path.stem}: {phrase[:60]}")


def texts_of_reasons(node):
    parts = []
    if isinstance(node, ast.FunctionDef):
        returns = "" if node.returns is None else ast.unparse(node.returns)
        if node.name.lstrip("_").startswith("why_") or returns == "str | None":
            parts = [part for part in node.body if not (isinstance(part, ast.Expr) and ast.get_docstring(node))]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in TAKE_REASONS:
        parts = node.args
    values = [getattr(node, "value", None) for part in parts for node in ast.walk(part)]
    return [value for value in values if isinstance(value, str)]


@pytest.mark.parametrize(("name", "reason"), sorted(set(reasons()), key=lambda param: param.id))
def test_a_page_has_every_reason(name, reason):
    assert reason in plain(page(name))


@pytest.mark.parametrize("level", Level)
def test_the_page_has_every_level(level):
    assert f"| `{level.name.lower()}` |" in PAGE


def test_the_page_quotes_the_log():
    assert f"Level head ({WHAT_IS_DONE[Level.HEAD]}), because a hook on LlamaDecoderLayer." in PAGE


@pytest.mark.parametrize("method", STEP_METHODS)
def test_the_page_names_every_method_whose_replacement_counts(method):
    assert f"`{method}`" in PAGE


def test_the_page_names_every_library_whose_code_is_known():
    names = {"liger_kernel": "Liger-Kernel"}
    for library in LIBRARIES:
        assert names.get(library, library).lower() in PAGE.lower(), library


@pytest.mark.parametrize("feature", FEATURES)
def test_the_page_has_every_feature_with_a_number_for_each_engine_that_trains_it(feature):
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    row = re.search(rf"^\|[^|]*\| `{feature}` \|([^?\n]+)\|$", text, re.MULTILINE)
    assert row
    cells = [cell.strip() for cell in row[1].split("|")]
    assert [cell[:1].isdigit() for cell in cells] == [engine in FEATURES[feature].engines for engine in ENGINES]


def rows_of_reductions():
    """What the table of reductions says on our side: a reduction and TRL's loss types that have it."""
    for ours, trls, _ in cells_of_reductions():
        yield re.findall(r'`"(\w+)"`', ours), re.findall(r"`(\w+)`", trls)


def cells_of_reductions():
    """The first three columns of the table of reductions."""
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    table = text.partition("| `reduction` | TRL's `loss_type` |")[2].partition("\n\n")[0]
    return [row.split("|")[1:4] for row in table.splitlines()[2:]]


def test_the_table_of_reductions_has_the_names_that_there_are():
    rows, named = list(rows_of_reductions()), []
    for reductions, loss_types in rows:
        for loss_type in loss_types:
            assert [objective.GRPOObjective(loss_type, max_completion_length=8).effective_reduction] == reductions
        named += loss_types
    assert rows[-1] == ([], [])  # what others have and nobody here
    assert {*named} == {*objective.LOSS_TYPES} - {"gmpo"}  # a trainer of TRL's, not a loss type
    assert {name for names, _ in rows for name in names} == {*objective.REDUCTIONS}


def test_the_table_has_skyrls_names_beside_the_reductions_that_take_them():
    reductions = [ours.strip(' `"') for ours, _, _ in cells_of_reductions()[:5]]
    skyrls = [re.findall(r"^ `(\w+)`", cell) for _, _, cell in cells_of_reductions()[:5]]
    named = {name: ours for ours, names in zip(reductions, skyrls, strict=True) for name in names}
    assert named.keys() >= {*objective.REDUCTION_ALIASES, "token_mean", "sequence_mean"}
    for name, ours in named.items():
        assert objective.GRPOObjective(reduction=name, max_completion_length=8).effective_reduction == ours

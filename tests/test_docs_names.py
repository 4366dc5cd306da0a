"""Paths, links, names and quoted messages of README, CONTRIBUTING and docs/ are those of the project."""

import ast
import functools
import re

import pytest

from tests.docs_pages import BLOCKS, PAGES, ROOT, name_of, text_outside_blocks


PATH = re.compile(r"(trl_fused_grpo|tests|docs|benchmarks|examples|constraints|\.github)/[\w./*-]*")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_and_links_lead_somewhere(page):
    text = "\n".join(text_outside_blocks(page))
    for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link
    for span in re.findall(r"`([^`]+)`", text):
        if PATH.fullmatch(span):
            assert any(ROOT.glob(span.rstrip("/"))), span


def test_the_names_that_the_recipes_give_are_in_the_code():
    sources = [*(ROOT / "trl_fused_grpo").rglob("*.py"), *(ROOT / "tests").rglob("test_*.py")]
    sources = [path for path in sources if not path.name.startswith("test_docs_")]  # which speak of the pages
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    names = re.findall(r"`([A-Za-z_]{5,})`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(names) > 10
    for name in names:
        assert re.search(rf"\b{name}\b", code), name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_the_drawing_of_the_design_names_modules_that_exist():
    drawing = "".join(block.code for block in BLOCKS if block.page.name == "design.md" and block.language == "text")
    modules = re.findall(r"\b(?:\w+/)*\w+\.py\b", drawing)
    assert len(modules) > 10
    for module in modules:
        assert (ROOT / "trl_fused_grpo" / module).exists(), module


@functools.cache
def messages():
    """Every string of the package but docstrings, what an f-string inserts as `{}`."""
    texts = []
    for path in (ROOT / "trl_fused_grpo").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                texts.append(node.value)
    return texts


def quoted_messages():
    """What the first column of a table quotes, without the parts that `…` leaves open."""
    for line in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines():
        first = line.split("|")[1] if line.startswith("|") else ""
        for message in re.findall(r"`([^`]+)`", first):
            yield from (part.strip() for part in message.split("…") if part.strip())


@pytest.mark.parametrize("message", sorted(set(quoted_messages())))
def test_a_message_is_quoted_as_the_code_has_it(message):
    assert any(message in text for text in messages())

"""The pages of the docs, and the fenced blocks in them."""

import re
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "examples" / "README.md"]


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its first line of code, its language and its code."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page):
    """The fenced blocks of a page, in order. A fence in a list is indented, and so is its code."""
    blocks, start, indent, language, code = [], None, 0, "", []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"( *)(```+|~~~+)\s*(\S*)\s*$", line)
        if start is None and fence:
            start, indent, language, code = number + 1, len(fence[1]), fence[3], []
        elif start is not None and fence:
            blocks.append(Block(page, start, language, "\n".join(code) + "\n"))
            start = None
        elif start is not None:
            code.append(line[indent:])
        else:
            assert not line.lstrip().startswith(("```", "~~~")), f"{page.name}:{number} has a fence that is not read"
    assert start is None, f"{page.name}:{start} begins a block that does not end"
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def text_outside_blocks(page):
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        is_fence = line.lstrip().startswith(("```", "~~~"))
        inside = inside != is_fence
        lines.append("" if inside or is_fence else line)
    return lines


def name_of(page):
    return str(page.relative_to(ROOT))


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = [line.lstrip("#").strip() for line in text_outside_blocks(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

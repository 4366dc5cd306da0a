"""Each fact about versions stands in one place, and the places that repeat one for their readers agree with it."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import trl_fused_grpo
from trl_fused_grpo._compat.required import NEWEST_TRL, OLDEST_TRL


tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins(name: str) -> dict[str, str]:
    """What a constraints file pins, by package."""
    lines = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8").split()
    return dict(line.split("==") for line in lines)


def lower_bounds(requirements: list[str]) -> dict[str, Version]:
    """The lowest version that each requirement admits, by package."""
    parsed = [Requirement(text) for text in requirements]
    return {one.name: Version(part.version) for one in parsed for part in one.specifier if part.operator == ">="}


# The one list of supported releases: a constraints file each
RELEASES = sorted(
    (path.stem.removeprefix("trl-") for path in (ROOT / "constraints").glob("trl-[0-9]*.txt")), key=Version
)
DECLARED = lower_bounds([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["peft"]])


@pytest.mark.parametrize("release", RELEASES)
def test_a_constraints_file_pins_the_trl_of_its_name(release):
    assert pins(f"trl-{release}")["trl"] == release


def test_vllm_is_tested_with_a_supported_trl():
    assert pins("trl-vllm-cpu")["trl"] in RELEASES


def test_the_import_supports_the_releases_that_are_tested():
    assert [str(OLDEST_TRL), str(NEWEST_TRL)] == [RELEASES[0], RELEASES[-1]]


def test_the_oldest_environment_pins_every_declared_lower_bound():
    assert {name: Version(pin) for name, pin in pins("oldest").items()} == DECLARED
    assert DECLARED["trl"] == Version(RELEASES[0])


def test_the_readme_lists_the_releases_that_are_tested():
    rows = re.findall(r"^\| *TRL *\|([\d., ]+)\|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [row.replace(" ", "").split(",") for row in rows] == [RELEASES]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_a_table_of_parity_by_release_has_a_row_for_each(page):
    """A table whose first column is TRL lists every supported release."""
    for table in re.findall(
        r"^\| TRL \| cases.*\n\|[- |]+\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE
    ):
        assert [row.split("|")[1].strip() for row in table.splitlines()] == RELEASES


def test_the_version_of_the_package_stands_in_the_package():
    assert PROJECT["dynamic"] == ["version"]
    assert Version(trl_fused_grpo.__version__).release

"""The folders are the architecture: who may import whom, and how long a module and a function may be."""

import ast
import re
import sys
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[1] / "trl_fused_grpo"
NAME = PACKAGE.name
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_MODULE, LONGEST_FUNCTION, LONGEST_TRAINER = 600, 60, 200
MOST_MODULES = 14

# What each part of the package may import of the others, beside itself
MAY_IMPORT = {
    "_utils": set(),
    "_compat": {"_utils"},
    "ops": set(),
    "loss": {"ops"},
    "modeling": {"ops", "_compat", "_utils"},
    "training": {"options", "loss", "modeling", "ops", "_compat", "_utils"},
    "options": set(),
    "config": {"options", "_compat"},
    "trainer": {"options", "training", "loss", "modeling", "ops", "_compat", "_utils"},
    "rloo": {"trainer", "_utils"},
    "async_grpo": {"options", "training", "loss", "modeling", "ops", "_compat", "_utils"},
    "patching": {"trainer", "rloo", "async_grpo", "options", "_compat"},
    "fusing": {"trainer", "rloo", "async_grpo", "config", "_compat"},
    "parity": {"", "training", "_compat"},
    "cli": {"", "parity", "training", "patching", "options", "config", "_compat", "_utils"},
    "__main__": {"cli"},
    "api": {"config", "trainer", "rloo", "patching", "fusing", "loss", "modeling", "ops", "_compat"},
    "": {"api"},
}
# The same for the rooms of `modeling`
ROOMS = {
    "attention": set(),
    "layers": {"attention"},
    "rows": {"attention", "layers"},
    "head": {"attention", "layers"},
}
# Libraries that a part may know of, beside Python's own; a part that is not listed may know of all
LIBRARIES = {
    "_utils": {"torch"},
    "options": set(),
    "ops": {"torch", "triton"},
    "loss": {"torch", "liger_kernel"},
    "modeling": {"torch", "transformers"},
}


def name_of(module: Path) -> str:
    return str(module.relative_to(PACKAGE))


def part_of(module: str) -> str:
    """`ops` of `trl_fused_grpo.ops.lm_head`, an empty string of the package's own `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, by its full name."""
    here = [NAME, *path.relative_to(PACKAGE).with_suffix("").parts]
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = [*here[: -node.level], *(node.module or "").split(".")] if node.level else node.module.split(".")
            base = ".".join(filter(None, home))
            for alias in node.names:
                is_module = (PACKAGE.parent / Path(*base.split("."), alias.name)).with_suffix(".py").exists()
                is_folder = (PACKAGE.parent / Path(*base.split("."), alias.name)).is_dir()
                imported.add(f"{base}.{alias.name}" if is_module or is_folder else base)
    return imported


PARTS = [path for path in sorted(PACKAGE.iterdir()) if (path / "__init__.py").exists()]
FOLDERS = [*PARTS, PACKAGE / "ops" / "kernels", *(PACKAGE / "modeling" / room for room in ROOMS)]


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_the_map_of_a_folder_names_all_of_its_modules(folder):
    told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    named = set(re.findall(r"`(\w+)(?:\.py|/)?`", told or ""))
    parts = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__"} - named == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_part_imports_only_what_lies_below_it(path):
    here = path.relative_to(PACKAGE).with_suffix("").parts
    part = "" if here == ("__init__",) else here[0]
    own = {part_of(name) for name in imports_of(path) if name.split(".")[0] == NAME}
    assert own - {part} <= MAY_IMPORT[part]


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[-3] == "modeling"], ids=name_of)
def test_a_room_of_modeling_imports_only_those_above_it(path):
    room, modeling = path.parent.name, f"{NAME}.modeling."
    rooms = {name.removeprefix(modeling).split(".")[0] for name in imports_of(path) if name.startswith(modeling)}
    assert rooms - {room} <= ROOMS[room]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_part_knows_only_its_libraries(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    libraries = {name.split(".")[0] for name in imports_of(path)} - {NAME, *sys.stdlib_module_names}
    assert part not in LIBRARIES or libraries <= LIBRARIES[part]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_read_in_one_sitting(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (LONGEST_TRAINER if path.name == "trainer.py" else LONGEST_MODULE)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_function_fits_on_a_screen(path):
    """Lines of a function without its docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node):
                length -= node.body[0].end_lineno - node.body[0].lineno + 1
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"

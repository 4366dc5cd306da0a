"""The docs do what they say: code runs, command lines work, links lead somewhere, reasons and messages are named."""

import ast
import functools
import importlib.util
import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset
from trl import GRPOConfig
from typer.testing import CliRunner

from tests.docs_pages import BLOCKS, PAGES, ROOT, Block, anchors_of, name_of, text_outside_blocks
from tests.harness.command import app as harness
from trl_fused_grpo import (
    FusedGRPOConfig,
    FusedGRPOTrainer,
    FusedLinearGRPOLoss,
    FusedRLOOConfig,
    FusedRLOOTrainer,
    fused_linear_logps,
    patch,
    read_hidden_states,
)
from trl_fused_grpo._compat.required import NEWEST_TRL, TRL
from trl_fused_grpo._compat.trainers import STEP_METHODS
from trl_fused_grpo.cli import app as cli
from trl_fused_grpo.cli.run import command_line as run_parser
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.loss import objective
from trl_fused_grpo.options import read_option
from trl_fused_grpo.parity.tiny import tiny_model, tokenizer
from trl_fused_grpo.training.findings import WHAT_IS_DONE, Level


MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", MAKEFILE, re.MULTILINE))
SOURCES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "trl_fused_grpo").rglob("*.py")}
# What a block need not say: it runs on a CPU, in a temporary folder, for one step
SMALL = {
    "output_dir": "out",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "gradient_checkpointing": False,
}


# Code blocks


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_in_a_language_that_is_run_or_is_no_code(block):
    assert block.language in ("python", "diff", "bash", "text")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def small_machine(tmp_path, monkeypatch):
    """A temporary folder, and arguments of a trainer that fit a CPU where a block does not give them."""
    monkeypatch.chdir(tmp_path)
    for config in (GRPOConfig, FusedGRPOConfig, FusedRLOOConfig):

        @functools.wraps(config.__init__)
        def small(self, *args, _original=config.__init__, **options):
            _original(self, *args, **{**({} if args else SMALL), **options})

        monkeypatch.setattr(config, "__init__", small)


def run(block, code, namespace):
    before = namespace.get("trainer")
    exec(compile("\n" * (block.line - 1) + code, str(block.page), "exec"), namespace)
    if ".train()" in code:
        assert namespace["trainer"].state.global_step >= 1, f"{block} has trained nothing"
    assert "Trainer(" not in code or namespace.get("trainer") is not before, f"{block} calls its trainer otherwise"


def given(checkpoint):
    """What a block need not make."""
    return {
        "__name__": "__main__",
        "model": checkpoint,
        "dataset": Dataset.from_dict({"prompt": ["w5 w6 w7", "w8 w9"] * 4}),
        "reward": lambda completion_ids, **kwargs: [float(ids[0] % 7) for ids in completion_ids],
    }


PYTHON_PAGES = [page for page in PAGES if any(b.page == page and b.language in ("python", "diff") for b in BLOCKS)]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_python_runs(page, checkpoint, small_machine):
    """The blocks of a page share what they define. Of a diff, what it takes away runs too, by itself."""
    namespace = given(checkpoint)
    for block in (block for block in BLOCKS if block.page == page):
        if block.language == "python":
            run(block, block.code, namespace)
        elif block.language == "diff":
            lines = block.code.splitlines(keepends=True)
            assert all(line[0] in "+- \n" for line in lines), block
            before, after = ("".join(line[1:] or "\n" for line in lines if line[0] != sign) for sign in "+-")
            run(block, before, dict(namespace))
            run(block, after, namespace)


@pytest.mark.parametrize(
    "documented",
    [FusedGRPOTrainer, FusedRLOOTrainer, FusedLinearGRPOLoss, fused_linear_logps, patch, read_hidden_states],
    ids=lambda one: one.__name__,
)
def test_the_example_of_a_docstring_runs(documented, checkpoint, small_machine):
    [code] = re.findall(r"```python\n(.*?)```", inspect.getdoc(documented), re.DOTALL)
    run(Block(Path(inspect.getfile(documented)), 1, "python", code), code, given(checkpoint))


# Command lines


def shell_lines():
    for block in BLOCKS:
        if block.language == "bash":
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield pytest.param(words, id=f"{block}: {' '.join(words)}")


def check_make(words, monkeypatch):
    assert set(words) <= TARGETS


def check_cli(words, monkeypatch):
    """One case runs. What runs many cases lists them. A training's options are those that there are."""
    if words[0] == "run":
        options = vars(run_parser().parse_args(words[1:]))
        assert options.pop("module") or Path(options["script"]).suffix == ".py"
        for name in FusedOptions.__dataclass_fields__.keys() & options:
            read_option(name, options[name])
        return
    if words[0] == "grpo":
        names = {word.removeprefix("--") for word in words if word.startswith("--")} - {"config"}
        launch = {action.dest for action in launch_command_parser()._actions}
        assert names <= FusedGRPOConfig.__dataclass_fields__.keys() | launch
        return
    is_short = {"--help", "--list", "--case", "doctor"} & set(words)
    result = CliRunner().invoke(cli, words if is_short else [*words, "--list"])
    assert result.exit_code == 0, result.output


def check_harness(words, monkeypatch):
    """One case runs, or is drawn, which takes a second. What runs many cases lists them."""
    for option, value in (("--random", "1"), ("--seed", "1"), ("--jobs", "1")):
        if option in words:
            place = words.index(option) + 1
            words = [*words[:place], value, *words[place + 1 :]]
    is_short = {"--case", "--random"} & set(words)
    result = CliRunner().invoke(harness, words if is_short else [*words, "--list"])
    assert result.exit_code == 0, result.output


def check_accelerate(words, monkeypatch):
    assert words[0] == "launch"
    args = launch_command_parser().parse_args(words[1:])
    if args.module:
        check_python(["-m", args.training_script, *args.training_script_args], monkeypatch)


def check_script(words, monkeypatch):
    """The arguments are those of the script's own command line; nothing runs."""
    path = ROOT / words[0]
    assert path.exists()
    if TRL < NEWEST_TRL:
        pytest.skip("benchmarks and examples are written for the newest TRL")
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("script_of_the_docs", path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script_of_the_docs", script)
    try:
        spec.loader.exec_module(script)
    finally:
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == path.parent:
                del sys.modules[name]
    app = typer.Typer()
    app.command()(script.main)
    typer.main.get_command(app).make_context(path.name, words[1:])


def check_pytest(words, monkeypatch):
    takes_value = ("-k", "-m", "-n")
    paths = [word for before, word in zip(["", *words], words, strict=False) if before not in takes_value]
    for word in paths:
        assert word.startswith("-") or (ROOT / word.partition("::")[0]).exists(), word


def check_python(words, monkeypatch):
    modules = {"pytest": check_pytest, "trl_fused_grpo": check_cli, "tests.harness": check_harness}
    if words[0] == "-m":
        modules[words[1]](words[2:], monkeypatch)
    else:
        check_script(words, monkeypatch)


ADDRESS = "<URL of this repository>"


def check_pip(words, monkeypatch):
    """The address is the reader's to fill in, and no shell takes it for one."""
    assert words in (["install", "./trl-fused-grpo"], ["install", f"git+{ADDRESS}"])


def check_git(words, monkeypatch):
    assert words == ["clone", ADDRESS, "trl-fused-grpo"]


def check_nox(words, monkeypatch):
    option, session = words
    name, _, version = session.rstrip(")").partition("(")
    assert option == "--session"
    assert f"def {name}(" in (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert not version or (ROOT / "constraints" / f"{name}-{version}.txt").exists()


COMMANDS = {
    "accelerate": check_accelerate,
    "git": check_git,
    "make": check_make,
    "trl-fused-grpo": check_cli,
    "pip": check_pip,
    "python": check_python,
    "pytest": check_pytest,
    "nox": check_nox,
}


@pytest.mark.any_trl
@pytest.mark.parametrize("words", list(shell_lines()))
def test_a_command_line_is_one_that_works(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    COMMANDS[words[0].removeprefix(".venv/bin/")](words[1:], monkeypatch)


@pytest.mark.any_trl
@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=name_of)
def test_a_workflow_makes_what_exists(path):
    text = path.read_text(encoding="utf-8")
    matrices = re.findall(r"target: \[(.*)\]", text)
    targets = {*re.findall(r"\bmake ([\w-]+)", text), *", ".join(matrices).split(", ")}
    assert {"lint", "quick", "matrix", "oldest", "newest"} <= targets <= TARGETS


# Links and paths

PATH = re.compile(r"(trl_fused_grpo|tests|docs|benchmarks|examples|constraints|\.github)/[\w./*-]*|[\w.*-]+\.json")


@pytest.mark.any_trl
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_and_links_lead_somewhere(page):
    """A record may be named without its folder."""
    text = "\n".join(text_outside_blocks(page))
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), f"{link}#{anchor}"
    for span in re.findall(r"`([^`]+)`", text):
        if PATH.fullmatch(span):
            places = [span.rstrip("/")] if "/" in span else [f"benchmarks/results/{span}"]
            assert any(any(ROOT.glob(place)) for place in places), span


@pytest.mark.any_trl
def test_the_drawing_of_the_design_names_modules_that_exist():
    drawing = "".join(block.code for block in BLOCKS if block.page.name == "design.md" and block.language == "text")
    modules = re.findall(r"\b(?:\w+/)*\w+\.py\b", drawing)
    assert len(modules) > 10
    for module in modules:
        assert (ROOT / "trl_fused_grpo" / module).exists(), module


# Words that a user looks up: messages, reasons and levels


@functools.cache
def messages():
    """Every string of the package but docstrings, what an f-string inserts as `{}`."""
    texts = []
    for tree in SOURCES.values():
        nodes = list(ast.walk(tree))
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


@pytest.mark.any_trl
@pytest.mark.parametrize("message", sorted(set(quoted_messages())))
def test_a_message_is_quoted_as_the_code_has_it(message):
    assert any(message in text for text in messages())


def page(name):
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def plain(text):
    return re.sub(r"[*`]", "", text)


PAGE = page("faster-paths.md")
# Reasons that are on another page, or in an error that says what to change
ELSEWHERE = {"checks.py": ("faster-paths.md", "numerics.md"), "moe.py": (), "output_projection.py": ()}
# What takes a reason as an argument
TAKE_REASONS = ("Reason", "refuse", "HolesError", "_padded")


def reasons():
    """
    The phrases of every reason: of three words and more, up to a colon, behind which stands what to change. They are in
    functions `why_…`, in those that return words or `None`, and in calls of those that take a reason.
    """
    for path, tree in SOURCES.items():
        pages = ELSEWHERE.get(path.name, ("faster-paths.md",))
        if not pages or {"parity", "cli"} & {*path.parts}:
            continue
        for node in ast.walk(tree):
            for text in texts_of_reasons(node):
                phrase = plain(text).partition(":")[0].strip(" (),'")
                if len(phrase.split()) >= 3:
                    yield pytest.param(pages, phrase, id=f"{path.stem}: {phrase[:60]}")


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


@pytest.mark.parametrize(("pages", "reason"), sorted(set(reasons()), key=lambda param: param.id))
def test_a_page_has_every_reason(pages, reason):
    assert any(reason in plain(page(name)) for name in pages)


@pytest.mark.parametrize("level", Level)
def test_the_page_has_every_level(level):
    assert f"| `{level.name.lower()}` |" in PAGE


def test_the_page_quotes_the_log():
    assert f"Level head ({WHAT_IS_DONE[Level.HEAD]}), because a hook on LlamaDecoderLayer." in PAGE


@pytest.mark.parametrize("method", STEP_METHODS)
def test_the_page_names_every_method_whose_replacement_counts(method):
    assert f"`{method}`" in PAGE


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
    assert {*named} == {*objective.LOSS_TYPES}
    assert {name for names, _ in rows for name in names} == {*objective.REDUCTIONS}


def test_the_table_has_skyrls_names_beside_the_reductions_that_take_them():
    reductions = [ours.strip(' `"') for ours, _, _ in cells_of_reductions()[:5]]
    skyrls = [re.findall(r"^ `(\w+)`", cell) for _, _, cell in cells_of_reductions()[:5]]
    named = {name: ours for ours, names in zip(reductions, skyrls, strict=True) for name in names}
    assert named.keys() >= {*objective.REDUCTION_ALIASES, "token_mean", "sequence_mean"}
    for name, ours in named.items():
        assert objective.GRPOObjective(reduction=name, max_completion_length=8).effective_reduction == ours

"""The code blocks of README, CONTRIBUTING and docs/ run; paths, links and quoted messages are those of the project."""

import ast
import functools
import importlib.util
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset
from trl import GRPOConfig
from typer.testing import CliRunner

from trl_fused_grpo import FusedGRPOConfig, FusedRLOOConfig
from trl_fused_grpo._compat.required import NEWEST_TRL, TRL
from trl_fused_grpo.cli import app as cli
from trl_fused_grpo.cli.run import command_line as run_parser
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.defaults import read_option, read_options
from trl_fused_grpo.parity.tiny import tiny_model, tokenizer


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "examples" / "README.md"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", MAKEFILE, re.MULTILINE))

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
PYTHON_PAGES = [page for page in PAGES if any(b.page == page and b.language in ("python", "diff") for b in BLOCKS)]


def shell_lines():
    for block in BLOCKS:
        if block.language == "bash":
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield pytest.param(words, id=f"{block}: {' '.join(words)}")


def text_outside_blocks(page):
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        is_fence = line.lstrip().startswith(("```", "~~~"))
        inside = inside != is_fence
        lines.append("" if inside or is_fence else line)
    return lines


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_in_a_language_that_is_run_or_is_no_code(block):
    assert block.language in ("python", "diff", "bash", "yaml", "text")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_the_options_and_plugins_of_a_configuration_exist(block):
    content = yaml.safe_load(block.code)
    assert {name for name in content if name.startswith("fused_")} <= FusedOptions.__dataclass_fields__.keys()
    for plugin in content.get("plugins", ()):
        module, _, name = plugin.rpartition(".")
        assert name in (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_code_hides_in_indented_lines(page):
    """Four spaces after an empty line are a block too, unless they continue a list."""
    in_list, before = False, ""
    for number, line in enumerate(text_outside_blocks(page), 1):
        if line.strip():
            if not line.startswith(" "):
                in_list = bool(re.match(r"([-*]|\d+\.) ", line))
            assert before or in_list or not line.startswith("    "), f"{page.name}:{number}"
        before = line.strip()


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


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_python_runs(page, checkpoint, small_machine):
    """The blocks of a page share what they define. Of a diff, what it takes away runs too, by itself."""
    namespace = {
        "__name__": "__main__",
        "model": checkpoint,
        "dataset": Dataset.from_dict({"prompt": ["w5 w6 w7", "w8 w9"] * 4}),
        "reward": lambda completion_ids, **kwargs: [float(ids[0] % 7) for ids in completion_ids],
    }
    for block in (block for block in BLOCKS if block.page == page):
        if block.language == "python":
            run(block, block.code, namespace)
        elif block.language == "diff":
            lines = block.code.splitlines(keepends=True)
            assert all(line[0] in "+- \n" for line in lines), block
            before, after = ("".join(line[1:] or "\n" for line in lines if line[0] != sign) for sign in "+-")
            run(block, before, dict(namespace))
            run(block, after, namespace)


def check_make(words, monkeypatch):
    targets = [word for word in words if "=" not in word]
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    assert set(targets) <= TARGETS
    assert all(f"$({name})" in MAKEFILE for name in variables)
    if variables.get("ARGS"):
        assert targets == ["demo"]
        check_script(["examples/train_arithmetic.py", *shlex.split(variables["ARGS"])], monkeypatch)


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
    if "--random" in words:
        place = words.index("--random") + 1
        words = [*words[:place], "1", *words[place + 1 :]]
    is_short = {"--help", "--list", "--case", "--random", "doctor"} & set(words)
    result = CliRunner().invoke(cli, words if is_short else [*words, "--list"])
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
    modules = {"pytest": check_pytest, "trl_fused_grpo": check_cli, "pip": check_pip}
    if words[0] == "-m":
        modules[words[1]](words[2:], monkeypatch)
    else:
        check_script(words, monkeypatch)


def check_pip(words, monkeypatch):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.search(r"\[project\.optional-dependencies\]\n(.*?)\n\[", project, re.DOTALL)[1]
    extras = set(re.findall(r"^(\w+) =", extras, re.MULTILINE))
    assert words[0] == "install"
    for word in words[1:]:
        name, _, asked_for = word.rstrip("]").partition("[")
        assert word in ("-e", "--editable") or name in (".", re.search(r'^name = "(.*)"', project, re.MULTILINE)[1])
        assert set(filter(None, asked_for.split(","))) <= extras


def check_nox(words, monkeypatch):
    option, session = words
    name, _, version = session.rstrip(")").partition("(")
    assert option == "--session"
    assert f"def {name}(" in (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert not version or (ROOT / "constraints" / f"{name}-{version}.txt").exists()


COMMANDS = {
    "accelerate": check_accelerate,
    "make": check_make,
    "trl-fused-grpo": check_cli,
    "pip": check_pip,
    "python": check_python,
    "pytest": check_pytest,
    "nox": check_nox,
}


@pytest.mark.parametrize("words", list(shell_lines()))
def test_a_command_line_is_one_that_works(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variable, equals, text = words[0].partition("=")
    if equals:
        assert variable == "TRL_FUSED_GRPO" and (text == "1" or read_options(text))
        words = words[1:]
    COMMANDS[words[0].removeprefix(".venv/bin/")](words[1:], monkeypatch)


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
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources if path != Path(__file__))
    names = re.findall(r"`([A-Za-z_]{5,})`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(names) > 10
    for name in names:
        assert re.search(rf"\b{name}\b", code), name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def measured(record, **wanted):
    """Time and memory of each trainer in a record, as the pages have them; stock's are the first."""
    results = json.loads((ROOT / "benchmarks/results" / record).read_text())["results"]
    results = [entry for entry in results if wanted.items() <= entry.items()]
    return {entry["name"]: f"{entry['ms']:.0f} ms, {entry['peak_gib']:.2f} GiB" for entry in results}


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("0.6b", "Qwen3-0.6B"),
        ("1.7b", "Qwen3-1.7B"),
        ("4b", "Qwen3-4B"),
        ("1.7b-lora-beta", "Qwen3-1.7B, LoRA, `beta=0.04`"),
        ("1.7b-lora-bf16", "Qwen3-1.7B, LoRA, bfloat16 weights"),
    ],
)
def test_time_and_memory_of_a_step_are_those_of_the_record(page, case, shown):
    of_case = measured("step-h200.json", case=case)
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"| {shown} | {of_case['stock']} | {of_case['ours']} (" in text


@pytest.mark.parametrize("name", ["0.6B", "4B", "4B, LoRA"])
def test_time_and_memory_of_an_accumulation_window_are_those_of_the_record(name):
    of_window = measured(f"window-{name.lower().replace(', ', '-')}-h200.json")
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert f"| Qwen3-{name} | {of_window['stock']} | {of_window['ours']}" in page


def test_what_goes_through_the_model_is_that_of_the_record():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for entry in json.loads((ROOT / "benchmarks/results/forwards-cpu.json").read_text())["results"]:
        cells = [f"{calls}, {tokens}" for calls, tokens in zip(entry["forwards"], entry["tokens"], strict=True)]
        name = entry["name"].removeprefix("ours, ")
        shown = f"`{name}`" if "=" in name else name
        assert f"| {shown} | {cells[0]} | {cells[1]} |" in page


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("ratio", "vLLM's importance ratios"),
        ("normalizer", "the normalizer of the whole batch"),
        ("tool-mask", "tokens written by a tool"),
        ("kl", "bias-corrected KL"),
        ("delta", "`delta`"),
    ],
)
def test_what_the_liger_loss_leaves_out_is_that_of_the_record(case, shown):
    record = json.loads((ROOT / "benchmarks/results/issue-1082-trl-0.27.2.json").read_text())
    [of_case] = [entry for entry in record["cases"] if entry["name"] == f"issue-1082-{case}"]
    liger = "refused"
    if "liger" not in of_case:
        digits = 3 if of_case["liger_ratio"] < 10 else 0
        liger = f"{of_case['liger_ratio']:.{digits}f}, {of_case['liger_error']:.{digits}f}"
    ours = f"{of_case['fused_ratio']:.3f}, {of_case['gradient_error']:.1e}"
    assert re.search(rf"\| {re.escape(shown)}.* \| {liger} \| {ours} \|", (ROOT / "README.md").read_text())


def record_of(name):
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


def test_the_equivalence_in_the_readme_is_that_of_the_record():
    record = record_of("learning-h200.json")
    [ours] = [e for e in record["comparison"] if (e["value"], e["arm"]) == ("accuracy", "ours")]
    assert ours["equivalent"] and ours["p"] < 0.05 and record["margin"] == 0.01
    seeds = len({entry["seed"] for entry in record["results"]})
    difference, low, high = (f"{100 * ours[name]:+.2f}" for name in ("difference", "from", "to"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"over {seeds} paired seeds accuracy differs by {difference} points (90% interval {low} to {high}), "
        f"equivalence within one point p = {ours['p']:.2g}."
    ) in readme
    assert f"Accuracy and entropy over {seeds} seeds" in readme


@pytest.mark.parametrize("script", ["learning", "replay"])
def test_what_is_learnt_is_that_of_the_record(script, monkeypatch):
    record = record_of(f"{script}-h200.json")
    if TRL < NEWEST_TRL:
        pytest.skip("benchmarks and examples are written for the newest TRL")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module(script)
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for row in [list(module.COLUMNS), *module.rows_of_table(record)]:
        assert re.sub(r"\| +(?=\|)", "| ", f"| {' | '.join(row)} |") in page


MEMORY_ROWS = {
    "0.6b-float32": "0.6B, float32 weights",
    "0.6b-bfloat16": "0.6B, bfloat16 weights",
    "0.6b-lora": "0.6B, LoRA",
    "1.7b-lora": "1.7B, LoRA",
    "4b-lora": "4B, LoRA",
    "8b-lora": "8B, LoRA",
}


CONTENDERS = ("dense, TRL 0.27.2", "Liger loss, TRL 0.27.2", "stock", "ours")
PEAK_TARGETS = {"dense, TRL 0.27.2": 0.60, "stock": 0.90}


def memory_of(case):
    results = json.loads((ROOT / "benchmarks/results/memory-h200.json").read_text())["results"]
    return {entry["name"]: entry for entry in results if entry["case"] == case}


@pytest.mark.parametrize("case", MEMORY_ROWS)
def test_the_largest_batch_is_that_of_the_record(case):
    of_case = memory_of(case)
    cells = [MEMORY_ROWS[case], *(str(of_case[name].get("largest", "failed")) for name in CONTENDERS)]
    for name in PEAK_TARGETS:
        rows, ratio = list(of_case["ours"]["peak_ratio"][name].items())[-1]
        cells.append(f"{ratio:.2f} ({rows})")
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", MEMORY_ROWS)
def test_peaks_at_equal_batch_and_missed_targets_are_those_of_the_record(case):
    ratios, cells = memory_of(case)["ours"]["peak_ratio"], [MEMORY_ROWS[case]]
    for rows in ("1", "2", "4", "8", "16", "32"):
        found = {name: ratios[name].get(rows) for name in PEAK_TARGETS}
        shown = [
            "-" if ratio is None else f"**{ratio:.3f}**" if ratio > PEAK_TARGETS[name] else f"{ratio:.3f}"
            for name, ratio in found.items()
        ]
        cells.append(", ".join(shown) if any(found.values()) else "")
    row = re.sub(r"\| +(?=\|)", "| ", f"| {' | '.join(cells)} |")
    assert row in (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


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
    for path in (*(ROOT / "trl_fused_grpo").rglob("*.py"), *(ROOT / "startup").rglob("*.py")):
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


def make_targets(workflow):
    """Every target that a step makes, those that come from the job's own matrix spelled out."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            for target in re.findall(r"\bmake ([\w-]+|\$\{\{ matrix\.\w+ \}\})", step.get("run", "")):
                found = re.search(r"matrix\.(\w+)", target)
                yield from matrix[found[1]] if found else [target]


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_makes_what_exists(path):
    workflow = pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))
    targets = set(make_targets(workflow))
    assert {"lint", "quick", "matrix", "oldest", "newest"} <= targets
    assert targets <= TARGETS

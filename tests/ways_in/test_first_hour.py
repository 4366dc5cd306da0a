"""
The first hour of a newcomer: a script of their own through each way in, the doctor, wrong words and parity. As they
would do it, in processes of their own.
"""

import json
import re
from functools import partial

import pytest

import trl_fused_grpo
from trl_fused_grpo._compat.required import TRANSFORMERS

from .processes import ROOT, run_python
from .stock_script import assert_fused_and_equal, assert_stock, told_by, write_files, write_yaml


ROUNDED = TRANSFORMERS.major < 5
# What a user writes in place of the first line
IMPORTS = "from trl import GRPOConfig, GRPOTrainer"
OURS = "from trl_fused_grpo import FusedGRPOTrainer as GRPOTrainer"
WAYS = {
    "class": f"from trl import GRPOConfig\n{OURS}",
    "config": f"from trl_fused_grpo import FusedGRPOConfig as GRPOConfig\n{OURS}",
    "patch": f"import trl_fused_grpo\ntrl_fused_grpo.patch()\n{IMPORTS}",
    "fuse": f"{IMPORTS}\nfrom trl_fused_grpo import fuse\nGRPOTrainer = fuse(GRPOTrainer)",
}
OFF = ("GRPOConfig(output_dir", "GRPOConfig(use_liger_loss=False, output_dir")
TORCH_FREE = """
import sys
words = {words!r}
sys.argv = ["trl-fused-grpo", *words]
from trl_fused_grpo.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"torch", "trl", "transformers", "accelerate", "datasets"}} & {{*sys.modules}}
assert not heavy, heavy
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("hour")).parent


def command(*words, folder=ROOT, **options):
    """`trl-fused-grpo`, as this checkout has it."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['trl-fused-grpo', *sys.argv[1:]]\n"
    return run_python("-c", f"{code}from trl_fused_grpo.cli import main; main()", *words, folder=folder, **options)


def train(folder, name, *changes):
    """Run the user's script with changes to its text, and return what it and the process tell."""
    text = (folder / "train.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / f"{name}.py").write_text(f"import sys; sys.path.insert(1, {str(ROOT)!r})\n{text}")
    process = run_python(folder / f"{name}.py", folder, f"{name}.json", folder=folder)
    return told_by(folder, f"{name}.json"), process


@pytest.mark.nightly
def test_every_way_in_trains_as_stock_and_says_so(folder):
    stock, _ = train(folder, "stock")
    assert_stock(stock)
    for name, imports in WAYS.items():
        told, process = train(folder, name, (IMPORTS, imports))
        assert_fused_and_equal(told["log"], stock["log"], rounded=ROUNDED)
        assert "FusedGRPOTrainer: level window: fused head, packed rows" in process.stderr  # no terminal
    command("run", "train.py", folder, "run.json", folder=folder)
    assert_fused_and_equal(told_by(folder, "run.json")["log"], stock["log"], rounded=ROUNDED)
    told, process = train(folder, "off", (IMPORTS, WAYS["class"]), OFF)
    assert process.stderr.count("FusedGRPOTrainer trains with TRL's own loss, because use_liger_loss=False.") == 1
    assert told["log"][0]["loss"] == stock["log"][0]["loss"]


@pytest.mark.parametrize("line", ["--help", "", "--version", "run --help", "doctor --help", "parity --help"])
def test_help_and_version_need_nothing_of_torch(line):
    words = line.split()
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{TORCH_FREE.format(words=words)}"
    process = run_python("-c", code, succeeds=bool(words))
    assert "trl-fused-grpo" in process.stdout + process.stderr
    if words == ["--version"]:
        assert process.stdout == f"trl-fused-grpo {trl_fused_grpo.__version__}\n"


def test_the_module_is_the_command():
    assert run_python("-m", "trl_fused_grpo", "--version", folder=ROOT).stdout.startswith("trl-fused-grpo ")


imports_torch = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["docto"], "trl-fused-grpo: No such command 'docto'.*"),
        (["doctor", "--modl", "x"], "trl-fused-grpo: No such option.*--model.*"),
        (["doctor", "--device", "tpu"], "trl-fused-grpo: .*--device is cpu or cuda, not tpu."),
        imports_torch(["doctor", "--model", "nope"], "trl-fused-grpo doctor: the model nope cannot be loaded: .*"),
        (["grpo", "--config", "nope.yaml"], "trl-fused-grpo grpo: nope.yaml cannot be read: .*"),
        imports_torch(
            ["grpo", "--fused_layot", "packed"],
            "trl-fused-grpo grpo: there is no option fused_layot; did you mean fused_layout\\?",
        ),
        imports_torch(
            ["grpo", "--config", "wrong.yaml"],
            "trl-fused-grpo grpo: there is no option fused_memry; did you mean fused_memory\\?",
        ),
        (["grpo", "--config", "value.yaml"], "trl-fused-grpo grpo: fused_memory must be None or a .* 1, not '80%'."),
        (["grpo", "--fused-layout=dense"], "trl-fused-grpo grpo: fused_layout must be None, .*, not 'dense'."),
        (["parity", "--cas", "x"], "trl-fused-grpo: No such option.*--case.*"),
        (["run", "-m", "nope"], "trl-fused-grpo run: there is no module nope that can be run."),
        (["run", "--fused_compil", "true", "train.py"], "trl-fused-grpo run: there is no option --fused_compil.*"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_answered_in_one_line(folder, words, line):
    (folder / "wrong.yaml").write_text("fused_memry: 0.9\n")
    (folder / "value.yaml").write_text("fused_memory: 80%\n")
    process = command(*words, folder=folder, succeeds=False)
    assert process.returncode == 2 and not process.stdout
    last = process.stderr.strip().splitlines()[-1]
    assert re.fullmatch(line, last)
    assert "Traceback" not in process.stderr and "usage" not in process.stderr.lower()


@pytest.mark.nightly
def test_the_doctor_and_parity_work_on_the_users_files(folder):
    file = write_yaml(folder, fused_memory=0.9)
    told = json.loads(command("doctor", "--config", file, "--device", "cuda", "--json", folder=folder).stdout)
    assert told["refused"] is None and told["summary"][0]["value"].startswith("level window: ")
    assert "1 equal" in command("parity", "--device", "cpu", "--case", "grpo-off-policy", folder=folder).stdout

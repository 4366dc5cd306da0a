"""The commands in `examples/README.md` are ones that the scripts, accelerate and TRL take."""

import re
import shlex

import pytest
import trl
import typer
from accelerate.commands.launch import launch_command_parser

from trl_fused_grpo import FusedGRPOConfig
from trl_fused_grpo._compat.required import NEWEST_TRL, TRL

from . import small


pytestmark = [
    pytest.mark.example,
    pytest.mark.skipif(TRL < NEWEST_TRL, reason="examples are written for the newest TRL"),
]

ROOT = small.EXAMPLES.parent
COMMANDS = re.findall(r"\| `([^`]+)` \|$", (small.EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


class Untrained:
    """What a trainer was built from."""

    def __init__(self, **arguments):
        self.arguments = arguments

    def train(self):
        pass

    save_model = train


def check_script(words, monkeypatch):
    path = ROOT / words[0]
    assert path.parent == small.EXAMPLES
    recipe = small.load(path.stem)
    if not hasattr(recipe, "TrlParser"):
        app = typer.Typer()
        app.command()(recipe.main)
        typer.main.get_command(app).make_context(path.name, words[1:])
        return
    monkeypatch.setattr(recipe, "FusedGRPOTrainer", Untrained)
    monkeypatch.setattr(recipe, "load_dataset", lambda name, split: name, raising=False)
    # as on a GPU, without asking for one
    arguments = recipe.main([*words[1:], "--bf16", "false", "--use_cpu", "true"]).arguments
    assert isinstance(arguments["args"], FusedGRPOConfig)
    assert arguments["args"].use_liger_loss
    assert (arguments.get("peft_config") is not None) == bool({"--lora", "--qlora"} & set(words))
    if "--server" in words:
        assert arguments["args"].vllm_server_base_url == words[words.index("--server") + 1]


def check_launch(words, monkeypatch):
    assert words.pop(0) == "launch"
    arguments = launch_command_parser().parse_args(words)
    assert arguments.config_file is None or (ROOT / arguments.config_file).exists()
    check_script([arguments.training_script, *arguments.training_script_args], monkeypatch)


def check_trl(words, monkeypatch):
    assert words.pop(0) == "vllm-serve"
    from trl.scripts.vllm_serve import ScriptArguments

    trl.TrlParser(ScriptArguments).parse_args_and_config(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_works(command, monkeypatch):
    program, *words = shlex.split(re.sub(r"^CUDA_VISIBLE_DEVICES=\S+ ", "", command))
    {"python": check_script, "accelerate": check_launch, "trl": check_trl}[program](words, monkeypatch)


def test_every_script_and_configuration_has_a_command():
    files = [*small.EXAMPLES.glob("*.py"), *small.EXAMPLES.glob("accelerate/*.yaml")]
    assert len(files) > 7
    files.remove(small.EXAMPLES / "axolotl_plugin.py")  # axolotl imports it
    for path in files:
        name = str(path.relative_to(ROOT))
        assert any(name in command for command in COMMANDS), name


def test_the_docstrings_have_the_same_commands():
    for path in small.EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines = re.findall(r"^    ((?:CUDA|python|accelerate|trl) ?\S* [^#\n]*)", text, re.MULTILINE)
        for line in lines:
            assert any(line.split("  #")[0].strip() in command for command in COMMANDS), line

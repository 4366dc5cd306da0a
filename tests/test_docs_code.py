"""The code blocks of README, CONTRIBUTING and docs/ run."""

import functools
import re

import pytest
from datasets import Dataset
from trl import GRPOConfig

from tests.docs_pages import BLOCKS, PAGES, name_of, text_outside_blocks
from trl_fused_grpo import FusedGRPOConfig, FusedRLOOConfig
from trl_fused_grpo.parity.tiny import tiny_model, tokenizer


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


PYTHON_PAGES = [page for page in PAGES if any(b.page == page and b.language in ("python", "diff") for b in BLOCKS)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_in_a_language_that_is_run_or_is_no_code(block):
    assert block.language in ("python", "diff", "bash", "text")


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

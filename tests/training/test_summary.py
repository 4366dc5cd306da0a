"""The summary of a training says what the training does, with the reasons of the predicates, and is printed once."""

import logging

import pytest
import transformers
from transformers.utils import logging as transformers_logging

from tests.harness.models import tiny_model
from tests.tiny_training import make_trainer
from trl_fused_grpo._compat.models import head_widths
from trl_fused_grpo.parity.tiny.families import FAMILIES
from trl_fused_grpo.training.findings import WHAT_IS_DONE, Level, Reason
from trl_fused_grpo.training.memory import why_no_memory_budget
from trl_fused_grpo.training.plan import why_forwards_are_not_shared

from .sampler import use_sampler


TITLE = "What FusedGRPOTrainer does in this training:"


def lora():
    pytest.importorskip("peft")
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")


def lines_of(trainer):
    return {line.name: line for line in trainer.fused_summary()}


@pytest.mark.parametrize(
    ("options", "name", "value", "reason", "change"),
    [
        ({}, "backward of the head", "3 matmuls", None, None),
        ({"fused_backward": "recompute"}, "backward of the head", "4 matmuls", "fused_backward='recompute'", "'auto'"),
        (
            {"top_entropy_quantile": 0.5},
            *("backward of the head", "4 matmuls", "the entropy quantile looks", "top_entropy_quantile=1.0"),
        ),
        ({}, "layout", "packed: no padding", None, None),
        ({"fused_layout": "aligned"}, "layout", "aligned, as asked for", "fused_layout='aligned'", "'auto'"),
        ({"kind": "gemma3-bidirectional"}, "layout", "padded", "its attention is not causal", None),
        ({"kind": "qwen3-next"}, "prompts", "once each", "rows of their own", None),
        ({"fused_share_prompts": False}, "prompts", "once each", "fused_share_prompts=False", None),
        ({"gradient_accumulation_steps": 4}, "forwards", "shared by up to 4 micro-batches", None, None),
        (
            {"gradient_accumulation_steps": 4, "fused_max_tokens_per_forward": 64},
            *("forwards", "up to 4 micro-batches, tokens: 64", None, None),
        ),
        (
            {"gradient_accumulation_steps": 4, "fused_max_tokens_per_forward": 0},
            *("forwards", "its own", "fused_max_tokens_per_forward=0", None),
        ),
        ({}, "old log-probs", "none: no weight moves", None, None),
        (
            {"num_iterations": 2},
            *("old log-probs", "from the training forward", None, None),
        ),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
            *("old log-probs", "from the training forward", "weights move before", "a steps_per_generation that"),
        ),
        ({"beta": 0.1}, "reference", "in the same forwards as the policy", None, None),
        ({}, "layers", "the model's own operations", "Triton's kernels are for CUDA", None),
        ({"fused_kernels": False}, "layers", "the model's own operations", "fused_kernels=False", "=True"),
        ({"fused_compile": True}, "layers", "compiled, as far as torch can", None, None),
        ({"beta": 0.1}, "zero-grad sequences", "in the model", "KL term", None),
        ({}, "check", "log-probs of the first step beside TRL's own", None, None),
        ({"fused_verify": 50}, "check", "first step beside TRL's own, then every 50 optimizer steps", None, None),
        ({}, "level", "window: everything is fused", None, None),
    ],
)
def test_each_line_has_the_reason_and_what_to_change(tmp_path, options, name, value, reason, change):
    line = lines_of(make_trainer(tmp_path, **options))[name]
    assert value in line.value
    assert (reason in line.reason) if reason else (line.reason is None)
    assert (change in line.change) if change else (line.change is None)


def test_the_reasons_are_those_of_the_predicates(tmp_path):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=4, fused_memory=0.9)
    trainer.accelerator.backward = lambda *args, **kwargs: None
    trainer._fused.ladder.look()
    lines = lines_of(trainer)
    assert lines["forwards"].reason == why_forwards_are_not_shared(trainer, "packed")
    assert lines["memory"].reason == why_no_memory_budget(trainer)


def test_adapters_and_vllms_ratio_have_a_line(tmp_path):
    trainer = make_trainer(tmp_path, peft_config=lora())
    use_sampler(trainer)
    lines = lines_of(trainer)
    assert lines["LoRA"].value == "within the products of the layers that carry it"
    assert lines["backward of the head"].value == "2 matmuls, frozen head"
    assert "from the training forward" in lines["old log-probs"].value


def test_a_backward_that_may_move_weights_is_the_reason_for_old_log_probs(tmp_path):
    trainer = make_trainer(tmp_path, num_iterations=2, gradient_accumulation_steps=2)
    use_sampler(trainer)
    assert lines_of(trainer)["old log-probs"].reason is None
    trainer.accelerator.backward = lambda *args, **kwargs: None
    trainer._fused.ladder.look()
    line = lines_of(trainer)["old log-probs"]
    assert line.value.startswith("a forward of their own")
    assert "the moment when weights move" in line.reason and line.change is None


@pytest.mark.parametrize(
    ("level", "names"),
    [
        (Level.ROWS, {"layout", "attention", "forwards", "check"}),
        (Level.HEAD, {"loss", "backward of the head", "check"}),
        (Level.STOCK, {"loss"}),
    ],
    ids=["rows", "head", "stock"],
)
def test_it_begins_with_the_level_and_every_finding(tmp_path, level, names):
    trainer = make_trainer(tmp_path)
    for each in (Level.ROWS, Level.HEAD, Level.STOCK):
        if each >= level:
            trainer._fused.ladder.fall(Reason(each, f"of something at {each.name}"))
    lines = [line.name for line in trainer.fused_summary()]
    found = [f"found ({each.name.lower()})" for each in (Level.ROWS, Level.HEAD, Level.STOCK) if each >= level]
    assert lines[2 : 3 + len(found)] == ["level", *found]
    assert names <= set(lines)
    assert ("layout" in lines) == (level == Level.ROWS) and ("check" in lines) == (level > Level.STOCK)
    by_name = lines_of(trainer)
    assert by_name["level"].value == f"{level.name.lower()}: {WHAT_IS_DONE[level]}"
    assert by_name[found[-1]].value == f"of something at {level.name}"


def test_a_trainer_without_the_fused_loss_says_so(tmp_path):
    lines = lines_of(make_trainer(tmp_path, use_liger_loss=False))
    assert lines["loss"].value == "TRL's own path"
    assert list(lines) == ["versions", "device", "loss"]


def test_it_is_printed_once_when_a_training_begins(tmp_path, capsys):
    trainer = make_trainer(tmp_path, max_steps=2)
    assert TITLE not in capsys.readouterr().out
    trainer.train()
    printed = capsys.readouterr().out
    assert printed.count(TITLE) == 1
    assert str(trainer.fused_summary()) in printed


@pytest.mark.parametrize("broken", ["summary", "output"])
def test_a_training_does_not_end_because_of_it(tmp_path, caplog, monkeypatch, broken):
    def fail(*args, **kwargs):
        raise RuntimeError("no such layer")

    if broken == "summary":
        monkeypatch.setattr("trl_fused_grpo.training.summary.summary_of", fail)
    else:
        monkeypatch.setattr("trl_fused_grpo.training.summary.print", fail, raising=False)
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
    (line,) = [record.message for record in caplog.records if "The summary of this training" in record.message]
    assert line.endswith("because RuntimeError: no such layer")


@pytest.mark.parametrize(
    ("kind", "widths"), [("llama", [16]), ("gpt2", [16]), ("deepseek-v3", [24]), ("gemma4", [16, 32])]
)
def test_the_widths_of_heads_are_those_of_every_layer(kind, widths):
    if not hasattr(transformers, FAMILIES[kind].config):
        pytest.skip("this transformers does not have it")
    assert head_widths(tiny_model(kind).config.get_text_config()) == widths


@pytest.mark.parametrize("quiet", ["of this package", "of transformers"])
def test_it_is_not_printed_where_only_errors_are_logged(tmp_path, capsys, request, quiet):
    package, verbosity = logging.getLogger("trl_fused_grpo"), transformers_logging.get_verbosity()
    request.addfinalizer(lambda: (package.setLevel(logging.NOTSET), transformers_logging.set_verbosity(verbosity)))
    if quiet == "of this package":
        package.setLevel(logging.ERROR)
    make_trainer(tmp_path, max_steps=1, **({} if "package" in quiet else {"log_level": "error"})).train()
    assert TITLE not in capsys.readouterr().out

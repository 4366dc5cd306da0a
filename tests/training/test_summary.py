"""The summary of a training says what the training does, with the reasons of the predicates, and is told once."""

import logging

import pytest
import transformers
from transformers.utils import logging as transformers_logging

from tests.tiny_training import make_trainer
from trl_fused_grpo._compat.models import head_widths
from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.parity.tiny.families import FAMILIES
from trl_fused_grpo.training.findings import WHAT_IS_DONE, Level, Reason
from trl_fused_grpo.training.plan import why_forwards_are_not_shared

from .sampler import use_sampler


def lora():
    pytest.importorskip("peft")
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")


def lines_of(trainer):
    return {line.name: line for line in trainer.fused_summary()}


HEAD, ROWS, FORWARDS, LAYERS = "fused head", "packed rows", "shared forwards", "compiled layers"
OLD, REFERENCE = "old log-probs of the training forward", "shared reference forwards"


@pytest.mark.parametrize(
    ("options", "name", "value", "reason", "change"),
    [
        ({}, HEAD, "3 matmuls", None, None),
        ({"fused_backward": "recompute"}, HEAD, "4 matmuls", "fused_backward='recompute'", "leave it out"),
        ({"top_entropy_quantile": 0.5}, HEAD, "4 matmuls", "the entropy quantile looks", "top_entropy_quantile=1.0"),
        ({}, ROWS, "no padding, each prompt once", None, None),
        ({"fused_layout": "padded"}, ROWS, "padded", "fused_layout='padded'", "leave fused_layout out"),
        ({"kind": "gemma3-bidirectional"}, ROWS, "padded as in TRL", "its attention is not causal", None),
        ({"kind": "attention-dropout"}, ROWS, "padded as in TRL", "its attention drops out", None),
        (
            {"kind": "qwen3-next"},
            ROWS,
            "each completion with its prompt (some layers run on rows of their own",
            None,
            None,
        ),
        (
            {"fused_share_prompts": False},
            ROWS,
            "each completion with its prompt (fused_share_prompts=False)",
            None,
            None,
        ),
        ({"gradient_accumulation_steps": 4}, FORWARDS, "up to 4 micro-batches in one", None, None),
        (
            {"gradient_accumulation_steps": 4, "fused_max_tokens_per_forward": 64},
            *(FORWARDS, "up to 4 micro-batches in one, 64 tokens", None, None),
        ),
        (
            {"gradient_accumulation_steps": 4, "fused_max_tokens_per_forward": 0},
            *(FORWARDS, "its own", "fused_max_tokens_per_forward=0", None),
        ),
        ({"num_iterations": 2}, OLD, "until the weights move", None, None),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
            *(OLD, "until the weights move", "they move before all is trained on", "a steps_per_generation that"),
        ),
        (
            {"num_iterations": 2, "fused_skip_old_logps": False},
            OLD,
            "of their own",
            "fused_skip_old_logps=False",
            "leave",
        ),
        ({"beta": 0.1}, REFERENCE, "those of the policy", None, None),
        ({}, LAYERS, "as they are", "Triton's kernels are for CUDA", "fused_compile=True"),
        ({"fused_compile": False}, LAYERS, "as they are", "fused_compile=False", "leave"),
        ({"fused_compile": True}, LAYERS, "one code for all layers of a kind", None, None),
        ({}, "check", "log-probs of the first step beside TRL's", None, None),
        ({"fused_verify": 50}, "check", "first step beside TRL's, then every 50 optimizer steps", None, None),
    ],
)
def test_each_line_has_the_reason_and_what_to_change(tmp_path, options, name, value, reason, change):
    line = lines_of(make_trainer(tmp_path, **options))[name]
    assert value in line.value
    assert (reason in line.reason) if reason else (line.reason is None)
    assert (change in line.change) if change else (line.change is None)


def test_rows_with_padding_have_no_line_of_what_packed_rows_alone_have(tmp_path):
    assert not {LAYERS, "fast attention"} & lines_of(make_trainer(tmp_path, fused_layout="padded")).keys()


def test_the_reasons_are_those_of_the_predicates(tmp_path):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=4)
    trainer.accelerator.backward = lambda *args, **kwargs: None
    trainer._fused.look()
    lines = lines_of(trainer)
    assert lines[FORWARDS].reason == why_forwards_are_not_shared(trainer, trainer._fused.ladder.findings, True)


def test_adapters_and_vllms_ratio_have_a_line(tmp_path):
    trainer = make_trainer(tmp_path, peft_config=lora())
    use_sampler(trainer)
    lines = lines_of(trainer)
    assert lines[HEAD].value == "2 matmuls, frozen"
    assert lines[OLD].value == "until the weights move"


def test_a_backward_that_may_move_weights_is_the_reason_for_old_log_probs(tmp_path):
    trainer = make_trainer(tmp_path, num_iterations=2, gradient_accumulation_steps=2)
    use_sampler(trainer)
    assert lines_of(trainer)[OLD].reason is None
    trainer.accelerator.backward = lambda *args, **kwargs: None
    trainer._fused.look()
    line = lines_of(trainer)[OLD]
    assert line.value.startswith("a forward of their own")
    assert "the moment when weights move" in line.reason and line.change is None


@pytest.mark.parametrize(
    ("level", "names"),
    [
        (Level.ROWS, {HEAD, ROWS, FORWARDS, LAYERS, "check"}),
        (Level.HEAD, {HEAD, "check"}),
        (Level.STOCK, set()),
    ],
    ids=["rows", "head", "stock"],
)
def test_a_lower_level_has_its_findings_and_the_lines_of_what_is_left(tmp_path, level, names):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2, num_iterations=1)
    for each in (Level.ROWS, Level.HEAD, Level.STOCK):
        if each >= level:
            trainer._fused.ladder.fall(Reason(each, f"of something at {each.name}"))
    lines = lines_of(trainer)
    verdict = lines["FusedGRPOTrainer"].value
    assert verdict.startswith(f"level {level.name.lower()}: ")
    assert level == Level.ROWS or verdict.endswith(WHAT_IS_DONE[level])
    assert all(
        f"of something at {each.name} ({each.name.lower()})" in lines["found"].value
        for each in Level
        if level <= each < Level.WINDOW
    )
    assert lines.keys() - {"fast attention"} == {"FusedGRPOTrainer", "setting", "found", *names}


def test_the_verdict_says_what_is_on_and_what_is_off(tmp_path):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=4, beta=0.1, fused_max_tokens_per_forward=0)
    first = trainer.fused_summary()[0]
    assert (first.name, first.reason) == ("FusedGRPOTrainer", None)
    on, _, off = first.value.removeprefix("level window: ").partition("; off: ")
    assert {HEAD, ROWS, REFERENCE} <= {*on.split(", ")}
    assert {FORWARDS, LAYERS} <= {*off.split(", ")}
    assert "fused_memory" not in off  # it acts on CUDA alone


def test_a_head_whose_logits_are_computed_again_is_fused_all_the_same(tmp_path):
    first = make_trainer(tmp_path, fused_layout="padded", fused_backward="recompute").fused_summary()[0]
    assert first.value.startswith("level window: fused head; off: forecast of the head, packed rows")


@pytest.mark.parametrize("kind", ["qwen3-vl", "qwen3-next", "llama"])
def test_there_are_at_most_a_dozen_plain_lines_behind_it(tmp_path, kind):
    if not hasattr(transformers, FAMILIES[kind].config):
        pytest.skip("this transformers does not have it")
    options = {"gradient_accumulation_steps": 4, "num_iterations": 2, "beta": 0.1, "fused_verify": 3}
    trainer = make_trainer(tmp_path, kind=kind, **options)
    trainer._fused.ladder.fall(Reason(Level.ROWS, "something"))
    with temporary_attr(trainer.accelerator.state, "num_processes", 2):
        assert len(trainer.fused_summary()) <= 13


def test_it_leaves_the_model_in_evaluation(tmp_path):
    trainer = make_trainer(tmp_path, kind="attention-dropout")
    trainer.model.eval()
    assert lines_of(trainer)[ROWS].reason == "its attention drops out"
    assert not any(module.training for module in trainer.model.modules())


def test_a_trainer_without_the_fused_loss_says_so(tmp_path):
    lines = lines_of(make_trainer(tmp_path, use_liger_loss=False))
    assert lines["FusedGRPOTrainer"].value == "TRL's own loss"
    assert list(lines) == ["FusedGRPOTrainer", "setting"]


@pytest.mark.parametrize("on_terminal", [True, False], ids=["terminal", "log"])
def test_it_is_told_once_when_a_training_begins(tmp_path, capsys, caplog, monkeypatch, on_terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: on_terminal, raising=False)
    trainer = make_trainer(tmp_path, max_steps=2)
    seen_before_generation = []
    generate = trainer._generate
    trainer._generate = lambda *args: (seen_before_generation.append(told(capsys, caplog)), generate(*args))[1]
    trainer.train()
    printed, logged = seen_before_generation[0]
    assert ("FusedGRPOTrainer  level" in printed) is on_terminal
    assert bool([line for line in logged if line.startswith("FusedGRPOTrainer: level")]) is not on_terminal
    assert len([line for line in logged if line.startswith("setting: ")]) == (not on_terminal)
    printed_later, logged_later = told(capsys, caplog)
    assert "FusedGRPOTrainer  level" not in printed_later
    assert len([line for line in logged_later if line.startswith("setting: ")]) == (not on_terminal)


def told(capsys, caplog):
    return capsys.readouterr().out, [*caplog.messages]


@pytest.mark.parametrize("broken", ["summary", "output"])
def test_a_training_does_not_end_because_of_it(tmp_path, caplog, monkeypatch, broken):
    def fail(*args, **kwargs):
        raise RuntimeError("no such layer")

    if broken == "summary":
        monkeypatch.setattr("trl_fused_grpo.training.summary.summary_of", fail)
    else:
        monkeypatch.setattr("sys.stdout.isatty", fail, raising=False)
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
def test_it_is_not_told_where_only_errors_are_logged(tmp_path, capsys, caplog, request, quiet):
    package, verbosity = logging.getLogger("trl_fused_grpo"), transformers_logging.get_verbosity()
    request.addfinalizer(lambda: (package.setLevel(logging.NOTSET), transformers_logging.set_verbosity(verbosity)))
    if quiet == "of this package":
        package.setLevel(logging.ERROR)
    make_trainer(tmp_path, max_steps=1, **({} if "package" in quiet else {"log_level": "error"})).train()
    assert not any("level window" in text for text in (capsys.readouterr().out, *caplog.messages))

"""PEFT methods that read whole rows keep TRL's padding; those that change each token by itself are packed."""

import pytest
import torch
from transformers import LlamaConfig

from tests.layout_pairs import SHAPE, assert_trains_as_stock, from_config, log_probs, make_pair, short_rows
from tests.oracle import relative_error
from trl_fused_grpo._compat import models as model_compat


peft = pytest.importorskip("peft")
INVOCATION = [21, 22]
WEIGHTS = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def with_invocations(inputs):
    """Some rows have the invocation once, at different places, some twice, some not."""
    for row, column in [(3, 0), (4, 1), (6, 2), (7, 5), (7, 2)]:
        inputs["completion_ids"][row, column : column + 2] = torch.tensor(INVOCATION)
    return inputs


def pair(tmp_path, make_config, **options):
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)), peft_config=make_config, **options)
    generator = torch.Generator().manual_seed(1)
    parameters = zip(fused.model.parameters(), stock.model.parameters(), strict=True)
    with torch.no_grad():  # an adapter that changes nothing yet would show nothing
        for mine, other in parameters:
            if mine.requires_grad:
                mine.add_(0.2 * torch.randn(mine.shape, generator=generator))
                other.copy_(mine)
    return fused, stock


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient-checkpointing"])
def test_an_adapter_that_waits_for_its_invocation_trains_as_stock(tmp_path, checkpointing):
    if not hasattr(peft.LoraConfig(), "alora_invocation_tokens"):
        pytest.skip("this PEFT has no aLoRA")
    make_config = lambda: peft.LoraConfig(**WEIGHTS, alora_invocation_tokens=INVOCATION)  # noqa: E731
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    fused, stock = pair(tmp_path, make_config, shared=options if checkpointing else {})
    inputs = with_invocations(short_rows(old_per_token_logps=torch.full((9, 8), -6.9)))
    if not checkpointing:
        expected = log_probs(stock, inputs, batch_size=2)
        assert relative_error(log_probs(fused, inputs, batch_size=2), expected) < 1e-5
    assert_trains_as_stock(fused, stock, inputs)
    assert fused.fused_layout() == "padded"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("method", "options", "layout"),
    [
        ("LoraConfig", {"r": 4}, "packed"),
        ("LoraConfig", {"r": 4, "use_dora": True}, "packed"),
        ("IA3Config", {"feedforward_modules": []}, "packed"),
        ("HRAConfig", {"r": 4}, "packed"),
        ("LilyConfig", {"r": 4, "num_B": 2}, "padded"),  # its router takes a mean over the tokens of a batch
        ("PolyConfig", {"r": 4, "n_tasks": 1}, "padded"),
    ],
)
def test_methods_are_packed_where_they_act_on_tokens(tmp_path, method, options, layout):
    if not hasattr(peft, method):
        pytest.skip(f"this PEFT has no {method}")
    targets = {} if method == "LilyConfig" else {"target_modules": ["q_proj", "v_proj"]}
    try:
        fused, stock = pair(tmp_path, lambda: getattr(peft, method)(**options, **targets, task_type="CAUSAL_LM"))
    except (TypeError, ValueError) as error:
        pytest.skip(f"{method}: {error}")
    assert fused.fused_layout() == layout
    if method != "PolyConfig":  # it wants the task of each row
        assert_trains_as_stock(fused, stock, short_rows(old_per_token_logps=torch.full((9, 8), -6.9)))


def test_every_method_that_puts_tokens_before_a_row_keeps_the_padding():
    prompt_learning = {
        "PROMPT_TUNING",
        "MULTITASK_PROMPT_TUNING",
        "P_TUNING",
        "PREFIX_TUNING",
        "CPT",
        "ADAPTION_PROMPT",
    }
    assert not model_compat.TOKENWISE_PEFT & {*prompt_learning, "XLORA", "POLY", "LILY", "CARTRIDGE", "SHADOW"}

"""What is read of a head: PEFT's wrappers, scales, softcaps, quantized weights and the layers before it."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.modeling.heads import QuantizedLinear, lora
from tests.oracle import relative_error
from trl_fused_grpo import fused_linear_logps, read_lm_head
from trl_fused_grpo._compat.trl import LOGPS_FROM_LOGITS
from trl_fused_grpo.modeling.head.output_projection import layer_before_head, output_projection
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, model_config, tiny_model


peft = pytest.importorskip("peft")

N = 37  # tokens


def adapted(config, kind="llama"):
    """A tiny model with an adapter, and the causal language model inside it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(kind))
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return wrapped, wrapped.get_base_model()


def assert_same_as_the_model(wrapped):
    """Log-probs through `read_lm_head` equal those of the model's own logits."""
    causal_lm = wrapped.get_base_model()
    ids = torch.randint(3, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = causal_lm.base_model(input_ids=ids).last_hidden_state.flatten(0, 1)
        logps, _ = fused_linear_logps(hidden, read_lm_head(causal_lm), ids.flatten())
        expected = causal_lm(input_ids=ids).logits.flatten(0, 1).log_softmax(-1)
    assert relative_error(logps, expected.gather(-1, ids.flatten()[:, None]).squeeze(-1)) < 1e-6
    return logps


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_lora_on_the_head_follows_what_is_active_disabled_and_merged(kind):
    wrapped, _ = adapted(lora("lm_head", "q_proj", lora_dropout=0.3), kind)
    wrapped.add_adapter("second", lora("lm_head"))
    nn.init.normal_(wrapped.get_base_model().lm_head.lora_B["second"].weight, std=0.2)
    wrapped.eval()
    first = assert_same_as_the_model(wrapped)
    wrapped.set_adapter("second")
    second = assert_same_as_the_model(wrapped)
    with wrapped.disable_adapter():
        neither = assert_same_as_the_model(wrapped)
    wrapped.base_model.set_adapter(["default", "second"])
    both = assert_same_as_the_model(wrapped)
    results = [first, second, neither, both]
    assert all(relative_error(x, y) > 1e-3 for i, x in enumerate(results) for y in results[:i])
    wrapped.merge_adapter()
    merged = assert_same_as_the_model(wrapped)
    if kind != "tied":  # there merging moves the embeddings too
        assert relative_error(merged, both) < 1e-5
        with wrapped.disable_adapter():
            assert relative_error(assert_same_as_the_model(wrapped), neither) < 1e-5


def test_bfloat16_logits_with_lora_are_no_further_from_the_truth_than_pefts():
    _, causal_lm = adapted(lora("lm_head"))
    causal_lm.bfloat16()
    hidden, targets = torch.randn(N, 64, dtype=torch.bfloat16), torch.randint(VOCAB_SIZE, (N,))

    def logps_of(logits):
        return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)

    logps, _ = fused_linear_logps(hidden, read_lm_head(causal_lm), targets)
    pefts = logps_of(causal_lm.lm_head(hidden).float())
    truth = logps_of(causal_lm.double().lm_head(hidden.double()))
    assert relative_error(logps, truth) <= relative_error(pefts, truth)


def test_loras_own_bias_counts():
    wrapped, causal_lm = adapted(lora("lm_head", lora_bias=True))
    nn.init.normal_(causal_lm.lm_head.lora_B["default"].bias)
    assert_same_as_the_model(wrapped)


def test_a_trained_copy_of_the_head_is_used_while_its_adapter_is():
    wrapped, causal_lm = adapted(lora("q_proj", modules_to_save=["lm_head"]))
    copy = causal_lm.lm_head.modules_to_save["default"]
    nn.init.normal_(copy.weight)
    assert read_lm_head(causal_lm).weight is copy.weight
    with wrapped.disable_adapter():
        assert read_lm_head(causal_lm).weight is causal_lm.lm_head.original_module.weight
        assert_same_as_the_model(wrapped)
    assert_same_as_the_model(wrapped)


REFUSED = {
    "dora": (lora("lm_head", use_dora=True), "DoRA|Dora"),
    "loha": (peft.LoHaConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM"), "not plain LoRA"),
    "ia3": (
        peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[], task_type="CAUSAL_LM"),
        "not plain LoRA",
    ),
    "trainable-tokens": (lora("q_proj", trainable_token_indices=[3, 4]), "trainable tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_are_more_than_a_low_rank_term_are_refused_with_the_reason(name):
    config, message = REFUSED[name]
    _, causal_lm = adapted(config, "tied")
    with pytest.raises(ValueError, match=message) as error:
        output_projection(causal_lm)
    assert "use_liger_loss=False" in str(error.value)


def _scaled(**options):
    config = model_config("llama")
    for name, value in options.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 1.0),
        ({"logit_scale": 0.0625}, 0.0625),
        ({"logit_scale": 0.0}, 0.0),
        ({"logit_scale": None}, 1.0),
        ({"output_multiplier": 3.0}, 3.0),
        ({"lm_head_multiplier": 0.5}, 0.5),
        ({"logits_scaling": 8.0}, 0.125),
        ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, 8.0),
    ],
)
def test_the_scale_of_the_logits_has_many_names(options, scale):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config("llama"))
    for name, value in options.items():
        setattr(model.config, name, value)
    # Before TRL 1.15 the model's own forward makes the logits, and Llama's reads none of these
    assert read_lm_head(model).logit_scale == (1.0 if LOGPS_FROM_LOGITS else scale)


def test_a_final_softcap_is_read():
    model = AutoModelForCausalLM.from_config(_scaled(final_logit_softcapping=30.0))
    assert read_lm_head(model).softcap == (None if LOGPS_FROM_LOGITS else 30.0)


def test_a_quantized_head_is_refused():
    model = AutoModelForCausalLM.from_config(model_config("llama"))
    model.lm_head = QuantizedLinear(model.lm_head)
    with pytest.raises(ValueError, match="no floating-point weight"):
        output_projection(model)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("roberta", "lm_head.dense"),
        ("bert", "cls.predictions.transform.dense"),
        ("electra", "generator_predictions"),
        ("bert-generation", None),
    ],
)
def test_layers_between_hidden_states_and_head_are_found(family, layer):
    config = AutoConfig.for_model(family, vocab_size=64, is_decoder=True, **SMALL)
    assert layer_before_head(AutoModelForCausalLM.from_config(config)) == layer


def test_a_layer_that_the_user_puts_before_the_head_later_is_found():
    model = tiny_model("llama")
    assert layer_before_head(model) is None
    model.lm_head = nn.ModuleDict({"dense": nn.Linear(8, 8), "decoder": model.lm_head})
    model.get_output_embeddings = lambda: model.lm_head["decoder"]
    assert layer_before_head(model) == "lm_head.dense"


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3-vl"])
def test_a_head_that_follows_the_hidden_states_has_no_layer_before_it(kind):
    assert layer_before_head(tiny_model(kind)) is None

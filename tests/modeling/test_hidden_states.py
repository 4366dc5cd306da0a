"""`read_hidden_states`: what the head of a model gets, in every wrapper, with gradients through it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from tests.grpo_oracle import grpo_loss
from tests.modeling.test_heads import adapted, lora
from tests.oracle import relative_error
from trl_fused_grpo import FusedLinearGRPOLoss, fused_linear_logps, read_hidden_states, read_lm_head
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, tiny_model
from trl_fused_grpo.parity.tiny.families import FAMILIES
from trl_fused_grpo.parity.tiny.images import image_inputs, with_images


IDS = torch.randint(5, VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(0))
WIDTH = 4  # of the prompts
TOKENS = IDS[:, WIDTH:]
MASK, ADVANTAGES = (torch.arange(5) < torch.tensor([5, 2, 4])[:, None]).float(), torch.tensor([1.0, -0.5, 0.7])


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def logps_of(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def assert_same_as_the_logits(model, **inputs):
    """Log-probs of hidden states and head are those of the model's own logits; no logits of every position exist."""
    with torch.no_grad():
        hidden = read_hidden_states(model, **inputs)
        logps, _ = fused_linear_logps(hidden.flatten(0, 1), read_lm_head(model), inputs["input_ids"].flatten())
        expected = logps_of(model(**inputs).logits, inputs["input_ids"])
    assert relative_error(logps, expected.flatten()) < 1e-6


# A softcap, a scale, experts, a state, a text model in a composite one, and a layer before the head
@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere", "qwen3-moe", "mamba2", "llava", "qwen3-vl"])
def test_head_and_hidden_states_give_the_models_logits(kind):
    try:
        model = tiny_model(kind).eval()
    except ImportError as missing:
        pytest.skip(str(missing))
    assert_same_as_the_logits(model, input_ids=IDS, attention_mask=torch.ones_like(IDS))


def test_a_layer_before_the_head_is_passed():
    from transformers import AutoConfig

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("bert", is_decoder=True, vocab_size=VOCAB_SIZE, **shape)
    assert_same_as_the_logits(AutoModelForCausalLM.from_config(config).eval(), input_ids=IDS)


def test_images_go_through_the_vision_tower():
    model, family = tiny_model("llava").eval(), FAMILIES["llava"]
    ids = torch.tensor(with_images([[5, 6, 7]] * 2, (1, 1), family.images))
    images = image_inputs(family.images, (1, 1), 1, ids, torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "pixel_values": images["pixel_values"]}
    assert_same_as_the_logits(model, **inputs)
    hidden = read_hidden_states(model, **inputs)
    other = read_hidden_states(model, **{**inputs, "pixel_values": images["pixel_values"] + 1})
    assert relative_error(hidden, other) > 1e-3


@pytest.mark.parametrize("config", [lora("q_proj"), lora("lm_head", "q_proj")], ids=["layers", "head"])
def test_peft_models_have_their_adapters_on(config):
    wrapped, _ = adapted(config)
    assert_same_as_the_logits(wrapped.eval(), input_ids=IDS)
    adapter_on = read_hidden_states(wrapped, input_ids=IDS)
    with wrapped.disable_adapter():
        assert_same_as_the_logits(wrapped, input_ids=IDS)
        assert relative_error(read_hidden_states(wrapped, input_ids=IDS), adapter_on) > 1e-3


def loss_of(model):
    hidden = read_hidden_states(model, input_ids=IDS)[:, WIDTH - 1 : -1]
    return FusedLinearGRPOLoss(beta=0.0)(hidden, read_lm_head(model), TOKENS, MASK, ADVANTAGES)[0]


def dense_loss(model):
    logits = model(input_ids=IDS).logits[:, WIDTH - 1 : -1].double()
    return grpo_loss({"loss_type": "dapo"}, logps_of(logits, TOKENS), MASK, ADVANTAGES)[0]


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("targets", [(), ("q_proj", "lm_head")], ids=["full", "lora"])
def test_ddp_reduces_the_gradients_of_layers_and_head(one_process, kind, targets):
    model = adapted(lora(*targets), kind)[0] if targets else tiny_model(kind)
    dense, ddp, reduced = copy.deepcopy(model), DistributedDataParallel(model), []

    def counting(state, bucket):
        reduced.extend(bucket.parameters())
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, counting)
    loss_of(ddp).backward()
    dense_loss(dense).backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(parameter) for parameter in reduced} == {id(parameter) for parameter in trained}
    expected = [parameter.grad for parameter in dense.parameters() if parameter.requires_grad]
    for parameter, grad in zip(trained, expected, strict=True):
        assert relative_error(parameter.grad, grad) < 1e-5


def test_the_head_runs_for_one_position_and_no_hook_is_left():
    model, widths = tiny_model("llama"), []
    handle = model.lm_head.register_forward_hook(lambda module, args, logits: widths.append(logits.shape[1]))
    read_hidden_states(model, input_ids=IDS)
    handle.remove()
    assert widths == [1]
    assert model(input_ids=IDS).logits.shape == (*IDS.shape, VOCAB_SIZE)


def test_a_model_that_does_not_call_its_head_is_named():
    model = tiny_model("llama")
    model.forward = lambda **inputs: None
    with pytest.raises(ValueError, match="LlamaForCausalLM did not call its output projection"):
        read_hidden_states(model, input_ids=IDS)

"""Layers that run unpacked in packed rows: attention of their own, attention that chooses its keys, groups of rows."""

from itertools import pairwise

import pytest
import torch
import transformers
from packaging.version import Version
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from tests.layout_pairs import SHAPE, assert_trains_as_stock, from_config, make_pair, short_rows
from tests.oracle import relative_error
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.models import PADDING_MATTERS
from trl_fused_grpo._compat.required import OLDEST_TRL, TRL
from trl_fused_grpo.modeling.layers.sequence_rows import SequenceRows, length_groups
from trl_fused_grpo.modeling.layers.unpacked import unpacked_layers
from trl_fused_grpo.parity.tiny import tiny_model


WITHOUT_DROPOUT = dict.fromkeys(
    (
        *("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop"),
        *("embd_pdrop", "attn_pdrop", "resid_dropout", "embed_dropout", "dropout", "activation_dropout", "layerdrop"),
    ),
    0.0,
)
INDEXED = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 16,
    "index_n_heads": 24,
    "index_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
OLD_NAMES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}
# By family: its configuration class, options, and options of other families that it does not know
FAMILIES = {
    "gptj": ("GPTJConfig", OLD_NAMES, ("intermediate_size", "num_key_value_heads")),
    "codegen": ("CodeGenConfig", OLD_NAMES, ("intermediate_size", "num_key_value_heads")),
    "falcon": (
        "FalconConfig",
        {"alibi": False, "num_kv_heads": 2, "new_decoder_architecture": True},
        ("num_key_value_heads",),
    ),
    "gpt-neo": (
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        ("num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    ),
    "xglm": (
        "XGLMConfig",
        {"d_model": 64, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads"),
    ),
    "rembert": (
        "RemBertConfig",
        {"is_decoder": True, "input_embedding_size": 64, "output_embedding_size": 64},
        ("num_key_value_heads",),
    ),
    "deepseek-v3.2": ("DeepseekV32Config", INDEXED, ()),
    "glm-moe-dsa": ("GlmMoeDsaConfig", INDEXED, ()),
}


def config_of(family):
    name, options, unknown = FAMILIES[family]
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"this transformers has no {name}")
    options = {**SHAPE, **WITHOUT_DROPOUT, **options}
    return cls(**{name: value for name, value in options.items() if name not in unknown})


def make_model(family):
    config = config_of(family)

    def make():
        model = from_config(config, attention=None)()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
                # Adds the same to all scores of a query, so that its gradient is zero but for rounding
                parameter.requires_grad_(not name.endswith("key.bias"))
        return model

    return make


@pytest.mark.sample(4)
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "gradient-checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_that_reads_its_masks_by_itself_trains_as_stock_in_packed_rows(tmp_path, family, checkpoints):
    options = {"router_aux_loss_coef": 0.0} if trl_compat.RETURNS_AUX_LOSS else {}
    fused, stock = make_pair(tmp_path, make_model(family), {"gradient_checkpointing": checkpoints, **options})
    if not unpacked_layers(fused.model).attention:
        pytest.skip("this transformers sends its attention through the interface")
    for trainer in (fused, stock):
        if checkpoints:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    for seed in range(2):
        assert_trains_as_stock(fused, stock, short_rows(8, seed=seed))
    if OLDEST_TRL < TRL < Version("1.13") and fused.fused_layout() == "padded":
        pytest.skip("the masks of this transformers say too little")
    assert fused.fused_layout() == "packed"


def test_rows_wider_than_the_tokens_that_are_chosen_keep_the_padding(tmp_path):
    """Scores that are exactly equal are told apart by their columns, in stock too."""
    config = config_of("deepseek-v3.2")
    config.index_topk, config.index_n_heads = 4, 2
    options = {"router_aux_loss_coef": 0.0} if trl_compat.RETURNS_AUX_LOSS else {}
    fused, stock = make_pair(tmp_path, from_config(config, attention=None), options)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_stats.layout == "padded"


def wrapped(kind):
    """A model whose layers FSDP's activation checkpointing would compute again in backward."""

    def make():
        model = tiny_model(kind)
        layers = {type(layer) for layer in model.model.layers}
        apply_activation_checkpointing(model, check_fn=lambda module: type(module) in layers)
        return model

    return make


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "layout"), [("llama", "packed"), ("gpt-oss", "packed"), ("lfm2", "padded")])
def test_layers_that_a_module_around_them_checkpoints_train_as_stock(tmp_path, kind, layout):
    if kind in PADDING_MATTERS:
        pytest.skip("this transformers lets padding into its convolutions")
    fused, stock = make_pair(tmp_path, wrapped(kind))
    for seed in range(2):
        assert_trains_as_stock(fused, stock, short_rows(8, seed=seed))
    assert fused.fused_stats.layout == layout


def test_a_packed_row_is_unpacked_into_rows_and_packed_again():
    lengths = [3, 7, 1, 7, 2]
    rows = SequenceRows(lengths, torch.device("cpu"))
    row = torch.randn(1, sum(lengths), 4, dtype=torch.float64, requires_grad=True)
    (groups,) = [rows.unpack(row)]
    assert sorted(len(group) for group in groups) == sorted(len(index) for index in rows.indices)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    seen = {tuple(line[:length].flatten().tolist()) for group in groups for line in group for length in lengths}
    assert all(tuple(row[0, a:b].flatten().tolist()) in seen for a, b in pairwise(starts))

    again = rows.pack([group * 2 for group in groups])
    assert torch.equal(again, row * 2)
    weights = torch.randn_like(row)
    (gradient,) = torch.autograd.grad((again * weights).sum(), row)
    assert torch.equal(gradient, 2 * weights)


def test_what_stands_behind_a_sequence_gets_no_gradient():
    rows = SequenceRows([2, 5], torch.device("cpu"), most_groups=1)
    row = torch.randn(1, 7, 3, dtype=torch.float64, requires_grad=True)

    def causal(x):  # each token sees the sum of those before it
        return x.cumsum(1)

    output = rows.pack([causal(group) for group in rows.unpack(row)])
    expected = torch.cat([causal(row[:, :2]), causal(row[:, 2:])], dim=1)
    assert relative_error(output, expected) < 1e-15
    weights = torch.randn_like(row)
    ours, reference = (torch.autograd.grad((o * weights).sum(), row)[0] for o in (output, expected))
    assert relative_error(ours, reference) < 1e-14


def test_lengths_are_grouped_so_that_rows_cost_least():
    lengths = [4000, 30, 20, 3900, 10]
    groups = length_groups(lengths)
    assert [sorted(group) for group in groups] == [[0, 3], [1, 2, 4]]
    assert length_groups(lengths, most=1) == [[0, 3, 1, 2, 4]]
    assert length_groups([5]) == [[0]]
    assert sorted(i for group in length_groups(list(range(1, 500))) for i in group) == list(range(499))

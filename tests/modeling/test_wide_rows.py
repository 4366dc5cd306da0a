"""Models whose layers treat wide rows by the column: the layout follows the width of a batch."""

import functools

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention
from trl import GRPOTrainer

from tests.code_of import as_code_of
from tests.layout_pairs import assert_trains_as_stock, make_pair, seeded, short_rows
from tests.oracle import relative_error
from tests.tiny_training import make_trainer
from trl_fused_grpo.parity.tiny import PAD_ID, images, tiny_model
from trl_fused_grpo.training.requests import LogpsArgs, LogpsRequest, images_of


COLUMNS, ROWS = 11, 9  # of the batch


class ColumnAttention(LlamaAttention):
    """Its queries are scaled by the column from a column on, as Llama 4's are, whatever positions they have."""

    def forward(self, hidden_states, *args, **kwargs):
        columns = torch.arange(hidden_states.shape[1]) + 1
        scale = 1 + (columns // self.config.floor_scale).log1p()
        self.q_proj.scale = scale[None, :, None]
        return super().forward(hidden_states, *args, **kwargs)


class ScaledLinear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.scale


for cls in (ColumnAttention, ScaledLinear):  # stand for transformers' own: other code is not packed
    cls.__module__, cls.forward = "transformers", as_code_of("transformers", cls.forward)


def limit_width(config, columns):
    """Have a text configuration say that queries are scaled by the column in rows that are wider."""
    config.attn_temperature_tuning, config.no_rope_layers, config.floor_scale = True, [0], columns + 1


def scaled(columns):
    def make():
        model = tiny_model("llama")
        limit_width(model.config, columns)
        for layer in model.model.layers:
            layer.self_attn.__class__ = ColumnAttention
            layer.self_attn.q_proj.__class__ = ScaledLinear
        return model

    return make


@pytest.fixture
def warnings(caplog):
    """The warnings of wide rows that were logged in this test."""
    return lambda: [record.message for record in caplog.records if record.message.startswith("Batches keep")]


def test_a_layout_that_was_asked_for_raises_where_rows_are_too_wide(tmp_path):
    fused, _ = make_pair(tmp_path, scaled(COLUMNS), fused_layout="packed")
    with pytest.raises(ValueError, match="'packed' does not fit this batch: its layers scale queries by column"):
        seeded(fused, short_rows())


@pytest.mark.parametrize(("columns", "layout"), [(ROWS * COLUMNS, "packed"), (ROWS * COLUMNS - 1, "padded")])
def test_rows_are_packed_where_their_columns_are_alike(tmp_path, columns, layout, warnings):
    fused, stock = make_pair(tmp_path, scaled(columns))
    for seed in range(2):
        assert_trains_as_stock(fused, stock, short_rows(8, seed=seed))
        assert fused.fused_stats.layout == layout
    told = [f"Batches keep TRL's padding where its layers scale queries by column, from column {columns}"]
    assert [message.removesuffix(" on.") for message in warnings()] == (told if layout != "packed" else [])


def with_images(seed):
    """A micro-batch whose prompts have an image each."""
    generator = torch.Generator().manual_seed(seed)
    inputs = short_rows(seed=seed)
    prompts = images.with_images([ids[mask.bool()].tolist() for ids, mask in prompts_of(inputs)], [1] * ROWS, "patches")
    width = max(map(len, prompts))
    inputs["prompt_ids"] = torch.tensor([[PAD_ID] * (width - len(ids)) + ids for ids in prompts])
    inputs["prompt_mask"] = (inputs["prompt_ids"] != PAD_ID).long()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return inputs | images.image_inputs("patches", [1] * ROWS, 1, ids, generator)


def prompts_of(inputs):
    return zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)


def test_micro_batches_with_images_keep_the_padding_where_they_are_too_wide_together(tmp_path):
    """Each alone is packed."""
    trainer = make_trainer(tmp_path, kind="qwen3-vl")
    batches = [with_images(seed) for seed in range(2)]
    ids = torch.cat([batches[0]["prompt_ids"], batches[0]["completion_ids"]], dim=1)
    limit_width(trainer.model.config.get_text_config(), ids.numel())
    engine = trainer._fused.engine
    trl_method = functools.partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
    call = LogpsArgs(trainer.model, ids, ids, 8, None, False, False, images_of(batches[0]))

    def logps(*micro_batches):
        requests = [LogpsRequest(batch["completion_mask"].bool()) for batch in micro_batches]
        with torch.no_grad():
            result = engine.compute(LogpsRequest.joined(requests), call.with_batches(micro_batches), trl_method)
        return result.logps, result.stats[0].layout

    alone = [logps(batch) for batch in batches]
    together, layout = logps(*batches)
    assert [layout for _, layout in alone] == ["packed", "packed"]
    assert layout == "padded"
    assert relative_error(together, torch.cat([value for value, _ in alone])) < 1e-5

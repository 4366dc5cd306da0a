"""What is seen of a model's attention, and cuDNN's kernel, which is only left out while it would do harm."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from transformers import masking_utils

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo.modeling.attention import kernels as attention_kernels
from trl_fused_grpo.modeling.attention.padded import cudnn_attention_off
from trl_fused_grpo.modeling.attention.watch import Chunk, WatchedCall


QUERY = torch.zeros(1, 1, 3, 4)
MODULE = torch.nn.Module()


def looked_at(module=MODULE, mask=None, **options):
    call = WatchedCall()
    call.look_at(module, QUERY, mask, options)
    return call.reason


def test_an_attention_call_shows_what_rows_must_not_lose():
    assert looked_at(dropout=0.0, scaling=0.1, is_causal=True, sliding_window=3, output_attentions=False) is None
    assert looked_at(dropout=0.1) == "its attention drops out"
    assert looked_at(is_causal=False) == "its attention is not causal"
    bidirectional = torch.nn.Module()
    bidirectional.is_causal = False
    assert looked_at(bidirectional) == "its attention is not causal"
    assert looked_at(bidirectional, is_causal=True) is None
    assert looked_at(mask=torch.ones(1, 1, 3, 3)) == "its layers make masks of their own"
    if "position_bias" in model_compat.FURTHER_SDPA_ARGUMENTS:
        assert looked_at(position_bias=QUERY) == "its attention takes position_bias"


def further(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx >= 0


@pytest.mark.parametrize(
    ("mask_function", "window", "reason"),
    [
        (masking_utils.causal_mask_function, None, None),
        (masking_utils.sliding_window_causal_mask_function(4), 4, None),
        (masking_utils.sliding_window_overlay(4), 4, "its mask is not causal"),
        (masking_utils.chunked_causal_mask_function(4, None), Chunk(4), None),
        (masking_utils.and_masks(masking_utils.causal_mask_function, further), None, "further"),
        (masking_utils.or_masks(masking_utils.causal_mask_function, further), None, "or_mask"),
        (further, None, "further"),
        (object(), None, "object"),
    ],
    ids=["causal", "window", "window-alone", "chunks", "and", "or", "own", "opaque"],
)
def test_masks_are_read(mask_function, window, reason):
    call = WatchedCall()
    call.read_mask(mask_function)
    assert call.windows == {window}
    assert (call.reason is None) if reason is None else (reason in call.reason)


def layer(index, *layer_types):
    config = SimpleNamespace(layer_types=list(layer_types)) if layer_types else SimpleNamespace()
    return SimpleNamespace(config=config, layer_idx=index)


@pytest.mark.parametrize(
    ("windows", "module", "passed", "expected"),
    [
        (set(), layer(0), 5, None),  # no mask, no window: SDPA ignores the argument
        ({None}, layer(0, "sliding_attention"), 5, None),
        ({4}, layer(0), None, 4),
        ({None, 4}, layer(0, "sliding_attention", "full_attention"), None, 4),
        ({None, 4}, layer(1, "sliding_attention", "full_attention"), 4, None),
        ({None, 4}, layer(0), 4, 4),
        ({None, 4}, layer(0), None, None),
        ({None, 4, 8}, layer(0, "sliding_attention"), 8, 8),
        ({Chunk(4)}, layer(0), None, Chunk(4)),
        ({None, Chunk(4)}, layer(0, "chunked_attention"), None, Chunk(4)),
        ({None, Chunk(4)}, layer(0, "full_attention"), None, None),
    ],
)
def test_the_mask_s_window_counts_not_the_layer_s(windows, module, passed, expected):
    call = WatchedCall()
    call.windows = windows
    assert call.window(module, passed) == expected
    assert call.reason is None


def test_windows_that_belong_to_no_known_layer_are_refused():
    call = WatchedCall()
    call.windows = {None, 4}
    call.window(layer(0), 5)
    assert "several windows" in call.reason


@pytest.mark.parametrize("before", [False, True])
def test_cudnn_s_attention_is_off_for_a_while_only(before, monkeypatch):
    state = {"cudnn": before}
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: state["cudnn"])
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: state.update(cudnn=enabled))
    with contextlib.suppress(RuntimeError), cudnn_attention_off():
        assert not state["cudnn"]
        raise RuntimeError
    assert state["cudnn"] == before


def test_a_replacement_of_torch_s_attention_is_called(monkeypatch):
    query = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 1, 3, 64), device=torch.device("cuda"))
    monkeypatch.setattr(attention_kernels, "_widest_head", lambda device: 256)
    assert attention_kernels.flash_takes(query, query)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: None)
    assert not attention_kernels.flash_takes(query, query)
    assert not attention_kernels.kernels_take(query)

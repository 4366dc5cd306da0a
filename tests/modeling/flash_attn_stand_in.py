"""
Stands for the `flash_attn` package where there is none, so that transformers' own code around it runs on the CPU: it
takes off padding, reads sequence boundaries and calls the package. Only the kernel is a stand-in, SDPA for each
sequence.
"""

import functools
import inspect
import sys
from types import ModuleType

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import modeling_flash_attention_utils as utils
from transformers.integrations import hub_kernels
from transformers.integrations.flash_attention import flash_attention_forward

from tests.attention_oracle import one_sequence
from tests.code_of import as_code_of


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    s_aux=None,
):
    """The package's function: `[S, heads, D]`, causal from the bottom right, a window that leaves out the token."""
    assert causal
    assert not dropout_p
    assert cu_seqlens_q[-1] == len(q)
    assert cu_seqlens_k[-1] == len(k) == len(v)
    assert cu_seqlens_q.diff().max() == max_seqlen_q
    assert cu_seqlens_k.diff().max() == max_seqlen_k
    CALLS.append((len(q), len(k)))
    scaling = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    window = None if window_size[0] < 0 else window_size[0] + 1
    options = {"scaling": scaling, "window": window, "softcap": softcap or None, "sinks": s_aux}
    lengths, key_lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    parts = q.split(lengths), k.split(key_lengths), v.split(key_lengths)
    return torch.cat([one_sequence(*(t.transpose(0, 1) for t in part), **options) for part in zip(*parts, strict=True)])


def flash_attn_func(q, k, v, **options):
    """Rows without padding."""
    count, width = q.shape[:2]
    cu_seqlens = torch.arange(0, (count + 1) * width, width, dtype=torch.int32)
    flat = (t.flatten(0, 1) for t in (q, k, v))
    return flash_attn_varlen_func(*flat, cu_seqlens, cu_seqlens, width, width, **options).unflatten(0, (count, width))


CALLS = []  # tokens and keys of each call


def install(monkeypatch):
    """Let transformers find the package; returns the list of calls."""
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    functions = (
        as_code_of("flash_attn.flash_attn_interface", one) for one in (flash_attn_func, flash_attn_varlen_func)
    )
    package.flash_attn_func, package.flash_attn_varlen_func = functions
    package.flash_attn_with_kvcache, package.__version__ = None, "2.8.0"
    padding.pad_input, padding.unpad_input = utils._pad_input, utils._unpad_input
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    is_available = as_code_of("transformers", lambda *args, **kwargs: True)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", is_available)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_process_flash_kwargs_fn"):
        if hasattr(utils, name):
            monkeypatch.setattr(utils, name, None)
    CALLS.clear()
    return CALLS


def register_as_hub_kernel(monkeypatch, name):
    """Have transformers take the stand-in for a kernel of the Hub of this `name`, as if it had been fetched."""
    kernel, function = sys.modules["flash_attn"], flash_attention_forward
    if "implementation" in inspect.signature(utils._flash_attention_forward).parameters:  # transformers < 5
        function = functools.partial(function, implementation=kernel)
    monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
    masks = AttentionMaskInterface._global_mapping
    monkeypatch.setitem(masks, name, masks["flash_attention_2"])
    for module in (utils, hub_kernels):
        if hasattr(module, "load_and_register_attn_kernel"):
            load = as_code_of("transformers", lambda *args, **kwargs: kernel)
            monkeypatch.setattr(module, "load_and_register_attn_kernel", load)
    is_available = as_code_of("transformers", lambda *args, **kwargs: False)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", is_available)

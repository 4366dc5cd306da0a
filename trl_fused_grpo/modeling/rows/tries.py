"""Rows of TRL's asynchronous trainer, in which samples with a common prefix share its tokens: a prefix trie."""

from typing import Any, NamedTuple

from torch import Tensor, bincount

from trl_fused_grpo.modeling.attention.varlen import SharedPrefixKV, cu_seqlens_arguments


class TrieLayout(NamedTuple):
    """What the model is called with for a trie, and where its tokens are then."""

    model_inputs: dict[str, Any]  # keyword arguments of the model
    lengths: list[int]  # tokens of each sequence in the row
    places: Tensor | None  # [S]: where each token of the trie stands in the row; `None` where that is its own place


def of_trie(
    input_ids: Tensor,  # [1, S]
    position_ids: Tensor,  # [1, S]
    kv_index: Tensor,  # [K]: where the tokens stand that each segment attends to, from the root to its own
    cu_seqlens_q: Tensor,  # [segments + 1]: where segments begin in the row
    cu_seqlens_k: Tensor,  # [segments + 1]: where those of each begin in `kv_index`
    shares_prefixes: bool,
) -> TrieLayout:
    """A trie's row as it is, or where prefixes are not shared the samples one behind the other: each ends at a leaf."""
    size, lengths, key_lengths = input_ids.shape[1], cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    places, keys = None, None
    if shares_prefixes:  # also where no two are the same, as in packed rows: a compiled layer has one code for both
        keys = SharedPrefixKV.at(kv_index, size)
    elif lengths != key_lengths:
        is_leaf = bincount(kv_index, minlength=size)[cu_seqlens_q[1:].long() - 1] == 1  # no other has its last token
        kv_index = kv_index[is_leaf.repeat_interleave(cu_seqlens_k.diff().long())]
        places = SharedPrefixKV.at(kv_index, size).first
        input_ids, position_ids = input_ids[:, kv_index], position_ids[:, kv_index]
        lengths = key_lengths = cu_seqlens_k.diff()[is_leaf].tolist()
    boundaries = cu_seqlens_arguments(lengths, key_lengths, keys, input_ids.device)
    return TrieLayout({"input_ids": input_ids, "position_ids": position_ids, **boundaries}, lengths, places)

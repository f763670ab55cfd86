# SPDX-License-Identifier: Apache-2.0
"""The tree of draft tokens that EAGLE verifies in one pass: building it and walking it.

Node 0 of a request's tree is the token the drafts start from, nodes 1 to n - 1 are the selected
drafts. A node's children hang on a linked list: `next_token` names the first, `next_sibling` the
one after; -1 ends it. Callers: kernels/ops/speculative/spec_tree.py of SGLang 0.5.23,
srt/speculative/eagle_utils.py of 0.5.16 to 0.5.22.
"""

from enum import IntEnum

import torch
from torch import Tensor


class TreeMaskMode(IntEnum):
    """Layouts of the tree mask, numbered as SGLang numbers them."""

    FULL_MASK = 0
    QLEN_ONLY = 1


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Turn the selected drafts into mask, positions and child lists of a tree of n tokens.

    With n = draft_token_num: selected_index [bs, n - 1] numbers each draft among all that were
    made, `topk` for every expanded draft; parent_list [bs, expanded] gives the draft that was
    expanded, so a draft's parent is parent_list[selected // topk], the root when that is 0.
    verified_seq_len: [bs] tokens before the tree.

    Writes positions [bs * n] (verified length plus depth in the tree), retrive_index [bs, n]
    (i * n + node), retrive_next_token and retrive_next_sibling [bs, n] (-1 for none), and the flat
    bool tree_mask: a node sees itself and its ancestors. QLEN_ONLY is an [n, n] block per request;
    FULL_MASK an [n, verified + n] block of which the first `verified` columns stay as they are.
    """
    mode = TreeMaskMode(tree_mask_mode)
    bs, n = len(verified_seq_len), draft_token_num
    if not bs:
        return
    parent, linked = _parents(parent_list.view(bs, -1), selected_index.view(bs, n - 1), topk)

    visible = torch.eye(n, dtype=torch.bool).expand(bs, n, n).clone()
    ancestor = torch.arange(n).expand(bs, n)
    level = torch.zeros(bs, n, dtype=torch.long)
    for _ in range(depth):
        level += ancestor > 0
        ancestor = parent.gather(1, ancestor)
        visible.scatter_(2, ancestor[:, :, None], True)
    positions.view(bs, n).copy_(verified_seq_len[:, None] + level)
    retrive_index.copy_(torch.arange(bs * n).view(bs, n))

    node = torch.arange(n)
    # [bs, p, c]: c is a child of p; [bs, i, j]: j comes after i below the same parent
    child = linked[:, None, :] & (parent[:, None, :] == node[:, None])
    later = linked[:, :, None] & linked[:, None, :] & (node > node[:, None])
    later &= parent[:, :, None] == parent[:, None, :]
    retrive_next_token.copy_(_first(child))
    retrive_next_sibling.copy_(_first(later))

    flat = tree_mask.view(-1)
    if mode is TreeMaskMode.QLEN_ONLY:
        flat[: bs * n * n] = visible.flatten()
        return
    begin = 0
    for block, verified in zip(visible, verified_seq_len.tolist(), strict=True):
        end = begin + n * (verified + n)
        flat[begin:end].view(n, verified + n)[:, verified:] = block
        begin = end


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from the root along the drafts that the target model predicts.

    candidates, target_predict: [bs, n] ids, the draft at each node and the target's prediction
    after it; retrive_*: [bs, n] as `build_tree_kernel_efficient_cpu` writes them.

    Writes accept_index [bs, steps]: retrive_index of the root and of each accepted draft, at most
    steps - 1 of these, the rest untouched; accept_token_num [bs]: how many drafts were accepted;
    predicts [bs * n]: the target's prediction at every node of that path.
    """
    steps = accept_index.shape[1]
    token, place = candidates.tolist(), retrive_index.tolist()
    first_child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    predicted = target_predict.view(-1).tolist()
    walked: list[int] = []
    cells: list[int] = []
    accepted: list[int] = []
    for i in range(len(token)):
        path = [place[i][0]]
        node = 0
        while len(path) < steps:
            node = first_child[i][node]
            while node != -1 and token[i][node] != predicted[path[-1]]:
                node = sibling[i][node]
            if node == -1:
                break
            path.append(place[i][node])
        accepted.append(len(path) - 1)
        walked += path
        cells += range(i * steps, i * steps + len(path))
    where = torch.tensor(walked, dtype=torch.long)
    accept_token_num.copy_(torch.tensor(accepted))
    accept_index.view(-1)[cells] = where.to(accept_index.dtype)
    predicts[where] = target_predict.view(-1)[where].to(predicts.dtype)


def _parents(parent_list: Tensor, selected: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Parent node [bs, n] and whether the node hangs on it [bs, n]; the root is its own parent.

    A draft whose parent was not selected hangs nowhere and counts as a child of the root.
    """
    bs, drafts = selected.shape
    group = selected // topk
    if parent_list.shape[1]:
        expanded = parent_list.gather(1, group)
        match = selected[:, None, :] == expanded[:, :, None]
    else:
        match = torch.zeros(bs, drafts, drafts, dtype=torch.bool)
    below_root = group == 0
    found = match.any(2)
    parent = torch.where(found & ~below_root, match.int().argmax(2) + 1, 0)
    root = torch.zeros(bs, 1, dtype=torch.long)
    return torch.cat([root, parent], 1), torch.cat([root > 0, found | below_root], 1)


def _first(flags: Tensor) -> Tensor:
    """Index of the first True along the last dimension, -1 where there is none."""
    return torch.where(flags.any(-1), flags.int().argmax(-1), -1)

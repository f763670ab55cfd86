# SPDX-License-Identifier: Apache-2.0
"""Building and walking draft trees against explicit parent pointers."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdlab.standin import sgl_kernel

FULL_MASK, QLEN_ONLY, BITPACKING = 0, 1, 2


@dataclass
class Tree:
    """One request's drafts as EAGLE makes them: `parents[i]` is the node above node i + 1."""

    parents: list[int]
    parent_list: list[int]
    selected: list[int]

    @classmethod
    def grow(cls, topk: int, steps: int, nodes: int, draw: random.Random) -> "Tree":
        """Each step expands topk drafts of the one before; any set closed upwards is selected."""
        above = dict.fromkeys(range(topk), -1)
        level, parent_list = list(range(topk)), [-1]
        for _ in range(steps - 1):
            expanded = draw.sample(level, topk)
            level = []
            for place, parent in enumerate(expanded, start=len(parent_list)):
                children = range(place * topk, (place + 1) * topk)
                above |= dict.fromkeys(children, parent)
                level += children
            parent_list += expanded
        chosen: set[int] = set()
        while len(chosen) < nodes - 1:
            ready = [d for d, p in above.items() if d not in chosen and (p == -1 or p in chosen)]
            chosen.add(draw.choice(ready))
        selected = sorted(chosen)
        parents = [0 if above[d] == -1 else selected.index(above[d]) + 1 for d in selected]
        return cls(parents, parent_list, selected)

    def above(self, node: int) -> int:
        return self.parents[node - 1]

    def path(self, node: int) -> list[int]:
        return [node] if node == 0 else [*self.path(self.above(node)), node]

    def children(self, node: int) -> list[int]:
        return [i + 1 for i, parent in enumerate(self.parents) if parent == node]


@dataclass
class Built:
    mask: Tensor
    positions: Tensor
    index: Tensor
    child: Tensor
    sibling: Tensor


def build(
    trees: list[Tree], lens: list[int], topk: int, steps: int, nodes: int, mode: int
) -> Built:
    bs = len(trees)
    cells = sum(nodes * (n + nodes) for n in lens) if mode == FULL_MASK else bs * nodes * nodes
    mask = torch.ones(cells + 3, dtype=torch.bool)
    positions = torch.empty(bs * nodes, dtype=torch.long)
    index, child, sibling = torch.full((3, bs, nodes), -1)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        *(torch.tensor([t.parent_list for t in trees]), torch.tensor([t.selected for t in trees])),
        *(torch.tensor(lens), mask, positions, index, child, sibling),
        *(topk, steps, nodes, mode),
    )
    assert bool(mask[-3:].all())
    return Built(mask[:-3], positions, index, child, sibling)


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Tree], list[int], int, int, int]:
    topk, steps = draw(st.sampled_from([(1, 1), (1, 3), (2, 3), (4, 1), (4, 3)]))
    drafts = topk + (steps - 1) * topk * topk
    nodes = draw(st.integers(2, min(9, drafts + 1)))
    lens = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    source = random.Random(draw(st.integers(0, 9999)))
    return [Tree.grow(topk, steps, nodes, source) for _ in lens], lens, topk, steps, nodes


@settings(max_examples=80, deadline=None)
@given(forests())
def test_mask_positions_and_child_lists_follow_the_parents(
    forest: tuple[list[Tree], list[int], int, int, int],
) -> None:
    trees, lens, _, _, nodes = forest
    built = build(*forest, QLEN_ONLY)
    for i, tree in enumerate(trees):
        for node in range(nodes):
            path, children = tree.path(node), tree.children(node)
            row = built.mask.view(len(trees), nodes, nodes)[i, node]
            assert row.nonzero().flatten().tolist() == path
            assert built.positions[i * nodes + node] == lens[i] + len(path) - 1
            assert built.index[i, node] == i * nodes + node
            assert built.child[i, node] == (children[0] if children else -1)
            after = [s for s in tree.children(tree.above(node)) if s > node] if node else []
            assert built.sibling[i, node] == (after[0] if after else -1)


@settings(max_examples=40, deadline=None)
@given(forests())
def test_full_mask_is_the_tree_behind_untouched_prefix_columns(
    forest: tuple[list[Tree], list[int], int, int, int],
) -> None:
    _, lens, _, _, nodes = forest
    full, short = build(*forest, FULL_MASK), build(*forest, QLEN_ONLY)
    begin = 0
    for i, length in enumerate(lens):
        block = full.mask[begin : begin + nodes * (length + nodes)].view(nodes, length + nodes)
        assert bool(block[:, :length].all())
        assert torch.equal(
            block[:, length:].flatten(), short.mask[i * nodes**2 : (i + 1) * nodes**2]
        )
        begin += block.numel()
    assert torch.equal(full.positions, short.positions)


def test_a_draft_whose_parent_was_not_selected_is_never_reached() -> None:
    # topk 2: drafts 0 and 1 hang on the root, drafts 2 and 3 on draft 0, which is not selected
    orphan = Tree(parents=[], parent_list=[-1, 0, 1], selected=[1, 2])
    built = build([orphan], [5], topk=2, steps=2, nodes=3, mode=QLEN_ONLY)
    assert built.child.tolist() == [[1, -1, -1]]
    assert built.sibling.tolist() == [[-1, -1, -1]]
    assert built.mask.view(3, 3)[2].tolist() == [True, False, True]


def test_a_mask_layout_it_does_not_have_is_refused() -> None:
    tree = Tree([0], [-1], [0])
    with pytest.raises(ValueError, match="2 is not a valid TreeMaskMode"):
        build([tree], [5], topk=1, steps=1, nodes=2, mode=BITPACKING)


def test_no_requests_no_tree() -> None:
    none = torch.empty(0, dtype=torch.long)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        none.view(0, 1),
        none.view(0, 3),
        none,
        none.bool(),
        none,
        *[none.view(0, 4)] * 3,
        1,
        3,
        4,
        1,
    )


def walk(tree: Tree, token: list[int], predicted: list[int], limit: int) -> list[int]:
    """The accepted path: at each node the first child that the target predicts there."""
    path = [0]
    while len(path) < limit:
        right = [c for c in tree.children(path[-1]) if token[c] == predicted[path[-1]]]
        if not right:
            break
        path.append(right[0])
    return path


@settings(max_examples=100, deadline=None)
@given(forests(), st.integers(0, 9999), st.integers(1, 3))
def test_greedy_verify_accepts_the_path_that_the_target_predicts(
    forest: tuple[list[Tree], list[int], int, int, int], seed: int, words: int
) -> None:
    trees, _, _, steps, nodes = forest
    built = build(*forest, QLEN_ONLY)
    torch.manual_seed(seed)
    token, predicted = torch.randint(0, words, (2, len(trees), nodes))
    predicts = torch.full((len(trees) * nodes,), -7, dtype=torch.int32)
    accept_index = torch.full((len(trees), steps + 1), -1, dtype=torch.int32)
    accepted = torch.empty(len(trees), dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=token,
        retrive_index=built.index,
        retrive_next_token=built.child,
        retrive_next_sibling=built.sibling,
        target_predict=predicted,
    )
    expected = [-7] * len(predicts)
    for i, tree in enumerate(trees):
        path = walk(tree, token[i].tolist(), predicted[i].tolist(), steps + 1)
        assert accepted[i] == len(path) - 1
        padding = [-1] * (steps + 1 - len(path))
        assert accept_index[i].tolist() == [i * nodes + node for node in path] + padding
        for node in path:
            expected[i * nodes + node] = int(predicted[i, node])
    assert predicts.tolist() == expected

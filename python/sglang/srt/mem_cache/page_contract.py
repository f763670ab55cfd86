# SPDX-License-Identifier: Apache-2.0
"""What a prefix hit may be: whole pages, the same on every rank, and on both ends of a transfer.

Three parties see a hit. The scheduler, when it decides what a request still computes; prefill, when
decode promises that it holds a prefix already; decode, when it has to keep that promise.

    hit           whole pages of the allocator, the minimum over the context-parallel group
    promise       whole pages, at most the prompt; checked where it is made and where it is used
    restore       what was promised, no more and no less, under the lock that was taken for it

A hit that must shrink is matched again with a shorter key. So its last node, its lock and its host
part are the tree's own answer for that length, and nothing has to be put right afterwards. Not a
hit, and exact to the token: the rows a request computed itself, that is, the refresh of an
unfinished request and the row that a streaming session lends to its next turn.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from sglang.srt.disaggregation import final_chunk

if TYPE_CHECKING:
    from aiohttp import web
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.disaggregation.decode_hicache_mixin import DecodePrefixMatch
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        BasePrefixCache,
        MatchPrefixParams,
        MatchResult,
    )

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])


# hits ---------------------------------------------------------------------------------------


def agreeing(tree: BasePrefixCache | None) -> BasePrefixCache | None:
    """The tree itself where its own hits will do, as in most servers, else a view that sees to it.

    A tree matches whole pages of its own, and equal requests in equal order give equal trees. So
    the view is for a tree with other pages than the allocator, and for ranks whose host tiers each
    have their own pace.
    """
    try:
        view = tree.agreeing  # type: ignore[union-attr]
        if view is tree or view.tree is tree:  # a tree that wraps another finds the other's
            return view
    except AttributeError:
        pass
    return None if tree is None else _agreeing(tree)


def _agreeing(tree: BasePrefixCache) -> BasePrefixCache | AgreeingTree:
    allocator = getattr(tree, "token_to_kv_pool_allocator", None)
    page = int(getattr(allocator, "page_size", None) or tree.page_size)
    group = _ranks(tree)
    keeps_it = group is None and tree.page_size % page == 0
    tree.agreeing = tree if keeps_it else AgreeingTree(tree, page, group)
    return tree.agreeing


def _ranks(tree: BasePrefixCache) -> dist.ProcessGroup | None:
    """The context-parallel ranks whose trees may differ from this one."""
    if getattr(tree, "cache_controller", None) is None:
        return None
    if hasattr(tree, "attn_cp_group"):  # from 0.5.11
        group = tree.attn_cp_group
    else:
        from sglang.srt.distributed import parallel_state

        group = getattr(parallel_state._ATTN_CP, "cpu_group", None)
    return group if group is not None and dist.get_world_size(group) > 1 else None


@dataclass(eq=False, slots=True)
class AgreeingTree:
    """A tree whose hits are whole pages of the allocator, and the minimum over the ranks."""

    tree: BasePrefixCache
    page: int  # tokens; with decode context parallelism, of the pages of all ranks together
    group: dist.ProcessGroup | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tree, name)

    def match_prefix(self, asked: MatchPrefixParams) -> MatchResult:
        """The tree's match, repeated with shorter keys until it is what every rank may see."""
        key = asked.key
        while True:
            # An EAGLE tree turns the key it is given into pairs, so that it gets one of its own.
            probe = replace(asked, key=copy(key), cow_mamba=False)
            result = self.tree.match_prefix(probe)
            if _is_lent_row(result):
                return result
            whole, settled = self._visible(_hit(result))
            if settled:
                break
            key = asked.key[: _key_length(self.tree, whole)]
        # A recurrent state is copied for the request once, of the hit that it gets.
        return self.tree.match_prefix(replace(asked, key=key)) if asked.cow_mamba else result

    def _visible(self, hit: int) -> tuple[int, bool]:
        """Tokens of a hit that the scheduler may see, and whether every rank has just these."""
        lowest = highest = hit
        if self.group is not None:
            bounds = torch.tensor([hit, -hit], dtype=torch.int64)
            dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=self.group)
            lowest, highest = int(bounds[0]), -int(bounds[1])
        whole = max(lowest, 0) // self.page * self.page
        return whole, whole == highest


def _hit(result: MatchResult) -> int:
    """Tokens matched, on the device (a length from 0.5.22 on) and on the host."""
    if hasattr(result, "device_prefix_len"):
        return int(result.device_prefix_len + result.host_hit_length)
    return int(len(result.device_indices) + result.host_hit_length)


def _is_lent_row(result: MatchResult) -> bool:
    """Whether it is a streaming session's row; only such a match says what the tree has of it."""
    return getattr(result, "cache_protected_len", None) is not None


def _key_length(tree: BasePrefixCache, tokens: int) -> int:
    """Length of the key that matches at most `tokens`: an EAGLE tree keys n pairs with n + 1."""
    bigram = getattr(getattr(tree, "tree_core", tree), "is_eagle", False)
    return tokens + 1 if bigram and tokens else tokens


# promises -----------------------------------------------------------------------------------


def promise(queue: DecodePreallocQueue, entry: DecodeRequest, *args: Any, **kwargs: Any) -> None:
    """Send what decode promises to prefill, or refuse the request when it cannot be kept.

    Args:
        args, kwargs: the arguments of the receiver's `send_metadata` (`init` up to 0.5.9).
    """
    receiver = entry.kv_receiver
    page = queue.token_to_kv_pool_allocator.page_size
    manager = receiver.kv_mgr if hasattr(receiver, "kv_mgr") else queue.kv_manager
    prefix = kwargs.get("decode_prefix_len") or 0
    reason = _other_pages(manager).get(getattr(receiver, "bootstrap_addr", ""))
    reason = reason or _broken(entry.req, prefix, page, "promised by decode")
    if reason is None:
        getattr(receiver, "send_metadata", receiver.init)(*args, **kwargs)
        return
    logger.error(reason)
    receiver.abort()  # tells prefill, where the release has a message for it
    manager.record_failure(receiver.bootstrap_room, reason)
    manager.update_status(receiver.bootstrap_room, _failed())


def agreed_prefix(queue: PrefillBootstrapQueue, req: Req) -> int:
    """The prefix that decode promised to hold, in tokens; a broken promise fails the request."""
    prefix: int = req.disagg_kv_sender.pop_decode_prefix_len()
    if not prefix:
        return 0
    reason = _broken(req, prefix, queue.kv_manager.kv_args.page_size, "received by prefill")
    if reason is None:
        return prefix
    final_chunk.fail(req.disagg_kv_sender, reason)
    return 0


def _broken(req: Req, prefix: int, page: int, where: str) -> str | None:
    prompt = len(req.origin_input_ids)
    if 0 <= prefix <= prompt and prefix % page == 0:
        return None
    return (
        f"Request {req.rid}: the prefix of {prefix} tokens {where} is not a whole number of pages "
        f"of {page} tokens within its {prompt} prompt tokens. Start both servers with the same "
        f"--page-size and tokenizer, and send both the same prompt."
    )


def _failed() -> int:
    from sglang.srt.disaggregation.base.conn import KVPoll

    return KVPoll.Failed  # type: ignore[no-any-return]


# page sizes of the two ends -----------------------------------------------------------------


def _other_pages(manager: CommonKVManager) -> dict[str, str]:
    """Prefill servers with another page size: bootstrap address to what is wrong."""
    refused: dict[str, str] = vars(manager).setdefault("other_pages", {})
    return refused


def refuse_peer(manager: CommonKVManager, bootstrap_addr: str, reason: str) -> None:
    """Note a prefill server with another page size; its requests are refused one by one."""
    logger.error(f"{bootstrap_addr}: {reason}")
    _other_pages(manager)[bootstrap_addr] = reason


def asking(manager: CommonKVManager, url: str) -> str:
    """A request for prefill's layout that says what decode's page size is."""
    return f"{url}&decode_page_size={manager.kv_args.page_size}"


def notices_other_pages(handle_route_get: Method) -> Method:
    """Decorate the bootstrap server's handler: prefill's log names a decode with other pages."""

    @functools.wraps(handle_route_get)
    async def handle(self: Any, request: web.Request) -> Any:
        page = request.query.get("decode_page_size")
        if page is not None and self.page_size is not None and page != str(self.page_size):
            logger.error(
                f"Page size mismatch: the decode server at {request.remote} has page_size={page}, "
                f"this prefill server has page_size={self.page_size}. Requests between the two are "
                f"refused; start both with the same --page-size."
            )
        return await handle_route_get(self, request)

    return handle  # type: ignore[return-value]


# what decode restores from its host and storage tiers ---------------------------------------


def take_prefetch(queue: DecodePreallocQueue, req: Req, match: DecodePrefixMatch | None) -> int:
    """Start the prefetch from storage; the prefix to promise has of it what was taken.

    Up to 0.5.22 the prefetch started after the promise and could be declined (too short, too many).
    """
    if match is None:
        return 0
    if queue.scheduler.enable_decode_hicache:
        queue._start_hicache_prefetch(req, match)
        if not match.prefetch_registered:
            match.l3_storage_hit_length = 0
    return int(match.decode_prefix_len)


def promised_ids(entry: DecodeRequest, tree: BasePrefixCache) -> Sequence[int]:
    """The prompt's tokens that were promised: other requests may have lengthened the hit since."""
    length = _key_length(tree, entry.prefix_match.decode_prefix_len)
    ids: Sequence[int] = entry.req.origin_input_ids[:length]
    return ids

# SPDX-License-Identifier: Apache-2.0
"""Every draft pool travels from prefill to decode, between two ends that draft alike.

Prefill tells its bootstrap server how it drafts; decode asks there before its first request to that
prefill and fails requests to one that drafts otherwise, naming both sides.
`SGLANG_DRAFT_PAIR_UNCHECKED=1` on decode skips the comparison: a decode server that drafts alone
then starts every request without the prompt's draft KV.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import requests
from sglang.srt.mem_cache import draft_pools

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache

logger = logging.getLogger(__name__)

ROUTE = "/draft_layout"
UNCHECKED = "SGLANG_DRAFT_PAIR_UNCHECKED"
ANSWER_S = 2.0

BufferInfos = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True)
class DraftLayout:
    """What of its drafting one end shares with the other; a field that differs breaks the pair.

    ``layers``, ``width`` and ``dtype`` have one entry per draft pool: its layers, the KV values of
    one token in one layer over all ranks, and how they are stored. The draft's own number of steps
    counts only where prefill drafts all of them, in a multi-layer draft.
    """

    algorithm: str = "none"
    layers: tuple[int, ...] = ()
    width: tuple[int, ...] = ()
    dtype: tuple[str, ...] = ()
    topk: int = 0
    steps: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler) -> DraftLayout:
        """The layout of a scheduler whose draft worker and pools exist."""
        runners = draft_pools.runners(scheduler)
        if not runners:
            return cls()
        spec = _spec_settings(scheduler)
        multi_layer = bool(spec.enable_multi_layer_eagle)
        return cls(
            algorithm=scheduler.spec_algorithm.name,
            layers=tuple(int(runner.token_to_kv_pool.layer_num) for runner in runners),
            width=tuple(_width(runner) for runner in runners),
            dtype=tuple(
                str(runner.token_to_kv_pool.dtype).removeprefix("torch.") for runner in runners
            ),
            topk=int(spec.speculative_eagle_topk or 0),
            steps=int(spec.speculative_num_steps or 0) if multi_layer else 0,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DraftLayout:
        """The layout that the other end sent; fields of another version of it are left out."""
        known: dict[str, Any] = {
            each.name: tuple(data[each.name])
            if isinstance(data[each.name], list)
            else data[each.name]
            for each in fields(cls)
            if each.name in data
        }
        return cls(**known)

    def differences(self, prefill: DraftLayout) -> list[str]:
        """Field by field, what ``prefill`` has and this decode side has not."""
        if "none" in (self.algorithm, prefill.algorithm) and self.algorithm != prefill.algorithm:
            return [f"algorithm: prefill {prefill.algorithm}, decode {self.algorithm}"]
        return [
            f"{name}: prefill {_plain(theirs)}, decode {_plain(ours)}"
            for (name, ours), theirs in zip(
                asdict(self).items(), asdict(prefill).values(), strict=True
            )
            if ours != theirs
        ]


class JoinedPools:
    """Several draft pools, registered for transfer as one; all else is the first one's.

    Entries keep the order that a single pool gives them, all layers of a kind together: the keys
    of every pool, then the values of every pool.
    """

    def __init__(self, pools: Sequence[KVCache]) -> None:
        self.pools = tuple(pools)
        self.layer_num = sum(int(pool.layer_num) for pool in pools)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pools[0], name)

    def get_contiguous_buf_infos(self) -> BufferInfos:
        """Addresses, bytes and bytes of a page of each entry."""
        infos = [list(zip(*pool.get_contiguous_buf_infos(), strict=True)) for pool in self.pools]
        layers = [int(pool.layer_num) for pool in self.pools]
        kinds = len(infos[0]) // layers[0]
        entries = [
            entry
            for kind in range(kinds)
            for info, n in zip(infos, layers, strict=True)
            for entry in info[kind * n : (kind + 1) * n]
        ]
        assert len(entries) == sum(map(len, infos)), "draft pools of different kinds"
        pointers, lengths, items = zip(*entries, strict=True)
        return list(pointers), list(lengths), list(items)


_own = DraftLayout()


def all_pools(scheduler: Scheduler, primary: KVCache | None) -> Any:
    """What a transfer queue registers in place of ``primary``, the first draft pool.

    Notes the scheduler's layout for the handshake on the way; there is one scheduler a process.
    Pools with buffers beside their rows (indexer keys, rings) are registered by their type, which
    a joined pool does not have: of those the first travels alone, as it did.
    """
    global _own
    _own = DraftLayout.of(scheduler)
    pools = draft_pools.of(scheduler)
    if primary is None or len(pools) < 2:
        return primary
    beside = [type(pool).__name__ for pool in pools if hasattr(pool, "get_state_buf_infos")]
    if not beside:
        return JoinedPools(pools)
    logger.warning(
        "Only the first of %d draft KV pools is transferred: %s has buffers beside its rows. "
        "Later draft steps start without the prompt's KV.",
        len(pools),
        beside[0],
    )
    return primary


def put(url: str, **arguments: Any) -> requests.Response:
    """``requests.put`` of a rank's registration at ``url``, with the layout sent ahead of it.

    The server is asked for the layout only after all ranks are registered.
    """
    try:
        address = url.removesuffix("/route") + ROUTE
        requests.put(address, json=asdict(_own), timeout=ANSWER_S).raise_for_status()
    except requests.RequestException as error:
        logger.info("The bootstrap server takes no draft layout, so no pair is checked: %s", error)
    return requests.put(url, **arguments)


def add_route(server: Any) -> None:
    """Let a bootstrap server keep how its prefill ranks draft and tell decode."""

    def tells_more(kept: dict[str, Any] | None, layout: dict[str, Any]) -> bool:
        # Of the stages of a pipeline the last alone drafts; the others must not hide it.
        return kept is None or bool(layout.get("layers"))

    keep_and_give(server, ROUTE, "no prefill rank has said how it drafts", tells_more)


def keep_and_give(
    server: Any,
    route: str,
    nothing: str,
    replaces: Callable[[dict[str, Any] | None, dict[str, Any]], bool] = lambda *_: True,
) -> None:
    """Let a bootstrap server keep the JSON object that prefill ranks PUT, and give it.

    It is kept in the attribute that `route` names. `nothing`: the text of the 404 before the first
    one; `replaces`: whether an object takes the place of the one that is kept.
    """
    from aiohttp import web

    attribute = route.removeprefix("/")
    setattr(server, attribute, None)

    async def keep(request: web.Request) -> web.Response:
        layout = await request.json()
        if not isinstance(layout, dict):
            return web.Response(text=f"{attribute} is a JSON object", status=400)
        if replaces(getattr(server, attribute), layout):
            setattr(server, attribute, layout)
        return web.Response(text="OK")

    async def give(_: web.Request) -> web.Response:
        kept = getattr(server, attribute)
        if kept is None:
            return web.Response(text=nothing, status=404)
        return web.json_response(kept)

    server.app.router.add_put(route, keep)
    server.app.router.add_get(route, give)


def compare(info: Any, address: str) -> None:
    """Note at ``info``, what is known of the prefill at ``address``, why it cannot serve here.

    Runs where that was just asked of the same server, before anybody finds ``info``.
    """
    info.refusal = getattr(info, "refusal", None) or _refusal(address)


def checked(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CommonKVReceiver.init``: a request to a prefill that drafts otherwise fails.

    It is set up first and then aborted, which is how prefill learns that it need not wait.
    """

    @functools.wraps(init)
    def wrapper(receiver: Any, prefill_dp_rank: int) -> None:
        manager = receiver.kv_mgr
        info = manager.prefill_info_table.get(receiver.bootstrap_addr)
        init(receiver, prefill_dp_rank)
        reason: str | None = getattr(info, "refusal", None)
        if reason is None:
            return
        from sglang.srt.disaggregation.base import KVPoll

        receiver.abort()
        manager.record_failure(receiver.bootstrap_room, reason)
        receiver.conclude_state = KVPoll.Failed
        manager.update_status(receiver.bootstrap_room, KVPoll.Failed)

    return wrapper


def checked_at_birth(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap 0.5.9's fetch of a prefill's sizes: one that drafts otherwise counts as gone."""

    @functools.wraps(fetch)
    def wrapper(receiver: Any) -> Any:
        sizes = fetch(receiver)
        if sizes[0] is None or _refusal(receiver.bootstrap_addr) is None:
            return sizes
        return (None,) * len(sizes)

    return wrapper


def _refusal(address: str) -> str | None:
    """Why the prefill at ``address`` cannot serve this server; None where it can, or may."""
    if os.environ.get(UNCHECKED, "").lower() in ("1", "true", "yes"):
        return None
    differences = _differences(address)
    if not differences:
        return None
    reason = (
        f"prefill {address} and this decode server draft differently "
        f"({'; '.join(differences)}). Start both with the same draft model and "
        f"--speculative-* flags."
    )
    logger.error("%s", reason[0].upper() + reason[1:])
    return reason


def _differences(address: str) -> list[str]:
    try:
        reply = requests.get(f"http://{address}{ROUTE}", timeout=ANSWER_S)
        reply.raise_for_status()
        return _own.differences(DraftLayout.from_json(reply.json()))
    except (requests.RequestException, ValueError, TypeError) as error:
        logger.info(
            "Prefill %s does not say how it drafts, so it is taken as is: %s", address, error
        )
        return []


def _width(runner: Any) -> int:
    """KV values of one token in one layer, over all ranks: a latent row, or all heads' keys."""
    pool = runner.token_to_kv_pool
    latent = getattr(pool, "kv_cache_dim", None)
    if latent is not None:
        return int(latent)
    return int(runner.model_config.get_total_num_kv_heads() * runner.model_config.head_dim)


def _spec_settings(scheduler: Scheduler) -> Any:
    try:
        from sglang.srt.runtime_context import get_spec
    except ImportError:  # before 0.5.17
        return scheduler.server_args
    return get_spec()


def _plain(value: Any) -> str:
    return " + ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)

# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode serve one model with one kind of KV cache, or their requests fail by name.

Prefill tells its bootstrap server what it serves, decode compares when it asks that server how it
is laid out. A request to a prefill that does not fit is set up and aborted, so that both ends learn
of it. What the draft shares is compared by `draft_transfer`, pages by `page_contract`, prompts by
`pair_agreement`. `SGLANG_PAIR_UNCHECKED=1` on decode skips the comparison.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import requests
from sglang.srt.disaggregation import draft_transfer

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

ROUTE = "/pair_layout"
UNCHECKED = "SGLANG_PAIR_UNCHECKED"
ANSWER_S = 1.0


@dataclass(frozen=True)
class PairLayout:
    """What both ends must have alike for KV of one to be KV of the other; None: not known.

    ``model``: architecture and sizes; weights and paths may differ, as quantized ones do.
    ``kv_width``: values of one token in one layer over all ranks, a latent row or all heads' keys.
    ``kv_dtype``: what the pool stores, which `--kv-cache-dtype auto` takes from the weights.
    """

    model: str | None = None
    kv_width: int | None = None
    kv_dtype: str | None = None

    @classmethod
    def of(cls, scheduler: Scheduler) -> PairLayout:
        """The layout of a scheduler whose pools exist."""
        config: Any = scheduler.model_config
        pool: Any = scheduler.token_to_kv_pool_allocator.get_kvcache()
        pool = getattr(pool, "full_kv_pool", pool)  # of a hybrid
        dtype = getattr(pool, "dtype", None)
        return cls(
            model=_model(config),
            kv_width=_width(pool, config),
            kv_dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PairLayout:
        """The layout that the other end sent; fields of another version of it are left out."""
        return cls(**{each.name: data.get(each.name) for each in fields(cls)})

    def differences(self, prefill: PairLayout) -> list[str]:
        """Field by field, what ``prefill`` has and this decode side has not, where both say."""
        return [
            f"{name}: prefill {theirs}, decode {ours}"
            for (name, ours), theirs in zip(
                asdict(self).items(), asdict(prefill).values(), strict=True
            )
            if None not in (ours, theirs) and ours != theirs
        ]


_own = PairLayout()


def note(scheduler: Scheduler) -> None:
    """Keep this scheduler's layout for the handshake; there is one scheduler a process."""
    global _own
    _own = PairLayout.of(scheduler)


def announce(url: str) -> None:
    """Tell the bootstrap server, of whose address `url` is a route, what this rank serves."""
    try:
        address = url.removesuffix("/route") + ROUTE
        requests.put(address, json=asdict(_own), timeout=ANSWER_S).raise_for_status()
    except requests.RequestException as error:
        logger.info("The bootstrap server takes no layout, so no pair is checked: %s", error)


def add_route(server: Any) -> None:
    """Let a bootstrap server keep the layout of its prefill and give it to decode."""
    draft_transfer.keep_and_give(server, ROUTE, "no prefill rank has said what it serves")


def refuse(info: Any, reason: str) -> None:
    """Note at ``info``, what is known of a prefill, why it cannot serve here."""
    logger.error("%s", reason)
    info.refusal = getattr(info, "refusal", None) or reason


def compare(info: Any, address: str) -> None:
    """Note at ``info`` why the prefill at ``address`` cannot serve this server, if it cannot."""
    if os.environ.get(UNCHECKED, "").lower() in ("1", "true", "yes"):
        return
    differences = _differences(address)
    if differences:
        refuse(
            info,
            f"Prefill {address} and this decode server do not fit ({'; '.join(differences)}). "
            "Start both with the same model, --dtype and --kv-cache-dtype.",
        )


def _differences(address: str) -> list[str]:
    try:
        reply = requests.get(f"http://{address}{ROUTE}", timeout=ANSWER_S)
        reply.raise_for_status()
        return _own.differences(PairLayout.from_json(reply.json()))
    except (requests.RequestException, ValueError, TypeError, AttributeError) as error:
        logger.info(
            "Prefill %s does not say what it serves, so it is taken as is: %s", address, error
        )
        return []


def _model(config: Any) -> str:
    names = getattr(config.hf_config, "architectures", None) or ["?"]
    return (
        f"{names[0]} of {config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"vocabulary {config.vocab_size}"
    )


def _width(pool: Any, config: Any) -> int:
    latent = getattr(pool, "kv_cache_dim", None)
    if latent is not None:
        return int(latent)
    return int(config.get_total_num_kv_heads() * config.head_dim)

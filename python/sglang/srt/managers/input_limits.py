# SPDX-License-Identifier: Apache-2.0
"""What a request may hold, looked at where it enters: a ValueError here is a 400 for its client.

What gets past this point is indexed with on the device, where a value out of range ends the
scheduler and with it every other request.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_params import SamplingParams

Result = TypeVar("Result")

MAX_SAMPLES = 4096
"""Most answers to one prompt (`n`); each is a request of its own."""
INT32_MAX, INT64_MIN, INT64_MAX = 2**31 - 1, -(2**63), 2**63 - 1
# Lowest and highest of what the scheduler counts with or puts into tensors.
WHOLE = {
    "top_k": (-1, INT32_MAX),
    "max_new_tokens": (0, INT64_MAX),
    "min_new_tokens": (0, INT32_MAX),
    "n": (1, MAX_SAMPLES),
    "sampling_seed": (INT64_MIN, INT64_MAX),
    "stream_interval": (INT64_MIN, INT64_MAX),
}
FINITE = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
# Fields of which a batch has one entry for each of its prompts.
PER_PROMPT = (
    "rid",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "lora_path",
    "custom_logit_processor",
    "return_hidden_states",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
# Those of them that may not be a list when there is one prompt.
SCALAR = (
    "rid",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "lora_path",
    "return_hidden_states",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
UNREADABLE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, re.error)


def refuses_unreadable(read: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a method that reads what a client sent: what it stumbles over is refused by name."""

    @functools.wraps(read)
    def reading(*args: Any, **kwargs: Any) -> Result:
        try:
            return read(*args, **kwargs)
        except UNREADABLE as error:
            kind = type(error).__name__
            raise ValueError(f"the request cannot be read ({kind}: {error})") from error

    return reading


def checks_shape(normalize: Callable[[GenerateReqInput], None]) -> Callable[..., None]:
    """Decorate `GenerateReqInput.normalize_batch_and_arguments`: its lists fit its prompts."""

    @functools.wraps(normalize)
    @refuses_unreadable
    def normalizing(request: GenerateReqInput) -> None:
        given = request.sampling_params
        for params in given if isinstance(given, list) else [given or {}]:
            _whole("n", params.get("n", 1), 1, MAX_SAMPLES)
        if request.rid == "":
            raise ValueError("rid is empty: leave it out, or give each request one of its own")
        normalize(request)
        _check_lists(request)

    return normalizing


def check_request(manager: TokenizerManager, request: Any, input_ids: Sequence[int] | None) -> None:
    """Refuse a tokenized request that the model cannot take.

    `request`: one GenerateReqInput or EmbeddingReqInput, `input_ids`: its prompt; None when it
    comes as embeddings or from a processor. A multimodal prompt may hold placeholders outside the
    vocabulary, an adapter's own tokens follow it.
    """
    vocab = manager.model_config.vocab_size
    processed = manager.mm_processor is not None and request.contains_mm_input()
    if request.input_embeds is not None:
        _check_embeddings(request.input_embeds, manager.model_config.hidden_size)
    elif input_ids is not None and not processed:
        own_tokens = getattr(request, "lora_path", None) is not None
        if input_ids:
            _check_tokens(input_ids, INT64_MAX if own_tokens else vocab)
        elif not _continues(request):
            raise ValueError("the prompt is empty: it needs at least one token")
    overrides = getattr(request, "positional_embed_overrides", None)
    if overrides is not None and not hasattr(overrides, "positions"):  # a class, with tensors
        raise ValueError("positional_embed_overrides can be given in the server's process only")
    _check_logprobs(request, vocab)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse sampling parameters of a type or size that no sampler takes."""
    for name, bounds in WHOLE.items():
        value = getattr(params, name, None)
        if value is not None:
            _whole(name, value, *bounds)
    for name in FINITE:
        value = getattr(params, name)
        if not isinstance(value, float | int) or isinstance(value, bool):
            raise ValueError(f"{name} has to be a number, got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
    for token, bias in (params.logit_bias or {}).items():
        if not math.isfinite(bias):
            raise ValueError(f"logit_bias must be finite, got {bias} for token {token}")
    if params.min_new_tokens > 0:  # stop tokens are masked until then, by index
        for token in params.stop_token_ids or ():
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"with min_new_tokens, stop_token_ids must be in [0, {vocab_size}), got {token}"
                )


def _whole(name: str, value: Any, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be in [{lowest}, {highest}], got {value}")


def _check_lists(request: GenerateReqInput) -> None:
    """One entry for each prompt of a batch, no list where there is one prompt."""
    if request.is_single:
        for name in SCALAR:
            if isinstance(getattr(request, name, None), list):
                raise ValueError(f"{name} is a list, but there is one prompt that is not in a list")
        return
    for name in PER_PROMPT:
        value = getattr(request, name, None)
        if isinstance(value, list) and len(value) < request.batch_size:
            raise ValueError(
                f"{name} has {len(value)} entries for {request.batch_size} prompts: give one for "
                "each prompt, or a single value for all"
            )


def _check_tokens(input_ids: Sequence[int], vocab: int) -> None:
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or highest >= vocab:
        raise ValueError(
            f"input_ids contains token {lowest if lowest < 0 else highest}, "
            f"the model's tokens are [0, {vocab})"
        )


def _continues(request: Any) -> bool:
    """Whether the prompt may come from a session's history, or from a processor of audio."""
    session = getattr(request, "session_params", None) or getattr(request, "session_id", None)
    return bool(session) or request.contains_mm_input()


def _check_embeddings(rows: Sequence[Sequence[float]], hidden_size: int) -> None:
    """`rows`: [tokens, hidden_size]."""
    if not rows:
        raise ValueError("input_embeds is empty: it needs at least one row")
    wrong = next((len(row) for row in rows if len(row) != hidden_size), None)
    if wrong is not None:
        raise ValueError(
            f"input_embeds has a row of {wrong} numbers, the model's have {hidden_size}"
        )


def _check_logprobs(request: Any, vocab: int) -> None:
    if (count := getattr(request, "top_logprobs_num", None)) is not None:
        _whole("top_logprobs_num", count, 0, vocab)
    for token in getattr(request, "token_ids_logprob", None) or ():
        _whole("each of token_ids_logprob", token, 0, vocab - 1)

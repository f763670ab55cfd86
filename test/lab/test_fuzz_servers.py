# SPDX-License-Identifier: Apache-2.0
"""Bodies and bootstrap messages of any kind neither end nor hang a patched pair.

PDLAB_FUZZ_BODIES says how many bodies: 200 by default, 2000 for a soak. Examples are the same in
every run; PDLAB_FUZZ_SEED gives others.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Coroutine, Iterator
from typing import Any

import aiohttp
import pytest
import zmq
from built import BUILD, START_LIMIT_S, TREE, on_servers
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from leftovers import MARK, marked

from pdlab import trees
from pdlab.attacks import FEW_TOKENS, ODD_FRAMES, Answer, Field
from pdlab.pair import Launcher, Pair
from pdlab.ports import HOST
from pdlab.progress import Progress
from pdlab.runner import Runner
from pdlab.settings import Device, Settings
from pdlab.siege import bootstrap_port, state
from pdlab.traffic import Outcome, random_requests, send_all

BODIES = int(os.environ.get("PDLAB_FUZZ_BODIES", "200"))
AT_ONCE = 20
# Beyond the limits in the settings and decode's tries at an address where nobody listens.
ANSWER_LIMIT_S = 40.0
SETTLE_S = 20.0
SETTINGS = Settings(
    environment=(
        ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "4"),
        ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "4"),
    )
)
VOCAB = 512
GOOD = random_requests(17, VOCAB, (5, 40, 129), 24)
pytestmark = on_servers

EDGES = (-1, 0, 1, VOCAB - 1, VOCAB, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
numbers = st.sampled_from(EDGES) | st.integers(-8, 8) | st.floats()
words = st.text(max_size=6) | st.sampled_from(("", "\0", "*" * 300, "(", "[", "a{99999}", "{"))
leaves = st.none() | st.booleans() | numbers | words
junk = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)
# How long a request is served is not what this is about: a large number of tokens is left out, and
# so is null, which is as many as the context has.
lengths = st.integers(-2, FEW_TOKENS) | words | st.floats(max_value=8)
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "stop_regex"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
    *("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "ignore_eos"),
    *("skip_special_tokens", "no_stop_trim", "custom_params", "stream_interval", "sampling_seed"),
    "no_such_parameter",
)
TOP = (
    *("input_ids", "text", "input_embeds", "rid", "stream", "return_logprob", "logprob_start_len"),
    *("top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "lora_path", "priority"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "extra_key"),
    *("return_hidden_states", "custom_logit_processor", "data_parallel_rank", "no_such_field"),
    *("sampling_params", "background", "conversation_id", "session_params"),
)
PLACES = ("front", "prefill", "decode", "both")
PATHS = ("/generate", "/generate", "/generate", "/v1/completions", "/abort_request")
BOOTSTRAP = ("/route", "/register_dp_rank", "/query_dp_ranks", "/draft_layout", "/pair_layout")


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A request that is right but for a few of its fields; at times it is no object at all."""
    body: Any = {"input_ids": draw(prompts), "sampling_params": {"max_new_tokens": FEW_TOKENS}}
    for name in draw(st.lists(st.sampled_from(SAMPLING), max_size=2)):
        body["sampling_params"][name] = draw(junk)
    if draw(st.booleans()):
        body["sampling_params"]["max_new_tokens"] = draw(lengths)
    for name in draw(st.lists(st.sampled_from(TOP), max_size=2)):
        body[name] = draw(junk)
    if draw(st.integers(0, 9)) == 0:
        body = draw(junk)
    place, path = draw(st.sampled_from(PLACES)), draw(st.sampled_from(PATHS))
    return {"place": place, "path": path, "body": body}


frames = st.lists(
    st.binary(max_size=24)
    | st.sampled_from((b"None", b"ABORT", b"12", b"WATERMARK", b"STAGING_RSP", HOST.encode())),
    min_size=1,
    max_size=20,
) | st.sampled_from(ODD_FRAMES)
messages = st.lists(st.tuples(st.sampled_from(BOOTSTRAP), junk), max_size=3)


class Fuzzed:
    """A pair, what it answered so far, and the port where prefill hears of decode."""

    def __init__(self, pair: Pair, right: list[Outcome]) -> None:
        self.pair, self.right = pair, right
        self.prefill, self.decode = pair.servers[:2]
        self.port = bootstrap_port(self.prefill)
        self.bodies = 0
        self.start = asyncio.run(state(*pair.servers[:2]))
        self.rank_port = asyncio.run(self._rank_port())
        self.context = zmq.Context()

    async def _rank_port(self) -> int:
        query = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
        url = f"http://{HOST}:{self.port}/route?{query}"
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return int((await reply.json())["rank_port"])

    def tell(self, odd: list[Any]) -> None:
        """Messages to the thread that serves all of prefill's requests."""
        socket = self.context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(f"tcp://{HOST}:{self.rank_port}")
        for message in odd:
            socket.send_multipart([*message])
        socket.close()

    async def send(self, wanted: list[dict[str, Any]], posts: list[tuple[str, Any]]) -> list[str]:
        """All at once; those that were not answered, and why."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            there = Field(self.pair.url, self.prefill.url, self.decode.url, self.port, VOCAB, 0,
                          session)  # fmt: skip
            tasks = [self._one(there, each) for each in wanted]
            bootstrap = f"http://{HOST}:{self.port}"
            tasks += [_alone(there.post(bootstrap, body, path)) for path, body in posts]
            answers = await asyncio.wait_for(asyncio.gather(*tasks), ANSWER_LIMIT_S)
        return [
            f"{answer.text}: {sent}"
            for sent, given in zip([*wanted, *posts], answers, strict=True)
            for answer in given
            if answer.status is None
        ]

    async def _one(self, there: Field, each: dict[str, Any]) -> list[Answer]:
        self.bodies += 1
        body = each["body"]
        if isinstance(body, dict) and each["place"] != "front":
            body = {
                "bootstrap_host": HOST,
                "bootstrap_port": self.port,
                "bootstrap_room": there.room(),
                **body,
            }
        if each["place"] == "both":
            halves = [there.post(s.url, body, each["path"]) for s in (self.prefill, self.decode)]
            return list(await asyncio.gather(*halves))
        url = {"front": self.pair.url, "prefill": self.prefill.url, "decode": self.decode.url}
        return [await there.post(url[each["place"]], body, each["path"])]

    def is_well(self) -> None:
        """Everybody lives, and good requests are answered right."""
        self.pair.require_alive()
        outcomes = asyncio.run(send_all(self.pair.url, GOOD, limit_s=ANSWER_LIMIT_S))
        assert [outcome.error for outcome in outcomes] == [None] * len(GOOD)
        assert [each.tokens for each in outcomes] == [each.tokens for each in self.right]


async def _alone(answer: Coroutine[Any, Any, Answer]) -> list[Answer]:
    return [await answer]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    """One pair for all examples."""
    mark = os.environ[MARK] = f"fuzz-{os.getpid()}"
    tree = trees.existing(TREE, trees.PATCHED)
    with Launcher(Device.CPU, START_LIMIT_S, tmp_path_factory.mktemp("logs")) as launcher:
        model = Runner(launcher, Progress(), BUILD / "fixtures").model_of(SETTINGS)
        with launcher.pair(tree, SETTINGS, model) as pair:
            right = asyncio.run(send_all(pair.url, GOOD))
            assert all(outcome.ok for outcome in right)
            yield Fuzzed(pair, right)
    del os.environ[MARK]
    assert marked(mark) == []


@seed(int(os.environ.get("PDLAB_FUZZ_SEED", "1")))
@settings(
    max_examples=math.ceil(BODIES / AT_ONCE),
    deadline=None,
    database=None,
    phases=(Phase.generate,),  # a server that is gone cannot be asked for a smaller example
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
@given(
    wanted=st.lists(bodies(), min_size=AT_ONCE, max_size=AT_ONCE, unique_by=repr),
    posts=messages,
    odd=st.lists(frames, max_size=3),
)
def test_no_body_and_no_message_ends_or_hangs_the_pair(
    fuzzed: Fuzzed, wanted: list[dict[str, Any]], posts: list[tuple[str, Any]], odd: list[Any]
) -> None:
    fuzzed.tell(odd)
    unanswered = asyncio.run(fuzzed.send(wanted, posts))
    fuzzed.is_well()
    assert unanswered == []


def test_afterwards_everything_is_as_it_was(fuzzed: Fuzzed) -> None:
    assert fuzzed.bodies >= BODIES

    async def settled() -> dict[str, Any]:
        for _ in range(int(SETTLE_S)):
            left = {
                name: value
                for name, value in (await state(*fuzzed.pair.servers[:2])).items()
                if value != fuzzed.start.get(name)
            }
            if not left:
                break
            await asyncio.sleep(1)
        return left

    assert asyncio.run(settled()) == {}

# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in whatever order, every metadata row has at most one owner and none is lost.

METADATA_SLOTS_STEPS sets the number of steps, METADATA_SLOTS_SEED the first seed (it is printed).
"""

import os
import random
import sys
import time
import unittest
from collections import Counter
from pathlib import Path
from unittest import mock

from sglang.srt.disaggregation import draft_rows
from sglang.srt.disaggregation.metadata_slots import DEFAULT_QUARANTINE_SECONDS, Status
from sglang.test.ci.ci_register import register_cpu_ci

sys.path.insert(0, str(Path(__file__).parent))
from decode_side import DecodeSide

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

STEPS = int(os.environ.get("METADATA_SLOTS_STEPS", 20_000))
SEED = int(os.environ.get("METADATA_SLOTS_SEED", time.time_ns() % 1_000_000))
STEPS_PER_LIFE = 500  # then everything is drained and the server starts anew
CROWD = 14  # requests at a time, for 3 + 3 request rows

FOREIGN = 255  # what a sender without a request writes
LIMIT = DEFAULT_QUARANTINE_SECONDS


class Life:
    """One decode server, driven at random and looked at after every step."""

    def __init__(self, rng):
        self.rng = rng
        self.side = DecodeSide(size=3, pre_alloc=3, slots=rng.choice((None, 4)))
        self.overlap = rng.random() < 0.5
        self.reqs = {}  # rid -> request, until it is gone
        self.values = {}  # rid -> what its sender writes
        self.late = []  # (row, room, end of its time) of aborted senders
        self.in_flight = None
        self.born = 0

    # Steps.

    def arrive(self):
        if len(self.reqs) < CROWD:
            self.born += 1
            rid = f"r{self.born}."
            self.reqs[rid] = self.side.arrive(rid, self.born, self.rng.randint(1, 6))
            self.values[rid] = self.born % 200 + 1

    def land(self):
        if entry := self.pick(self.side.transfer.queue):
            self.side.arrived(entry.req.rid, self.values[entry.req.rid])

    def land_without_row(self):
        """The KV is there; the row comes later."""
        if entry := self.pick(self.side.transfer.queue):
            self.side.kv_arrived(entry.req.rid)

    def fail(self):
        if entry := self.pick(self.side.transfer.queue):
            self.note_late_sender(entry)
            self.side.fail(entry.req.rid)

    def abort(self):
        if rid := self.pick(self.reqs):
            for entry in self.side.transfer.queue:
                if entry.req.rid == rid:
                    self.note_late_sender(entry)
            self.side.abort(rid)

    def write_late(self):
        self.late = [sender for sender in self.late if self.side.now < sender[2]]
        if sender := self.pick(self.late):
            row, room, _ = sender
            self.side.write(row, room, FOREIGN)

    def poll(self):
        self.side.poll()

    def turn(self):
        self.side.poll()
        batch = self.side.schedule()
        if not self.overlap:
            if batch:
                self.side.result(batch)
            return
        self.in_flight, done = batch.copy() if batch else None, self.in_flight
        if done:
            self.side.result(done)

    def retract(self):
        running = [req for req in self.side.scheduler.running_batch.reqs if not req.finished()]
        if self.in_flight is None and len(running) > 1:
            req = self.pick(running)
            backup = self.rng.random() < 0.7
            self.side.retract(req, backup)

    def wait(self):
        self.side.now += self.rng.choice((0.1, LIMIT / 3, LIMIT))

    def break_prebuilt_step(self):
        """The step fails half-way; its rows are back before the error leaves it."""
        if not self.side.scheduler.waiting_queue:
            return
        taken = list(self.side.scheduler.waiting_queue)
        with mock.patch.object(draft_rows, "topk_index", side_effect=ZeroDivisionError):
            try:
                self.turn()
            except ZeroDivisionError:
                waiting = self.side.scheduler.waiting_queue
                taken = [req for req in taken if req not in waiting]
                assert taken, "failed although nothing was taken"
                for req in taken:
                    assert self.side.status(req) is None, f"{req.rid} kept {req.metadata_slot}"
                raise EndOfLife from None

    def switch_roles(self):
        if not self.live():
            self.side.check_all_free()
            self.side.take_role()
            self.late.clear()

    # Watching.

    def check(self):
        side = self.side
        side.slots.check_integrity()
        live = self.live()
        owners = Counter()
        for req in live:
            slot = getattr(req, "metadata_slot", None)
            if slot is None:
                assert req.hidden_states_tensor is None, f"{req.rid} reads a row it has not"
                continue
            owners[slot.index] += 1
            assert slot.owner == req.rid, f"{req.rid} has a slot of {slot.owner}"
            assert side.slots.holders[slot.index] is slot, f"{req.rid}: {slot.index} was given on"
            if slot.status in (Status.WAITING, Status.PREBUILT):
                value = side.buffers.output_hidden_states[slot.index, 0].item()
                assert value == self.values[req.rid], f"{req.rid} would read {value}"
                address = side.buffers.output_hidden_states[slot.index].data_ptr()
                assert req.hidden_states_tensor.data_ptr() == address, f"{req.rid} has a copy"
        assert all(n == 1 for n in owners.values()), f"rows with several owners: {owners}"
        held = {slot.index for slot in side.slots.held()}
        assert held == set(owners), f"held {held}, owned {set(owners)}"
        for entry in side.transfer.queue:
            assert side.status(entry.req) is Status.TRANSFERRING, entry.req.rid
        self.reqs = {rid: req for rid, req in self.reqs.items() if req in live}

    def live(self):
        """Every request that is anywhere."""
        side = self.side
        scheduler = side.scheduler
        batches = [scheduler.running_batch, scheduler.last_batch, self.in_flight]
        return {
            *(entry.req for entry in side.prealloc.queue + side.transfer.queue),
            *(entry[0].req for entry in getattr(side.transfer, "_deferred_releases", ())),
            *side.prealloc.retracted_queue,
            *scheduler.waiting_queue,
            *(req for batch in batches if batch for req in batch.reqs if not req.finished()),
        }

    def drain(self):
        """Let everything end, then find everything free."""
        for _ in range(200):
            if not self.live() and self.in_flight is None:
                break
            for entry in list(self.side.transfer.queue):
                self.side.arrived(entry.req.rid, self.values[entry.req.rid])
            self.turn()
            self.check()
            self.side.now += 1
        self.side.schedule()  # drops what finished last
        self.side.check_all_free()
        self.side.now += LIMIT
        free = self.side.slots.counts()["free"]
        assert free == self.side.slots.size, f"{free} of {self.side.slots.size} slots free"

    # Helpers.

    def pick(self, things):
        things = list(things)
        return self.rng.choice(things) if things else None

    def note_late_sender(self, entry):
        until = self.side.now + LIMIT
        self.late.append((entry.metadata_buffer_index, entry.req.bootstrap_room, until))


class EndOfLife(Exception):
    """The scheduler did not survive a step."""


WEIGHTS = {
    Life.arrive: 20,
    Life.land: 22,
    Life.land_without_row: 4,
    Life.fail: 3,
    Life.abort: 5,
    Life.write_late: 8,
    Life.poll: 10,
    Life.turn: 40,
    Life.retract: 5,
    Life.wait: 3,
    Life.switch_roles: 1,
    Life.break_prebuilt_step: 0.05,
}


class TestRandomOrder(unittest.TestCase):
    def test_rows_have_one_owner_and_totals_add_up(self):
        print(f"METADATA_SLOTS_SEED={SEED} METADATA_SLOTS_STEPS={STEPS}", flush=True)
        steps, weights = zip(*WEIGHTS.items(), strict=True)
        done = Counter()
        for first in range(0, STEPS, STEPS_PER_LIFE):
            rng = random.Random(SEED + first)
            life = Life(rng)
            trace = []
            try:
                for step in rng.choices(steps, weights, k=min(STEPS_PER_LIFE, STEPS - first)):
                    trace.append(step.__name__)
                    step(life)
                    life.check()
                life.drain()
            except EndOfLife:
                pass
            except Exception as error:
                where = f"seed {SEED + first}, step {len(trace)} ({', '.join(trace[-8:])})"
                raise AssertionError(f"{where}: {error!r}") from error
            finally:
                life.side.close()
            done.update(trace)
        self.assertGreater(done["turn"], STEPS // 8)


if __name__ == "__main__":
    unittest.main()

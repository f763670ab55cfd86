# SPDX-License-Identifier: Apache-2.0
"""What two threads say of one room at the same moment is both heard."""

import threading
import unittest
from types import SimpleNamespace

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

ROOM, OTHER = 7, 8
LONG_S = 1.0  # for another thread to do what takes microseconds, unless it has to wait


class Interrupted(dict):
    """A table whose first reader loses its turn to another thread."""

    def __init__(self, *known):
        super().__init__(*known)
        self.others = []

    def lose_turn(self):
        while self.others:
            other = threading.Thread(target=self.others.pop(), daemon=True)
            other.start()
            other.join(LONG_S)

    def get(self, *asked):
        found = super().get(*asked)
        self.lose_turn()
        return found

    def __contains__(self, room):
        found = super().__contains__(room)
        self.lose_turn()
        return found


class Manager(conn.MooncakeKVManager):
    """A real manager's table of statuses, without engine and sockets."""

    def __init__(self, **known):
        self.request_status = Interrupted(known.get("status", {}))
        self.deferred_bootstrap = None
        self.disaggregation_mode = DisaggregationMode.DECODE  # a prefill forgets what has failed
        self._deferred_ack_targets, self._staging_outstanding = {}, {}
        self._deferred_ack_poisoned_rooms = set()

    def said_at_once(self, first, second, room=ROOM):
        """The status once two threads have spoken, the second within what the first does."""
        done = threading.Event()

        def speak():
            self.update_status(room, second)
            done.set()

        self.request_status.others = [speak]
        self.update_status(ROOM, first)
        assert done.wait(60)
        return self.request_status[room]


class TestRoomStatus(unittest.TestCase):
    def test_a_peer_that_is_ready_as_the_request_comes_is_heard(self):
        said = Manager().said_at_once(KVPoll.Bootstrapping, KVPoll.WaitingForInput)
        self.assertEqual(said, KVPoll.WaitingForInput)

    def test_a_failure_between_two_steps_stays(self):
        manager = Manager(status={ROOM: KVPoll.Bootstrapping})
        said = manager.said_at_once(KVPoll.WaitingForInput, KVPoll.Failed)
        self.assertEqual(said, KVPoll.Failed)

    def test_a_finished_transfer_is_not_taken_back(self):
        manager = Manager(status={ROOM: KVPoll.WaitingForInput})
        said = manager.said_at_once(KVPoll.Transferring, KVPoll.Success)
        self.assertEqual(said, KVPoll.Success)

    def test_managers_do_not_wait_for_each_other(self):
        one, two = Manager(), Manager()
        heard = []

        def elsewhere():
            two.update_status(OTHER, KVPoll.Bootstrapping)
            heard.append(dict(two.request_status))

        one.request_status.others = [elsewhere]
        one.update_status(ROOM, KVPoll.Bootstrapping)
        self.assertEqual(heard, [{OTHER: KVPoll.Bootstrapping}])

    @unittest.skipUnless(
        hasattr(conn.MooncakeKVManager, "_notify_bootstrap"), "nobody is told before 0.5.22"
    )
    def test_telling_a_peer_of_a_failure_keeps_nobody_waiting(self):
        manager = Manager(status={ROOM: KVPoll.Bootstrapping})
        heard = []

        def tell(_room):
            other = threading.Thread(
                target=manager.update_status, args=(OTHER, KVPoll.Bootstrapping), daemon=True
            )
            other.start()
            other.join(LONG_S)
            heard.append(dict(manager.request_status))

        manager.deferred_bootstrap = SimpleNamespace(fail=tell)
        manager.update_status(ROOM, KVPoll.Failed)
        self.assertEqual(heard, [{ROOM: KVPoll.Failed, OTHER: KVPoll.Bootstrapping}])


if __name__ == "__main__":
    unittest.main()

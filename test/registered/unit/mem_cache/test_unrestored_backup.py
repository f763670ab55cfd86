# SPDX-License-Identifier: Apache-2.0
"""A backup that is dropped leaves rows nobody may read, and none outlives its request's KV."""

import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.common import RetractionBackup
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

TOKENS = 8


class Tree:
    """What the release and discard functions ask of a prefix cache."""

    def __init__(self):
        self.published, self.discarded, self.freed = [], [], []
        self.req_to_token_pool = SimpleNamespace(free=lambda req: None)
        self.token_to_kv_pool_allocator = SimpleNamespace(page_size=1)

    def supports_mamba(self):
        return False

    def claim_kv_row(self, req):
        return False

    def checkpoint(self, req, up_to):
        self.published.append(req.rid)

    def free_kv_row(self, kv, spans):
        self.freed += spans

    def unlock(self, lock):
        pass

    def on_release(self, req, checkpointed):
        pass

    def discard_kv_cache_backup(self, backup):
        self.discarded.append(backup)


def received_on_host():
    """A request whose KV a transfer has put into host memory and not yet onto its device rows."""
    req = Req.__new__(Req)
    req.rid = "r"
    req.skip_radix_cache_insert = False
    req.finished_reason = object()
    req.to_finish = None
    req.lock = None
    req.kv = ReqKvInfo()
    req.kv.req_pool_idx, req.kv.kv_allocated_len = 0, TOKENS
    req.kv.retraction_backup = RetractionBackup(host_indices=torch.arange(TOKENS))
    req.owned_kv_len = lambda: TOKENS
    req.refresh_fill_ids = lambda: None
    return req


class Released(unittest.TestCase):
    def release(self, req, tree):
        with mock.patch.object(common, "_release_overallocated_kv_indices"):
            common.release_kv_cache(req, tree, checkpoint=True)

    def test_an_abort_before_the_restore_publishes_nothing(self):
        req, tree = received_on_host(), Tree()
        common.discard_kv_cache_backup(req, tree, "host_pool")
        self.release(req, tree)
        self.assertEqual([], tree.published)
        self.assertEqual([(0, TOKENS)], tree.freed)
        self.assertEqual(1, len(tree.discarded))

    def test_a_request_without_a_pending_backup_is_published_as_ever(self):
        req, tree = received_on_host(), Tree()
        req.kv.retraction_backup = None
        self.release(req, tree)
        self.assertEqual(["r"], tree.published)


class Paused(unittest.TestCase):
    """A pause gives up the KV of requests that wait; it is computed anew afterwards."""

    def retract(self, req, tree, offload_kv):
        req.reset_for_retract = lambda: None
        new = RetractionBackup(host_indices=torch.arange(2))
        disagg = SimpleNamespace(
            disaggregation_mode="decode", disaggregation_decode_retraction_backup="host_pool"
        )

        def back_up(req, *_):
            req.kv.retraction_backup = new
            return True

        with mock.patch.multiple(
            schedule_batch,
            get_disagg=lambda: disagg,
            backup_kv_cache=back_up,
            release_kv_cache=lambda *_, **__: None,
            evict_from_tree_cache=lambda *_: None,
        ):
            schedule_batch.release_req(
                req=req,
                remaing_req_count=0,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=None,
                tree_cache=tree,
                hisparse_coordinator=None,
                offload_kv=offload_kv,
            )
        return new

    def test_a_pending_backup_is_dropped_once_with_the_kv(self):
        req, tree = received_on_host(), Tree()
        pending = req.kv.retraction_backup
        self.retract(req, tree, offload_kv=False)
        self.assertIsNone(req.kv.retraction_backup)
        self.assertEqual([pending], tree.discarded)

    def test_a_backup_made_by_the_retraction_stays(self):
        req, tree = received_on_host(), Tree()
        req.kv.retraction_backup = None
        self.assertIs(self.retract(req, tree, offload_kv=True), req.kv.retraction_backup)
        self.assertEqual([], tree.discarded)

    def test_without_any_backup_there_is_nothing_to_drop(self):
        req, tree = received_on_host(), Tree()
        req.kv.retraction_backup = None
        self.retract(req, tree, offload_kv=False)
        self.assertEqual([], tree.discarded)
        self.assertFalse(req.skip_radix_cache_insert)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode serve without a GPU, and nothing changes where there is one."""

import inspect
import os
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.disaggregation import cpu_pd, prefill
from sglang.srt.distributed import parallel_state
from sglang.test.ci.ci_register import register_cpu_ci

try:
    from sglang.srt.mem_cache import kv_cache_builder
except ImportError:  # up to 0.5.13
    kv_cache_builder = None

try:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host import common as host_memory
    from sglang.srt.mem_cache.pool_host import mha, mla
except ImportError:  # before 0.5.16
    mha = None
try:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
except ImportError:  # before 0.5.23 a host pool takes the device pool itself
    _mha_host_inputs = None

HAS_KINDS = hasattr(kv_cache_builder, "resolve_decode_retraction_backup")  # from 0.5.18 on

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

CPU_ENGINE = {"SGLANG_USE_CPU_ENGINE": "1"}
GPU_ENGINE = {"SGLANG_USE_CPU_ENGINE": "0"}


class Sender:
    """A KV sender that takes host tensors and keeps what it was given."""

    supports_host_tensor_indices = True
    kv_mgr = SimpleNamespace(enable_all_cp_ranks_for_transfer=False)

    def __init__(self):
        self.sent = []

    def get_max_transfer_tokens(self):
        return None

    def should_send_kv_chunk(self, num_pages, last_chunk):
        return num_pages > 0 or last_chunk

    def send(self, page_indices, state_indices, **more):
        self.sent.append((list(page_indices), more.get("indices_event")))


class TestPrefill(unittest.TestCase):
    @unittest.skipUnless(
        "supports_host_tensor_indices" in inspect.getsource(prefill)
        or "takes_pinned_indices" in inspect.getsource(prefill),
        "this release has no pinned path",
    )
    def test_a_chunk_in_host_memory_needs_no_cuda_event(self):
        sender = Sender()
        scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(
                page_size=1, translate_kv_indices_for_transfer=lambda indices: indices
            ),
            req_to_token_pool=SimpleNamespace(
                req_to_token=torch.arange(32, dtype=torch.int32).view(2, 16)
            ),
            enable_staging=False,
            disagg_prefill_pending_chunk_rids=set(),
        )
        request = SimpleNamespace(
            rid="r",
            start_send_idx=3,
            extend_end=9,
            origin_input_ids=list(range(12)),
            disagg_kv_sender=sender,
            disagg_decode_prefix_len=0,
            kv=SimpleNamespace(req_pool_idx=1),
        )
        parallel = SimpleNamespace(enable_dsa_cache_layer_split=False)
        with mock.patch.object(prefill, "get_parallel", lambda: parallel):
            prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk(scheduler, request)
        self.assertEqual(sender.sent, [(list(range(19, 25)), None)])

    @unittest.skipUnless(
        "torch.cuda.Event" in inspect.getsource(prefill), "this release waits for no event"
    )
    def test_a_cached_prefix_is_sent_early_without_a_cuda_event(self):
        sent = []
        scheduler = SimpleNamespace(
            enable_overlap=True,
            enable_staging=False,
            forward_stream=object(),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
            send_kv_chunk=lambda req, last_chunk, end_idx: sent.append((last_chunk, end_idx)),
        )
        request = SimpleNamespace(
            prefix_len=4,
            prefix_indices=torch.arange(4),
            host_hit_length=0,
            start_send_idx=0,
            early_send_prefix_end=None,
            pending_bootstrap=False,
            disagg_kv_sender=Sender(),
        )
        with mock.patch.dict(os.environ, CPU_ENGINE):
            prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk(
                scheduler, request
            )
        self.assertEqual(sent, [(False, 4)])
        self.assertFalse(hasattr(request.disagg_kv_sender, "_early_send_wait_event"))


class TestRetractionBackup(unittest.TestCase):
    def resolved(self, environment):
        """The backup a decode server chooses for an MHA pool when no flag names one."""
        pool = kv_cache_builder.MHATokenToKVPool.__new__(kv_cache_builder.MHATokenToKVPool)
        disagg = mock.MagicMock(
            disaggregation_decode_retraction_backup=None,
            disaggregation_mode="decode",
            disaggregation_decode_enable_radix_cache=False,
            disaggregation_decode_enable_offload_kvcache=False,
        )
        memory = mock.MagicMock(enable_unified_memory=False, hicache_ratio=2.0)
        schedule = mock.MagicMock(enable_priority_scheduling=False)
        parallel = mock.MagicMock(dcp_enabled=False)
        worker = mock.MagicMock(is_hybrid_swa=False)
        worker.get_memory_pool()[1].get_kvcache.return_value = pool
        worker.model_runner.mtp_draft_device_pools = ()
        given = {
            "get_disagg": lambda: disagg,
            "get_memory": lambda: memory,
            "get_schedule": lambda: schedule,
            "get_parallel": lambda: parallel,
            "get_context": mock.MagicMock(),
            "uses_ssm_state": lambda *_: False,
            "is_hip": lambda: False,
        }
        with mock.patch.dict(os.environ, environment):
            for name, value in given.items():
                if hasattr(kv_cache_builder, name):
                    self.enterContext(mock.patch.object(kv_cache_builder, name, value))
            return kv_cache_builder.resolve_decode_retraction_backup(tp_worker=worker)

    @unittest.skipUnless(HAS_KINDS, "this release has one kind of backup")
    def test_no_host_pool_on_the_cpu(self):
        self.assertEqual(self.resolved(CPU_ENGINE), "cpu_tensor")

    @unittest.skipUnless(HAS_KINDS, "this release has one kind of backup")
    def test_stock_default_elsewhere(self):
        self.assertEqual(self.resolved(GPU_ENGINE), "host_pool")


@unittest.skipUnless(mha, "from 0.5.16 on")
class TestHostPool(unittest.TestCase):
    """A host pool works where there is no CUDA to register its memory or to copy its rows."""

    SLOTS, LAYERS, PAGE = 32, 2, 4

    def setUp(self):
        self.enterContext(mock.patch.dict(os.environ, CPU_ENGINE))
        self.device = MHATokenToKVPool(
            size=self.SLOTS,
            page_size=self.PAGE,
            dtype=torch.float32,
            head_num=2,
            head_dim=4,
            layer_num=self.LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        for buffer in self.buffers():
            buffer.copy_(torch.rand_like(buffer))

    def buffers(self):
        return [*self.device.k_buffer, *self.device.v_buffer]

    def host_pool(self):
        cls, given, more = mha.MHATokenToKVPoolHost, self.device, {}
        if _mha_host_inputs is not None:
            cls, given, more = _mha_host_inputs(self.device)
        return cls(given, 2.0, 0, self.PAGE, "layer_first", **more)

    def test_rows_go_to_the_host_and_come_back_elsewhere(self):
        host = self.host_pool()
        there, kept = torch.arange(4, 12), torch.arange(16, 24)
        before = [buffer[there].clone() for buffer in self.buffers()]
        host.backup_from_device_all_layer(self.device, kept, there, "direct")
        for buffer in self.buffers():
            buffer.fill_(float("nan"))
        back = torch.arange(20, 28)
        for layer in range(self.LAYERS):
            host.load_to_device_per_layer(self.device, kept, back, layer, "direct")
        for was, buffer in zip(before, self.buffers(), strict=True):
            torch.testing.assert_close(was, buffer[back], rtol=0, atol=0)
            self.assertTrue(buffer[:20].isnan().all(), "other rows were written")

    def test_a_page_from_storage_needs_no_cuda(self):
        host = self.host_pool()
        self.assertFalse(host.pin_memory)
        page = host.get_dummy_flat_data_page()
        self.assertEqual(2 * self.LAYERS * self.PAGE * 2 * 4, page.numel())

    def test_memory_is_registered_where_there_is_a_gpu(self):
        registered = []
        asked = mock.patch.object(
            host_memory, "_cuda_host_register", lambda buffer, *_: registered.append(buffer)
        )
        arguments = {
            "dtype": torch.float32,
            "device": "cpu",
            "pin_memory": True,
            "allocator": host_memory.get_allocator_from_storage("default"),
        }
        for environment, times in ((CPU_ENGINE, 0), (GPU_ENGINE, 1)):
            with asked, mock.patch.dict(os.environ, environment):
                registered.clear()
                host_memory.alloc_with_host_register((4,), **arguments)
            self.assertEqual(times, len(registered), environment)

    def test_an_operator_that_was_imported_stays(self):
        names = {"transfer_kv_direct": "sgl_kernel's"}
        method = SimpleNamespace(__globals__=names)
        self.assertIs(method, cpu_pd.copies_in_place(method))
        self.assertEqual("sgl_kernel's", names["transfer_kv_direct"])
        for module in (mha, mla):
            self.assertTrue(hasattr(module, "transfer_kv_direct"), module.__name__)


class TestRankGroup(unittest.TestCase):
    def group(self, environment):
        """A real group of one rank that was asked for PyNccl."""
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        self.addCleanup(torch.distributed.destroy_process_group)
        given = {
            name: False
            for name, parameter in inspect.signature(
                parallel_state.GroupCoordinator.__init__
            ).parameters.items()
            if name.startswith("use_") and parameter.default is inspect.Parameter.empty
        }
        given["use_pynccl"] = True
        with mock.patch.dict(os.environ, environment):
            return parallel_state.GroupCoordinator(
                group_ranks=[[0]], local_rank=0, torch_distributed_backend="gloo", **given
            )

    def test_no_nccl_communicator_on_the_cpu(self):
        self.assertFalse(self.group(CPU_ENGINE).use_pynccl)

    def test_stock_communicator_elsewhere(self):
        self.assertTrue(self.group(GPU_ENGINE).use_pynccl)


class TestAnswers(unittest.TestCase):
    def test_indices_on_a_device_take_the_pinned_path(self):
        device = SimpleNamespace(device=torch.device("cuda"))
        self.assertTrue(cpu_pd.takes_pinned_indices(Sender(), device))
        self.assertFalse(cpu_pd.takes_pinned_indices(object(), device))


if __name__ == "__main__":
    unittest.main()

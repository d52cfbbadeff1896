"""The parts of time that communication takes."""

from experiments.scaling_gpus.communication import Communication, of_kernels, watch

SEND = "ncclDevKernel_AllGather_RING_LL"
RAGGED = "stream_executor::gpu::RaggedAllToAllKernelImpl<8>"


def test_communication_beside_other_work_is_not_exposed():
    kernels = [
        ("gemm", 0, 40),
        (SEND, 20, 60),  # from 40 on alone
        ("fusion", 70, 80),
        (SEND, 65, 90),  # alone before, and after
        (RAGGED, 75, 85),  # two at a time count once
        ("gemm", 99, 100),
    ]
    assert of_kernels(kernels) == Communication(share=0.65, exposed=0.35)


def test_a_device_that_did_nothing_has_no_share():
    assert of_kernels([]) is None


def test_only_gpus_tell():
    ran = []
    assert watch(lambda: ran.append(1)) is None and ran == [1]

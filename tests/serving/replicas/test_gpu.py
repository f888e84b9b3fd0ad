import pytest

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.serving.replicas import gpu
from rlvlm.serving.replicas.gpu import GIB, GpuMemory, assigned_device, check_share, limit_share


def test_a_share_by_hand() -> None:
    # 30 of 40 GiB are three quarters of the card
    memory = GpuMemory(peak=30 * GIB, total=40 * GIB)
    assert memory.exceeds(0.5) and not memory.exceeds(0.75)
    assert not memory.exceeds(0.0) and not memory.exceeds(1.0), "no share and a whole card set no limit"
    assert str(memory) == "30.00 of 40.00 GiB"


def test_a_judge_beyond_its_share_is_refused_with_the_share_it_needs(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "measured", lambda device: GpuMemory(peak=24 * GIB, total=40 * GIB))
    with pytest.raises(JudgeUnavailable, match="holds 24.00 of 40.00 GiB, its share is 0.5") as caught:
        check_share("cuda", 0.5)
    assert "--serve.num-gpus to 0.7" in caught.value.fix


def test_a_cpu_has_no_share() -> None:
    limit_share("cpu", 0.5)
    check_share("cpu", 0.5)
    assert assigned_device("cpu") == "cpu" and assigned_device("cuda:1") == "cuda:1"


@pytest.mark.gpu
def test_the_allocator_stops_at_the_share() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    limit_share("cuda", 0.25)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(0.5 * torch.cuda.get_device_properties(0).total_memory), dtype=torch.uint8, device="cuda")
    check_share("cuda", 0.25)

import pytest
import ray

from rlvlm.commands.judging.serve import find_app
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.gateway import launch
from rlvlm.serving.startup import check_cluster


def test_resources_of_all_apps_of_a_file_are_counted_together(monkeypatch):
    # by hand: two judges of half a GPU and one core each, and a gateway of a tenth: 1 GPU, 2.1 CPU
    file = find_app("two_judges_one_card")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.1, "GPU": 1.0})
    check_cluster(launch._wanted(file), file.name, "")
    for total, reason in [
        ({"CPU": 2.0, "GPU": 1.0}, "asks for 2.1 CPU, the Ray cluster has 2"),
        ({"CPU": 8.0}, "asks for 1 GPU, the Ray cluster has 0"),
    ]:
        monkeypatch.setattr(ray, "cluster_resources", lambda total=total: total)
        with pytest.raises(JudgeUnavailable, match=reason):
            check_cluster(launch._wanted(file), file.name, "")

import pytest
import ray
from ray.serve.schema import ApplicationStatus

from rlvlm.errors import JudgeUnavailable, MachineError
from rlvlm.experiments.terminal.serve import find_app
from rlvlm.serving.http import launch


class Status:
    """What Serve says about an app."""

    def __init__(self, status: ApplicationStatus, *messages: str) -> None:
        self.status, self.message = status, ""
        self.deployments = {str(number): type("D", (), {"message": text}) for number, text in enumerate(messages)}


def test_resources_of_all_apps_of_a_file_are_counted_together(monkeypatch):
    # by hand: two judges of half a GPU and one core each, and a gateway of a tenth: 1 GPU, 2.1 CPU
    file = find_app("two_judges_one_card")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.1, "GPU": 1.0})
    launch._check_resources(file)
    for total, reason in [({"CPU": 2.0, "GPU": 1.0}, "asks for 2.1 CPU, the Ray cluster has 2"),
                          ({"CPU": 8.0}, "asks for 1 GPU, the Ray cluster has 0")]:
        monkeypatch.setattr(ray, "cluster_resources", lambda total=total: total)
        with pytest.raises(JudgeUnavailable, match=reason):
            launch._check_resources(file)


def test_the_replicas_own_cause_is_told_at_once_and_serves_when_it_gave_up():
    loading = Status(ApplicationStatus.DEPLOYING, "", 'x RuntimeError: judge-cause: ["no weights", "fetch them"]')
    with pytest.raises(JudgeUnavailable, match="a: no weights") as caught:
        launch._raise_cause("a", loading)  # pyright: ignore[reportArgumentType] the stand-in
    assert caught.value.fix == "fetch them"
    with pytest.raises(MachineError, match="a: the token file /t must be yours") as wrong:
        launch._raise_cause("a", Status(ApplicationStatus.DEPLOYING, "the gateway cannot start: the token file /t must "
                                        "be yours; chmod 600 /t"))  # pyright: ignore[reportArgumentType]
    assert wrong.value.fix == "chmod 600 /t"
    with pytest.raises(JudgeUnavailable, match="a could not start: the last line"):
        launch._raise_cause("a", Status(ApplicationStatus.DEPLOY_FAILED, "first\nthe last line\n"))  # pyright: ignore
    launch._raise_cause("a", Status(ApplicationStatus.DEPLOYING, "still trying"))  # pyright: ignore

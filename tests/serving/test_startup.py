import pytest
from ray.serve.schema import ApplicationStatus

from rlvlm.core.errors import JudgeUnavailable, MachineError
from rlvlm.serving.startup import cause_of, marked


class Status:
    """What Serve says about an app."""

    def __init__(self, status: ApplicationStatus, *messages: str) -> None:
        self.status, self.message = status, ""
        self.deployments = {str(number): type("D", (), {"message": text}) for number, text in enumerate(messages)}


@pytest.mark.parametrize("error", [JudgeUnavailable("no weights [here]", "fetch them"), MachineError("not yours", "")])
def test_a_marked_cause_is_read_back_out_of_serves_text_while_serve_still_tries(error):
    text = f"The deployment failed to start 1 times.\nRuntimeError: {marked(error)}\nRetrying 2 more times"
    found = cause_of(Status(ApplicationStatus.DEPLOYING, "", text))  # pyright: ignore[reportArgumentType] the stand-in
    assert (type(found), str(found), found.fix) == (type(error), str(error), error.fix)


def test_without_a_mark_serves_last_line_counts_once_it_gave_up():
    given_up = Status(ApplicationStatus.DEPLOY_FAILED, "first\nthe last line\n")
    assert "it could not start: the last line" in str(cause_of(given_up))  # pyright: ignore[reportArgumentType]
    assert cause_of(Status(ApplicationStatus.DEPLOYING, "still trying")) is None  # pyright: ignore[reportArgumentType]

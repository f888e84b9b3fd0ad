"""RAY_ADDRESS is tried within seconds, and what is wrong with it is said."""

import socket

import pytest

from rlvlm.core.errors import MachineError, UsageError
from rlvlm.runs.preflight import cluster_address


@pytest.mark.parametrize("address", ["", " ", "local"])
def test_without_a_cluster_the_run_starts_its_own(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert cluster_address() == ""


@pytest.mark.parametrize(
    ("address", "what", "fix"),
    [
        ("http://head:8265", "where jobs are submitted", "ray job submit --address http://head:8265 --"),
        ("https://head", "where jobs are submitted", "ray job submit"),
        ("ray://head:10001", "Ray Client", "log in to the cluster"),
        ("head", "not of the form HOST:PORT", "HOST:6379"),
        ("head:gcs", "not of the form HOST:PORT", "HOST:6379"),
    ],
)
def test_an_address_of_another_kind_is_explained(
    address: str, what: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match=what) as caught:
        cluster_address()
    assert fix in caught.value.fix and "unset RAY_ADDRESS" in caught.value.fix


def test_a_dead_cluster_is_no_wait_of_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive:
        address = f"127.0.0.1:{alive.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert cluster_address() == address
    for dead in (address, "127.0.0.1:99999", "no-such-host.invalid:6379"):
        monkeypatch.setenv("RAY_ADDRESS", dead)
        with pytest.raises(MachineError, match="no Ray answers at"):
            cluster_address()

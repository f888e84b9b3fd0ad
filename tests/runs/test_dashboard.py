"""The link that signs a browser in, without the Ray that it leads to."""

import re

import httpx
import pytest

from rlvlm.runs.start import dashboard


def test_the_link_brings_the_cookie_and_leads_on_and_no_other_path_does(monkeypatch):
    headers = {"authorization": "Bearer abc"}
    monkeypatch.setattr(dashboard, "get_auth_headers_if_auth_enabled", lambda _: headers)
    with dashboard.signed_in_link("127.0.0.1:8265") as words:
        link, target = re.fullmatch(r"(http://127.0.0.1:\d+/\S{20,})  \(signs in, and leads to (\S+)\)", words).groups()
        found = httpx.get(link)
        assert (found.status_code, found.headers["location"]) == (303, target) and target == "http://127.0.0.1:8265"
        cookie = found.headers["set-cookie"]
        assert cookie == "ray-authentication-token=abc; Path=/; HttpOnly; SameSite=Strict"
        for other in (f"{link}x", link[:-1], link.rpartition("/")[0]):
            refused = httpx.get(other)
            assert refused.status_code == 404 and "set-cookie" not in refused.headers
    with pytest.raises(httpx.ConnectError):
        httpx.get(link)
    headers.clear()  # a user who switched Ray's tokens off
    with dashboard.signed_in_link("127.0.0.1:8265") as words:
        assert words == "http://127.0.0.1:8265"

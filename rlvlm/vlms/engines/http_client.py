"""The HTTP client of the openai package for one server, with the proxy configured in the environment."""

import os
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rlvlm.core.errors import ModelUnavailable


@dataclass(frozen=True, slots=True)
class Proxy:
    """Proxy that the environment configures for a server."""

    url: str = ""
    """Empty if there is none, or NO_PROXY excludes the server. May contain a password."""

    @classmethod
    def of(cls, server: str) -> "Proxy":
        """Returns the proxy for this server."""
        parts, proxies = urlsplit(server), getproxies()
        url = proxies.get(parts.scheme) or proxies.get("all") or ""
        if not url or proxy_bypass(parts.netloc) or _is_in_network(parts.hostname or "", proxies.get("no") or ""):
            return cls()
        return cls(url if "://" in url else f"http://{url}")

    @property
    def words(self) -> str:
        """Text for messages, without the password."""
        if not self.url:
            return ""
        scheme, _, rest = self.url.partition("://")
        return f" through the proxy {scheme}://{rest.rpartition('@')[2]} of the environment"


def _is_in_network(host: str, networks: str) -> bool:
    """Returns whether a host, as an address in numbers, lies in one of NO_PROXY's networks, such as `10.0.0.0/8`.

    `urllib` compares names and whole addresses alone.
    """
    for entry in networks.split(","):
        with suppress(ValueError):  # a name
            if ip_address(host) in ip_network(entry.strip().strip("[]"), strict=False):
                return True
    return False


def make_http_client(sdk: Any, url: str, proxy: Proxy) -> Any:
    """Makes the HTTP client for this server.

    Raises:
        ModelUnavailable: its proxy or the file of certificates is invalid.
    """
    import httpx2  # the openai client's own library

    try:
        httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ModelUnavailable(f"{url} is no address: {error}", "correct the base-url") from None
    try:
        # explicitly: by default the client sets up every proxy of the environment, also for servers that NO_PROXY
        # excludes, and fails on an unusable one
        way = httpx2.AsyncHTTPTransport(proxy=proxy.url or None, limits=sdk.DEFAULT_CONNECTION_LIMITS)
    except (ImportError, ValueError, httpx2.InvalidURL):  # their messages may contain the proxy's password
        raise ModelUnavailable(
            f"the model cannot be reached{proxy.words}: only http:// and https:// proxies can be used, and socks5:// "
            "where the package socksio is installed",
            f"set HTTPS_PROXY to such a proxy, or add {urlsplit(url).hostname} to NO_PROXY",
        ) from None
    except OSError as error:
        file = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
        raise ModelUnavailable(
            f"the model cannot be reached: the certificates cannot be read{f' from {file}' * bool(file)}: {error}",
            "correct SSL_CERT_FILE or SSL_CERT_DIR, or unset it",
        ) from error
    return sdk.DefaultAsyncHttpxClient(follow_redirects=False, transport=way)  # a key only goes to its own server

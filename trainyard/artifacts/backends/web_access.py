"""Which addresses a request to a web server may reach, and where it may be redirected.

Cloud machines have a metadata service at a link-local address, which gives credentials to every
local program that asks. No request reaches one, by whatever name. What is checked is the address
that is connected to: a name may resolve to something else the next time."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from http.client import HTTPConnection, HTTPSConnection
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    Request,
    build_opener,
)

from trainyard.artifacts.urls import show_url
from trainyard.errors import ConfigError

METADATA = frozenset(
    ipaddress.ip_address(text) for text in ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200")
)
"""Metadata services outside of the link-local ranges."""

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

TO_THIS_MACHINE = "another server redirects to this machine; give the URL of the file itself"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_refused(text: str) -> bool:
    """Whether no request may go to an IP address; False for anything else, such as a name."""
    address = parsed_address(text)
    return address is not None and (address.is_link_local or address in METADATA)


def parsed_address(text: str) -> Address | None:
    """An address; the IPv4 one within an IPv6 one. Also of spellings such as 0xa9fea9fe."""
    try:
        address: Address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(text))
        except (OSError, UnicodeEncodeError):
            return None
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def _is_loopback(text: str) -> bool:
    address = parsed_address(text)
    return address is not None and (address.is_loopback or address.is_unspecified)


def _check(text: str) -> None:
    if is_refused(text):
        raise ConfigError(
            f"{text}: a link-local address or metadata service, which no URL may lead to"
        )


def _connected(host: str, port: int, may_be_local: bool, *more: Any) -> socket.socket:
    """As socket.create_connection; every address of the host is checked before any is tried."""
    found = [one[4][0] for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        _check(str(address))
        if not may_be_local and _is_loopback(str(address)):
            raise ConfigError(f"{host}: {TO_THIS_MACHINE}")
    for address in found[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection((str(address), port), *more)
    return socket.create_connection((str(found[-1]), port), *more)


class _Connection(HTTPConnection):
    may_be_local = True

    def connect(self) -> None:
        # What http.client itself connects by, before TLS.
        self._create_connection = self._connected
        super().connect()

    def _connected(self, address: tuple[str, int], *more: Any) -> socket.socket:
        return _connected(*address, self.may_be_local, *more)


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _FromElsewhere(_Connection):
    may_be_local = False


class _SecureFromElsewhere(_SecureConnection):
    may_be_local = False


class _Redirected(Request):
    """A request to another server than the one that was asked first."""


class _Handler(HTTPHandler):
    def http_open(self, req: Request) -> Any:
        if _has_proxy(req):
            return super().http_open(req)
        return self.do_open(_FromElsewhere if _is_redirected(req) else _Connection, req)


class _SecureHandler(HTTPSHandler):
    def https_open(self, req: Request) -> Any:
        if _has_proxy(req):
            return super().https_open(req)
        return self.do_open(_SecureFromElsewhere if _is_redirected(req) else _SecureConnection, req)


def _is_redirected(req: Request) -> bool:
    return isinstance(req, _Redirected)


def _has_proxy(req: Request) -> bool:
    """Whether a proxy connects, whose own address may be any; then only the URL is checked."""
    asked = urlsplit(req.full_url)
    _check(asked.hostname or "")
    return req.host != asked.netloc


class _Redirects(HTTPRedirectHandler):
    """Redirects between web servers, and from none to this machine."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if fault := self._fault(before, after):
            raise ConfigError(f"{show_url(req.full_url)}: the server redirects to {fault}")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and (before.hostname != after.hostname or isinstance(req, _Redirected)):
            new.__class__ = _Redirected
        return new

    def _fault(self, before: SplitResult, after: SplitResult) -> str:
        if after.scheme not in ("http", "https"):
            return f"{after.scheme}://, which is no web address"
        return ""


class _RedirectsWithin(_Redirects):
    """Redirects that stay at a server."""

    def _fault(self, before: SplitResult, after: SplitResult) -> str:
        if fault := super()._fault(before, after):
            return fault
        if (before.scheme, before.netloc) == (after.scheme, after.netloc):
            return ""
        is_upgrade = (before.scheme, after.scheme) == ("http", "https")
        if is_upgrade and before.hostname == after.hostname and not (before.port or after.port):
            return ""
        return "another server, which the URL of a document must not; give the URL there"


def _opener(redirects: type[HTTPRedirectHandler]) -> OpenerDirector:
    return build_opener(_Handler, _SecureHandler, redirects)


def open_url(request: Request, timeout_seconds: float, *, stays: bool = False) -> Any:
    """The reply to a request, as urlopen gives it. stays: refuse a redirect to another server."""
    opener = _opener(_RedirectsWithin if stays else _Redirects)
    return opener.open(request, timeout=timeout_seconds)

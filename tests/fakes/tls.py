"""TLS in front of a proxy, as an ingress terminates it: a test's own authority, and a relay on loopback."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_authority(folder: Path) -> tuple[Path, Path]:
    """Makes a self-signed certificate for 127.0.0.1; returns its file, and a file of certificate and key."""
    authority, key, both = (folder / name for name in ("authority.pem", "key.pem", "server.pem"))
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=a test"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(authority)]
    subprocess.run(made, check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + authority.read_bytes())
    return authority, both


@contextmanager
def tls_before(host: str, port: int, *, certificate: Path) -> Iterator[str]:
    """Yields an https:// address on loopback that relays to a port unchanged."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_accept, args=(listening, context, (host, port)), daemon=True).start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}"
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, context: ssl.SSLContext, target: tuple[str, int]) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_relay, args=(connection, context, target), daemon=True).start()


def _relay(connection: socket.socket, context: ssl.SSLContext, target: tuple[str, int]) -> None:
    with (
        suppress(OSError),
        connection,
        context.wrap_socket(connection, server_side=True) as outer,
        socket.create_connection(target) as inner,
    ):
        back = threading.Thread(target=_pass_on, args=(inner, outer), daemon=True)
        back.start()
        _pass_on(outer, inner)
        back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)

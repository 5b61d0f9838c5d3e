"""A Prefect server as a program: `prefect server start` without its command line, and with less garbage collection.

It listens at a bound socket with the given descriptor. Prefect's own variables select its services and UI.
"""

from __future__ import annotations

import gc
import socket
import sys


def main(descriptor: int) -> None:
    gc.disable()  # a fifth of the time of these imports
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(final=True)
    gc.freeze()
    gc.enable()
    config = uvicorn.Config(app, log_level="warning", lifespan="on")
    uvicorn.Server(config).run([socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]))

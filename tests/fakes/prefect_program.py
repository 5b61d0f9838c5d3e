"""A Prefect server as a program: `prefect server start` without its command line, and with less garbage collection.

What it runs of the server's services, and whether of its UI, Prefect's own variables say.
"""

from __future__ import annotations

import gc
import sys


def main(port: int) -> None:
    """Serves until it is ended."""
    gc.disable()  # a fifth of the time of these imports
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(final=True)
    gc.freeze()
    gc.enable()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", lifespan="on")


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""A Prefect server as a program: `prefect server start` without its command line, and with less garbage collection.

Prefect's own variables select its services and UI.
"""

from __future__ import annotations

import gc
import sys


def main(port: int) -> None:
    gc.disable()  # a fifth of the time of these imports
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(final=True)
    gc.freeze()
    gc.enable()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", lifespan="on")


if __name__ == "__main__":
    main(int(sys.argv[1]))

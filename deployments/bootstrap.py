"""Builds `.venv` from the pinned lists with uv, which it installs first if missing. Standard library only.

Run by the Makefile: `python3 deployments/bootstrap.py [--development]`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LISTS = ROOT / "resources" / "environments" / "requirements"


def find_or_install_uv() -> str:
    """Returns the uv on PATH, else a uv that pip installs into a small environment of its own."""
    binary_on_path = shutil.which("uv")
    if binary_on_path:
        return binary_on_path
    home = VENV / "uv"
    binary = home / "bin" / "uv"
    if not binary.is_file():
        print("installing uv", flush=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True)
        except subprocess.CalledProcessError:
            sys.exit(
                "Expected: Python's venv module, to install uv with\n"
                f"Found:    {sys.executable} has none\n"
                "To do:    install it (Debian: apt install python3-venv), or install uv, and run again"
            )
        subprocess.run([str(home / "bin" / "pip"), "install", "--quiet", "uv"], check=True)
    return str(binary)


def main() -> None:
    """Builds or completes the environment; a second run changes nothing."""
    if sys.version_info < (3, 11):
        sys.exit(
            f"Expected: Python 3.11 or newer\nFound:    {sys.version.split()[0]} ({sys.executable})\n"
            "To do:    name another Python: make PYTHON=python3.12 demo"
        )
    VENV.mkdir(exist_ok=True)
    uv = find_or_install_uv()
    python = VENV / "bin" / "python"
    if not python.exists():
        subprocess.run(
            [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(VENV)], check=True, cwd=ROOT
        )
    lists = ["orchestrator.txt", *(["development.txt", "backends.txt"] if "--development" in sys.argv else [])]
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    print(f"installing {', '.join(lists)} into .venv", flush=True)
    requirements = [part for name in lists for part in ("-r", str(LISTS / name))]
    subprocess.run([*install, "--compile-bytecode", *requirements], check=True, cwd=ROOT)
    subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()

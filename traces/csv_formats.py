"""CSV traces with a published header: Azure, BurstGPT, Vidur, splitwise-sim."""

from __future__ import annotations

from collections.abc import Sequence

from vsim.traces.csv_blocks import header_of
from vsim.traces.csv_table import CsvSpec, read_csv
from vsim.traces.draft import Draft
from vsim.traces.files import TraceFile
from vsim.traces.options import Report

# Azure/AzurePublicDataset, LLM inference traces 2023 (naive time, 7 digits) and 2024 (+00:00, 6 digits).
AZURE = CsvSpec(
    whose="Azure",
    columns={
        "timestamp": "TIMESTAMP",
        "input_tokens": "ContextTokens",
        "output_tokens": "GeneratedTokens",
    },
)
# HPMLL/BurstGPT: seconds from local midnight of the first day; 0 response tokens mark a failure.
BURSTGPT = CsvSpec(
    whose="BurstGPT",
    columns={
        "timestamp": "Timestamp",
        "input_tokens": "Request tokens",
        "output_tokens": "Response tokens",
        "tenant": "Model",
    },
    unit="s",
    zero_means="failed requests",
)
# microsoft/vidur: the Azure 2023 trace re-based to seconds.
VIDUR = CsvSpec(
    whose="Vidur",
    columns={
        "timestamp": "arrived_at",
        "input_tokens": "num_prefill_tokens",
        "output_tokens": "num_decode_tokens",
    },
    unit="s",
)
VIDUR_LENGTHS = CsvSpec(
    whose="Vidur",
    columns={"input_tokens": "num_prefill_tokens", "output_tokens": "num_decode_tokens"},
)


def _llm_only(row: dict[str, str]) -> str | None:
    # splitwise-sim: request types 0 and 1 are its other workloads, 2 is an LLM request.
    return None if row.get("request_type", "2") == "2" else "not_an_llm_request"


# Mutinifni/splitwise-sim
SPLITWISE_SIM = CsvSpec(
    whose="splitwise-sim",
    columns={
        "timestamp": "arrival_timestamp",
        "input_tokens": "prompt_size",
        "output_tokens": "token_size",
    },
    unit="s",
    filter_columns=("request_type",),
    row_filter=_llm_only,
)


def read_azure(file: TraceFile, report: Report) -> Draft:
    return read_csv(file, AZURE, report)


def read_burstgpt(file: TraceFile, report: Report) -> Draft:
    columns = dict(BURSTGPT.columns)
    if "Session ID" in header_of(file.head):
        columns["session"] = "Session ID"
    report.assume(
        "BurstGPT's seconds count from local midnight of its first day; its Model column is read as the tenant."
    )
    spec = CsvSpec(BURSTGPT.whose, columns, unit=BURSTGPT.unit, zero_means=BURSTGPT.zero_means)
    return read_csv(file, spec, report)


def read_vidur(file: TraceFile, report: Report) -> Draft:
    if "arrived_at" in header_of(file.head):
        return read_csv(file, VIDUR, report)
    report.oddity(
        "The file has no arrival times: all requests are sent at 0 (give them a rate to space them)."
    )
    return read_csv(file, VIDUR_LENGTHS, report)


def read_splitwise_sim(file: TraceFile, report: Report) -> Draft:
    return read_csv(file, SPLITWISE_SIM, report)


def recognise(header: Sequence[str]) -> str | None:
    """The format whose header this is."""
    names = set(header)
    for name, spec in (
        ("azure", AZURE),
        ("burstgpt", BURSTGPT),
        ("vidur", VIDUR_LENGTHS),
        ("splitwise-sim", SPLITWISE_SIM),
    ):
        if set(spec.columns.values()) <= names:
            return name
    return None

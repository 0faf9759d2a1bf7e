"""`vsim catalog`: the bundled GPUs, models and profiles, each with its source."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command()
@click.argument("what", type=click.Choice(["all", "gpus", "models", "profiles"]), default="all")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
@click.option("--sources", is_flag=True, help="Show where each figure comes from.")
def catalog(what: str, as_json: bool, sources: bool) -> None:
    """List the bundled GPUs, models and profiles, with sources."""
    parts: dict[str, list[dict[str, Any]]] = {}
    if what in ("all", "gpus"):
        parts["gpus"] = _gpus()
    if what in ("all", "models"):
        parts["models"] = _models()
    if what in ("all", "profiles"):
        parts["profiles"] = _profiles()
    if as_json:
        click.echo(json.dumps(parts, indent=1))
        return
    for name, rows in parts.items():
        click.echo(name)
        if not rows:
            click.echo("  none bundled")
            continue
        keys = [k for k in rows[0] if k not in ("sources", "source", "aliases")]
        cells = [[k.replace("_", " ") for k in keys]]
        cells += [["-" if row[k] is None else str(row[k]) for k in keys] for row in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(keys))]
        for index, row in enumerate(cells):
            click.echo(
                "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            )
            if sources and index:
                _show_sources(rows[index - 1])
        click.echo("")
    if not sources:
        click.echo("`vsim catalog --sources` shows where each figure comes from.")


def _show_sources(row: dict[str, Any]) -> None:
    found = row.get("sources") or row.get("source") or {}
    if isinstance(found, str):
        found = {"": found}
    for field, text in found.items():
        label = f"{field}: " if field and field != "default" else ""
        click.echo(f"      {label}{text}")


def _gpus() -> list[dict[str, Any]]:
    from vsim.models.hardware import gpus

    return [
        {
            "name": gpu.name,
            "memory_gib": round(gpu.memory_gib, 2) if gpu.memory_bytes else None,
            "bf16_tflops": gpu.bf16_tflops or gpu.fp16_tflops,
            "fp8_tflops": gpu.fp8_tflops,
            "int8_tops": gpu.int8_tops,
            "gb_per_s": gpu.memory_bandwidth_gb_s,
            "pcie_gb_s": gpu.pcie_gb_s,
            "nvlink_gb_s": gpu.nvlink_gb_s,
            "sm": ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else None,
            "aliases": list(gpu.aliases),
            "sources": gpu.sources,
        }
        for gpu in gpus()
    ]


def _models() -> list[dict[str, Any]]:
    from vsim.models.model_spec import bundled_models, load_model

    rows = []
    for name, row in bundled_models().items():
        model = load_model(name)
        rows.append(
            {
                "name": name,
                "parameters_b": round(model.num_parameters / 1e9, 3),
                "active_b": round(model.num_active_parameters / 1e9, 3),
                "layers": model.num_layers,
                "kv_heads": 1 if model.mla else model.num_kv_heads,
                "max_model_len": model.max_model_len,
                "quantization": model.quantization,
                "aliases": row["aliases"],
                "source": row["source"],
            }
        )
    return rows


def _profiles() -> list[dict[str, Any]]:
    """Bundled calibration artifacts (models/*.json with a step-model schema)."""
    from vsim.models import hardware

    rows = []
    for path in sorted(hardware.CATALOGUE.parent.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if not isinstance(data, dict) or not str(data.get("schema", "")).startswith(
            "vsim/step-model"
        ):
            continue
        found = data.get("provenance")
        provenance: dict[str, Any] = found if isinstance(found, dict) else {}
        model = data.get("model")
        rows.append(
            {
                "name": path.stem,
                "kind": data.get("kind"),
                "model": model if isinstance(model, str) else provenance.get("model"),
                "gpu": provenance.get("gpu") or provenance.get("device"),
                "vllm": provenance.get("vllm_version"),
                "source": str(
                    provenance.get("source") or provenance.get("command") or "see the file"
                ),
            }
        )
    return rows

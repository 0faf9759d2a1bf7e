"""Finding a model: bundled by its Hugging Face name, or a folder with its `config.json`."""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

from vsim.errors import UserError
from vsim.models.hf_config import read_config, spec_from_config
from vsim.models.model_shape import Config, LayerSpec, Mla, ModelSpec, Moe

__all__ = [
    "Config",
    "LayerSpec",
    "Mla",
    "ModelSpec",
    "Moe",
    "bundled_models",
    "load_model",
    "read_config",
    "spec_from_config",
]

BUNDLED = Path(__file__).with_name("model_configs.json")


@cache
def bundled_models() -> dict[str, dict[str, Any]]:
    """Bundled shapes by Hugging Face name: {"name", "aliases", "source", "config"}, in file order."""
    rows = json.loads(BUNDLED.read_text(encoding="utf-8"))["models"]
    return {row["name"]: row for row in rows}


@cache
def _by_alias() -> dict[str, str]:
    """Lower-case name, alias or last path part -> bundled name. A last part shared by two models is left out."""
    table: dict[str, str] = {}
    parts: dict[str, set[str]] = {}
    for name, row in bundled_models().items():
        for alias in (name, *row["aliases"]):
            table[alias.lower()] = name
            parts.setdefault(alias.lower().rsplit("/", 1)[-1], set()).add(name)
    for part, names in parts.items():
        if len(names) == 1:
            table.setdefault(part, next(iter(names)))
    return table


def _is_there(path: Path) -> bool:
    try:
        return path.is_dir() or path.is_file()
    except (OSError, ValueError):  # a name longer than any file's, or one that holds a NUL
        return False


def load_model(name_or_folder: str) -> ModelSpec:
    """A bundled model by its Hugging Face name (case-insensitive), or a folder (or file) with `config.json`.

    A name like "meta-llama/Llama-3.1-8B" is looked up in the bundle before the disk.
    Raises `UserError` with near matches and the remedy if there is no such model.
    """
    known = _by_alias()
    bundled = known.get(name_or_folder.lower())
    path = Path(name_or_folder)
    if bundled is None and _is_there(path):
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise UserError(
                f"{path}: the folder has no config.json (copy the model's from Hugging Face)"
            )
        # Results must not depend on where the file lay, so only the folder's own name is kept.
        name = path.resolve().name if path.is_dir() else path.resolve().parent.name
        return spec_from_config(read_config(file), name, "config.json of the user", str(file))
    if bundled is not None:
        row = bundled_models()[bundled]
        name = next((a for a in row["aliases"] if a.lower() == name_or_folder.lower()), row["name"])
        return spec_from_config(row["config"], name, row["source"])
    near = difflib.get_close_matches(name_or_folder.lower(), list(known), n=4, cutoff=0.5)
    names = list(dict.fromkeys(known[k] for k in near))
    hint = f"near matches: {', '.join(names)}; " if names else ""
    raise UserError(
        f"unknown model {name_or_folder!r}: neither bundled nor a folder with a config.json; {hint}"
        "`vsim catalog` lists the bundled ones, any other works from a folder with its config.json"
    )

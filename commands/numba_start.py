"""numba without scipy: what the compiled path loads at its start, less 0.3 s that it has no use for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_ASKS = "numba.np.arraymath"  # looks for BLAS in scipy.linalg, for np.dot in compiled code


class _NoScipyForNumba:
    """Answers "not installed" where numba itself asks for scipy, and nobody else."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name != "scipy.linalg":
            return
        spec = getattr(sys.modules.get(_ASKS), "__spec__", None)
        if getattr(spec, "_initializing", False):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def spare_scipy() -> None:
    """Let numba, if this process comes to load it, do without scipy.

    For a process of our own only: compiled code in it can then not call `np.dot`. Ours does not.
    """
    if not any(isinstance(finder, _NoScipyForNumba) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NoScipyForNumba())  # type: ignore[arg-type]

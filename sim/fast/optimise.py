"""The kernel as LLVM's module: numba's types and lowering, our own optimisation of the whole.

numba counts references to every array at every call between compiled functions, by calls that LLVM may not
look into. Our arrays lie in memory that Python owns and have no counter, so those calls do nothing: without
them, and with all functions private, LLVM sees one program, passes on what is used and inlines the rest.
"""

from __future__ import annotations

import os
import re
from typing import Any

_COUNTING = re.compile(r"^ *(?:tail )?call void @NRT_(?:in|de)cref\(.*\n", re.MULTILINE)
_SHARED = re.compile(r"^define linkonce_odr ", re.MULTILINE)


def plain_ir() -> tuple[str, str]:
    """(LLVM's text of `kernel.entry` and all that it calls, name of the function to call)."""
    import llvmlite.binding as llvm

    before = os.environ.get("NUMBA_OPT")
    if _optimises(llvm):
        os.environ["NUMBA_OPT"] = "0"  # done below, once instead of function by function
    try:
        from numba import cfunc, types
        from numba.core import config

        config.reload_config()
        from vsim.sim.fast import kernel

        pointer = types.CPointer(types.int64)
        made: Any = cfunc(types.boolean(pointer, pointer, types.int64))(kernel.entry)
        return made._library.get_llvm_str(), made._wrapper_name
    finally:
        os.environ.pop("NUMBA_OPT", None)
        if before is not None:
            os.environ["NUMBA_OPT"] = before


def optimised(text: str, machine: Any) -> Any:
    """The module of `text` for `machine`; as numba left it where llvmlite has no way to optimise it again."""
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(_SHARED.sub("define internal ", _COUNTING.sub("", text)))
    if hasattr(llvm, "create_pass_builder"):
        builder = llvm.create_pass_builder(
            machine, llvm.create_pipeline_tuning_options(speed_level=3)
        )
        builder.getModulePassManager().run(module, builder)
    elif _optimises(llvm):  # llvmlite before 0.45
        old = llvm.create_pass_manager_builder()
        old.opt_level, old.inlining_threshold = 3, 225
        old.loop_vectorize = old.slp_vectorize = True
        passes = llvm.create_module_pass_manager()
        machine.add_analysis_passes(passes)
        old.populate(passes)
        passes.run(module)
    return module


def _optimises(llvm: Any) -> bool:
    return hasattr(llvm, "create_pass_builder") or hasattr(llvm, "create_pass_manager_builder")

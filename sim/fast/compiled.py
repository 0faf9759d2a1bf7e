"""The kernel's machine code: compiled by numba once, then loaded from a file without numba.

numba takes most of a second to import and to read its own cache, llvmlite a few hundredths to load machine
code. The file lies beside the package, or in the user's cache where that is read-only; it is used only if it
was made from this very kernel.py, places.py and optimise.py by this llvmlite for this CPU, and it is published
only after a process of its own has loaded it and repeated a run with it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Entry = Callable[[int, int, int], bool]
_PROVING = "VSIM_PROVE_KERNEL"  # the file that a proving process loads
_NEVER_CALLED = {"NRT_Free", "NRT_MemInfo_call_dtor"}
_kept: list[Any] = []  # engines and stubs must outlive the code that they hold


class CompileError(Exception):
    """This machine cannot compile or load the kernel."""


def folders() -> Iterator[Path]:
    """Where the machine code may lie, best place first."""
    yield HERE / "__pycache__"
    cache = os.environ.get("XDG_CACHE_HOME")
    yield (Path(cache) if cache else Path.home() / ".cache") / "vsim"


@functools.cache
def file_name() -> str:
    sources = [(HERE / name).read_bytes() for name in ("kernel.py", "places.py", "optimise.py")]
    return f"kernel-{hashlib.sha256(b''.join(sources)).hexdigest()[:16]}.bin"


def kept_file() -> Path | None:
    """The machine code of this kernel.py, whatever machine it was made for; None: not compiled yet."""
    proving = os.environ.get(_PROVING)
    places = [Path(proving)] if proving else [folder / file_name() for folder in folders()]
    return next((place for place in places if place.is_file()), None)


def entry() -> Entry:
    """`kernel.entry`, compiled now if no file serves. Raises CompileError, each time if once."""
    found = _entry_or_error()
    if isinstance(found, CompileError):
        raise found
    return found


def is_loaded() -> bool:
    """Is the kernel in this process already? Then even the smallest run is sooner done with it."""
    return _entry_or_error.cache_info().currsize > 0 and not isinstance(
        _entry_or_error(), CompileError
    )


@functools.cache
def _entry_or_error() -> Entry | CompileError:
    try:
        return _loaded(*_code())
    except CompileError as error:
        return error


def _code() -> tuple[dict[str, Any], bytes]:
    kept = kept_file()
    code = None if kept is None else _read(kept)
    if code is None:
        if os.environ.get(_PROVING):
            raise CompileError("the code to be proved is of another machine")
        _compile()
        kept = kept_file()
        code = None if kept is None else _read(kept)
        if code is None:
            raise CompileError("no folder keeps the compiled kernel")
    return code


def _machine() -> dict[str, str]:
    import llvmlite
    import llvmlite.binding as llvm

    return {
        "llvmlite": llvmlite.__version__,
        "triple": llvm.get_default_triple(),
        "cpu": llvm.get_host_cpu_name(),
        "features": llvm.get_host_cpu_features().flatten(),
    }


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """(header, object code) if it fits this machine."""
    try:
        first, _, code = path.read_bytes().partition(b"\n")
        header = json.loads(first)
        fits = header["machine"] == _machine()
        whole = header["sha256"] == hashlib.sha256(code).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (header, code) if fits and whole else None


def _target_machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    made_for = _machine()
    return llvm.Target.from_triple(made_for["triple"]).create_target_machine(
        cpu=made_for["cpu"],
        features=made_for["features"],
        opt=3,
        reloc="default",
        codemodel="jitdefault",
        jit=True,
    )


def _loaded(header: dict[str, Any], code: bytes) -> Entry:
    import ctypes

    import llvmlite.binding as llvm

    machine = _target_machine()

    def nothing() -> None:
        raise CompileError

    # What numba's error paths would call; the kernel has none that is ever taken.
    stub = ctypes.CFUNCTYPE(None)(nothing)
    for name in header["foreign"]:
        if llvm.address_of_symbol(name) is None:
            llvm.add_symbol(name, ctypes.cast(stub, ctypes.c_void_p).value or 0)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(header["symbol"])
    # numba's own calling convention: (where to put the result, where to put an error, arguments) -> status.
    call = ctypes.CFUNCTYPE(
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_bool),
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
    )(address)
    _kept.extend((stub, engine, call))

    def run(places: int, dims: int, task: int) -> bool:
        result, error = ctypes.c_bool(), ctypes.c_void_p()
        status = call(ctypes.byref(result), ctypes.byref(error), places, dims, task)
        if status:
            raise CompileError(f"the kernel returned status {status}")
        return result.value

    return run


def _compile() -> None:
    """Compile with numba and keep the machine code, once another process has proved it."""
    import tempfile

    said = sys.stderr.isatty()
    if said:
        print("Compiling vsim's fast path, once on this machine …", file=sys.stderr, flush=True)
    try:
        from vsim.sim.fast.optimise import optimised, plain_ir

        text, wrapper = plain_ir()
        machine = _target_machine()
        module = optimised(text, machine)
        code = machine.emit_object(module)
    except Exception as error:  # whatever numba or LLVM has against this machine
        raise CompileError(f"{type(error).__name__}: {error}") from error
    foreign = sorted(
        item.name
        for item in (*module.functions, *module.global_variables)
        if item.is_declaration and not item.name.startswith("llvm.")
    )
    # numba's memory manager is not there when the code runs: it may only be asked to do nothing.
    needed = [n for n in foreign if n.startswith("NRT_") and n not in _NEVER_CALLED]
    if needed:
        raise CompileError(f"the kernel asks for memory: {needed}")
    header = {
        "symbol": wrapper.removeprefix("cfunc."),
        "foreign": foreign,
        "machine": _machine(),
        "sha256": hashlib.sha256(code).hexdigest(),
    }
    content = json.dumps(header).encode() + b"\n" + code
    for folder in folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
                file.write(content)
        except OSError:
            continue
        part = Path(file.name)
        try:
            _prove(part)
            part.replace(folder / file_name())
            for old in folder.glob("kernel-*.bin") if folder.parent == HERE else ():
                if old.name != file_name():
                    old.unlink(missing_ok=True)
        finally:
            part.unlink(missing_ok=True)
        return
    raise CompileError("no folder to keep the compiled kernel in")


def _prove(path: Path) -> None:
    """A process that loads the code and repeats a run with it: if it dies, it dies alone."""
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "vsim.sim.fast.warm"],
        env={**os.environ, _PROVING: str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CompileError(f"the compiled kernel fails its proof: {done.stderr.strip()[-200:]}")

"""Bytes of a trace file: opened, decompressed, cut at line ends, and never more than a bounded amount at once."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from vsim.errors import UserError

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 64 << 20  # a 1M-token prompt's ids fit many times over
MAX_DOCUMENT_BYTES = 1 << 30  # formats that are one JSON document are held in memory
# A compressed file may grow to this without being told so: traces shrink five- to twentyfold.
BOMB_FLOOR_BYTES = 1 << 30
BOMB_RATIO = 200


@dataclass(slots=True)
class TraceFile:
    """One input file, checked to exist and to be text (or Parquet).

    `head` is its decompressed beginning; `kind` is "text" or "parquet".
    """

    path: Path
    name: str
    kind: str
    head: bytes
    compression: str
    max_bytes: int | None = None

    def sha256(self) -> str:
        """Hash of the file as it lies on disk."""
        try:
            with self.path.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{self.name}: can't be read: {error.strerror or error}") from None

    def open(self) -> IO[bytes]:
        try:
            raw = self.path.open("rb")
        except OSError as error:
            raise UserError(f"{self.name}: can't be read: {error.strerror or error}") from None
        if self.compression == "gzip":
            return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
        if self.compression == "zstd":
            import zstandard

            reader: Any = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
                raw, read_across_frames=True
            )
            return cast(IO[bytes], reader)
        return raw

    def byte_limit(self) -> int | None:
        if self.max_bytes is not None:
            return self.max_bytes
        if self.compression:
            return max(BOMB_FLOOR_BYTES, BOMB_RATIO * self.path.stat().st_size)
        return None

    def blocks(self) -> Iterator[bytes]:
        """The file as blocks of whole lines, about 8 MiB each, BOM removed. The last may lack its newline.

        Raises UserError for a line over 64 MiB, a damaged compressed stream, or more than the size limit.
        """
        limit = self.byte_limit()
        total = 0
        carry: list[bytes] = []
        carried = 0
        first = True
        with self.open() as stream:
            while True:
                data = self._read(stream)
                total += len(data)
                if limit is not None and total > limit:
                    raise UserError(
                        f"{self.name}: decompresses to more than {limit} bytes; decompress it yourself if it is meant"
                    )
                if first and data:
                    data = data.removeprefix(b"\xef\xbb\xbf")
                    first = False
                if not data:
                    if carried:
                        yield b"".join(carry)
                    return
                cut = data.rfind(b"\n") + 1
                if cut:
                    yield b"".join([*carry, data[:cut]])
                    carry, carried = [data[cut:]], len(data) - cut
                else:
                    carry.append(data)
                    carried += len(data)
                if carried > MAX_LINE_BYTES:
                    raise UserError(f"{self.name}: a line is longer than {MAX_LINE_BYTES} bytes")

    def _read(self, stream: IO[bytes]) -> bytes:
        try:
            return stream.read(BLOCK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{self.name}: damaged gzip data: {error}") from None
        except OSError as error:
            raise UserError(f"{self.name}: can't be read: {error.strerror or error}") from None
        except Exception as error:
            # zstandard raises its own ZstdError; anything else here is also the stream's fault.
            if self.compression != "zstd":
                raise
            raise UserError(f"{self.name}: damaged zstd data: {error}") from None

    def lines(self) -> Iterator[tuple[int, bytes, bool]]:
        """(line number from 1, the line without its end, is it the file's last line that isn't blank?)."""
        held: tuple[int, bytes] | None = None
        number = 0
        for block in self.blocks():
            rows = block.split(b"\n")
            if block.endswith(b"\n"):
                rows.pop()
            for row in rows:
                number += 1
                if not row.strip():
                    continue
                if held is not None:
                    yield *held, False
                held = (number, row)
        if held is not None:
            yield *held, True

    def document(self) -> bytes:
        """The whole file, for formats that are one JSON document. Raises UserError above 1 GiB."""
        parts, size = [], 0
        for block in self.blocks():
            size += len(block)
            if size > MAX_DOCUMENT_BYTES:
                raise UserError(
                    f"{self.name}: a JSON document over {MAX_DOCUMENT_BYTES} bytes; use JSON lines"
                )
            parts.append(block)
        return b"".join(parts)


def open_trace_file(path: str | Path, max_bytes: int | None = None) -> TraceFile:
    """Check a file and look at its beginning.

    Raises UserError if it is missing, a folder, unreadable, empty, binary, or not UTF-8 (BOM allowed).
    """
    path = Path(path)
    name = path.name or str(path)
    try:
        if path.is_dir():
            raise UserError(f"{path}: is a folder; name a trace file")
        if not path.exists():
            raise UserError(f"{path}: no such file")
        if not path.is_file():
            # A pipe can be read only once (and may never end); reading looks at the beginning first.
            raise UserError(f"{path}: is no regular file; save it to one first")
        with path.open("rb") as stream:
            magic = stream.read(8)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(
            f"{path}: can't be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not magic:
        raise UserError(f"{name}: the file is empty; a trace needs at least one request")
    if magic.startswith(b"PAR1"):
        return TraceFile(path, name, "parquet", magic, "")
    compression = ""
    if magic.startswith(b"\x1f\x8b"):
        compression = "gzip"
    elif magic.startswith(b"\x28\xb5\x2f\xfd"):
        compression = "zstd"
    file = TraceFile(path, name, "text", b"", compression, max_bytes)
    with file.open() as stream:
        head = _head(file, stream)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{name}: is UTF-16 text; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)")
    if head.startswith(b"PAR1"):
        raise UserError(f"{name}: is a compressed Parquet file; decompress it first")
    if b"\0" in head:
        raise UserError(
            f"{name}: is a binary file of unknown kind; traces are CSV, JSON lines, JSON or Parquet"
        )
    if not head.strip():
        raise UserError(f"{name}: the file is empty; a trace needs at least one request")
    file.head = head.removeprefix(b"\xef\xbb\xbf")
    return file


def _head(file: TraceFile, stream: IO[bytes], size: int = 1 << 16) -> bytes:
    """Up to 64 KiB from the beginning."""
    try:
        return stream.read(size)
    except Exception as error:
        raise UserError(
            f"{file.name}: damaged {file.compression or 'file'} data: {error}"
        ) from None


def decode_line(raw: bytes, name: str, number: int) -> str:
    """Bytes of a line as text. Raises UserError with the line's number if it isn't UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}:{number}: is not UTF-8 (byte 0x{raw[error.start]:02x}); convert the file, "
            "for example iconv -f LATIN1 -t UTF-8"
        ) from None

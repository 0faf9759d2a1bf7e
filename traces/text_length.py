"""How many tokens a text is: by a local tokenizer, or by a stated rule of thumb. The text itself goes nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vsim.traces.options import Report

# English text under the tokenizers of the Llama 3 and Qwen families comes out near four characters a token.
CHARS_PER_TOKEN = 4
# A chat template wraps each message in role markers.
TEMPLATE_TOKENS = 4


def text_counter(report: Report) -> Callable[[str], int]:
    """A function text -> tokens. Raises UserError if the tokenizer asked for can't be loaded."""
    where = report.options.tokenizer
    if where is None:
        report.assume(
            f"Token counts are estimated as one per {CHARS_PER_TOKEN} characters, rounded up; "
            "--tokenizer FOLDER counts them."
        )
        return lambda text: -(-len(text) // CHARS_PER_TOKEN)
    path = Path(where)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        report.fail(
            f"tokenizer {where!r}: no tokenizer.json there (a local file or folder is needed)"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        report.fail("--tokenizer needs the package tokenizers (pip install tokenizers)")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for any damage
        report.fail(f"tokenizer {where!r} can't be loaded: {str(error)[:200]}")
    report.assume(f"Tokens are counted by the tokenizer in {path.parent.name or path.name}.")
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)

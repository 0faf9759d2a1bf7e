"""vLLM's own argument parser: a JSON list of `vllm serve` words per line on stdin, its answer on stdout.

    <python of the vLLM environment> serve_flags.py

in   ["some/model", "--block-size", "16"]
out  {"block_size": 16, …} (every argument that differs from the parser's default) or {"refused": text}
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys


def parser():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made = FlexibleArgumentParser()
    with contextlib.suppress(argparse.ArgumentError):
        made.add_argument("model_tag", nargs="?")
    return make_arg_parser(made)


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever vLLM prints is no answer
    made = parser()
    for line in sys.stdin:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                given = vars(made.parse_args(json.loads(line)))
            answer = {
                name: value
                for name, value in given.items()
                if value != made.get_default(name) and isinstance(value, str | int | float | bool)
            }
        except SystemExit:
            answer = {"refused": said.getvalue()}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

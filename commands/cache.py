"""`vsim cache`: what prefix caching can find in a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from vsim.commands.trace_options import read_options
from vsim.errors import UserError


@click.command(short_help="What prefix caching can find: by cache size, block size, router.")
@click.argument("trace", type=click.Path(path_type=Path))
@read_options
@click.option("--limit", type=int, help="Only the first so many requests.")
@click.option("--block-size", type=int, default=16, show_default=True, help="Tokens in one block.")
@click.option(
    "--cache-blocks",
    type=int,
    metavar="N",
    help="Blocks of one replica (vsim capacity tells); default: what 95 % of the ceiling needs.",
)
@click.option(
    "--replicas", default="1,2,4,8", show_default=True, metavar="N,N,…", help="Fleets to compare."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def cache(
    trace: Path,
    reading: dict[str, Any],
    limit: int | None,
    block_size: int,
    cache_blocks: int | None,
    replicas: str,
    as_json: bool,
) -> None:
    """Audit the prefix sharing of TRACE, whose requests say which prompts begin alike (Mooncake's hash ids).

    The ceiling with a cache that never evicts, hit rates by cache size (exact LRU, requests one after another),
    block size, router and number of replicas; tokens shared but shorter than a block; tokens evicted and
    then needed. docs/cache.md says how.
    """
    from vsim.sim.prefix_audit import audit, audit_data, render_audit
    from vsim.traces.readers import read_trace

    try:
        counts = [int(part) for part in replicas.split(",")]
    except ValueError:
        raise UserError(
            f"--replicas {replicas}: give whole numbers separated by commas, such as 1,2,4"
        ) from None
    requests = read_trace(trace, limit=limit, **reading)
    found = audit(requests, block_size, cache_blocks, counts)
    if as_json:
        click.echo(json.dumps(audit_data(found), indent=1, sort_keys=True, allow_nan=False))
    else:
        click.echo(render_audit(found), nl=False)

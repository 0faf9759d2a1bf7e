"""`--fleet FILE` beside `--replicas` and `--route`: what stands twice must agree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vsim.errors import UserError

if TYPE_CHECKING:
    from vsim.sim.fleet.spec import FleetSpec

fleet_option = click.option(
    "--fleet",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML of a fleet: limits, failures, autoscaling, pools, tenants (docs/fleet.md).",
)


def settled_fleet(file: Path, replicas: int, route: str) -> FleetSpec:
    """The fleet of `file`, with replicas and route of the command line where the file leaves them open.

    Raises UserError for a bad file, and where file and command line disagree.
    """
    from vsim.sim.fleet.read import read_fleet

    fleet = read_fleet(file)
    given = {"replicas": replicas, "route": route}
    for name, value in given.items():
        stated = getattr(fleet, name)
        if stated is not None and _on_command_line(name) and value != stated:
            raise UserError(
                f"--{name} {value}, and {file.name} says {name}: {stated}; drop one of them"
            )
    return fleet.settled(replicas, route)


def _on_command_line(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE

"""A fleet file (docs/fleet.md) as a `FleetSpec`."""

from __future__ import annotations

from pathlib import Path

from vsim.errors import UserError
from vsim.sim.fleet.located import Section, read_located
from vsim.sim.fleet.spec import Admission, FleetSpec, Network
from vsim.sim.router import named_route

MAX_REPLICAS = 4096


def read_fleet(path: str | Path) -> FleetSpec:
    """Read and check a fleet file. Raises UserError naming file, line and key."""
    top = read_located(path, "fleet file")
    spec = FleetSpec(
        name=Path(path).name,
        replicas=top.integer_or_none("replicas", least=1, most=MAX_REPLICAS),
        route=_route(top),
        network=_network(top.section("network")),
        admission=_admission(top.section("admission")),
    )
    top.end()
    return spec


def _route(top: Section) -> str | None:
    if "route" not in top:
        return None
    name = top.text("route")
    try:
        named_route(name)
    except UserError as error:
        raise top.fail("route", f"names no route: {error}") from None
    return name


def _network(section: Section | None) -> Network:
    if section is None:
        return Network()
    found = Network(
        latency_s=section.number("latency_s", 0.0, most=3600),
        jitter_s=section.number("jitter_s", 0.0, most=3600),
    )
    section.end()
    return found


def _admission(section: Section | None) -> Admission:
    if section is None:
        return Admission()
    found = Admission(
        max_waiting_per_replica=section.integer_or_none("max_waiting_per_replica", least=1),
        max_num_queued_reqs=section.integer_or_none("max_num_queued_reqs"),
        max_num_queued_tokens=section.integer_or_none("max_num_queued_tokens"),
        max_waiting=section.integer_or_none("max_waiting"),
        max_in_flight_per_replica=section.integer_or_none("max_in_flight_per_replica", least=1),
        when_full=section.choice("when_full", "reject", ("reject", "wait")),  # type: ignore[arg-type]
    )
    section.end()
    return found

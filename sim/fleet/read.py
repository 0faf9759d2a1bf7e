"""A fleet file (docs/fleet.md) as a `FleetSpec`."""

from __future__ import annotations

from pathlib import Path

from vsim.errors import UserError
from vsim.sim.fleet.located import Section, read_located
from vsim.sim.fleet.spec import Admission, FleetSpec, Network, Outage, Retry
from vsim.sim.router import named_route

MAX_REPLICAS = 4096
MAX_SECONDS = 1e9  # some thirty years: beyond that ns would leave int64


def read_fleet(path: str | Path) -> FleetSpec:
    """Read and check a fleet file. Raises UserError naming file, line and key."""
    top = read_located(path, "fleet file")
    replicas = top.integer_or_none("replicas", least=1, most=MAX_REPLICAS)
    spec = FleetSpec(
        name=Path(path).name,
        replicas=replicas,
        route=_route(top),
        network=_network(top.section("network")),
        admission=_admission(top.section("admission")),
        failures=_outages(top.sections("failures"), MAX_REPLICAS if replicas is None else replicas),
        drains=_outages(top.sections("drains"), MAX_REPLICAS if replicas is None else replicas),
        retry=_retry(top.section("retry")),
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


def _outages(sections: list[Section], replicas: int) -> tuple[Outage, ...]:
    """Failures or drains: of replicas that there are, and not twice at a time."""
    found: list[Outage] = []
    for section in sections:
        if "replica" not in section or "at_s" not in section:
            raise section.missing("replica and at_s", "{replica: 0, at_s: 60, for_s: 30}")
        one = Outage(
            replica=section.integer("replica", 0),
            at_s=section.number("at_s", 0.0, most=MAX_SECONDS),
            for_s=section.number_or_none("for_s", positive=True),
        )
        section.end()
        if one.replica >= replicas:
            raise section.fail(
                "replica", f"is {one.replica}, and replicas run from 0 to {replicas - 1}"
            )
        for other in found:
            if other.replica == one.replica and one.at_s <= other.end_s and other.at_s <= one.end_s:
                raise section.fail(
                    "at_s", f"falls into or touches another one of replica {one.replica}"
                )
        found.append(one)
    return tuple(found)


def _retry(section: Section | None) -> Retry:
    if section is None:
        return Retry()
    found = Retry(
        attempts=section.integer("attempts", 2, least=1, most=100),
        delay_s=section.number("delay_s", 0.0, most=MAX_SECONDS),
        refused=section.flag("refused", False),
    )
    section.end()
    return found

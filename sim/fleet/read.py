"""A fleet file (docs/fleet.md) as a `FleetSpec`."""

from __future__ import annotations

from pathlib import Path

from vsim.errors import UserError
from vsim.sim.fleet.autoscale import METRICS, Autoscale
from vsim.sim.fleet.located import Section, read_located
from vsim.sim.fleet.spec import (
    Admission,
    Disaggregation,
    FleetSpec,
    Network,
    Outage,
    Retry,
    TenantLimit,
    Tenants,
)
from vsim.sim.router import named_route

MAX_REPLICAS = 4096
MAX_SECONDS = 1e9  # some thirty years: beyond that ns would leave int64


def read_fleet(path: str | Path) -> FleetSpec:
    """Read and check a fleet file. Raises UserError naming file, line and key."""
    top = read_located(path, "fleet file")
    replicas = top.integer_or_none("replicas", least=1, most=MAX_REPLICAS)
    autoscale = _autoscale(top.section("autoscale"))
    pools = _disaggregation(top.section("disaggregation"))
    if pools is not None:
        for key in ("autoscale", "failures", "drains"):
            if top.had(key):
                raise top.fail(key, "beside disaggregation is not simulated: drop one of them")
        if replicas not in (None, pools.replicas):
            raise top.fail(
                "replicas", f"is {replicas}, and the pools have {pools.replicas} together"
            )
        replicas = pools.replicas
    most = MAX_REPLICAS if replicas is None else replicas
    if autoscale is not None:
        most = autoscale.max_replicas
        if replicas is not None and not autoscale.min_replicas <= replicas <= most:
            bounds = f"{autoscale.min_replicas} to {most}"
            raise top.fail(
                "replicas", f"is {replicas}, and autoscale keeps {bounds}: start within that"
            )
    spec = FleetSpec(
        name=Path(path).name,
        replicas=replicas,
        route=_route(top),
        network=_network(top.section("network")),
        admission=_admission(top.section("admission")),
        failures=_outages(top.sections("failures"), most, may_hide=True),
        drains=_outages(top.sections("drains"), most),
        retry=_retry(top.section("retry")),
        autoscale=autoscale,
        disaggregation=pools,
        tenants=_tenants(top.section("tenants")),
    )
    top.end()
    return spec


def _route(top: Section, key: str = "route") -> str | None:
    if key not in top:
        return None
    name = top.text(key)
    try:
        named_route(name)
    except UserError as error:
        raise top.fail(key, f"names no route: {error}") from None
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


def _outages(sections: list[Section], replicas: int, may_hide: bool = False) -> tuple[Outage, ...]:
    """Failures or drains: of replicas that there are, and not twice at a time."""
    found: list[Outage] = []
    for section in sections:
        if "replica" not in section or "at_s" not in section:
            raise section.missing("replica and at_s", "{replica: 0, at_s: 60, for_s: 30}")
        one = Outage(
            replica=section.integer("replica", 0),
            at_s=section.number("at_s", 0.0, most=MAX_SECONDS),
            for_s=section.number_or_none("for_s", positive=True),
            noticed_after_s=section.number("noticed_after_s", 0.0, most=MAX_SECONDS)
            if may_hide
            else 0.0,
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


def _autoscale(section: Section | None) -> Autoscale | None:
    if section is None:
        return None
    for key in ("max_replicas", "target"):
        if key not in section:
            raise section.missing(
                "max_replicas and target", "{max_replicas: 8, metric: waiting_per_gpu, target: 10}"
            )
    rule = section.choice("rule", "hpa", ("hpa", "threshold"))
    if rule == "hpa":
        for key in ("step", "scale_in_below"):
            if key in section:
                raise section.fail(key, "is for rule: threshold")
    else:
        for key in ("tolerance", "max_up_pods", "max_up_percent"):
            if key in section:
                raise section.fail(key, "is for rule: hpa")
    nothing = Autoscale(1, 1, 1.0)
    low = section.integer("min_replicas", 1, least=1, most=MAX_REPLICAS)
    high = section.integer("max_replicas", 1, least=1, most=MAX_REPLICAS)
    if high < low:
        raise section.fail("max_replicas", f"is {high}, below min_replicas={low}")

    def seconds(key: str, positive: bool = False) -> float:
        least = 0.1 if positive else 0.0
        return section.number(key, getattr(nothing, key), least=least, most=1e6)

    target = section.number("target", 0.0, positive=True)
    below = section.number_or_none("scale_in_below")
    if below is not None and below > target:
        raise section.fail("scale_in_below", f"is {below:g}, above target={target:g}")
    found = Autoscale(
        min_replicas=low,
        max_replicas=high,
        target=target,
        rule=rule,  # type: ignore[arg-type]
        metric=section.choice("metric", "waiting_per_gpu", METRICS),  # type: ignore[arg-type]
        scale_in_below=below,
        step=section.integer("step", 1, least=1, most=MAX_REPLICAS),
        cold_start_s=seconds("cold_start_s"),
        sync_s=seconds("sync_s", positive=True),
        scrape_s=seconds("scrape_s", positive=True),
        scrape_delay_s=seconds("scrape_delay_s"),
        scale_down_window_s=seconds("scale_down_window_s"),
        scale_up_window_s=seconds("scale_up_window_s"),
        tolerance=section.number("tolerance", nothing.tolerance, most=10.0),
        max_up_pods=section.integer("max_up_pods", nothing.max_up_pods, least=0, most=MAX_REPLICAS),
        max_up_percent=section.number("max_up_percent", nothing.max_up_percent, most=1e6),
    )
    section.end()
    return found


def _disaggregation(section: Section | None) -> Disaggregation | None:
    if section is None:
        return None
    for key in ("prefill_replicas", "decode_replicas", "bandwidth_gb_s"):
        if key not in section:
            raise section.missing(
                "prefill_replicas, decode_replicas and bandwidth_gb_s",
                "{prefill_replicas: 1, decode_replicas: 1, bandwidth_gb_s: 50}",
            )
    found = Disaggregation(
        prefill_replicas=section.integer("prefill_replicas", 1, least=1, most=MAX_REPLICAS),
        decode_replicas=section.integer("decode_replicas", 1, least=1, most=MAX_REPLICAS),
        bandwidth_gb_s=section.number("bandwidth_gb_s", 1.0, least=1e-6, positive=True),
        latency_s=section.number("latency_s", 0.0, most=3600),
        first_token=section.choice("first_token", "prefill", ("prefill", "decode")),  # type: ignore[arg-type]
        decode_route=_route(section, "decode_route"),
    )
    section.end()
    return found


def _tenants(section: Section | None) -> Tenants | None:
    if section is None:
        return None
    each = section.section("each")
    named = section.section("named")
    found: dict[str, TenantLimit] = {}
    if named is not None:
        for name in named.names():
            one = named.section(name)
            if one is None:
                raise named.fail(name, "is empty: say max_in_flight or tokens_per_s")
            found[name] = _tenant(one)
    section.end()
    if each is None and not found:
        raise section.missing("each or named", "{each: {max_in_flight: 8}}")
    return Tenants(None if each is None else _tenant(each), found)


def _tenant(section: Section) -> TenantLimit:
    rate = section.number_or_none("tokens_per_s", positive=True)
    if "burst_tokens" in section and rate is None:
        raise section.fail("burst_tokens", "needs tokens_per_s beside it")
    found = TenantLimit(
        max_in_flight=section.integer_or_none("max_in_flight", least=1),
        tokens_per_s=rate,
        burst_tokens=section.number_or_none("burst_tokens", positive=True),
        over_limit=section.choice("over_limit", "reject", ("reject", "wait")),  # type: ignore[arg-type]
    )
    section.end()
    if found.max_in_flight is None and rate is None:
        raise section.missing("max_in_flight or tokens_per_s", "{max_in_flight: 8}")
    return found

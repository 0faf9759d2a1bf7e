"""What a profile decides where the user didn't: the block size that it was measured at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vsim.errors import UserError
from vsim.models.hardware import Gpu
from vsim.models.load import read_profile
from vsim.models.model_spec import ModelSpec
from vsim.models.profile_check import block_sizes
from vsim.sim.deployment import Deployment, resolve


def resolve_with_profile(
    model: str | ModelSpec, gpu: str | Gpu, profile: str | None, flags: Mapping[str, Any]
) -> tuple[Deployment, dict[str, Any]]:
    """(`resolve` with these flags, the flags as taken): without `block_size`, the profile's only one is.

    Attention at another block size was not measured, so vLLM's default would be a guess about step times. It
    stays where the profile was measured at several or does not say, and where this deployment can't have
    the measured one. Raises UserError as `resolve` and `read_profile` do.
    """
    taken = dict(flags)
    deployment = resolve(model, gpu, **taken)
    if profile is None or taken.get("block_size") is not None:
        return deployment, taken
    name, calibration = read_profile(profile)
    sizes = block_sizes(calibration)
    default = deployment.scheduler.block_size
    if len(sizes) != 1 or sizes[0] == default:
        return deployment, taken
    try:
        deployment = resolve(model, gpu, **{**taken, "block_size": sizes[0]})
    except UserError:
        return deployment, taken
    taken["block_size"] = sizes[0]
    sentence = (
        f"block size {sizes[0]}, the only one that profile {name} was measured at (vLLM's default here is "
        f"{default}; --block-size takes another)"
    )
    return (
        replace(
            deployment,
            origins={**deployment.origins, "block_size": f"profile {name}"},
            assumptions=(*deployment.assumptions, sentence),
        ),
        taken,
    )

"""One scheduled step: who runs how many tokens, and who had to give way."""

from __future__ import annotations

from dataclasses import dataclass, field

from vsim.models.step import StepShape


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies between GPU and CPU that the worker is told to make with a step (V1's CPU offload tier).

    `loads`, `stores`: job number -> (request index, blocks). Stores are submitted only with the next step,
    except those in `flush`: the step must not start before these have ended (spec 9.1, 9.2).
    """

    loads: dict[int, tuple[int, int]]
    stores: dict[int, tuple[int, int]]
    flush: tuple[int, ...]


@dataclass(slots=True)
class Step:
    """The outcome of one `schedule()` call. Lists run in schedule order; entries are request indices.

    `num_computed[i]`: tokens of `requests[i]` whose KV exists before this step, fresh prefix hits included.
    A step without requests is possible (nothing could be scheduled); it takes no device time.
    """

    requests: list[int]
    num_tokens: list[int]
    num_computed: list[int]
    preempted: list[int]  # victims, in the order chosen
    new: list[int]  # admitted for the first time in this step
    resumed: list[int]  # admitted again after a preemption
    emits: list[bool]  # does requests[i] produce a token when this step completes?
    # V0 only: blocks moved over the host link before this step can run, by request.
    swapped_in: dict[int, int] = field(default_factory=dict)
    swapped_out: dict[int, int] = field(default_factory=dict)
    # V0 only: requests the scheduler gives up on without output (they can never fit).
    ignored: list[int] = field(default_factory=list)
    # Why the head of the waiting queue was not admitted in this step (scheduler_v1.BLOCKED_BY); None: the
    # queue was empty when scheduling ended.
    blocked_by: str | None = None
    # V1 with a CPU offload tier only; transfers.CopyChannels times them.
    transfers: Transfers | None = None

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def shape(self) -> StepShape:
        """This step as the cost model sees it."""
        prefills: list[tuple[int, int]] = []
        decodes = context_sum = context_max = 0
        for new, context in zip(self.num_tokens, self.num_computed, strict=True):
            if new > 1:
                prefills.append((new, context))
            else:
                decodes += 1
                context_sum += context
                context_max = max(context_max, context)
        return StepShape(tuple(prefills), decodes, context_sum, context_max)


@dataclass(slots=True)
class StepOutput:
    """What became of a step once it ran. Entries are request indices, in schedule order."""

    emitted: list[int]  # produced one token each
    finished: list[int]  # ended with this step's token
    wasted: list[int] = field(
        default_factory=list
    )  # had already ended (async scheduling after EOS)
